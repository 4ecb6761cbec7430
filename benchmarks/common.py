"""Helpers for the benchmarks: worker processes, memory readings, a description of the machine, tables.

This module does not import torch, as a benchmark's parent process never does: the parent only starts workers, each in a
fresh interpreter, and reads their results. So a system starts from the same state in every round, and the parent
occupies no core.
"""

import json
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

if TYPE_CHECKING:
    from machines import Machines

System = TypeVar("System")
REPOSITORY = Path(__file__).resolve().parent.parent

GPTS: dict[str, dict[str, int]] = {
    "tiny": {"width": 64, "depth": 2, "heads": 2},
    "25m": {"width": 512, "depth": 8, "heads": 8},
    "124m": {"width": 768, "depth": 17, "heads": 12},
    "1.3b": {"width": 2048, "depth": 24, "heads": 16},
    "7b": {"width": 4096, "depth": 32, "heads": 32},
    "13b": {"width": 5120, "depth": 40, "heads": 40},
}
"""Options of `lightning_zero.zoo.gpt.GPT` with an untied head, by number of parameters."""

MODELS: dict[str, dict[str, Any]] = {
    **{name: {"kind": "gpt", **sizes} for name, sizes in GPTS.items()},
    "deep": {"kind": "deep", "width": 64, "depth": 100},  # bound by overhead
    "deep200": {"kind": "deep", "width": 64, "depth": 200},
    "wide": {"kind": "wide", "width": 2048, "depth": 4},  # bound by communication: 17 M parameters, little arithmetic
    "wide2m": {"kind": "wide", "width": 1024, "depth": 2},
    "vit": {"kind": "vit", "width": 384, "depth": 12, "heads": 6},
    "moe": {"kind": "moe", "width": 256, "depth": 4, "heads": 4, "experts": 8},
    "lora": {"kind": "lora", **GPTS["25m"], "rank": 8},
}
"""All models of `models.py`, by their kind and its options."""
READS_TOKENS = {"gpt", "deep", "moe", "lora"}  # kinds whose batches are sequences; those of the others are samples

# glibc keeps freed blocks for later, so that resident memory would show what was once used. With these it hands every
# larger block back at once, and resident memory follows the live tensors. It costs page faults: not for timing.
RETURN_MEMORY_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def run_workers(
    script: str,
    arguments: list[str],
    ranks: int,
    environment: dict[str, str],
    timeout: float,
    machines: "Machines | None" = None,
) -> list[Any]:
    """Run `script --worker FILE *arguments` in `ranks` processes of one thread each; return the JSON results of all.

    With `machines`, half of the processes run on each machine.

    Raises:
        RuntimeError: a worker failed or did not end within `timeout` seconds; the message has the end of its output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder, f"rank{rank}.json") for rank in range(ranks)]
        logs = [Path(folder, f"rank{rank}.log") for rank in range(ranks)]
        processes = []
        places = machines.places(ranks) if machines is not None else [([], {})] * ranks
        for rank in range(ranks):
            added = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            added |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": path}
            inside, there = places[rank]
            with logs[rank].open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [*inside, sys.executable, script, "--worker", str(results[rank]), *arguments],
                        env=os.environ | {name: str(value) for name, value in added.items()} | there | environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        failed = wait_for_all(processes, timeout)
        if failed is not None:
            raise RuntimeError(
                f"{script} {shlex.join(arguments)}: rank {failed} of {ranks} failed or took longer than "
                f"{timeout:.0f} s; the end of its output:\n{logs[failed].read_text()[-3000:]}"
            )
        return [json.loads(result.read_text()) for result in results]


def wait_for_all(processes: list[subprocess.Popen[bytes]], timeout: float) -> int | None:
    """The first process that fails or outlasts `timeout` seconds, after which all are ended; None if all succeed."""
    deadline = time.monotonic() + timeout
    try:
        while True:
            codes = [process.poll() for process in processes]
            late = time.monotonic() > deadline
            for index, code in enumerate(codes):
                if code not in (None, 0) or (code is None and late):
                    return index
            if None not in codes:
                return None
            time.sleep(0.05)  # one rank that failed leaves the others waiting for it, so all are watched at once
    finally:
        for process in processes:
            process.kill()
            process.wait()


def in_turn(systems: Sequence[System], rounds: int) -> Iterator[tuple[int, Sequence[System]]]:
    """Each round's number, from 0, and the systems in that round's order, which is reversed every other round."""
    for number in range(rounds):
        yield number, systems if number % 2 == 0 else systems[::-1]


def resident_bytes() -> int:
    """Bytes of memory that this process holds now."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """The most bytes of memory that this process has held so far."""
    if sys.platform == "linux":  # not ru_maxrss: on Linux that starts from what the parent held
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def describe(script: str, packages: tuple[str, ...]) -> dict[str, str]:
    """The hardware, versions and command behind the script's result, listed with every figure."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} not installed")
    changed = (
        " with uncommitted changes"
        if git("status", "--porcelain", "--", "lightning_zero", "benchmarks", ":!benchmarks/results")
        else ""
    )
    memory = psutil.virtual_memory().total / 2**30
    return {
        "hardware": f"{processor_name()}, {os.cpu_count()} logical cores, {memory:.0f} GiB",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "commit": os.environ.get("COMMIT") or git("rev-parse", "--short=12", "HEAD") + changed,
        "command": shlex.join(["python", os.path.relpath(script, REPOSITORY), *sys.argv[1:]]),
    }


def processor_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_results(folder: Path, name: str, result: dict[str, Any], lines: list[str]) -> None:
    """Write `folder/name.json` and `folder/name.md` (the lines followed by the description), and print the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [*lines, "", *(f"- {key}: {value}" for key, value in result["about"].items())]
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def markdown_table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table with the first column aligned left, the others right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in [head, rule, *rows]]


def median_of_rounds(rounds: list[list[float]]) -> float:
    return statistics.median(value for values in rounds for value in values)


def spread(rounds: list[list[float]], digits: int = 4) -> str:
    """The lowest and the highest median of a round, which show how noisy the machine was."""
    medians = [statistics.median(values) for values in rounds]
    return f"{min(medians):.{digits}f} - {max(medians):.{digits}f}"
