"""Schedules do not change numbers: overlap, prefetch, units, buffers, and randomly delayed collectives."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import Block, OddModel, adam
from tests.support.training import Recipe, batch, prepare, same_runs, train_ddp, train_zero
from tests.support.workers import rank


def layers(name: str, module: nn.Module) -> bool:
    """A predicate for many small units: all modules without submodules."""
    return not list(module.children())


SCHEDULES = [
    *({"overlap": overlap, "prefetch": prefetch} for overlap in (True, False) for prefetch in (0, 1, 2)),
    *({"reduction_buffers": buffers, "prefetch": 2} for buffers in (1, 3)),
    *({"bucket_numel": numel} for numel in (1, 100, 300)),
    *(
        {"units": units, "prefetch": prefetch}
        for units in (Block, [Block, nn.Embedding], layers)
        for prefetch in (0, 2)
    ),
]


def describe(options: dict[str, Any]) -> str:
    return " ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in options.items())


def train_both(stage: int, options: dict[str, Any]) -> None:
    recipe = Recipe(OddModel, adam, steps=8)
    same_runs(train_zero(recipe, stage, **options), train_ddp(recipe))


@pytest.mark.exhaustive(but=2)
@pytest.mark.behaviour("The numbers", "Overlap on and off, every prefetch, bucket size and choice of units: bit-equal")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("options", SCHEDULES, ids=describe)
def test_every_schedule_and_choice_of_units_equals_ddp_bit_for_bit(run_on, stage, options):
    run_on(2, train_both, stage=stage, options=options)


def count_units() -> dict[str, int]:
    from lightning_zero.engine import Engine

    counts = {}
    for name, units in {"auto": "auto", "Block": Block, "list": [Block, nn.Embedding], "predicate": layers}.items():
        module = OddModel()
        engine = Engine(module, [adam(module)], stage=3, units=units)
        counts[name] = len(engine.units)
        engine.close()
    return counts


def test_units_are_chosen_automatically_by_class_or_by_predicate(run_on):
    # 3 blocks and the rest; the embedding too; or 3 x 4 layers in blocks, embedding, widen, head, the loose scalars
    counts = {"auto": 3 + 1, "Block": 3 + 1, "list": 3 + 1 + 1, "predicate": 3 * 4 + 3 + 1}
    assert run_on(1, count_units) == [counts]


@contextlib.contextmanager
def late_collectives(seed: int) -> Iterator[list[float]]:
    """Start and await the engine's collectives up to 2 ms late, differently on each rank; yield the delays so far."""
    from lightning_zero.engine.comm.collectives import BucketCollectives, Pending

    generator = random.Random(100 * seed + rank())
    delays: list[float] = []

    def sleep() -> None:
        delays.append(generator.choice([0, 0.0005, 0.002]))
        time.sleep(delays[-1])

    def late(function: Any) -> Any:
        def delayed(*args: Any, **kwargs: Any) -> Any:
            sleep()
            result = function(*args, **kwargs)
            sleep()
            return result

        return delayed

    originals = [
        (owner, name, getattr(owner, name))
        for owner, name in [(BucketCollectives, "all_gather"), (BucketCollectives, "reduce_scatter"), (Pending, "wait")]
    ]
    for owner, name, function in originals:
        setattr(owner, name, late(function))
    try:
        yield delays
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def train_both_with_late_collectives(stage: int, options: dict[str, Any], delays_from: int) -> None:
    recipe = Recipe(OddModel, adam, steps=8)
    with late_collectives(delays_from) as delays:
        run = train_zero(recipe, stage, **options)
    launched = run.report.calls["all_gather"] + run.report.calls["reduce_scatter"]
    assert len(delays) >= 4 * launched > 0, "before and after each launch, before and after each wait"
    same_runs(run, train_ddp(recipe))


@pytest.mark.exhaustive(but=2)
@pytest.mark.behaviour("The numbers", "Delayed collectives change no numbers")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", [{"overlap": True, "prefetch": p} for p in (0, 1, 2)], ids=describe)
def test_random_delays_of_collectives_change_no_numbers(run_on, stage, options, seed):
    run_on(2, train_both_with_late_collectives, stage=stage, options=options, delays_from=seed)


def step_while_another_does_not(stage: int) -> None:
    import torch.distributed as dist

    from lightning_zero.engine import Engine

    module, optimizer = prepare(Recipe(OddModel, adam))
    engine = Engine(module, [optimizer], stage=stage, units=Block)
    told = torch.zeros(1)
    for index in range(3):
        module(*batch(index)).backward()
        if rank() == 1:
            dist.recv(told, 0)  # rank 0's step has ended
        optimizer.step()
        if rank() == 0:
            dist.send(told, 1)
        optimizer.zero_grad()
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_step_waits_for_no_other_rank(run_on, stage):
    run_on(2, step_while_another_does_not, stage=stage)
