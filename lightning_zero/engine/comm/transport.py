"""The interface of all transports: how buckets are gathered and how gradients are reduced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.comm.codec import Codec, encode_changes

Ranges = Sequence[tuple[int, int]]
"""``[start, stop)`` of each rank's slice of a flat buffer, in the order of ranks."""


def slices_of(flat: Tensor, ranges: Ranges) -> list[Tensor]:
    return [flat[start:stop] for start, stop in ranges]


class Span(NamedTuple):
    """Consecutive elements to reduce; ``values`` is 1-D, or None for zeros."""

    numel: int
    values: Tensor | None

    @property
    def address(self) -> int:
        return self.values.data_ptr() if self.values is not None else 0


class Started(NamedTuple):
    """A collective in flight, and the functions that wait for it and finish it.

    Attributes:
        waits: functions that block the current stream (NCCL) or the thread until the collective is complete.
        buffers: the tensors that the transport reads and writes, kept alive until the collective is complete.
        finish: called once after all waits; returns the collective's result.
        ends_by_itself: whether the other ranks' collectives complete even if this rank never waits.
    """

    waits: list[Callable[[], Any]]
    buffers: list[Tensor]
    finish: Callable[[], Any] | None = None
    ends_by_itself: bool = False


class Transport(ABC):
    """Moves flat buffers, which are 1-D and contiguous.

    Attributes:
        takes_spans: whether ``reduce_spans`` is supported.
        encodes_within: whether gradients are also encoded when sent between ranks of one machine.
    """

    takes_spans: bool = False
    encodes_within: bool = True

    @abstractmethod
    def all_gather(self, full: Tensor, ranges: Ranges, number: int) -> Started:
        """Fill a flat buffer with the slices of all ranks.

        Args:
            full: the buffer, which already holds this rank's slice.
            ranges: each rank's slice of the buffer.
            number: the bucket's number, the same on every rank. Transports that allow ranks to begin gathers in
                different orders use it to match the gathers.
        """

    def encode_changes(self, own: Tensor, new: Tensor) -> Tensor:
        """Encode the changes from this rank's slice ``own`` to ``new``, and set ``own`` to ``new``."""
        return encode_changes(own, new)

    def exchange_changes(self, full: Tensor, ranges: Ranges, number: int, message: Tensor) -> Started:
        """Update a flat buffer with all ranks' changes; so far, each rank has changed only its own slice.

        Args:
            full, ranges, number: see ``all_gather``.
            message: the result of ``encode_changes``.
        """
        raise NotImplementedError

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        """Sum a flat buffer over ranks; the result is this rank's slice of the sum, in the buffer's dtype."""

    @abstractmethod
    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        """Bytes of memory in use while a flat buffer is reduced: sent and received values, and this rank's slice."""

    def reduce_spans(self, spans: list[list[Span]], dtype: torch.dtype, factor: float) -> Started:
        """Like ``reduce_scatter``, but multiply values by ``factor``, and take each rank's slice as a list of spans.

        The spans of a slice have the same lengths on every rank.
        """
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - most transports have nothing to close
        """Begin no more collectives. Those in flight are still completed, since other ranks wait for them."""
