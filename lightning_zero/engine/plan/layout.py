"""Layout of a bucket: which ranges of the flat buffer belong to which parameters and ranks. Pure arithmetic.

::

    bucket   |  weight (segment 0)      |gap| bias |gap|  weight2 (segment 2)       | padding |
    shards   |        rank 0        |        rank 1        |        rank 2        | rank 3    |

Segments start at multiples of ``ALIGNMENT`` elements, so that views of segments are aligned like ordinary tensors
(for vector loads and cuBLAS). Shards have equal lengths, with padding at the end, so that one collective moves them.

A *whole* bucket is for optimizers that need whole matrices: each segment has one owner, and a rank's shard is a run of
segments, which may be empty (see ``balanced_owners``)::

    bucket   |  weight (segment 0)      |gap| bias |gap|  weight2 (segment 2)       |
    shards   |        rank 0            .   |        rank 2                         |
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import overload

import torch

from lightning_zero.engine.plan.share import Share

# In elements: this is a multiple of 16 bytes in every dtype, and of the stride of vectorised CPU kernels (two 512-bit
# vectors in fp32). These kernels may round the elements after the last full stride differently. Since shards consist of
# full strides, each element is computed as in the full parameter.
ALIGNMENT = 32

Spans = list[tuple[int, int | None, int]]
"""Parts of a range, in order: (number of elements, segment index or None for a gap, start in the segment or gap)."""


@dataclass(frozen=True)
class Segment:
    """The range ``[start, stop)`` of a bucket for one flattened parameter, or for its tensor-parallel share."""

    name: str
    share: Share
    start: int

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter, or of this rank's tensor-parallel share."""
        return self.share.own_shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class BucketLayout:
    """The positions of parameters and of ranks' shards in a flat buffer.

    Attributes:
        segments: the ranges of the parameters, ascending.
        world_size: the number of ranks, each of which has one shard.
        owners: in a whole bucket, each segment's owner as a position (see ``order``), ascending; None in other buckets.
        padded_to: the length of the flat buffer; None for the smallest length that holds all shards.
        rank: this rank.
        order: the position of each rank's shard among the shards; None if positions equal ranks.
        nodes: the number of machines, if each holds all parameters at rest; 1 if all ranks shard them. At rest, a rank
            holds its *part*: its own shard and, with several nodes, the adjacent shards of the ranks with the same
            local index on the other machines.
    """

    segments: tuple[Segment, ...]
    world_size: int
    owners: tuple[int, ...] | None = None
    padded_to: int | None = None
    rank: int = 0
    order: tuple[int, ...] | None = None
    nodes: int = 1

    @classmethod
    def of(
        cls,
        named: Sequence[tuple[str, torch.Size | Share]],
        world_size: int,
        owners: Sequence[int] | None = None,
        *,
        rank: int = 0,
        order: tuple[int, ...] | None = None,
        nodes: int = 1,
    ) -> BucketLayout:
        """Lay out parameters, given as (name, shape) or (name, share), one after another."""
        segments, position = [], 0
        for name, shape in named:
            share = shape if isinstance(shape, Share) else Share(torch.Size(shape))
            segments.append(Segment(name, share, position))
            position = _align(segments[-1].stop)
        owned = tuple(owners) if owners is not None else None
        return cls(tuple(segments), world_size, owned, rank=rank, order=order, nodes=nodes)

    def with_owners(self, owners: Sequence[int]) -> BucketLayout:
        """The layout of the same buffer as a whole bucket, with the given owner of each segment."""
        return replace(self, owners=tuple(owners), padded_to=self.padded_numel)

    @property
    def is_whole(self) -> bool:
        """Whether each segment has one owner."""
        return self.owners is not None

    @property
    def mean(self) -> float:
        """The factor that turns a sum over the ranks into a mean."""
        return 1.0 / self.world_size

    @property
    def numel(self) -> int:
        """The number of elements of all segments, without gaps and padding."""
        return sum(segment.numel for segment in self.segments)

    def shard_numel(self, rank: int) -> int:
        """The number of elements of a rank's shard, including gaps and padding."""
        start, stop = self.shard_range(rank)
        return stop - start

    @property
    def own_range(self) -> tuple[int, int]:
        """``shard_range`` of this rank."""
        return self.shard_range(self.rank)

    @property
    def padded_numel(self) -> int:
        _, stop = self._range_at(self.world_size - 1)
        return stop

    def owner(self, index: int) -> int:
        """The rank that owns a segment of a whole bucket."""
        assert self.owners is not None
        return self.owners[index] if self.order is None else self.order.index(self.owners[index])

    def shard_range(self, rank: int) -> tuple[int, int]:
        """``[start, stop)`` of a rank's shard in the bucket."""
        return self._range_at(self.position(rank))

    @property
    def own_part(self) -> tuple[int, int]:
        """``[start, stop)`` of this rank's part in the bucket."""
        return self._part_at(self.position(self.rank) // self.nodes)

    @property
    def part_ranges(self) -> Sequence[tuple[int, int]]:
        """``[start, stop)`` of the part of each rank in the group that gathers the bucket."""
        return [self._part_at(n) for n in range(self.world_size // self.nodes)] if self.nodes > 1 else self.shard_ranges

    @property
    def ranges_in_part(self) -> Sequence[tuple[int, int]]:
        """``[start, stop)`` of each shard in this rank's part, relative to the start of the part."""
        begin, first = self.own_part[0], self.position(self.rank) // self.nodes * self.nodes
        shards = map(self._range_at, range(first, first + self.nodes))
        return [(start - begin, stop - begin) for start, stop in shards]

    def _part_at(self, number: int) -> tuple[int, int]:
        first = number * self.nodes
        return self._range_at(first)[0], self._range_at(first + self.nodes - 1)[1]

    def position(self, rank: int) -> int:
        """The position of a rank's shard among the shards."""
        return rank if self.order is None else self.order[rank]

    def _range_at(self, position: int) -> tuple[int, int]:
        if self.owners is None:
            return position * self._equal_shard, (position + 1) * self._equal_shard
        starts = [*(segment.start for segment in self.segments), self.padded_to or _align(self._stop)]
        return starts[bisect_left(self.owners, position)], starts[bisect_left(self.owners, position + 1)]

    @cached_property
    def _equal_shard(self) -> int:
        return _align(-(-self._stop // self.world_size))

    @property
    def _stop(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    @property
    def shard_ranges(self) -> Sequence[tuple[int, int]]:
        """``shard_range`` of every rank, each computed only on access, since there may be thousands of ranks."""
        return ShardRanges(self)

    def owned_range(self, first: int, last: int, rank: int) -> tuple[int, int]:
        """``[start, stop)`` of a rank's elements in segments ``first`` to ``last`` (inclusive); may be empty."""
        low, high = self.shard_range(rank)
        start = max(self.segments[first].start, low)
        return start, max(start, min(self.segments[last].stop, high))

    def range_in_part(self, index: int) -> tuple[int, int]:
        """``[start, stop)`` of a segment's elements in this rank's part; may be empty."""
        low, high = self.own_part
        start = min(max(self.segments[index].start, low), high)
        return start, max(start, min(self.segments[index].stop, high))

    def spans_of(self, rank: int) -> Spans:
        """The spans of a rank's shard."""
        if rank not in self._spans:
            self._spans[rank] = self._cut(*self.shard_range(rank))
        return self._spans[rank]

    @cached_property
    def _spans(self) -> dict[int, Spans]:
        return {}

    def _cut(self, low: int, high: int) -> Spans:
        spans: Spans = []
        position = 0
        for number, size in enumerate(self.sizes()):
            start, stop = max(position, low), min(position + size, high)
            if start < stop:
                spans.append((stop - start, None if number % 2 else number // 2, start - position))
            position += size
        return spans

    def sizes(self) -> list[int]:
        """The number of elements of each segment and of the gap after it, alternating, for the entire bucket."""
        sizes = []
        for segment, end in zip(self.segments, [*(other.start for other in self.segments[1:]), self.padded_numel]):
            sizes += [segment.numel, end - segment.stop]
        return sizes


class ShardRanges(Sequence[tuple[int, int]]):
    """``shard_range`` of every rank, computed on access. ``are_equal``: whether all shards have equal lengths."""

    def __init__(self, layout: BucketLayout) -> None:
        self._layout, self.are_equal = layout, not layout.is_whole

    def __len__(self) -> int:
        return self._layout.world_size

    @overload
    def __getitem__(self, rank: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, rank: slice) -> list[tuple[int, int]]: ...

    def __getitem__(self, rank: int | slice) -> tuple[int, int] | list[tuple[int, int]]:
        ranks = range(len(self))[rank]
        return self._layout.shard_range(ranks) if isinstance(ranks, int) else list(map(self._layout.shard_range, ranks))


def _align(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


# -- owners of segments ------------------------------------------------------------------------------------------------

_SWEEPS = 4
_CHOICES = 4
"""Number of candidate owners per segment of a bucket. If there are more ranks, the least loaded ones are candidates."""


def balanced_owners(
    buckets: Sequence[Sequence[int]], ranks: int, loads: Sequence[int] | None = None
) -> list[list[int]]:
    """Choose the owner of each segment, as a position in the order of shards. Owners ascend in each bucket.

    Thus a rank's shard of a bucket is one run of consecutive segments, and segments keep their places. Buckets are
    assigned one after another, those with the largest segments first, each in the best way for the ranks' current
    loads. Then all buckets are reassigned several times, since loads have changed. With enough candidates, the largest
    load comes as close to the mean as if segments were assigned freely (largest first, to the least loaded rank).

    Args:
        buckets: number of elements in each segment, by bucket.
        ranks: the number of ranks.
        loads: number of elements that each rank already owns in other buckets.

    Returns:
        The owner of each segment, by bucket.
    """
    loads = list(loads or [0] * ranks)
    owners: list[list[int]] = [[] for _ in buckets]
    order = sorted(range(len(buckets)), key=lambda number: -max(buckets[number], default=0))
    for _ in range(_SWEEPS):
        for number in order:
            for rank, numel in zip(owners[number], buckets[number]):
                loads[rank] -= numel
            owners[number] = _runs(buckets[number], loads)
            for rank, numel in zip(owners[number], buckets[number]):
                loads[rank] += numel
    return owners


def _runs(numels: Sequence[int], loads: list[int]) -> list[int]:
    """Divide one bucket into runs of segments for ascending ranks, minimising the sum of the ranks' squared loads.

    Uses dynamic programming over the ranks: ``costs[n]`` is the least cost of assigning the first ``n`` segments to
    the ranks tried so far. Returns the owner of each segment.
    """
    tried = range(len(loads))
    if len(loads) > _CHOICES * len(numels):
        tried = sorted(sorted(tried, key=lambda rank: loads[rank])[: _CHOICES * len(numels)])  # type: ignore[assignment]
    ends = [0]
    for numel in numels:
        ends.append(ends[-1] + numel)
    costs = [0.0] + [float("inf")] * len(numels)
    cuts: list[list[int]] = []  # by tried rank: where its run starts, for each possible end
    for rank in tried:
        after, begins = list(costs), list(range(len(ends)))
        for stop in range(1, len(ends)):
            for start in range(stop):
                taken = ends[stop] - ends[start]
                cost = costs[start] + taken * (taken + 2 * loads[rank])
                if cost < after[stop]:
                    after[stop], begins[stop] = cost, start
        costs = after
        cuts.append(begins)
    owners, stop = [0] * len(numels), len(numels)
    for rank, begins in zip(reversed(tried), reversed(cuts)):
        owners[begins[stop] : stop] = [rank] * (stop - begins[stop])
        stop = begins[stop]
    return owners
