"""`lightning-zero bench`: run a benchmark from the repository that this package was installed from."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

BENCHMARKS = ("peers", "ratios", "growth")
SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


def main(arguments: list[str]) -> int:
    name, *options = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: lightning-zero bench {{{','.join(BENCHMARKS)}}} ...")
        print("lightning-zero bench peers --help says what can be set; docs/benchmarks.md, what is measured.")
        return 0
    if name not in BENCHMARKS:
        return _complain(f"there is no benchmark {name!r}, but {', '.join(BENCHMARKS)}")
    script = SCRIPTS / f"{name}.py"
    if not script.exists():
        return _complain(
            "benchmarks come with the repository, not with the installed package. Clone the repository and run "
            f"`python -m lightning_zero bench {name}` in it."
        )
    if importlib.util.find_spec("psutil") is None:
        return _complain("it describes the machine by psutil: pip install 'lightning_zero[bench]'")
    try:
        # Runs in a new process: this one imports no torch, and takes no core from the benchmark.
        return subprocess.call([sys.executable, str(script), *options])
    except KeyboardInterrupt:
        return 130  # a shell's exit code after Ctrl-C; the script received the signal, too


def _complain(text: str) -> int:
    print(f"lightning-zero bench: {text}", file=sys.stderr)
    return 2
