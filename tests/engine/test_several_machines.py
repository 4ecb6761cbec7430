"""Collectives in two levels, within machines and between them.

All ranks run on one machine here; a patched memory domain makes some of them appear to be on another machine.
``tests/network`` has machines that are separate in the kernel's network.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.engine import Engine
from lightning_zero.engine.comm import collectives
from lightning_zero.engine.comm.backend_transport import Levels
from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.transport import Cast
from lightning_zero.engine.plan.layout import BucketLayout
from lightning_zero.engine.plan.mesh import ALL
from tests.support import whole
from tests.support.lost import die, run_ranks
from tests.support.models import OddModel, Square, adam
from tests.support.training import CLOSE, Recipe, batch, prepare, same_runs, same_tensors, train_ddp, train_zero
from tests.support.transports import cross_memory
from tests.support.workers import rank

MACHINES = pytest.mark.parametrize("machines", ["aabb", "abab"])


@contextmanager
def on_machines(machines: str) -> Iterator[None]:
    """Ranks with the same letter share a machine."""
    domain = collectives.memory_domain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "memory_domain", lambda: f"{domain} {machines[rank()]}")
        yield


def communicator_on(machines: str) -> Communicator:
    with on_machines(machines):
        return Communicator(None, torch.device("cpu"))


def column_of(machines: str) -> list[int]:
    """This rank and its counterpart on the other machine."""
    here, there = ([r for r in range(4) if (machines[r] == machines[rank()]) is is_here] for is_here in (True, False))
    return [rank(), there[here.index(rank())]]


def exchange(machines: str, numel: int, owners: Any, wire: torch.dtype, reads_memory: bool) -> None:
    with cross_memory() if reads_memory else nullcontext():
        communicator = communicator_on(machines)
    assert isinstance(communicator.along(ALL)._transport, Levels)
    shapes = [(str(n), torch.Size([numel])) for n in range(5)]
    layout = BucketLayout.of(shapes, 4, owners, rank=rank(), order=communicator.mesh.order)
    bounds = layout.part_bounds
    values = torch.randn(4, layout.padded_numel, generator=torch.Generator().manual_seed(1))

    start, stop = layout.own_range
    for turn in range(3):
        full = torch.full_like(values[0], -1.0)
        full[start:stop] = values[turn][start:stop]
        communicator.along(ALL).all_gather(full, bounds, "a gather").wait()
        assert torch.equal(full, values[turn])

    column = column_of(machines)
    of_machines = []
    for member in column:
        here = [other for other in range(4) if machines[other] == machines[member]]
        total = sum(values[other][start:stop] for other in here)
        of_machines.append(total if member == rank() else total.to(wire).float())
    expected = of_machines[0] + of_machines[1]
    for _ in range(3):
        total = communicator.along(ALL).reduce_scatter(values[rank()].clone(), bounds, Cast(wire), "a reduction").wait()
        assert torch.equal(total, expected)
    communicator.close()


@MACHINES
@pytest.mark.parametrize("numel", [3, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("owners", [None, (0, 0, 1, 2, 2)], ids=["equal", "owned"])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reads_memory", [False, True], ids=["gloo", "cross-memory"])
def test_gathers_and_reductions_in_two_levels_give_all_slices_and_their_sums(
    run_on, machines, numel, owners, wire, reads_memory
):
    run_on(4, exchange, machines=machines, numel=numel, owners=owners, wire=wire, reads_memory=reads_memory)


def start_many_before_waiting() -> None:
    communicator = communicator_on("aabb")
    layout = BucketLayout.of([("p", torch.Size([2**16]))], 4, rank=rank(), order=communicator.mesh.order)
    start, stop = layout.own_range
    buffers = [torch.zeros(layout.padded_numel) for _ in range(8)]
    pending = []
    for number, full in enumerate(buffers):
        full[start:stop] = number + 1.0
        pending.append(communicator.along(ALL).all_gather(full, layout.part_bounds, "a gather"))
        time.sleep(0.002 * rank())
    for number in sorted(range(8), reverse=rank() == 2):
        pending[number].wait()
        assert (buffers[number] == number + 1.0).all()
    communicator.close()


def test_ranks_may_wait_for_gathers_in_different_orders(run_on):
    run_on(4, start_many_before_waiting)


def close_twice(machines: str, **options: Any) -> None:
    """Groups that something still refers to keep three threads each."""
    with on_machines(machines):
        module, optimizer = prepare(Recipe(Square, adam))
        engine = Engine(module, [optimizer], stage=3, **options)
    module(*batch(0)).backward()
    optimizer.step()
    groups = [weakref.ref(group) for group in engine.communicator._own_groups]
    assert groups
    engine.close()
    engine.communicator.close()
    del module, optimizer, engine
    dist.barrier()
    deadline = time.monotonic() + 10
    while any(group() is not None for group in groups):  # threads may just be ending
        assert time.monotonic() < deadline
        gc.collect()


@pytest.mark.parametrize("machines", ["aaaa", "aabb"])
@pytest.mark.parametrize("options", [{}, {"shard_within": 2}], ids=str)
def test_no_process_group_of_a_closed_engine_is_left(run_on, machines, options):
    run_on(4, close_twice, machines=machines, **options)


def train_on(machines: str, stage: int, recipe: Recipe, **options: Any) -> Any:
    with on_machines(machines):
        return train_zero(recipe, stage, **options)


def train_alike(machines: str, recipe: Recipe, bound: float = CLOSE, **options: Any) -> None:
    runs = [train_on(machines, stage, recipe, **options) for stage in (1, 2, 3)]
    same_runs(runs[1], runs[0])
    same_runs(runs[2], runs[0])
    same_runs(runs[0], train_ddp(recipe), bound=bound)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The numbers", "Several machines with several ranks each, over Gloo: each byte crosses between them once"
)
@MACHINES
@pytest.mark.parametrize(
    "options",
    [{}, {"unit_numel": 2**20}, {"offload": "cpu"}, {"overlap": False}],
    ids=str,
)
def test_all_stages_train_alike_and_as_ddp_except_for_the_order_of_sums(run_on, machines, options):
    run_on(4, train_alike, machines=machines, recipe=Recipe(OddModel, adam), **options)


def train_wholes(machines: str) -> None:
    train_alike(machines, Recipe(whole.Layered, whole.adafactor), bound=1e-5)


def test_stages_train_alike_with_owners_of_whole_parameters_on_several_machines(run_on):
    run_on(4, train_wholes, machines="aabb")


def train_on_six(machines: str) -> None:
    """Rings of more than two machines, and sums of more than two ranks on each."""
    recipe = Recipe(OddModel, adam, steps=3)
    train_alike(machines, recipe)
    flat = train_on(machines, 3, recipe)
    same_runs(train_on(machines, 3, recipe, shard_within="node"), flat)
    accumulating = Recipe(OddModel, adam, steps=3, micro_batches=2)
    same_runs(train_on(machines, 3, accumulating, shard_within="node"), train_ddp(accumulating), bound=CLOSE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("machines", ["aabbcc", "abcabc", "aaabbb"])
def test_stages_train_alike_on_three_machines_and_on_machines_of_three_ranks(run_on, machines):
    run_on(6, train_on_six, machines=machines)


def refuse_two_levels(machines: str) -> None:
    communicator = communicator_on(machines)
    assert not isinstance(communicator.along(ALL)._transport, Levels)
    communicator.close()
    same_runs(train_on(machines, 3, Recipe(steps=3)), train_on("aaaa", 3, Recipe(steps=3)))


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(("size", "machines"), [(3, "aab"), (4, "abcd"), (4, "aaaa")])
def test_machines_with_different_numbers_of_ranks_or_one_rank_each_exchange_directly(run_on, size, machines):
    run_on(size, refuse_two_levels, machines=machines)


def count(machines: str, stage: int, crosses: float) -> None:
    with on_machines(machines):
        module, optimizer = prepare(Recipe(Square, adam))
        engine = Engine(module, [optimizer], stage=stage)
    for step in range(3):
        module(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            engine.reset_counters()
    elements = engine.communicator.counters.elements
    for kind in ("all_gather", "reduce_scatter"):
        across, within = elements[kind, "across"], elements[kind, "within"]
        assert across == pytest.approx(crosses * (across + within)), (kind, across, within)
        assert across + within == engine.report().elements[kind]
    report = engine.report()
    assert report.elements["reduce_scatter"] == 2 * report.numel
    counted = engine.communicator.counters.bytes
    assert report.bytes_by_link == {
        link: sum(counted[kind, link] for kind in report.bytes) for link in ("within", "across")
    }
    assert sum(report.bytes_by_link.values()) == sum(report.bytes.values())
    assert (report.bytes_by_link["across"] == 0) is (crosses == 0)
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("size", "machines", "crosses"),
    # share that crosses, for one rank: (N - 1) / N of its part in two levels, else all that other machines have
    [(4, "aabb", 1 / 4), (4, "aaab", None), (4, "aaaa", 0), (4, "abcd", 3 / 4)],
)
def test_elements_and_bytes_that_cross_between_machines_are_counted(run_on, stage, size, machines, crosses):
    run_on(size, count_unevenly if crosses is None else count, machines=machines, stage=stage, crosses=crosses)


def count_unevenly(machines: str, stage: int, crosses: None) -> None:
    count(machines, stage, 1 / 4 if machines[rank()] == "a" else 3 / 4)


def be_killed() -> str:
    with on_machines("aabb"):
        module, optimizer = prepare(Recipe(Square, adam))
        engine = Engine(module, [optimizer], stage=3)
    for step in range(3):
        if step == 1 and rank() == 3:
            die()
        module(*batch(step)).backward()
        optimizer.step()
    engine.close()
    return "trained on"


@pytest.mark.exhaustive
def test_a_killed_rank_ends_the_others_on_both_machines(run_on):
    run_on(1, kill_one)


def kill_one() -> None:
    *others, killed = run_ranks(be_killed, 4)
    assert killed.code == -9
    for ending in others:
        assert ending.code == 1 and "rank 3 was killed" in ending.said and ending.seconds < 15


def resume_elsewhere() -> None:
    """States sharded over two machines are saved and loaded like any others."""
    with on_machines("aabb"):
        module, optimizer = prepare(Recipe(OddModel, adam))
        engine = Engine(module, [optimizer], stage=3)
    for step in range(2):
        module(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = engine.full_state_dict(), engine.full_optimizer_state_dict(optimizer)
    engine.close()
    same_tensors(dict(module.state_dict()), weights, bound=0)
    other, its_optimizer = prepare(Recipe(OddModel, adam))
    other.load_state_dict(weights)
    second = Engine(other, [its_optimizer], stage=3)
    its_optimizer.load_state_dict(states)
    again = second.full_optimizer_state_dict(its_optimizer)
    for number, state in states["state"].items():
        same_tensors(again["state"][number], state, bound=0)
    second.close()


def test_states_saved_on_two_machines_load_on_one(run_on):
    run_on(4, resume_elsewhere)
