"""Contract of every transport: gathers from separate inputs, sums of a codec's encodings, and counts by link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lightning_zero.engine.plan.mesh import ALL
from tests.support.workers import rank, world_size

TRANSPORTS = pytest.mark.parametrize("transport", ["shared memory", "gloo", "the backend's own"])


@contextmanager
def communicator(transport: str) -> Iterator:
    """A communicator over a transport; "the backend's own" is Gloo under another backend's name."""
    from lightning_zero.engine.comm import collectives, process_group
    from lightning_zero.engine.plan.topology import Topology

    with pytest.MonkeyPatch.context() as patch:
        if transport != "shared memory":
            patch.setattr(collectives, "connect", lambda *_: (Topology((0,) * world_size()), None))
        if transport == "the backend's own":
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
    ranges = [(each * numel, (each + 1) * numel) for each in range(world_size())]
    with communicator(transport) as group:
        full = torch.zeros(world_size(), numel)
        full[rank()] = values[rank()]
        group.along(ALL).all_gather(full.view(-1), ranges, 3, "this gather").wait()
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


def add_up_what_is_encoded(transport: str, numel: int) -> None:
    from lightning_zero.engine.comm.codec import Cast

    values = torch.randn(world_size(), world_size() * numel, generator=torch.Generator().manual_seed(1))
    ranges = [(each * numel, (each + 1) * numel) for each in range(world_size())]
    with communicator(transport) as group:
        for dtype, accuracy in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
            mine = values[rank()].clone()
            total = group.along(ALL).reduce_scatter(mine, ranges, Cast(dtype), "this reduction").wait()
            expected = values.sum(0)[rank() * numel : (rank() + 1) * numel]
            assert total.dtype == torch.float32
            assert torch.allclose(total, expected, atol=accuracy)
            assert not torch.equal(total, expected) or dtype == torch.float32, "nothing was rounded"
        ((key, elements),) = group.counters.elements.items()
        assert key == ("reduce_scatter", "within" if transport == "shared memory" else "across")
        assert elements == 2 * values.shape[1]
        assert group.counters.bytes[key] == (4 + 2) * values.shape[1]
        assert group.counters.calls[key] == 2


@TRANSPORTS
@pytest.mark.parametrize("numel", [5, 50_000])
def test_a_reduction_is_encoded_and_counted_by_kind_and_link(run_on, transport, numel):
    run_on(3, add_up_what_is_encoded, transport=transport, numel=numel)


def exchange_values() -> None:
    with communicator("gloo") as group:
        size, control = world_size(), group.control
        assert control.any_rank([rank() == 1, False, True], "flags") == [True, False, True]
        assert control.gather_numbers(2**40 + rank(), "numbers") == [2**40 + each for each in range(size)]
        assert control.numbers_of_first([rank(), 7 - rank()]) == [0, 7]
        assert control.is_alike("the same") and not control.is_alike(f"rank {rank()}")
        if rank() == 0:
            control.tell([1, 2], [5, -1])
            control.wait_until_told()
        else:
            assert control.hear(0, 2, "what rank 0 tells") == [5, -1]


def test_the_control_plane_exchanges_python_values(run_on):
    run_on(3, exchange_values)
