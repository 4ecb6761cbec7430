"""Time to save and load one training state: our two formats, both blocking and asynchronous, FSDP2 with DCP, and dd.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --rounds 1 --saves 2 --model tiny --systems sharded,sharded_async

Two processes over Gloo, one thread each, write to one folder and sync it to the disk. Every system runs once per round
in fresh processes, in reversed order every other round. Training continues after each save until it is written. The
first save of a process, which also allocates memory that later saves reuse, is listed separately. The last save is
loaded twice: from the disk, with the page cache emptied, and from the page cache. Before each load an equal amount of
memory is used and freed, so that every system finds the machine's memory in the same state.
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from common import GPTS, REPOSITORY, describe, in_turn, markdown_table, run_workers, write_results

SYSTEMS = ["sharded", "sharded_async", "full", "full_async", "fsdp2", "fsdp2_async"]
RANKS = 2
BATCH, SEQUENCE = 1, 64
STEPS = 3  # timed before the first save
WORKER_TIMEOUT = 900.0  # seconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated, from: " + " ".join(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=3, help="how often each system is run and timed")
    parser.add_argument("--saves", type=int, default=4, help="saves per round; the first is listed separately")
    parser.add_argument("--model", default="124m", choices=GPTS)
    parser.add_argument(
        "--disk", type=Path, help="folder on the disk to write to; default: the system's temporary folder"
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    arguments = parser.parse_args()
    unknown = set(arguments.systems.split(",")) - set(SYSTEMS)
    if unknown:
        parser.error(f"--systems: {', '.join(sorted(unknown))} is not among {', '.join(SYSTEMS)}")
    if arguments.rounds < 1 or arguments.saves < 2:
        parser.error("--rounds must be at least 1, and --saves at least 2")
    return arguments


def work(arguments: argparse.Namespace) -> None:
    """One rank of one system: trains, saves, loads, and writes the seconds to the file that the parent named."""
    import torch
    import torch.distributed as dist
    from models import model_of
    from saving_systems import SYSTEMS
    from systems import cross_entropy

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = model_of(arguments.model, SEQUENCE)
    parameters = sum(p.numel() for p in model.parameters())
    system = SYSTEMS[arguments.systems](model)
    text = torch.randint(256, (BATCH, SEQUENCE + 1))

    def step() -> float:
        started = time.perf_counter()
        cross_entropy(system.module(text[:, :-1]), text[:, 1:]).backward()
        system.optimizer.step()
        system.optimizer.zero_grad()
        return time.perf_counter() - started

    step()
    result: dict[str, Any] = {"parameters": parameters, "steps": [step() for _ in range(STEPS)]}
    result |= {"stalls": [], "written": [], "steps_while_writing": []}
    paths = [arguments.disk / f"save{number}" for number in range(arguments.saves)]
    for path in paths:
        step()
        dist.barrier()
        started = time.perf_counter()
        system.save(path)
        result["stalls"].append(time.perf_counter() - started)
        steps = []
        while not all_are(system.is_written()):
            steps.append(step())
        system.finish()
        dist.barrier()
        result["written"].append(time.perf_counter() - started)
        result["steps_while_writing"].append(steps)
    forget(paths[-1])
    for key in ("load", "load_cached"):
        touch_memory(size_of(paths[-1]))
        dist.barrier()
        started = time.perf_counter()
        system.load(paths[-1])
        dist.barrier()
        result[key] = time.perf_counter() - started
    result["loss"] = float(cross_entropy(system.module(text[:, :-1]), text[:, 1:]).detach())
    arguments.worker.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def forget(path: Path) -> None:
    """Evict files that have been synced to the disk from the page cache."""
    for file in [path] if path.is_file() else path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def touch_memory(size: int) -> None:
    """Use ``size`` bytes of memory, and free them.

    A virtual machine gets memory from its host at the first write, at about a second per gigabyte, and returns memory
    that has been free for a while. Files that were just evicted from the cache leave memory for the next reader; files
    written past the cache leave none. This call makes all systems equal, as when a run is resumed.
    """
    with mmap.mmap(-1, size) as memory:
        for position in range(0, size, mmap.PAGESIZE):
            memory[position] = 1


def all_are(here: bool) -> bool:
    """Whether ``here`` is true on every rank, so that all ranks train for equally many steps."""
    import torch
    import torch.distributed as dist

    everywhere = torch.tensor(int(here))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)


def seconds_of_dd(folder: Path, size: int) -> float:
    """Seconds that dd takes to write ``size`` random bytes from memory and sync them to the disk."""
    source = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None), "random")
    block = os.urandom(2**24)
    with source.open("wb") as file:
        for _ in range(size // len(block) + 1):
            file.write(block)
    started = time.perf_counter()
    command = ["dd", f"if={source}", f"of={folder / 'dd'}", "bs=4M", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    elapsed = time.perf_counter() - started
    shutil.rmtree(source.parent)
    return elapsed * size / (folder / "dd").stat().st_size


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return
    systems = arguments.systems.split(",")
    rounds: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    dd: list[float] = []
    for number, turn in in_turn(systems, arguments.rounds):
        for system in turn:
            with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
                options = ["--systems", system, "--saves", str(arguments.saves), "--model", arguments.model]
                ranks = run_workers(__file__, [*options, "--disk", folder], RANKS, {}, WORKER_TIMEOUT)
                size = size_of(Path(folder, f"save{arguments.saves - 1}"))
            # A save ends when the slowest rank's has.
            found = {key: [max(pair) for pair in zip(*(rank[key] for rank in ranks))] for key in ("stalls", "written")}
            steps = [s for rank in ranks for steps in rank["steps_while_writing"][1:] for s in steps]
            rounds[system].append(
                {
                    **found,
                    "bytes": size,
                    "load": max(rank["load"] for rank in ranks),
                    "load_cached": max(rank["load_cached"] for rank in ranks),
                    "step": statistics.median(s for rank in ranks for s in rank["steps"]),
                    "step_while_writing": statistics.median(steps) if steps else None,
                    "loss": ranks[0]["loss"],
                    "parameters": ranks[0]["parameters"],
                }
            )
            print(f"round {number + 1}: {system:<14} {rounds[system][-1]}", flush=True)
        with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
            dd.append(seconds_of_dd(Path(folder), rounds[systems[0]][-1]["bytes"]) / rounds[systems[0]][-1]["bytes"])
        print(f"round {number + 1}: dd {1e-6 / dd[-1]:.0f} MB/s", flush=True)
    report(arguments, rounds, dd)


def report(arguments: argparse.Namespace, rounds: dict[str, list[dict[str, Any]]], dd: list[float]) -> None:
    disk = 1e-6 / statistics.median(dd)  # MB/s
    rows = []
    medians: dict[str, dict[str, float]] = {}
    for system, results in rounds.items():

        def median(key: str, results: list[dict[str, Any]] = results) -> float:
            return statistics.median(value for result in results for value in result[key][1:])

        medians[system] = {
            "stall": median("stalls"),
            "first_stall": statistics.median(result["stalls"][0] for result in results),
            "written": median("written"),
            "load": statistics.median(result["load"] for result in results),
            "load_cached": statistics.median(result["load_cached"] for result in results),
        }
        now = medians.get(system.removesuffix("_async"), medians[system])["stall"]
        speed = results[0]["bytes"] / medians[system]["written"] / 1e6
        slower = [result["step_while_writing"] / result["step"] for result in results if result["step_while_writing"]]
        rows.append(
            [
                system,
                f"{medians[system]['stall']:.3f}",
                f"{100 * medians[system]['stall'] / now:.1f} %",
                f"{medians[system]['first_stall']:.3f}",
                f"{medians[system]['written']:.3f}",
                f"{speed:.0f}",
                f"{speed / disk:.2f}",
                f"{statistics.median(slower):.2f}" if slower else "",
                f"{medians[system]['load']:.3f}",
                f"{medians[system]['load_cached']:.3f}",
            ]
        )
    first = next(iter(rounds.values()))[0]
    stalls = ["stall s", "of the same now", "first stall s"]
    head = ["system", *stalls, "written s", "MB/s", "x dd", "step x", "load s", "cached s"]
    lines = [
        f"A GPT of {first['parameters'] / 1e6:.1f} M parameters with AdamW in fp32, {first['bytes'] / 1e6:.0f} MB of "
        f"state; {RANKS} processes over Gloo with one thread each, stage 3. Medians of {arguments.rounds} rounds of "
        f"{arguments.saves - 1} saves. `stall`: seconds for which training waits; `written`: until all is synced to "
        f"the disk; `x dd`: against {disk:.0f} MB/s, which dd reaches with conv=fsync; `step x`: a training step while "
        "it is written against one at rest; `load`: into a model that trains, weights and optimizer, from the disk; "
        "`cached`: again, out of the system's cache.",
        "",
        *markdown_table(head, rows),
    ]
    result = {
        "about": describe(__file__, ("torch", "lightning")),
        "medians": medians,
        "rounds": rounds,
        "dd_seconds_per_byte": dd,
    }
    write_results(arguments.output, "checkpoint", result, lines)


if __name__ == "__main__":
    main()
