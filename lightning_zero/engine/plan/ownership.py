"""Owners of the parameters in whole buckets (see ``layout``), balanced by elements over all units."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_zero.engine.plan.layout import BucketLayout

MOST_UNEVEN = 2.0
"""Users are warned if the largest load is more than this many times the mean."""

_SWEEPS = 4
_CHOICES = 4
"""Ranks per segment of a bucket that are tried as owners; if there are more, the least loaded ranks are tried."""


def balanced_owners(
    buckets: Sequence[Sequence[int]], ranks: int, loads: Sequence[int] | None = None
) -> list[list[int]]:
    """Choose each segment's owner, given as a position in the order of shards, so that positions ascend in each bucket.

    Thus a rank's shard of a bucket is one run of segments, and no segment has to move. Buckets are assigned one after
    another, those with the largest segments first, each in the best way given the others; then all are assigned again,
    since the other assignments have changed. With enough ranks to choose from, the most loaded rank comes as close to
    the mean as with segments assigned freely (largest first, to the least loaded rank).

    Args:
        buckets: elements of each segment, by bucket.
        ranks: the number of ranks.
        loads: the elements of other buckets that each rank already owns.

    Returns:
        For each bucket the owners of its segments.
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
    """Warn if one rank's whole parameters far exceed the mean: a step takes as long as that rank's updates."""
    whole = [layout for layout in layouts if layout.owners is not None]
    numels = [[segment.numel for segment in layout.segments] for layout in whole]
    ranks = whole[0].world_size if whole else 1
    uneven = imbalance(numels, [layout.owners or () for layout in whole], ranks)
    if uneven > MOST_UNEVEN:
        largest = max((segment for layout in whole for segment in layout.segments), key=lambda segment: segment.numel)
        warnings.warn(
            f"Parameters that are updated as a whole are unevenly distributed over {ranks} ranks: one rank owns "
            f"{uneven:.1f} times the mean number of elements, so the other ranks wait for it. The largest "
            f"parameter, '{largest.name}', has {largest.numel / sum(map(sum, numels)):.0%} of these elements. Use "
            "fewer ranks for this model, or give large parameters to an elementwise optimizer such as AdamW: those are "
            "sharded evenly.",
            stacklevel=2,
        )


def _runs(numels: Sequence[int], loads: list[int]) -> list[int]:
    """Cut one bucket into runs for ascending ranks, minimising the sum of squared loads.

    Dynamic programming over the ranks: ``costs[n]`` is the least cost of assigning the first ``n`` segments.
    """
    tried = range(len(loads))
    if len(loads) > _CHOICES * len(numels):
        tried = sorted(sorted(tried, key=lambda rank: loads[rank])[: _CHOICES * len(numels)])  # type: ignore[assignment]
    ends = [0]
    for numel in numels:
        ends.append(ends[-1] + numel)
    costs = [0.0] + [float("inf")] * len(numels)
    cuts: list[list[int]] = []  # by rank, the start of its run for each possible end
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
