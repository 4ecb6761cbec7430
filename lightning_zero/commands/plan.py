"""`lightning-zero plan`: predict memory, traffic and time of a training run without running it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from lightning_zero.commands.projects import project_of, project_parser, split_arguments, strategy_options
from lightning_zero.commands.showing import not_negative, positive, print_json, size_of
from lightning_zero.io.annotations import matches
from lightning_zero.io.paths import read_json
from lightning_zero.io.text import in_bytes, print_table


def main(arguments: list[str]) -> int:
    own, of_script = split_arguments(arguments)
    parsed = parser().parse_intermixed_args(own)
    if parsed.paper:
        return _paper(parsed)
    if not parsed.project:
        parser().error("name a project (package.module:Module, train.py or model=gpt_small), or pass --paper")
    sys.path.insert(0, "")
    try:
        from lightning_zero.planning.advice import CHECKPOINTING, OFFLOADS, advise, as_json, make_plans

        measured = read_json(parsed.resources) if parsed.resources is not None else {}
        if not all(isinstance(measured.get(name, {}), dict) for name in ("resources", "machine")):
            raise ValueError(f"{parsed.resources} is not the output of lightning-zero doctor --json")
        resources = _resources(parsed, measured.get("resources", {}))
        memory = parsed.memory or (resources.memory if resources is not None else None)
        project = project_of(parsed, of_script)
        settings = {name: value for name in _SETTINGS if (value := getattr(parsed, name)) is not None}
        if parsed.ranks is not None:
            settings = {"machines": 1, **settings}  # with --ranks, the Trainer's number of machines is ignored
        known = {**project.settings, **settings}
        left_out: list[str] = []
        options = strategy_options(parsed.option, _CHOICES)
        variants = [
            {**dict(zip(options, values)), **CHECKPOINTING[checkpointing], **OFFLOADS[offload]}
            for offload, checkpointing, *values in product(parsed.offload, parsed.checkpointing, *options.values())
        ]
        plans = make_plans(
            project.make_module,
            project.batch,
            stages=parsed.stage,
            variants=variants,
            micro_batches=parsed.micro_batch or [None],
            resources=resources,
            memory=memory,
            transport=parsed.transport or measured.get("machine", {}).get("transport") or "nccl",
            left_out=left_out,
            **{"ranks": 1, **known},
        )
        if "ranks" not in known:
            plans = [replace(each, assumptions=(*each.assumptions, _ONE_RANK)) for each in plans]
    except (ValueError, ImportError, OSError) as error:
        print(f"lightning-zero plan: {error}", file=sys.stderr)
        return 2
    for reason in left_out:
        print(f"Left out: {reason}", file=sys.stderr)
    if parsed.json:
        print_json([as_json(plan) for plan in plans])
        return 0
    _print(plans)
    for sentence in advise(plans, memory):
        print(sentence)
    for assumption in dict.fromkeys(text for plan in plans for text in plan.assumptions):
        print(f"Assumed: {assumption}")
    return 0


_SPEEDS = {
    "flops": "floating-point operations per second in matrix products",
    "low_flops": "the same in 16 bits (default: --flops)",
    "memory_bandwidth": "bytes per second that operators read and write",
    "link_bandwidth": "bytes per second that a rank sends in a collective",
    "machine_bandwidth": "bytes per second from a machine to other machines",
    "link_seconds": "latency of a collective",
    "host_bandwidth": "bytes per second of optimizer updates on the host",
    "disk_bandwidth": "bytes per second of optimizer updates on a disk",
}
"""Options that override measured values, with their help."""

_SETTINGS = ("ranks", "machines", "accumulate", "precision", "clip")
"""Options that take precedence over the arguments of the project's own Trainer."""


_ONE_RANK = "one rank, because the number of devices is not known (give the number of ranks with --ranks)"


_CHOICES = {
    "stage": "write --stage {}",
    "offload": "write --offload with cpu, nvme or activations",
    "activation_checkpointing": "write --checkpointing on",
    "partition_activations": "write --checkpointing partitioned",
}
"""Options of the strategy that have their own arguments here, since each value gets its own plans."""


def parser() -> argparse.ArgumentParser:
    made = project_parser(
        "plan",
        "Predict memory, traffic and time: run the real Trainer and engine for two steps on fake tensors, as one rank "
        "of many.",
        stages=[0, 1, 2, 3],
    )
    made.add_argument("--ranks", type=positive, help="world size (default: the Trainer's, or 1)")
    made.add_argument("--offload", nargs="+", default=["none"], choices=["none", "cpu", "nvme", "activations"])
    made.add_argument(
        "--machines", type=positive, help="machines, each with the same number of ranks (default: the Trainer's, or 1)"
    )
    made.add_argument("--micro-batch", type=positive, nargs="+", help="samples per rank in each micro-batch")
    made.add_argument(
        "--checkpointing",
        nargs="+",
        default=["off"],
        choices=["off", "on", "partitioned"],
        help="activation checkpointing; partitioned: each tensor-parallel rank keeps a part of the activations",
    )
    made.add_argument(
        "--accumulate", type=positive, nargs="+", help="micro-batches per step (default: the Trainer's, or 1)"
    )
    made.add_argument("--clip", type=not_negative, help="gradient_clip_val (default: the Trainer's)")
    made.add_argument("--memory", type=size_of, help="memory of the device, such as 80GB, to show which choices fit")
    made.add_argument("--resources", type=Path, help="file with the output of lightning-zero doctor --json")
    for name, does in _SPEEDS.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=float, help=does)
    made.add_argument(
        "--transport",
        choices=["nccl", "gloo", "shared memory"],
        help="transport between ranks, which determines communication buffers (default: as in --resources, or nccl)",
    )
    made.add_argument(
        "--paper", action="store_true", help="print Table 1 of the ZeRO paper, by its formula and by the engine"
    )
    return made


def _resources(parsed: argparse.Namespace, measured: dict[str, Any]) -> Any:
    """The machine's measured speeds, overridden by options; None if no speeds are given."""
    from lightning_zero.planning.timeline import resources_of

    given = dict(measured)
    for name in _SPEEDS:
        if (value := getattr(parsed, name)) is not None:
            given[name] = value
    if not given:
        return None
    if "flops" not in given:
        raise ValueError("--flops is required if other speeds are given: add it, or pass --resources FILE")
    if "memory_bandwidth" not in given and matches(given["flops"], float):
        given["memory_bandwidth"] = given["flops"] / 100
    return resources_of(given, parsed.resources or "the command line")


def _print(plans: list[Any]) -> None:
    batches = [f"{plan.micro_batch or ''}{f' x {plan.accumulate}' if plan.accumulate > 1 else ''}" for plan in plans]
    columns = {"strategy": [plan.name for plan in plans], "batch": batches}
    for name in ("parameters", "gathered", "gradients", "reduction", "optimizer", "activations"):
        if any(plan.peak_bytes.get(name) for plan in plans):
            columns[name] = [in_bytes(plan.peak_bytes.get(name, 0)) for plan in plans]
    columns["total"] = [in_bytes(plan.total_bytes) for plan in plans]
    columns["host"] = [in_bytes(plan.host_bytes) for plan in plans]
    if any(plan.disk_bytes for plan in plans):
        columns["disk"] = [in_bytes(plan.disk_bytes) for plan in plans]
    columns["sent"] = [in_bytes(sum(plan.traffic_bytes.values())) for plan in plans]
    if any(plan.leaving_bytes for plan in plans):
        columns["leaves a machine"] = [in_bytes(plan.leaving_bytes) for plan in plans]
    if plans[0].seconds_per_step is not None:
        columns["s/step"] = [f"{plan.seconds_per_step:.3g}" for plan in plans]
        rates = [plan.samples_per_second for plan in plans]
        columns["samples/s"] = ["" if rate is None else f"{rate:.4g}" for rate in rates]
    columns["fits"] = [{True: "yes", False: "no", None: ""}[plan.fits] for plan in plans]
    print_table([tuple(columns), *zip(*columns.values())], tuple(range(1, len(columns))))


def _paper(parsed: argparse.Namespace) -> int:
    from lightning_zero.planning.paper import TABLE_1_RANKS, TABLE_1_SIZES, table_1

    cells = table_1()
    if parsed.json:
        print_json(cells)
        return 0
    rows = [("ranks", *(f"{size / 1e9:g} B, stage {stage}" for size in TABLE_1_SIZES for stage in (1, 2, 3)))]
    for ranks in TABLE_1_RANKS:
        found = [f"{cell['formula_gb']:.4g} | {cell['engine_gb']:.4g}" for cell in cells if cell["ranks"] == ranks]
        rows.append((str(ranks), *found))
    print_table(rows, tuple(range(len(rows[0]))))
    print("GB of model states per rank: by the paper's formula | in this engine, whose gradients are fp32.")
    return 0
