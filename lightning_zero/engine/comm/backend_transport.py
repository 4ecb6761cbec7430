"""Transport by the backend's own collectives: NCCL, and any other backend but Gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engine.comm.codec import Codec
from lightning_zero.engine.comm.process_group import ProcessGroup, rank, world_size
from lightning_zero.engine.comm.transport import Piece, Started


class BackendTransport:
    """All-gathers and reduce-scatters as the backend has them; it sums what travels, in the codec's dtype.

    Args:
        gathers, reductions: a group for each. Ranks whose data differ may complete a gradient before or after the next
            gather starts, and in one group's queue the two would have to come in one order.
    """

    takes_pieces = False

    def __init__(self, gathers: ProcessGroup, reductions: ProcessGroup) -> None:
        self._gathers, self._reductions = gathers, reductions
        self._rank, self._size = rank(gathers), world_size(gathers)

    def all_gather(self, full: Tensor, number: int, own: Tensor | None = None) -> Started:
        if own is None:
            numel = full.numel() // self._size
            own = full[self._rank * numel : (self._rank + 1) * numel]  # of a thousand ranks not all slices are made
        return Started([dist.all_gather_single(full, own, group=self._gathers, async_op=True)], [full, own])

    def reduce_scatter(self, flat: Tensor, codec: Codec) -> Started:
        dtype, sent = flat.dtype, codec.encode(flat)
        shard = torch.empty_like(sent[: sent.numel() // self._size])
        mine, all_of_it = _as_real(shard), _as_real(sent)
        work = dist.reduce_scatter_single(mine, all_of_it, group=self._reductions, async_op=True)
        # the input is kept until the current stream has waited for its reader
        return Started([work], [sent], lambda: codec.decode(shard, dtype))

    def reduction_bytes(self, flat: Tensor, codec: Codec) -> int:
        return codec.size(flat.numel() // self._size) * codec.dtype.itemsize * (self._size + 1)

    def reduce_pieces(self, pieces: list[list[Piece]], dtype: torch.dtype, factor: float) -> Started:
        raise NotImplementedError  # the collectives take one buffer

    def close(self) -> None:
        """Nothing: the groups belong to the communicator."""


def _as_real(tensor: Tensor) -> Tensor:
    """NCCL has no complex dtypes; sums of these are sums of their parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
