"""Parts of a run that must end in time: each a command with its own time limit, the most important first."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
REPOSITORY = BENCHMARKS.parent
GRACE = 5.0
"""Seconds that a part has to write its results after its time limit."""


@dataclass(frozen=True)
class Part:
    """A command, without the interpreter.

    Attributes:
        share: the share of the run's time after which it is stopped; with less than a third of this left, it is not
            started.
    """

    name: str
    command: list[str]
    share: float


def main(about: str, minutes: float, parts_of: Callable[[argparse.Namespace], list[Part]]) -> int:
    """Run the parts for the command line's options; return how many failed."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--output", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    return run(parts_of(arguments), arguments.minutes, arguments.output)


def run(parts: list[Part], minutes: float, folder: Path) -> int:
    """Run the parts one after another within some minutes, and print how each ended; return how many failed.

    A part's output is in ``folder/NAME.log``; its last lines are printed, since they may be all that is seen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(REPOSITORY), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    ends, rows, failed = time.monotonic() + 60 * minutes, [], 0
    for part in parts:
        left, limit = ends - time.monotonic(), 60 * minutes * part.share
        if left < limit / 3:
            rows.append((part.name, "left out", f"{max(left, 0):.0f} s were left, {limit / 3:.0f} s are needed"))
            continue
        started = time.monotonic()
        with (folder / f"{part.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *part.command],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ended = f"exit code {process.wait(min(limit, left))}"
            except subprocess.TimeoutExpired:
                ended = "stopped at its time limit"
                process.send_signal(signal.SIGINT)  # pytest then writes what it has found
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what the command has left running
                process.wait()
        failed += ended != "exit code 0"
        said = (folder / f"{part.name}.log").read_text(errors="replace").strip()
        rows.append((part.name, ended, f"{time.monotonic() - started:.0f} s"))
        print(f"== {part.name}: {ended}\n{said[-1500:]}\n", flush=True)
    for row in rows:
        print(f"{row[0]:<16} {row[1]:<26} {row[2]}")
    return failed
