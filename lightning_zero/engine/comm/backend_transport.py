"""The default transport, on any backend: collectives of ``torch.distributed``, and sums in the order of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engine.comm.codec import Cast, Codec
from lightning_zero.engine.comm.process_group import (
    ProcessGroup,
    all_gather_single,
    backend_name,
    rank,
    reduce_scatter_single,
)
from lightning_zero.engine.comm.transport import Ranges, Started, Transport, are_equal, slices_of


class BackendTransport(Transport):
    """Sums the slices that it receives in an all-to-all exchange, in the order of ranks.

    Backends other than Gloo sum unencoded slices of equal lengths themselves.

    Args:
        gathers, reductions: the process groups for gathers and for reductions. In a single group, all ranks would
            have to begin gathers and reductions in the same order; but whether a gradient is complete before the next
            gather begins may depend on a rank's data.
        is_gloo: whether the backend is Gloo; by default, the groups' backend decides.
    """

    def __init__(self, gathers: ProcessGroup, reductions: ProcessGroup, is_gloo: bool | None = None) -> None:
        self._gathers, self._reductions, self._rank = gathers, reductions, rank(gathers)
        self._is_gloo = backend_name(gathers) == "gloo" if is_gloo is None else is_gloo

    def all_gather(self, full: Tensor, ranges: Ranges) -> Started:
        # ``data``, so that writes do not increment the version that autograd checks; bytes, since backends lack dtypes
        filled = full.data.view(torch.uint8)
        if not self._is_gloo and are_equal(ranges):
            own = slices_of(full.data, [ranges[self._rank]])[0].view(torch.uint8)
            works = [all_gather_single(filled, own, group=self._gathers, async_op=True)]
            return Started([work.wait for work in works], [full])
        size = full.itemsize
        slices = slices_of(filled, [(start * size, stop * size) for start, stop in ranges])
        if self._is_gloo:  # whose all-gather would receive into another buffer of the full size, and then copy it
            works = [
                dist.broadcast(part, group=self._gathers, async_op=True, group_src=source)
                for source, part in enumerate(slices)
                if part.numel()
            ]
        else:
            works = [dist.all_gather(slices, slices[self._rank], group=self._gathers, async_op=True)]
        return Started([work.wait for work in works], [full])

    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        if self._is_summed_by_backend(flat, ranges, codec):
            start, stop = ranges[self._rank]
            shard = flat.new_empty(stop - start)
            work = reduce_scatter_single(_as_real(shard), _as_real(flat), group=self._reductions, async_op=True)
            return Started([work.wait], [flat], lambda: shard)
        return self._sum_in_order(flat, ranges, codec)

    def _sum_in_order(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        """Exchange slices, and add them up. This rank's own values are not encoded."""
        slices, is_encoded = slices_of(flat, ranges), codec != Cast(flat.dtype)
        own, message = slices[self._rank], flat
        sizes = [codec.size(len(part)) * codec.dtype.itemsize for part in slices]
        received_sizes = [sizes[self._rank]] * len(sizes)
        if is_encoded:
            own = own.clone()  # so that the buffer can be freed
            message = torch.cat([codec.encode(part) for other, part in enumerate(slices) if other != self._rank])
            sizes[self._rank] = received_sizes[self._rank] = 0
        received = torch.empty(sum(received_sizes), dtype=torch.uint8, device=flat.device)
        work = dist.all_to_all_single(
            received, message.view(torch.uint8), received_sizes, sizes, group=self._reductions, async_op=True
        )

        def terms() -> Iterator[Tensor]:
            for other, part in enumerate(received.split_with_sizes(received_sizes)):
                is_own = is_encoded and other == self._rank
                yield own if is_own else codec.decode(part.view(codec.dtype), len(own), own.dtype)

        def add_up() -> Tensor:
            in_order = terms()
            total = torch.add(next(in_order), next(in_order))
            for term in in_order:
                total.add_(term)
            return total

        return Started([work.wait], [message], add_up)

    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        start, stop = ranges[self._rank]
        own_nbytes = (stop - start) * flat.itemsize
        if self._is_summed_by_backend(flat, ranges, codec):
            return flat.nbytes + own_nbytes
        if codec == Cast(flat.dtype):
            return flat.nbytes + own_nbytes * len(ranges)
        lengths = [end - begin for begin, end in ranges]
        received = codec.size(lengths.pop(self._rank)) * len(lengths)
        return own_nbytes + (sum(map(codec.size, lengths)) + received) * codec.dtype.itemsize

    def _is_summed_by_backend(self, flat: Tensor, ranges: Ranges, codec: Codec) -> bool:
        return not self._is_gloo and are_equal(ranges) and codec == Cast(flat.dtype)


def _as_real(tensor: Tensor) -> Tensor:
    """View complex values as pairs of real values, since NCCL has no complex dtypes; the sums are the same."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
