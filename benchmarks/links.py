"""Traffic between two machines in a step, and its time, for different ways to shard and encode parameters.

    python benchmarks/links.py
    python benchmarks/links.py --systems zero3,zero3_node --rates none,1gbit --rounds 1 --width 256 --output FOLDER

The machines are network namespaces with two ranks each, which needs root. Each system is trained with and without
overlap; without overlap, the extra time on a slow network compared with a fast one is the communication time.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from common import REPOSITORY, describe, in_turn, markdown_table, run_workers, write_results
from machines import CABLE, Machines, bytes_sent, bytes_sent_by_all

RANKS, LAYERS, MICRO_BATCHES, WARM_UP, WIDTH = 4, 4, 4, 3, 1024
WORKER_TIMEOUT = 600.0  # seconds
MEBIBYTE = 2**20

SYSTEMS: dict[str, dict[str, Any]] = {
    "zero3": {"stage": 3},
    "zero2": {"stage": 2},
    "zero3_node": {"stage": 3, "shard_within": "node"},
    "zero3_node int8": {"stage": 3, "shard_within": "node", "compression": "int8"},
    "bf16 zero3_node": {"bf16": True, "stage": 3, "shard_within": "node"},
    "bf16 zero3_node int8": {"bf16": True, "stage": 3, "shard_within": "node", "compression": "int8"},
    "bf16 zero3_node int4": {"bf16": True, "stage": 3, "shard_within": "node", "compression": "int4"},
}
BASES = {"fp32": "zero3", "bf16": "bf16 zero3_node"}
"""The system with which those of each precision are compared."""


def base_of(system: str) -> str:
    return BASES["bf16" if system.startswith("bf16") else "fp32"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--rates", default="none,1gbit", help="rates of the network; the first counts as unlimited")
    parser.add_argument("--width", type=int, default=WIDTH, help="width of each of the model's square layers")
    parser.add_argument("--rounds", type=int, default=3, help="how often each system is run and timed")
    parser.add_argument("--steps", type=int, default=6, help="timed steps per round, after the warm-up")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    arguments = parser.parse_args()
    systems = arguments.systems.split(",")
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"--systems: {', '.join(sorted(unknown))} is not among {', '.join(SYSTEMS)}")
    if not arguments.worker and (missing := {base_of(system) for system in systems} - set(systems)):
        parser.error(f"--systems: add {', '.join(sorted(missing))}, with which other systems are compared")
    return arguments


def work(arguments: argparse.Namespace) -> None:
    """Run one rank of one system; write seconds per step with and without overlap, and the last step's bytes."""
    import time
    from contextlib import nullcontext

    import torch
    import torch.distributed as dist
    from torch import nn

    from lightning_zero.engine import Engine

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options = dict(SYSTEMS[arguments.systems])
    if bf16 := options.pop("bf16", False):
        options["compute_dtype"] = torch.bfloat16
    found: dict[str, Any] = {}
    for overlap in (True, False):
        torch.manual_seed(0)
        layers = (nn.Linear(arguments.width, arguments.width, bias=False) for _ in range(LAYERS))
        module = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4)
        engine = Engine(module, [optimizer], unit_numel=0, overlap=overlap, **options)
        generator = torch.Generator().manual_seed(dist.get_rank())
        seconds = []
        for step in range(WARM_UP + arguments.steps):
            batches = torch.randn(MICRO_BATCHES, 4, arguments.width, generator=generator)
            before = bytes_sent_by_all()[CABLE]
            started = time.perf_counter()
            for number, batch in enumerate(batches):
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = module(batch).square().mean() / MICRO_BATCHES
                with engine.no_sync() if number + 1 < MICRO_BATCHES else nullcontext():
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for bucket in engine.buckets:  # what the step has begun to fetch is part of it
                if bucket.part is not None:
                    bucket.part.values()
                elif bucket.is_ready:
                    bucket.wait()
            dist.barrier()
            if step >= WARM_UP:
                seconds.append(time.perf_counter() - started)
        found["overlap" if overlap else "apart"] = seconds
        found["left_bytes"] = bytes_sent()[CABLE] - before
        engine.close()
    arguments.worker.write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By system: seconds of all rounds' steps by rate, with and without overlap, and the bytes that leave a machine."""
    systems, rates = arguments.systems.split(","), arguments.rates.split(",")
    found: dict[str, dict[str, Any]] = {system: {"seconds": {rate: {} for rate in rates}} for system in systems}
    turns = [(system, rate) for system in systems for rate in rates]
    for number, turn in in_turn(turns, arguments.rounds):
        for system, rate in turn:
            options = ["--systems", system, "--width", str(arguments.width), "--steps", str(arguments.steps)]
            with Machines(None if rate == "none" else rate) as machines:
                ranks = run_workers(__file__, options, RANKS, {}, WORKER_TIMEOUT, machines)
            for kind in ("overlap", "apart"):
                steps = [max(step) for step in zip(*(rank[kind] for rank in ranks))]
                found[system]["seconds"][rate].setdefault(kind, []).extend(steps)
            found[system]["left_bytes"] = ranks[0]["left_bytes"]
            print(f"round {number + 1} of {arguments.rounds}: {system} at {rate}", flush=True)
    return found


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return
    found, rates = measure(arguments), arguments.rates.split(",")
    fast, slow = rates[0], rates[-1]

    def communication(system: str) -> float:
        each = found[system]["seconds"]
        return statistics.median(each[slow]["apart"]) - statistics.median(each[fast]["apart"])

    rows = []
    for system, each in found.items():
        base = base_of(system)
        rows.append(
            [
                system,
                f"{each['left_bytes'] / MEBIBYTE:.2f}",
                f"{each['left_bytes'] / found[base]['left_bytes']:.3f}",
                f"{communication(system):.4f}",
                f"{communication(system) / communication(base):.3f}",
                *(f"{statistics.median(each['seconds'][rate]['overlap']):.4f}" for rate in rates),
            ]
        )
    head = ["system", "left MiB", "x bytes", f"communication at {slow}, s", "x time"]
    head += [f"s a step, {rate if rate != 'none' else 'no limit'}" for rate in rates]
    numel = LAYERS * arguments.width**2
    lines = [
        f"{LAYERS} square layers, {numel / 1e6:.1f} M parameters, AdamW, {MICRO_BATCHES} micro-batches a step, two "
        "ranks of one thread on each of two simulated machines. Bytes leave one machine in a step, by the kernel's "
        "count. "
        f"Communication is what a step without overlap takes longer at {slow} than without a limit. Both are compared "
        f"with {BASES['fp32']}, and in bf16 with {BASES['bf16']}. Medians of {arguments.rounds} rounds of "
        f"{arguments.steps} steps.",
        "",
        *markdown_table(head, rows),
    ]
    name = "links" if arguments.width == WIDTH else f"links_width{arguments.width}"
    write_results(arguments.output, name, {"about": describe(__file__, ("torch",)), "systems": found}, lines)


if __name__ == "__main__":
    main()
