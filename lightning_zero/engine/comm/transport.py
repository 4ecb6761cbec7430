"""The interface of transports: two operations on flat buffers, each started on all ranks in the same order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.comm.codec import Codec
from lightning_zero.engine.plan.layout import ShardRanges

Ranges = Sequence[tuple[int, int]]
"""``[start, stop)`` of each rank's slice of a flat buffer, in the order of ranks: adjacent, and together all of it."""


def are_equal(ranges: Ranges) -> bool:
    """Whether all slices have the same length."""
    return ranges.are_equal if isinstance(ranges, ShardRanges) else len({stop - start for start, stop in ranges}) == 1


def slices_of(flat: Tensor, ranges: Ranges) -> list[Tensor]:
    return [flat[start:stop] for start, stop in ranges]


def in_order_of_ranks(own: Tensor, rank: int, others: Iterable[Tensor]) -> Iterator[Tensor]:
    """Insert this rank's term among those of the other ranks, which are in ascending order of ranks."""
    remaining = iter(others)
    yield from islice(remaining, rank)
    yield own
    yield from remaining


def add_up(terms: Iterator[Tensor], out: Tensor) -> Tensor:
    """Write the sum of two or more terms, in their order, to ``out``, which may be one of the first two terms."""
    torch.add(next(terms), next(terms), out=out)
    for term in terms:
        out.add_(term)
    return out


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

    All ranks must start gathers in the same order, and reductions in the same order. Implementations give the same
    results, bit for bit, since they all add up values in the order of ranks.

    Attributes:
        encodes_within: whether gradients are also encoded when sent between ranks of one machine.
    """

    encodes_within: bool = True

    @abstractmethod
    def all_gather(self, full: Tensor, ranges: Ranges) -> Started:
        """Fill a flat buffer with the slices of all ranks.

        Args:
            full: the buffer, which already holds this rank's slice.
            ranges: each rank's slice of the buffer.
        """

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        """Sum a flat buffer over ranks; the result is this rank's slice of the sum, in the buffer's dtype."""

    @abstractmethod
    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        """Bytes of memory in use while a flat buffer is reduced: sent and received values, and this rank's slice."""

    def close(self) -> None:  # noqa: B027 - most transports have nothing to close
        """Start no more collectives. Those in flight are still completed, since other ranks wait for them."""
