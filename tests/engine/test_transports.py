"""Contract of every transport: gathers, sums of encoded values in the order of ranks, and counts by link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from lightning_zero.engine.plan.mesh import ALL
from tests.support.transports import cross_memory
from tests.support.workers import rank, world_size

TRANSPORTS = pytest.mark.parametrize("transport", ["cross-memory", "gloo", "another"])


@contextmanager
def communicator(transport: str) -> Iterator:
    """A communicator over a transport; "another" is Gloo under another backend's name, whose own sums are used."""
    from lightning_zero.engine.comm import collectives, process_group

    with cross_memory() if transport == "cross-memory" else nullcontext(), pytest.MonkeyPatch.context() as patch:
        if transport == "another":
            new_group = process_group.new_group
            patch.setattr(process_group, "backend_name", lambda *_: "another")
            patch.setattr(process_group, "new_group", lambda ranks, _, timeout: new_group(ranks, "gloo", timeout))
        made = collectives.Communicator(None, torch.device("cpu"))
        try:
            yield made
        finally:
            made.control.gather_objects(None)
            made.close()


def gather_slices(transport: str, numel: int) -> None:
    values = torch.arange(float(world_size() * numel)).view(world_size(), numel)
    bounds = range(0, world_size() * numel + 1, numel)
    with communicator(transport) as group:
        full = torch.zeros(world_size(), numel)
        full[rank()] = values[rank()]
        group.along(ALL).all_gather(full.view(-1), bounds, "this gather").wait()
        assert torch.equal(full, values)


@TRANSPORTS
@pytest.mark.parametrize("numel", [5, 50_000])
def test_a_gather_fills_a_buffer_with_the_slices_of_all_ranks(run_on, transport, numel):
    run_on(3, gather_slices, transport=transport, numel=numel)


def gather_values(transport: str, lengths: list[int]) -> None:
    values = [{"rank": each, "text": "x" * length} for each, length in enumerate(lengths)]
    with communicator(transport) as group:
        for _ in range(2):  # the second exchange must not receive messages of the first
            assert group.control.gather_objects(values[rank()]) == values
        assert group.control.any_rank([rank() == 1, False], "flags") == [True, False]


@TRANSPORTS
@pytest.mark.parametrize("lengths", [[1, 5, 100], [2**16 - 100, 2**16 + 100, 1], [2**17, 2**18, 2**17]])
def test_values_of_any_length_are_gathered_in_the_order_of_ranks(run_on, transport, lengths):
    run_on(3, gather_values, transport=transport, lengths=lengths)


KINDS = {
    "fp32": (torch.float32, None),
    "fp64": (torch.float64, None),
    "complex64": (torch.complex64, None),
    "bf16 on the wire": (torch.float32, torch.bfloat16),
}
BOUNDS = {
    "equal": lambda numel: [0, numel, 2 * numel, 3 * numel],
    "unequal": lambda numel: [0, 2 * numel, 2 * numel, 3 * numel],
}


def add_up(transport: str, numel: int, kind: str, lengths: str) -> None:
    from lightning_zero.engine.comm.transport import Cast

    dtype, wire = KINDS[kind]
    bounds = BOUNDS[lengths](numel)
    values = torch.randn(3, 3 * numel, dtype=dtype, generator=torch.Generator().manual_seed(1))
    start, stop = bounds[rank() : rank() + 2]
    terms = [part if wire is None or other == rank() else part.to(wire) for other, part in enumerate(values)]
    first, second, third = (term[start:stop] for term in terms)
    with communicator(transport) as group:
        codec = Cast(wire or dtype)
        total = group.along(ALL).reduce_scatter(values[rank()].clone(), bounds, codec, "this reduction").wait()
        assert total.dtype == dtype
        if transport == "another" and lengths == "equal" and wire is None:
            torch.testing.assert_close(total, first + second + third)
        else:
            assert torch.equal(total, first.to(dtype) + second + third), "not in the order of ranks"
        ((key, elements),) = group.counters.elements.items()
        assert key == ("reduce_scatter", "within") and elements == values.shape[1]
        assert group.counters.bytes[key] == (wire or dtype).itemsize * values.shape[1]
        assert group.counters.calls[key] == 1


@TRANSPORTS
@pytest.mark.parametrize("numel", [5, 50_000])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("lengths", list(BOUNDS))
def test_a_reduction_adds_up_encoded_values_in_the_order_of_ranks(run_on, transport, numel, kind, lengths):
    run_on(3, add_up, transport=transport, numel=numel, kind=kind, lengths=lengths)


def exchange_values() -> None:
    with communicator("gloo") as group:
        size, control = world_size(), group.control
        assert control.any_rank([rank() == 1, False, True], "flags") == [True, False, True]
        assert control.gather_numbers(2**40 + rank(), "numbers") == [2**40 + each for each in range(size)]
        assert control.numbers_of(0, [rank(), 7 - rank()], "numbers") == [0, 7]
        assert control.numbers_of(2, [rank(), 7 - rank()], "numbers") == [2, 5]
        assert control.is_alike("the same") and not control.is_alike(f"rank {rank()}")


def test_the_control_plane_exchanges_python_values(run_on):
    run_on(3, exchange_values)
