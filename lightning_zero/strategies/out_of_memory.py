"""Advice added to out-of-memory errors: memory in use by category, and how much each remedy would free."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from lightning_zero.engine import Engine, failures, layout
from lightning_zero.io.text import in_gb


def say_who_holds_memory(error: BaseException, engine: Engine | None) -> None:
    """Add the memory in use by category, and remedies, to an out-of-memory error. Leave other errors unchanged."""
    if engine is None or not failures.is_of_memory(error) or not error.args:
        return
    held, rest = engine.report().at_rest, _rest(engine)
    message = f"{error.args[0]}\n{_holders(engine, held, rest)}\n{_remedies(engine, held.get('optimizer', 0), rest)}"
    error.args = (message, *error.args[1:])


def _holders(engine: Engine, at_rest: Mapping[str, int], rest: int) -> str:
    total = in_gb(sum(at_rest.values()))
    states = ", ".join(f"{category} {in_gb(nbytes)}" for category, nbytes in Counter(at_rest).most_common() if nbytes)
    return (
        f"When the allocation failed, rank {engine.rank} held {total} of model states and buffers "
        f"({states}), and {in_gb(rest)} of activations and everything else."
    )


def _remedies(engine: Engine, optimizer: int, rest: int) -> str:
    remedies = []
    if (leanest := layout.placements_of(3)) != engine.placements:
        less = engine.bytes_saved_by(leanest)
        without = "without shard_within " if engine.placements.parameters.is_sharded else ""
        remedies.append((less, f"stage=3 {without}frees {in_gb(less)}"))
    if optimizer:
        place = "nvme" if engine.device.type == "cpu" else "cpu"
        remedies.append((optimizer, f'offload="{place}" frees {in_gb(optimizer)}'))
    if engine.config.activation_checkpointing is None:
        remedies.append((rest, f'activation_checkpointing="units" frees most of the {in_gb(rest)} of activations'))
    remedies.append((rest // 2, f"half the batch size with accumulate_grad_batches=2 frees up to {in_gb(rest // 2)}"))
    said = "; ".join(text for _, text in sorted(remedies, key=lambda remedy: -remedy[0]))
    return f"What helps: {said}. Run 'lightning-zero plan' to see in advance what fits."


def _rest(engine: Engine) -> int:
    """Return the bytes that are in use on the device but were not allocated by the engine."""
    device = engine.device
    if device.type == "cuda":
        in_use = torch.cuda.memory_allocated(device)
    else:
        statm = Path("/proc/self/statm")
        in_use = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
    on_device = sum(nbytes for category, nbytes in engine.ledger.now.items() if category != "host")
    return max(in_use - on_device, 0)
