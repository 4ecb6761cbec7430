"""The interface of all transports: how buckets are gathered, and their gradients reduced."""

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
    """Neighbouring elements of a range to reduce; ``values`` is 1-D, or None for zeros."""

    numel: int
    values: Tensor | None

    @property
    def address(self) -> int:
        return self.values.data_ptr() if self.values is not None else 0


class Started(NamedTuple):
    """A collective in flight, and the functions that wait for it and finish it.

    Attributes:
        waits: functions that block the current stream (NCCL) or the thread.
        buffers: the tensors that the transport reads and writes, kept until the end.
        finish: called once after all waits; returns the collective's result.
        ends_by_itself: whether the peers get what they need from this rank even if it never waits.
    """

    waits: list[Callable[[], Any]]
    buffers: list[Tensor]
    finish: Callable[[], Any] | None = None
    ends_by_itself: bool = False


class Transport(ABC):
    """Moves flat buffers, which are 1-D and contiguous.

    Attributes:
        takes_spans: whether ``reduce_spans`` is supported.
        encodes_within: whether gradients are also encoded between ranks of one machine.
    """

    takes_spans: bool = False
    encodes_within: bool = True

    @abstractmethod
    def all_gather(self, full: Tensor, ranges: Ranges, number: int) -> Started:
        """Fill a flat buffer.

        Args:
            full: the buffer, which has this rank's values in this rank's slice.
            ranges: each rank's slice of the buffer.
            number: the bucket's number, the same on every rank. Transports whose ranks may begin gathers in different
                orders tell gathers apart by this number.
        """

    def encode_changes(self, own: Tensor, new: Tensor) -> Tensor:
        """Encode a message for ``exchange_changes``, and update this rank's slice to its new values."""
        return encode_changes(own, new)

    def exchange_changes(self, full: Tensor, ranges: Ranges, number: int, message: Tensor) -> Started:
        """Update a flat buffer that is the same on every rank, except for the changes to each rank's own slice.

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
        """Bytes held while a flat buffer is reduced: sent values, received values, and this rank's own slice."""

    def reduce_spans(self, spans: list[list[Span]], dtype: torch.dtype, factor: float) -> Started:
        """Multiply ranges, one per rank, by a factor, and sum them. A range has the same spans on every rank."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Begin no more collectives. Those in flight are finished, since peers need them."""
