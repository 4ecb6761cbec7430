"""Step time and peak memory of DDP, FSDP2, DeepSpeed and the three stages, side by side on one model.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --batch 1 --sequence 16                  # bound by communication
    python benchmarks/step_time.py --model deep --steps 30                  # bound by overhead: 100 layers of width 64
    python benchmarks/step_time.py --rounds 1 --steps 3 --model tiny --systems ddp,zero3

Every system runs once a round, in fresh processes (two over Gloo, one thread each), and the order is reversed from one
round to the next, so that a machine which gets slower over time treats all alike. The figures are medians over all
rounds. Memory is read in runs of its own, so that reading it costs the timed runs nothing.
"""

import argparse
import json
import os
import statistics
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import (
    GPTS,
    REPOSITORY,
    RETURN_MEMORY_AT_ONCE,
    describe,
    in_turn,
    markdown_table,
    median_of_rounds,
    peak_resident_bytes,
    resident_bytes,
    run_workers,
    spread,
    write_results,
)

SYSTEMS = ["single", "ddp", "zero1", "zero2", "zero3", "fsdp2", "deepspeed1", "deepspeed2", "deepspeed3"]
RANKS = 2
WARM_UP = 2  # steps: the first allocates gradients and optimizer state, the second may still find its order
WORKER_TIMEOUT = 600.0  # seconds
MEBIBYTE = 2**20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated, of: " + " ".join(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5, help="how often each system is run and timed")
    parser.add_argument("--steps", type=int, default=8, help="timed steps a round, after the warm-up")
    parser.add_argument("--model", default="25m", choices=[*GPTS, "deep"])
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank and step")
    parser.add_argument("--sequence", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    arguments = parser.parse_args()
    unknown = set(arguments.systems.split(",")) - set(SYSTEMS)
    if unknown:
        parser.error(f"--systems: {', '.join(sorted(unknown))} is not among {', '.join(SYSTEMS)}")
    if min(arguments.rounds, arguments.steps, arguments.batch, arguments.sequence) < 1:
        parser.error("--rounds, --steps, --batch and --sequence must be at least 1")
    return arguments


def work(arguments: argparse.Namespace) -> None:
    """One rank of one system: trains, and writes losses, seconds and memory to the file that the parent named."""
    import torch
    import torch.distributed as dist
    from models import model_of
    from systems import SYSTEMS

    world_size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo")
    if arguments.systems.startswith("deepspeed"):
        import_module("deepspeed")  # here, so that the memory of its code is not counted as the training's
    before = resident_bytes()

    torch.manual_seed(0)
    model = model_of(arguments.model, arguments.sequence)
    parameters = sum(p.numel() for p in model.parameters())
    training = SYSTEMS[arguments.systems](model)
    del model  # what a system does not keep, it need not pay for

    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    losses, seconds = [], []
    for _ in range(WARM_UP + arguments.steps):
        text = torch.randint(256, (arguments.batch, arguments.sequence + 1), generator=generator)
        started = time.perf_counter()
        losses.append(training.step(text[:, :-1], text[:, 1:]).item())
        seconds.append(time.perf_counter() - started)
    result = {
        "parameters": parameters,
        "losses": losses,
        "seconds": seconds[WARM_UP:],
        "peak_resident_bytes": peak_resident_bytes() - before,
        "peak_by_category": training.peak_by_category(),
    }
    arguments.worker.write_text(json.dumps(result))
    # DDP's reducer would else be the last to hold the group, and end it without giving up the interpreter's lock, for
    # which Gloo's threads may wait then: the process would never end.
    del training
    if world_size > 1:
        dist.barrier()  # a rank that leaves first must not take the store away from the others
        dist.destroy_process_group()


def run(system: str, arguments: argparse.Namespace, steps: int, environment: dict[str, str]) -> list[Any]:
    options = ["--systems", system, "--steps", str(steps), "--model", arguments.model]
    options += ["--batch", str(arguments.batch), "--sequence", str(arguments.sequence)]
    return run_workers(__file__, options, 1 if system == "single" else RANKS, environment, WORKER_TIMEOUT)


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return

    systems = arguments.systems.split(",")
    if find_spec("deepspeed") is None:
        absent = [system for system in systems if system.startswith("deepspeed")]
        if absent:
            print(f"left out, since the package deepspeed is not installed: {', '.join(absent)}")
        systems = [system for system in systems if system not in absent]

    seconds: dict[str, list[list[float]]] = {system: [] for system in systems}
    losses: dict[str, list[float]] = {}
    memory: dict[str, list[Any]] = {}
    for system in systems:
        memory[system] = run(system, arguments, steps=1, environment=RETURN_MEMORY_AT_ONCE)
    for round_index, turn in in_turn(systems, arguments.rounds):
        for system in turn:
            ranks = run(system, arguments, arguments.steps, environment={})
            # A step ends when its slowest rank has ended it.
            seconds[system].append([max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)])
            losses[system] = [statistics.fmean(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
            print(
                f"round {round_index + 1} of {arguments.rounds}: {system:<10} "
                f"{statistics.median(seconds[system][-1]):.3f} s a step, last loss {losses[system][-1]:.7f}",
                flush=True,
            )

    report(arguments, systems, seconds, losses, memory)


def report(
    arguments: argparse.Namespace,
    systems: list[str],
    seconds: dict[str, list[list[float]]],
    losses: dict[str, list[float]],
    memory: dict[str, list[Any]],
) -> None:
    medians = {system: median_of_rounds(seconds[system]) for system in systems}
    bases = [system for system in ("ddp", "fsdp2") if system in systems]
    rows, peaks = [], {}
    for system in systems:
        resident = max(rank["peak_resident_bytes"] for rank in memory[system])
        buffers = max((rank["peak_by_category"] for rank in memory[system]), key=lambda peak: sum(peak.values()))
        peaks[system] = {"resident": resident, "buffers": buffers}
        rows.append(
            [
                system,
                f"{medians[system]:.4f}",
                spread(seconds[system]),
                *(f"{medians[system] / medians[base]:.2f}" for base in bases),
                f"{resident / MEBIBYTE:.0f}",
                f"{sum(buffers.values()) / MEBIBYTE:.0f}" if buffers else "",
                f"{losses[system][-1]:.7f}",
            ]
        )
    parameters = memory[systems[0]][0]["parameters"]
    ratios = [f"x {base.upper()}" for base in bases]
    head = ["system", "s a step", "rounds", *ratios, "peak MiB a rank", "of it model states MiB", "last loss"]
    lines = [
        f"The model {arguments.model} of {parameters / 1e6:.1f} M parameters, fp32, AdamW, {arguments.batch} x "
        f"{arguments.sequence} tokens a rank and step; {RANKS} processes over Gloo with one thread each. `single` is "
        "one process with one rank's data: no communication, and another loss.",
        f"Medians of {arguments.rounds} rounds of {arguments.steps} steps; `rounds` is the lowest and the highest "
        "median of one round. Peak: resident memory beyond what the process held before it made the model.",
        "",
        *markdown_table(head, rows),
    ]
    result = {
        "about": describe(__file__, ("torch", "lightning", "deepspeed")),
        "parameters": parameters,
        "median_seconds": medians,
        "seconds": seconds,
        "losses": losses,
        "peak_bytes": peaks,
    }
    write_results(arguments.output, "step_time", result, lines)


if __name__ == "__main__":
    main()
