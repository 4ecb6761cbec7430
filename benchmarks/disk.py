"""Bandwidth of the pipeline between disk and memory, compared with dd with O_DIRECT on the same file.

    python benchmarks/disk.py
    python benchmarks/disk.py --disk FOLDER --size 4096 --piece 256 --rounds 5

Measured are reading alone, writing alone, and both at once with no computation in between, as in an update of states on
a disk. dd has the same block size, reads to /dev/null and writes from /dev/zero. The two alternate, and the order
changes every round. The whole file is written once beforehand, so that no measurement includes unwritten blocks.
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
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from common import REPOSITORY, describe, in_turn, markdown_table, write_results

from lightning_zero.io.swap import BUFFERS, FileRange, Ring, SwapFile, stream

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
    parser.add_argument("--piece", type=int, default=64, help="MiB per piece, and per block of dd")
    parser.add_argument("--threads", type=int, default=4, help="threads that read a piece, and as many that write one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.piece < 1 or arguments.threads < 1 or arguments.size % arguments.piece:
        parser.error("--rounds, --piece and --threads must be at least 1, and --size a multiple of --piece")
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


def move_all(extents: list[FileRange], move: Callable[[int, FileRange], list[Future[None]]]) -> None:
    """Read into or write from a ring's buffers, as the pipeline does."""
    begun = [move(index, piece) for index, piece in enumerate(extents[:BUFFERS])]
    for index in range(len(extents)):
        for part in begun[index]:
            part.result()
        if index + BUFFERS < len(extents):
            begun.append(move(index + BUFFERS, extents[index + BUFFERS]))


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds per round for both systems, by operation: reading, writing, and both."""
    file = SwapFile(arguments.disk, arguments.size * MIB)
    nbytes = arguments.piece * MIB
    extents = [FileRange(file, start, nbytes) for start in range(0, file.nbytes, nbytes)]
    ring = Ring(arguments.threads)

    def write(index: int, extent: FileRange) -> list[Future[None]]:
        return [ring.write(index, extent, lambda _: None)]

    for index in range(BUFFERS):
        ring.buffer(index, nbytes)[:] = os.urandom(nbytes)
    move_all(extents, write)
    if not fcntl.fcntl(file._file, fcntl.F_GETFL) & os.O_DIRECT:
        raise SystemExit(
            f"{arguments.disk}: this file system refuses to be written past its cache, which dd is asked to"
        )

    block = [f"bs={arguments.piece}M", f"count={len(extents)}"]

    path = f"/proc/{os.getpid()}/fd/{file._file}"  # the file has no name

    def dd_seconds() -> dict[str, float]:
        read = dd(f"if={path}", "of=/dev/null", "iflag=direct", *block)
        write = dd("if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc", *block)
        return {"read": read, "write": write, "both": read + write}

    def own_seconds() -> dict[str, float]:
        return {
            "read": timed(lambda: move_all(extents, ring.read)),
            "write": timed(lambda: move_all(extents, write)),
            "both": timed(lambda: stream(extents, lambda *_: None, ring)),
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
        f"A file of {arguments.size} MiB in extents of {arguments.piece} MiB, past the cache; {arguments.threads} "
        f"threads read and {arguments.threads} write. MB/s: medians of {arguments.rounds} rounds (lowest - highest). "
        "`both`: all of it is read, handed to a function that does nothing, and written back, at the same time; dd "
        "reads all and then writes all. `x dd`: dd's median time over ours.",
        "",
        *markdown_table(["what", "dd", "lightning_zero", "x dd"], rows),
    ]
    result: dict[str, Any] = {"about": describe(__file__, ("torch",)), "seconds": seconds, "ratios": ratios}
    write_results(arguments.output, "disk", result, lines)


if __name__ == "__main__":
    main()
