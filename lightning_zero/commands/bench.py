"""`lightning-zero bench`: run a benchmark from the repository that this package was installed from."""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "lightning-zero bench",
        epilog="lightning-zero bench peers --help lists its options; see docs/development/benchmarks.md.",
    )
    parser.add_argument("name", choices=("peers", "ratios", "growth"))
    parser.add_argument("options", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments or ["--help"])
    script = SCRIPTS / f"{given.name}.py"
    if not script.exists():
        parser.error(
            "benchmarks are part of the repository, not of the installed package. Clone the repository and run "
            f"`python -m lightning_zero bench {given.name}` in it."
        )
    if importlib.util.find_spec("psutil") is None:
        parser.error("the package psutil is missing, which describes the machine: pip install 'lightning_zero[bench]'")
    try:
        # Runs in a new process: this one imports no torch, and takes no core from the benchmark.
        return subprocess.call([sys.executable, str(script), *given.options])
    except KeyboardInterrupt:
        return 130  # a shell's exit code after Ctrl-C; the script received the signal, too
