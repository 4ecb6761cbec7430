"""Expected cost of a unit, computed independently of the engine: padding, collectives, bytes."""

from __future__ import annotations

from math import ceil
from typing import Any

from torch import nn

ALIGNMENT = 32
"""In elements: each parameter starts at a multiple of it in its bucket, and a shard's size is a multiple of it."""


def padded_numel(numels: list[int], ranks: int) -> int:
    """Elements of a bucket for parameters of these sizes, including the padding between and after them."""
    stop = 0
    for numel in numels:
        stop = aligned(stop) + numel
    return ranks * aligned(ceil(stop / ranks))


def aligned(numel: int) -> int:
    return ALIGNMENT * ceil(numel / ALIGNMENT)


def padded_units(units: list[Any], module: nn.Module, ranks: int) -> dict[str, int]:
    """Padded elements by unit; in these tests each unit has one bucket (one dtype, all trainable)."""
    numels = {name: p.numel() for name, p in module.named_parameters()}
    names = {unit: [part.name for bucket in unit.buckets for part in bucket.layout.segments] for unit in units}
    assert sorted(name for found in names.values() for name in found) == sorted(numels), "each is in one unit"
    assert all(unit.numel == sum(numels[name] for name in names[unit]) for unit in units)
    return {unit.name: padded_numel([numels[name] for name in names[unit]], ranks) for unit in units}


def difference(later: Any, earlier: Any) -> dict[str, dict[str, int]]:
    """Difference between two reports: calls, elements and bytes of all-gathers and reduce-scatters."""
    kinds = ("all_gather", "reduce_scatter")
    return {
        what: {kind: getattr(later, what).get(kind, 0) - getattr(earlier, what).get(kind, 0) for kind in kinds}
        for what in ("calls", "elements", "bytes")
    }


def expected_traffic(padded: dict[str, int], stage: int, steps: int, backwards: int) -> dict[str, dict[str, int]]:
    """Expected fp32 traffic of steps and backward passes over units of these sizes; the root unit's name is "".

    Gradients are reduced once a step at stage 1, and once a backward pass at stages 2 and 3. Weights are gathered once
    a step at stages 1 and 2, and at stage 3 in the forward and in the backward pass of each unit. Exceptions are the
    root unit, which stays gathered from the start of forward to the end of backward, and the last unit, with which
    backward starts.
    """
    stay = ("", list(padded)[-1])
    reductions = dict.fromkeys(padded, steps if stage == 1 else backwards)
    gathers = {name: steps if stage < 3 else backwards * (1 if name in stay else 2) for name in padded}
    times = {"all_gather": gathers, "reduce_scatter": reductions}
    elements = {kind: sum(times[kind][name] * padded[name] for name in padded) for kind in times}
    return {
        "calls": {kind: sum(times[kind].values()) for kind in times},
        "elements": elements,
        "bytes": {kind: 4 * elements[kind] for kind in times},
    }
