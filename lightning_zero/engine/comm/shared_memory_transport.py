"""Transport between ranks of one machine: small ranges as messages, others by reading the peers' memory."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.engine.comm.cma_exchange import CrossMemoryExchanges
from lightning_zero.engine.comm.codec import Codec
from lightning_zero.engine.comm.small_messages import SMALL, bytes_of, fill, tensor_of
from lightning_zero.engine.comm.transport import Piece, Started


class SharedMemoryTransport:
    """Exchanges in one copy; sums in the dtype in which gradients are kept, in the order of Gloo's transport.

    Codecs must encode each element alone, as those that cast do: large ranges are added up in parts.

    Args:
        exchanges: with the other ranks.
        rank: this one's.
        gather_tag, reduce_tag: as of ``GlooTransport``.
    """

    takes_pieces = True

    def __init__(self, exchanges: CrossMemoryExchanges, rank: int, gather_tag: int, reduce_tag: int) -> None:
        self._exchanges, self._small, self._rank = exchanges, exchanges.small, rank
        self._size = len(exchanges.small.ranks) + 1
        self._gather_tag, self._reduce_tag = gather_tag, reduce_tag

    def all_gather(self, full: Tensor, number: int, own: Tensor | None = None) -> Started:
        tag, slices = self._gather_tag + number, full.chunk(self._size)
        if own is not None:
            slices[self._rank].copy_(own)
        if full.nbytes // self._size > SMALL:
            return Started([self._exchanges.gather(tag, slices)], [full], ends_by_itself=True)

        def finish(messages: list[bytes]) -> None:
            for rank, message in zip(self._small.ranks, messages):
                fill(slices[rank], message)

        work = self._small.begin(tag, [bytes_of(slices[self._rank])] * (self._size - 1), finish)
        return Started([work], [full], ends_by_itself=True)

    def reduce_scatter(self, flat: Tensor, codec: Codec) -> Started:
        slices = flat.chunk(self._size)
        own, numel = slices[self._rank], codec.size(slices[self._rank].numel())
        if numel * codec.dtype.itemsize > SMALL:
            sent = [part if rank == self._rank else codec.encode(part) for rank, part in enumerate(slices)]
            return self._add_up([[Piece(part.numel(), part)] for part in sent], codec.dtype, 1.0)
        total = torch.empty_like(own)

        def finish(messages: list[bytes]) -> None:
            came = [tensor_of(message, (numel,), codec.dtype) for message in messages]
            torch.add(codec.decode(came[0], total.dtype), own, out=total)
            for part in came[1:]:
                codec.add(total, part)

        messages = [bytes_of(codec.encode(slices[rank])) for rank in self._small.ranks]
        work = self._small.begin(self._reduce_tag, messages, finish)
        return Started([work], [], lambda: total, ends_by_itself=True)

    def reduction_bytes(self, flat: Tensor, codec: Codec) -> int:
        part = flat.numel() // self._size
        is_encoded = codec.dtype != flat.dtype
        copies = codec.size(part) * codec.dtype.itemsize * (self._size - 1) if is_encoded else 0
        return flat.nbytes + part * flat.element_size() + copies

    def reduce_pieces(self, pieces: list[list[Piece]], dtype: torch.dtype, factor: float) -> Started:
        return self._add_up(pieces, dtype, factor)

    def _add_up(self, pieces: list[list[Piece]], wire: torch.dtype, factor: float) -> Started:
        others = {rank: part for rank, part in enumerate(pieces) if rank != self._rank}
        exchange, total = self._exchanges.reduce(self._reduce_tag, pieces[self._rank], others, wire, factor)
        return Started([exchange], [], lambda: total, ends_by_itself=True)

    def close(self) -> None:
        self._exchanges.close()
