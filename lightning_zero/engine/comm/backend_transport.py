"""Transport over the backend's own collectives: for all backends, except Gloo on CPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engine.comm.codec import Codec
from lightning_zero.engine.comm.process_group import (
    ProcessGroup,
    all_gather_single,
    backend_name,
    rank,
    reduce_scatter_single,
)
from lightning_zero.engine.comm.transport import Ranges, Started, Transport, slices_of
from lightning_zero.engine.plan.layout import ShardRanges


class BackendTransport(Transport):
    """Uses the backend's all-gathers and reduce-scatters; the backend sums encoded values in the codec's dtype.

    Slices of unequal lengths are passed as lists of tensors, or broadcast one by one.

    Args:
        gathers, reductions: the process groups for gathers and for reductions. In a single group, all ranks would
            have to begin gathers and reductions in the same order; but whether a gradient is complete before the next
            gather begins may depend on a rank's data.
    """

    def __init__(self, gathers: ProcessGroup, reductions: ProcessGroup) -> None:
        self._gathers, self._reductions, self._rank = gathers, reductions, rank(gathers)
        self._is_gloo = backend_name(gathers) == "gloo"

    def all_gather(self, full: Tensor, ranges: Ranges, number: int) -> Started:
        start, stop = ranges[self._rank]
        filled = full.data  # so that writes do not increment the version that autograd checks, as some of Gloo's do
        own = filled[start:stop]
        if _are_equal(ranges):
            works = [all_gather_single(filled, own, group=self._gathers, async_op=True)]
        elif self._is_gloo:  # which gathers only slices of one length
            works = [
                dist.broadcast(part, group=self._gathers, async_op=True, group_src=source)
                for source, part in enumerate(slices_of(filled, ranges))
                if part.numel()
            ]
        else:
            works = [dist.all_gather(slices_of(filled, ranges), own, group=self._gathers, async_op=True)]
        return Started([work.wait for work in works], [full])

    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        (start, stop), dtype, sent = ranges[self._rank], flat.dtype, codec.encode(flat)
        shard = sent.new_empty(codec.size(stop - start))
        mine, all_of_it = _as_real(shard), _as_real(sent)
        if _are_equal(ranges):
            work = reduce_scatter_single(mine, all_of_it, group=self._reductions, async_op=True)
        else:
            encoded = [(codec.size(begin), codec.size(end)) for begin, end in ranges]
            work = dist.reduce_scatter(mine, slices_of(all_of_it, encoded), group=self._reductions, async_op=True)
        # the collective reads ``sent``, which is kept until the current stream has waited for the collective
        return Started([work.wait], [sent], lambda: codec.decode(shard, stop - start, dtype))

    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        start, stop = ranges[self._rank]
        return (codec.size(len(flat)) + codec.size(stop - start)) * codec.dtype.itemsize


def _are_equal(ranges: Ranges) -> bool:
    return ranges.are_equal if isinstance(ranges, ShardRanges) else len({stop - start for start, stop in ranges}) == 1


def _as_real(tensor: Tensor) -> Tensor:
    """View complex values as pairs of real values, since NCCL has no complex dtypes; the sums are the same."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
