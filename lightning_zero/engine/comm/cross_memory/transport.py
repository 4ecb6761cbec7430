"""The two operations between ranks of one machine: small slices are sent as messages, large ones read from memory."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.engine.comm.codec import Codec
from lightning_zero.engine.comm.cross_memory.exchange import CrossMemoryExchanges
from lightning_zero.engine.comm.cross_memory.small_messages import (
    GATHER_TAG,
    REDUCE_TAG,
    SMALL,
    SmallMessages,
    bytes_of,
    fill,
    tensor_of,
)
from lightning_zero.engine.comm.transport import Ranges, Started, Transport, add_up, in_order_of_ranks, slices_of


class CrossMemoryTransport(Transport):
    """Copies each large slice only once. Gives the same sums as ``BackendTransport``.

    Codecs must be casts, since large slices are added up in parts.

    Args:
        small: their exchanges of small messages; None if all slices count as large.
    """

    def __init__(self, exchanges: CrossMemoryExchanges, small: SmallMessages | None, rank: int) -> None:
        self._exchanges, self._small, self._rank = exchanges, small, rank

    def all_gather(self, full: Tensor, ranges: Ranges) -> Started:
        slices, small = slices_of(full, ranges), self._small
        if small is None or max(map(len, slices)) * full.itemsize > SMALL:
            return self._exchanges.gather(slices)
        key = small.send(GATHER_TAG, [bytes_of(slices[self._rank])] * len(small.ranks))

        def receive() -> None:
            for rank, message in zip(small.ranks, small.receive(key)):
                fill(slices[rank], message)

        return Started([receive], [full], ends_by_itself=True)

    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        sent = slices_of(codec.encode(flat), ranges)
        own, small = slices_of(flat, ranges[self._rank : self._rank + 1])[0], self._small
        if small is None or max(map(len, sent)) * codec.dtype.itemsize > SMALL:
            return self._exchanges.reduce(own, sent)
        total = torch.empty_like(own)
        key = small.send(REDUCE_TAG, [bytes_of(sent[rank]) for rank in small.ranks])

        def receive() -> None:
            messages = (tensor_of(message, (len(own),), codec.dtype) for message in small.receive(key))
            others = (codec.decode(message, len(own), own.dtype) for message in messages)
            add_up(in_order_of_ranks(own, self._rank, others), total)

        return Started([receive], [], lambda: total, ends_by_itself=True)

    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        start, stop = ranges[self._rank]
        encoded = flat.numel() * codec.dtype.itemsize if codec.dtype != flat.dtype else 0
        return flat.nbytes + encoded + (stop - start) * flat.itemsize

    def close(self) -> None:
        self._exchanges.close()
