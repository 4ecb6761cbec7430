"""Loss of quality by fewer bits: a GPT on text, trained on two machines with each kind of compression and state.

    python benchmarks/neutrality.py
    python benchmarks/neutrality.py --name neutrality_states --systems "fp32,bf16 states,bf16 true,bf16 true lean"
    python benchmarks/neutrality.py --steps 50 --seeds 0 --systems fp32,int8 --output FOLDER

The machines are network namespaces, which needs root. A system passes if its mean is as close to fp32's as fp32's own
seeds are to each other.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from common import REPOSITORY, describe, markdown_table, run_workers, write_results
from machines import Machines

SIZES = {"width": 128, "depth": 2, "heads": 4}
CONTEXT, BATCH, WARM_UP, EXEMPT = 64, 8, 50, 8192
WORKER_TIMEOUT = 3600.0  # seconds

SYSTEMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8": {"compression": "int8"},
    "int4": {"compression": "int4"},
    "bf16": {"bf16": True},
    "bf16 int8": {"bf16": True, "compression": "int8"},
    "bf16 int4": {"bf16": True, "compression": "int4"},
    "bf16 states": {"state_dtype": "bf16"},
    "bf16 true": {"true": True},  # parameters in bf16, with fp32 master weights and states
    "bf16 true lean": {"true": True, "state_dtype": "bf16", "masters": False},
}
COMPRESSED = [system for system in SYSTEMS if "states" not in system and "true" not in system]
BASE = "fp32"
"""The system with which the others are compared."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--systems", default=",".join(COMPRESSED), help=f"some of {', '.join(SYSTEMS)}")
    parser.add_argument("--name", default="neutrality", help="name of the files with results")
    parser.add_argument("--seeds", default="0,1,2", help="seeds of the weights and the data order")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    arguments = parser.parse_args()
    systems = arguments.systems.split(",")
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"--systems: {', '.join(sorted(unknown))} is not among {', '.join(SYSTEMS)}")
    if BASE not in systems:
        parser.error(f"--systems: add {BASE}, with which other systems are compared")
    return arguments


def work(arguments: argparse.Namespace) -> None:
    """Run one rank; write each system's and seed's validation loss, and the bytes that left in the last step."""
    import torch
    import torch.distributed as dist

    from lightning_zero.engine import Engine
    from lightning_zero.engine.init import bucketing
    from lightning_zero.zoo.gpt import GPT
    from lightning_zero.zoo.text import Windows, read_split

    torch.set_num_threads(1)
    bucketing.EXEMPT_NUMEL = EXEMPT  # the model is small
    dist.init_process_group("gloo")
    rank, cross_entropy = dist.get_rank(), torch.nn.functional.cross_entropy
    texts = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in read_split(None, 4_000_000, 10))
    train, validation = (Windows(text, CONTEXT) for text in texts)

    def stacked(windows: Windows, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = zip(*(windows[int(index)] for index in indices))
        return torch.stack(inputs), torch.stack(targets)

    def loss_of(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor], bf16: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(data[0])
        return cross_entropy(logits.float().flatten(0, 1), data[1].flatten())

    found: dict[str, dict[str, float]] = {}
    for system in arguments.systems.split(","):
        chosen = SYSTEMS[system]
        bf16 = chosen.get("bf16", False)
        for seed in arguments.seeds.split(","):
            torch.manual_seed(int(seed))
            model = GPT(**SIZES, context=CONTEXT, tied=False)
            if chosen.get("true", False):
                model = model.bfloat16()
            optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer,
                lambda step: (
                    min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / arguments.steps))
                ),
            )
            options = {name: chosen[name] for name in ("state_dtype", "masters", "compression") if name in chosen}
            if bf16:
                options["compute_dtype"] = torch.bfloat16
            engine = Engine(model, [optimizer], stage=2, **options)
            order = torch.Generator().manual_seed(1000 + int(seed))
            for _ in range(arguments.steps):
                indices = torch.randint(len(train), (dist.get_world_size(), BATCH), generator=order)[rank]
                engine.reset_counters()
                loss_of(model, stacked(train, indices), bf16).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            crossed = sum(n for (_, link), n in engine.communicator.counters.bytes.items() if link == "across")
            with torch.no_grad():
                parts = torch.arange(min(512, len(validation))).split(64)
                losses = [loss_of(model, stacked(validation, part), bf16).item() for part in parts]
            engine.close()
            found.setdefault(system, {})[seed] = statistics.mean(losses)
            found[system]["crossed"] = crossed
    arguments.worker.write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return
    options = ["--systems", arguments.systems, "--seeds", arguments.seeds, "--steps", str(arguments.steps)]
    with Machines() as machines:
        ranks = run_workers(__file__, options, 2, {}, WORKER_TIMEOUT, machines)
    found, seeds = ranks[0], arguments.seeds.split(",")
    reference = found[BASE]
    spread = max(reference[seed] for seed in seeds) - min(reference[seed] for seed in seeds)
    rows = []
    for system, losses in found.items():
        gaps = [losses[seed] - reference[seed] for seed in seeds]
        gap = statistics.mean(gaps)
        rows.append(
            [
                system,
                *(f"{losses[seed]:.4f}" for seed in seeds),
                f"{gap:+.4f}",
                f"{max(gaps, key=abs):+.4f}",
                "yes" if abs(gap) <= spread else "no",
                f"{losses['crossed'] / reference['crossed']:.2f}",
            ]
        )
    head = ["system", *(f"seed {seed}" for seed in seeds), "mean gap to fp32", "largest gap of a seed"]
    head += ["mean within fp32's spread", "x bytes that cross"]
    lines = [
        f"Validation loss of a GPT (width {SIZES['width']}, depth {SIZES['depth']}) after {arguments.steps} steps of "
        f"{2 * BATCH} windows of {CONTEXT} bytes, AdamW, stage 2, one rank on each of two machines; spread of fp32's "
        f"seeds {spread:.4f}.",
        "",
        *markdown_table(head, rows),
    ]
    write_results(
        arguments.output,
        arguments.name,
        {"about": describe(__file__, ("torch",)), "systems": found, "spread": spread},
        lines,
    )


if __name__ == "__main__":
    main()
