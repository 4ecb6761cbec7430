"""Complexity of the engine's Python code: counts instructions instead of time, so quadratic parts show at small sizes.

The number of tensors is doubled twice. With linear work the second doubling adds twice as many instructions as the
first, with quadratic work four times as many. World sizes are simulated on rank 0 of torch's `fake` group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 33
"""Elements of a tensor: not a multiple of 32, so tensors are not adjacent and each has a separate master."""

NEARLY = 1.1
"""Tolerance for linear growth: dictionaries, and with them some instructions, grow in leaps."""


class Layer(nn.Module):
    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(WIDTH) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        for vector in self.vectors:
            x = x * vector
        return x


def count(do: Callable[[], Any], of: str = "opcode", within: str = "") -> int:
    """Count what this thread does during a call: bytecode instructions, or with ``of="call"`` calls of functions.

    Args:
        within: count only in files whose path contains this.
    """
    found = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal found
        found += event == of and within in frame.f_code.co_filename
        if of == "call":
            return None  # nothing within the function counts
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
    return found


@contextmanager
def group_of(ranks: int) -> Iterator[None]:
    """Join a fake process group as rank 0; a single rank has no group."""
    if ranks == 1:
        yield
        return
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

    # not its FakeStore, which cannot be cloned
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def count_setup_and_step(
    stage: int, tensors: int, units: int, ranks: int, within: str = "", **options: Any
) -> tuple[int, int]:
    """Instructions to construct the engine, and to run a step after two warm-up steps; see ``count``."""
    from lightning_zero.engine import Engine
    from lightning_zero.engine.comm.asynchronous import synchronize

    module = nn.Sequential(*(Layer(tensors // units) for _ in range(units)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=True)
    engines: list[Engine] = []

    def step() -> None:
        module(torch.ones(WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with group_of(ranks):
        setup = count(lambda: engines.append(Engine(module, [optimizer], stage=stage, **options)), within=within)
        assert len(engines[0].units) == units
        for _ in range(2):
            step()
        # the first step that finds no update under way measures the new states; without this, it may be the counted one
        synchronize()
        engines[0].report()
        counted = count(step)
        engines[0].close(communicate=False)  # there is no other rank
    return setup, counted


def count_each(stage: int, sizes: list[tuple[int, int, int]], **options: Any) -> list[tuple[int, int]]:
    """The lower of two counts each: if another thread is late, this one polls again, which adds instructions."""
    runs = [[count_setup_and_step(stage, *size, **options) for size in sizes] for _ in range(2)]
    return [(min(a[0], b[0]), min(a[1], b[1])) for a, b in zip(*runs)]


def check_linear(counts: list[tuple[int, int]], of: str) -> None:
    """Check growth over three sizes, each twice the one before."""
    for what, (small, middle, large) in zip(("setting up", "a step"), zip(*counts)):
        growth = (large - middle) / (middle - small)
        assert growth <= 2 * NEARLY, f"{what}: {growth:.2f} times as many more for twice as many {of} more"


STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


@STAGES
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.exhaustive
def test_setup_and_a_step_are_linear_in_the_number_of_tensors(run_on, stage, ranks):
    sizes = [(tensors, 2, ranks) for tensors in (40, 80, 160)]
    (counts,) = run_on(1, count_each, stage=stage, sizes=sizes)
    check_linear(counts, "tensors")


@pytest.mark.exhaustive
@STAGES
def test_setup_and_a_step_are_linear_in_the_number_of_units(run_on, stage):
    sizes = [(2 * units, units, 8) for units in (20, 40, 80)]
    (counts,) = run_on(1, count_each, stage=stage, sizes=sizes)
    check_linear(counts, "units")


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_step_with_offloaded_states_is_linear_in_the_number_of_units(run_on, ranks):
    sizes = [(2 * units, units, ranks) for units in (20, 40, 80)]
    # Only the engine's instructions: waits for the thread of an update take more of Python's own if it is late.
    (counts,) = run_on(
        1, count_each, stage=3, sizes=sizes, offload={"optimizer": "cpu"}, within="lightning_zero/engine"
    )
    check_linear(counts, "units")


@pytest.mark.exhaustive(but=1)
@STAGES
def test_a_step_takes_as_many_instructions_on_1024_ranks_as_on_8(run_on, stage):
    (counts,) = run_on(1, count_each, stage=stage, sizes=[(20, 5, 8), (20, 5, 1024)])
    (_, few), (_, many) = counts
    assert many <= NEARLY * few, f"{many} instructions on 1024 ranks, {few} on 8"


@pytest.mark.exhaustive(but=1)
@STAGES
@pytest.mark.parametrize(
    ("within", "few"), [("lightning_zero/engine", 50), ("", 300)], ids=["of the engine", "also of torch"]
)
def test_setup_adds_only_a_few_instructions_per_rank_whatever_the_model(run_on, stage, within, few):
    """Torch's own are 216: to gather a value from each rank, and to make process groups."""
    more = []
    for tensors in (20, 40):
        sizes = [(tensors, 5, 8), (tensors, 5, 1024)]
        ((on_8, _), (on_1024, _)) = run_on(1, count_each, stage=stage, sizes=sizes, within=within)[0]
        more.append(on_1024 - on_8)
    assert max(more) <= few * (1024 - 8), f"{more} instructions for 1016 ranks more, with 20 and 40 tensors"
