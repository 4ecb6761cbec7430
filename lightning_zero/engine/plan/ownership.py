"""Choose the rank that owns each parameter of a *whole* bucket (see ``layout``), to balance elements over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_zero.engine.plan.layout import BucketLayout

MOST_UNEVEN = 2.0
"""Users are warned if one rank owns more than this many times the mean number of elements."""

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


def imbalance(buckets: Sequence[Sequence[int]], owners: Sequence[Sequence[int]], ranks: int) -> float:
    """The largest load of a rank, divided by the mean load."""
    loads = [0] * ranks
    for of_bucket, numels in zip(owners, buckets):
        for rank, numel in zip(of_bucket, numels):
            loads[rank] += numel
    return max(loads) * ranks / max(sum(loads), 1)


def warn_if_uneven(layouts: Sequence[BucketLayout]) -> None:
    """Warn if one rank owns far more elements of whole parameters than the mean: other ranks wait for its updates."""
    whole = [layout for layout in layouts if layout.owners is not None]
    numels = [[segment.numel for segment in layout.segments] for layout in whole]
    ranks = whole[0].world_size if whole else 1
    uneven = imbalance(numels, [layout.owners or () for layout in whole], ranks)
    if uneven > MOST_UNEVEN:
        largest = max((segment for layout in whole for segment in layout.segments), key=lambda segment: segment.numel)
        warnings.warn(
            f"Parameters that are updated as a whole are unevenly distributed over {ranks} ranks: one rank owns "
            f"{uneven:.1f} times the mean number of elements, so the other ranks wait for it. The largest of these "
            f"parameters, '{largest.name}', has {largest.numel / sum(map(sum, numels)):.0%} of their elements. Use "
            "fewer ranks for this model, or give large parameters to an elementwise optimizer such as AdamW, whose "
            "parameters are sharded evenly.",
            stacklevel=2,
        )


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
