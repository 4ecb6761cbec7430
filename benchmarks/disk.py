"""Bandwidth between disk and memory of offloaded states, compared with dd with O_DIRECT.

    python benchmarks/disk.py
    python benchmarks/disk.py --disk FOLDER --size 4096 --piece 256 --rounds 5

Measured are reading alone, writing alone, and both at once with no computation in between, as in an update of states on
a disk. dd reads one file of the same size to /dev/null and writes it from /dev/zero, in blocks of the size of our
files. The two alternate, and the order changes every round. All files are written once beforehand, so that no
measurement includes unwritten blocks.
"""

import argparse
import fcntl
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import REPOSITORY, describe, in_turn, markdown_table, write_results

from lightning_zero.io.disk import huge_memory
from lightning_zero.io.swap import BUFFERS, Buffers, SwapFile, Turn

MIB = 2**20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--disk",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder on the disk; default: the system's temporary folder",
    )
    parser.add_argument("--size", type=int, default=2048, help="MiB read, and MiB written, per measurement")
    parser.add_argument("--piece", type=int, default=64, help="MiB per file, and per block of dd")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.piece < 1 or arguments.size % arguments.piece:
        parser.error("--rounds and --piece must be at least 1, and --size a multiple of --piece")
    return arguments


def dd(*operands: str) -> float:
    """Run dd; return the seconds that it reports."""
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(["dd", *operands], env=environment, check=True, capture_output=True, text=True)
    found = re.search(r"copied, ([^ ]+) s", done.stderr)
    assert found, done.stderr
    return float(found[1])


def timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds per round for both systems, by operation: reading, writing, and both."""
    nbytes = arguments.piece * MIB
    files = [SwapFile(arguments.disk, nbytes) for _ in range(arguments.size // arguments.piece)]
    of_dd = SwapFile(arguments.disk, arguments.size * MIB)
    buffers, memory = Buffers(), huge_memory(nbytes)
    memory[:] = os.urandom(nbytes)
    for number, file in enumerate(files):
        file.write(memory, 0)
        of_dd.write(memory, number * nbytes)
    if not fcntl.fcntl(files[0]._file, fcntl.F_GETFL) & os.O_DIRECT:
        raise SystemExit(
            f"{arguments.disk}: this file system refuses to be written past its cache, which dd is asked to"
        )

    block = [f"bs={arguments.piece}M", f"count={len(files)}"]
    path = f"/proc/{os.getpid()}/fd/{of_dd._file}"  # the file has no name

    def dd_seconds() -> dict[str, float]:
        read = dd(f"if={path}", "of=/dev/null", "iflag=direct", *block)
        write = dd("if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc", *block)
        return {"read": read, "write": write, "both": read + write}

    def own_seconds() -> dict[str, float]:
        with ThreadPoolExecutor(BUFFERS) as threads:
            return {
                "read": timed(lambda: [file.read(memory, 0) for file in files]),
                "write": timed(lambda: [file.write(memory, 0) for file in files]),
                "both": timed(lambda: [*threads.map(lambda file: buffers.change(file, lambda _: None, Turn()), files)]),
            }

    systems = [("dd", dd_seconds), ("lightning_zero", own_seconds)]
    seconds: dict[str, dict[str, list[float]]] = {
        what: {"dd": [], "lightning_zero": []} for what in ("read", "write", "both")
    }
    for number, turn in in_turn(systems, arguments.rounds):
        for name, system in turn:
            for what, taken in system().items():
                seconds[what][name].append(taken)
        last = {what: {name: of[-1] for name, of in pair.items()} for what, pair in seconds.items()}
        print(f"round {number + 1}: {last}", flush=True)
    for file in (*files, of_dd):
        file.close()
    return seconds


def main() -> None:
    arguments = parse_arguments()
    seconds = measure(arguments)
    rows, ratios = [], {}
    for what, pair in seconds.items():
        moved = arguments.size * MIB * (2 if what == "both" else 1) / 1e6  # MB
        ratios[what] = statistics.median(pair["dd"]) / statistics.median(pair["lightning_zero"])
        speeds = {name: sorted(moved / taken for taken in of) for name, of in pair.items()}
        cells = [f"{statistics.median(of):.0f} ({of[0]:.0f} - {of[-1]:.0f})" for of in speeds.values()]
        rows.append([what, *cells, f"{ratios[what]:.2f}"])
    lines = [
        f"{arguments.size} MiB in files of {arguments.piece} MiB, past the cache; for dd one file, in blocks of that "
        f"size. MB/s: medians of {arguments.rounds} rounds (lowest - highest). `read`, `write`: one thread. `both`: "
        f"{BUFFERS} threads read files, hand them to a function that does nothing, and write them back; dd reads all "
        "and then writes all. `x dd`: dd's median time over ours.",
        "",
        *markdown_table(["what", "dd", "lightning_zero", "x dd"], rows),
    ]
    result: dict[str, Any] = {"about": describe(__file__, ("torch",)), "seconds": seconds, "ratios": ratios}
    write_results(arguments.output, "disk", result, lines)


if __name__ == "__main__":
    main()
