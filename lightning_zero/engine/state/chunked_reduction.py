"""Reduction of one very large gradient in chunks, with buffers that do not grow with the gradient.

These are the constant-size buffers (C_B) of Rajbhandari et al., "ZeRO", SC20, section 6.2. Each chunk contains a piece
of every rank's range, so that each chunk's reduction gives every rank a piece of its own shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.engine.comm.bucket_collectives import BucketCollectives, Pending
from lightning_zero.engine.comm.codec import Codec
from lightning_zero.engine.plan.layout import ALIGNMENT
from lightning_zero.engine.state.ledger import Ledger

_IN_FLIGHT = 2
"""Number of chunks in flight: one is sent while another is copied."""


class ChunkedReduction:
    """Sums a gradient over ranks, chunk by chunk.

    Args:
        gradient: a 1-D tensor in any dtype, without padding at its end; None for zeros.
        ranges: ``[start, stop)`` for each rank; all ranges have equal length, or all but one are empty.
        own_numel: number of elements in this rank's range.
        collectives: collectives between the ranks whose gradients are summed.
        codec: encodes the chunks that are sent.
        factor: the gradient is multiplied by this number before the sum.
        chunk_numel: approximate number of elements in a chunk.
        like: an empty tensor with the dtype and device of the result.
        ledger: counts the bytes of the chunks' buffers.
        what: describes the sum, for error messages.
    """

    def __init__(
        self,
        gradient: Tensor | None,
        ranges: Sequence[tuple[int, int]],
        own_numel: int,
        collectives: BucketCollectives,
        codec: Codec,
        *,
        factor: float = 1.0,
        chunk_numel: int,
        like: Tensor,
        ledger: Ledger,
        what: str,
    ) -> None:
        self._gradient, self._ranges, self._collectives, self._codec = gradient, ranges, collectives, codec
        self._factor, self._like, self._ledger, self._what = factor, like, ledger, what
        self._length = max(stop - start for start, stop in ranges)  # the length of each nonempty range
        chunks = max(-(-max(stop for _, stop in ranges) // chunk_numel), 1)
        self._step = max(-(-self._length // chunks // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        self._starts = deque(range(0, self._length, self._step))
        self._total = like.new_empty(own_numel)
        self._running: deque[tuple[int, Pending, int]] = deque()
        while self._starts and len(self._running) < _IN_FLIGHT:
            self._start()

    def finish(self) -> Tensor:
        """Wait for all chunks, and return this rank's part of the sum."""
        while self._running:
            start, pending, nbytes = self._running.popleft()
            piece = pending.wait()
            self._total[start : start + len(piece)].copy_(piece)
            self._ledger.add("reduction", -nbytes)
            if self._starts:
                self._start()
        self._gradient = None
        return self._total

    def _start(self) -> None:
        start = self._starts.popleft()
        width = min(self._step, self._length - start)
        ranges = [(low // self._length * width, high // self._length * width) for low, high in self._ranges]
        flat = self._like.new_empty(max(stop for _, stop in ranges))
        self._copy_into(flat.view(-1, width), start)
        nbytes = self._collectives.reduction_bytes(flat, ranges, self._codec)
        self._ledger.add("reduction", nbytes)
        self._running.append((start, self._collectives.reduce_scatter(flat, ranges, self._codec, self._what), nbytes))

    def _copy_into(self, chunk: Tensor, start: int) -> None:
        """Fill row i of ``chunk`` with elements of range i, from ``start`` on, cast and scaled; zero the padding."""
        filled, width, length = 0, chunk.shape[1], self._length
        if self._gradient is not None:
            whole = len(self._gradient) // length
            rows, rest = self._gradient[: whole * length].view(whole, length), self._gradient[whole * length :]
            rest = rest[start : start + width]
            filled = whole * width + len(rest)
            for values, into in (
                (rows[:, start : start + width], chunk[:whole]),
                (rest, chunk.view(-1)[whole * width : filled]),
            ):
                if values.dtype == into.dtype:
                    torch.mul(values, self._factor, out=into)
                else:
                    into.copy_(values)
                    into.mul_(self._factor)
        chunk.view(-1)[filled:].zero_()
