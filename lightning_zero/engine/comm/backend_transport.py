"""The default transport, on any backend: collectives of ``torch.distributed``, and sums in the order of ranks.

``Levels`` composes two transports, of which one is between machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engine.comm.failures import waits_for
from lightning_zero.engine.comm.process_group import ProcessGroup, rank
from lightning_zero.engine.comm.transport import (
    Bounds,
    Cast,
    Chain,
    Codec,
    Pending,
    Transport,
    are_equal,
    encoded_bytes,
    slices_of,
)
from lightning_zero.engine.plan.layout import from_0

# Torch before 2.13 has them only as ``all_gather_into_tensor`` and ``reduce_scatter_tensor``, which 2.13 deprecates.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class BackendTransport(Transport):
    """Sums the slices that it receives in an all-to-all exchange, in the order of ranks.

    Backends other than Gloo sum unencoded slices of equal lengths themselves.

    Args:
        gathers, reductions: the process groups for gathers and for reductions. In a single group, all ranks would
            have to begin gathers and reductions in the same order; but whether a gradient is complete before the next
            gather begins may depend on a rank's data.
        is_gloo: whether the backend is Gloo.
    """

    def __init__(self, gathers: ProcessGroup, reductions: ProcessGroup, is_gloo: bool) -> None:
        self._gathers, self._reductions, self._rank, self._is_gloo = gathers, reductions, rank(gathers), is_gloo

    def all_gather(self, full: Tensor, bounds: Bounds) -> Pending:
        # ``data``, so that writes do not increment the version that autograd checks; bytes, since backends lack dtypes
        filled, size = full.data.view(torch.uint8), full.itemsize
        if not self._is_gloo and are_equal(bounds):
            start, stop = bounds[self._rank : self._rank + 2]
            work = all_gather_single(filled, filled[start * size : stop * size], group=self._gathers, async_op=True)
            return Pending([work.wait], [full])
        slices = slices_of(filled, [bound * size for bound in bounds])
        if self._is_gloo:  # whose all-gather would receive into another buffer of the full size, and then copy it
            works = [
                dist.broadcast(part, group=self._gathers, async_op=True, group_src=source)
                for source, part in enumerate(slices)
                if part.numel()
            ]
        else:
            works = [dist.all_gather(slices, slices[self._rank], group=self._gathers, async_op=True)]
        return Pending(waits_for(works, are_of_gloo=self._is_gloo), [full])

    def reduce_scatter(self, flat: Tensor, bounds: Bounds, codec: Codec) -> Pending:
        if self._is_summed_by_backend(flat, bounds, codec):
            start, stop = bounds[self._rank : self._rank + 2]
            shard = flat.new_empty(stop - start)
            work = reduce_scatter_single(_as_real(shard), _as_real(flat), group=self._reductions, async_op=True)
            return Pending([work.wait], [flat, shard], lambda: shard)
        return self._sum_in_order(flat, bounds, codec)

    def _sum_in_order(self, flat: Tensor, bounds: Bounds, codec: Codec) -> Pending:
        """Exchange slices, and add them up in the order of ranks. This rank's own values are not encoded.

        Slices for lower ranks and for higher ranks are exchanged separately, since a single exchange would also copy
        this rank's own slice, which is between them.
        """
        slices, is_encoded = slices_of(flat, bounds), codec != Cast(flat.dtype)
        own, place, size = slices[self._rank], self._rank, len(slices)
        lower, higher = flat[: bounds[place]], flat[bounds[place + 1] :]
        if is_encoded:
            own = own.clone()  # so that the buffer can be freed
            lower, higher = (_encoded(part, flat, codec) for part in (slices[:place], slices[place + 1 :]))
        sizes = [encoded_bytes(codec, len(part)) for part in slices]
        received = torch.empty((size - 1) * sizes[place], dtype=torch.uint8, device=flat.device)
        from_lower, from_higher = received.tensor_split([place * sizes[place]])
        works = [
            self._exchange(lower, sizes[:place] + [0] * (size - place), from_higher, range(place + 1, size)),
            self._exchange(higher, [0] * (place + 1) + sizes[place + 1 :], from_lower, range(place)),
        ]

        def finish() -> Tensor:
            parts = [part.view(codec.dtype) for part in received.split_with_sizes([sizes[place]] * (size - 1))]
            others = (codec.decode(part, len(own), own.dtype) for part in parts)
            terms = (own if each == place else next(others) for each in range(size))
            total = torch.add(next(terms), next(terms), out=torch.empty_like(own) if is_encoded else parts[0])
            for term in terms:
                total.add_(term)
            return total if is_encoded or size == 2 else total.clone()  # without the rest of ``received``

        return Pending(waits_for(works, are_of_gloo=self._is_gloo), [own, lower, higher, received], finish)

    def _exchange(self, sent: Tensor, sizes: list[int], received: Tensor, sources: range) -> Any:
        """Start to send parts of these sizes in bytes to all ranks, and to receive parts of equal sizes from some."""
        received_sizes = [0] * len(sizes)
        for source in sources:
            received_sizes[source] = len(received) // len(sources)
        return dist.all_to_all_single(
            received, sent.view(torch.uint8), received_sizes, sizes, group=self._reductions, async_op=True
        )

    def _is_summed_by_backend(self, flat: Tensor, bounds: Bounds, codec: Codec) -> bool:
        return not self._is_gloo and are_equal(bounds) and codec == Cast(flat.dtype)


def _encoded(slices: list[Tensor], flat: Tensor, codec: Codec) -> Tensor:
    encoded = [codec.encode(part) for part in slices]
    return torch.cat(encoded) if encoded else flat.new_empty(0, dtype=codec.dtype)


def _as_real(tensor: Tensor) -> Tensor:
    """View complex values as pairs of real values, since NCCL has no complex dtypes; the sums are the same."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Levels(Transport):
    """The two operations on several machines with several ranks each: every element is sent to each machine only once.

    A column consists of the slices of all ranks with the same local index, one slice per machine. A gather first
    fetches this rank's column from the other machines, and then the other columns from the other ranks of this machine.
    A reduction first sums within each machine, and then sums each column across machines. With M machines of G ranks
    each, a machine sends (M - 1) / M of a buffer to others; direct exchanges between all ranks would send G times as
    much. The slices of a column are adjacent (see ``mesh.ALL``), so a column is one range.

    Args:
        within: the transport between the ranks of this machine, in the order of local indices.
        across: the transport between the ranks with this rank's local index, in the order of machines.
        first: the position of the first slice of this rank's column.
        machines: the number of machines.
    """

    encodes_within = False

    def __init__(self, within: Transport, across: Transport, first: int, machines: int) -> None:
        self._within, self._across, self._first, self._machines = within, across, first, machines
        # Gathers may not wait for the second halves of reductions, since ranks may start the two in different orders.
        self._gathers, self._reductions = Chain("gathers"), Chain("reductions")

    def all_gather(self, full: Tensor, bounds: Bounds) -> Pending:
        column = bounds[self._first : self._first + self._machines + 1]
        first = self._across.all_gather(full[column[0] : column[-1]], from_0(column))
        return _in_two_halves(self._gathers, first, lambda _: self._within.all_gather(full, bounds[:: self._machines]))

    def reduce_scatter(self, flat: Tensor, bounds: Bounds, codec: Codec) -> Pending:
        slices = from_0(bounds[self._first : self._first + self._machines + 1])
        first = self._within.reduce_scatter(flat, bounds[:: self._machines], Cast(flat.dtype))
        return _in_two_halves(self._reductions, first, lambda part: self._across.reduce_scatter(part, slices, codec))

    def close(self) -> None:
        # second halves that have not started yet still use the inner transport
        self._gathers.close(lambda: self._reductions.close(self._within.close))


def _in_two_halves(chain: Chain, first: Pending, begin_second: Callable[[Any], Pending]) -> Pending:
    """Let a thread wait for the first half of a collective, and begin the second half with its result."""
    second = chain.submit(lambda: begin_second(first.wait()))
    return Pending([lambda: second.result().block()], first.buffers, lambda: second.result().finish())
