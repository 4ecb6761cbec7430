"""Choose the rank that owns each parameter of a *whole* bucket (see ``layout``), to balance elements over ranks."""

from __future__ import annotations

from collections.abc import Sequence

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
