"""Transport between ranks of one machine: small slices are sent as messages; large ones are read from peers' memory."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.engine.comm.cma_exchange import CrossMemoryExchanges
from lightning_zero.engine.comm.codec import Codec
from lightning_zero.engine.comm.small_messages import SMALL, bytes_of, fill, tensor_of
from lightning_zero.engine.comm.transport import Ranges, Span, Started, Transport, slices_of


class SharedMemoryTransport(Transport):
    """Copies each large slice only once. Sums in the buffer's dtype, in the same order as ``GlooTransport``.

    Codecs must encode each element independently, as casts do, since large slices are added up in parts.

    Args:
        exchanges: the exchanges with the other ranks. Without exchanges of small messages, all slices count as large.
        rank: this rank's number among the ranks of the exchanges.
        gather_tag, reduce_tag: see ``GlooTransport``.
    """

    takes_spans = True

    def __init__(self, exchanges: CrossMemoryExchanges, rank: int, gather_tag: int, reduce_tag: int) -> None:
        self._exchanges, self._small, self._rank = exchanges, exchanges.small, rank
        self._gather_tag, self._reduce_tag = gather_tag, reduce_tag

    def all_gather(self, full: Tensor, ranges: Ranges, number: int) -> Started:
        tag, slices = self._gather_tag + number, slices_of(full, ranges)
        if self._small is None or max(map(len, slices)) * full.itemsize > SMALL:
            return Started([self._exchanges.gather(tag, slices).wait], [full], ends_by_itself=True)
        key = self._small.send(tag, [bytes_of(slices[self._rank])] * len(self._small.ranks))

        def receive() -> None:
            for rank, message in zip(self._small.ranks, self._small.receive(key)):
                fill(slices[rank], message)

        return Started([receive], [full], ends_by_itself=True)

    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        slices = slices_of(flat, ranges)
        if self._small is None or max(codec.size(len(part)) for part in slices) * codec.dtype.itemsize > SMALL:
            sent = [part if rank == self._rank else codec.encode(part) for rank, part in enumerate(slices)]
            return self.reduce_spans([[Span(len(part), part)] for part in sent], codec.dtype, 1.0)
        own = slices[self._rank]
        total, numel = torch.empty_like(own), codec.size(len(own))
        key = self._small.send(self._reduce_tag, [bytes_of(codec.encode(slices[rank])) for rank in self._small.ranks])

        def receive() -> None:
            first, *rest = (tensor_of(message, (numel,), codec.dtype) for message in self._small.receive(key))
            torch.add(codec.decode(first, len(own), total.dtype), own, out=total)
            for part in rest:
                codec.add(total, part)

        return Started([receive], [], lambda: total, ends_by_itself=True)

    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        lengths = [stop - start for start, stop in ranges]
        own = lengths.pop(self._rank)
        copies = sum(map(codec.size, lengths)) * codec.dtype.itemsize if codec.dtype != flat.dtype else 0
        return flat.nbytes + own * flat.element_size() + copies

    def reduce_spans(self, spans: list[list[Span]], dtype: torch.dtype, factor: float) -> Started:
        others = {rank: part for rank, part in enumerate(spans) if rank != self._rank}
        exchange, total = self._exchanges.reduce(self._reduce_tag, spans[self._rank], others, dtype, factor)
        return Started([exchange.wait], [], lambda: total, ends_by_itself=True)

    def close(self) -> None:
        self._exchanges.close()
