"""What an optimizer is given in the place of neighbouring parameters: this rank's part of them, as one tensor.

One rank that updates parameters where they are has each as a whole, and in its shape: there any optimizer may be used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.slot import BucketSlot, slots_of


class Master:
    """This rank's part of a run of neighbouring segments, as one leaf over the bucket's shard: 1-D, but over one rank.

    Attributes:
        first, last: the segments, inclusive.
        tensor: what the optimizer updates; empty where the rank owns nothing of them.
    """

    def __init__(self, bucket: Bucket, first: int, last: int) -> None:
        self.bucket, self.first, self.last = bucket, first, last
        bucket.promote()
        start, stop = bucket.layout.owned_range(first, last, bucket.communicator.rank)
        low, _ = bucket.layout.shard_range(bucket.communicator.rank)
        self.range = slice(start - low, stop - low) if stop > start else slice(0, 0)
        part = bucket.residency.leaf(self.range)
        self.tensor = nn.Parameter(part.view(self.slots[0].shape) if self._has_shape else part)
        bucket.has_master(self)

    @property
    def slots(self) -> list[BucketSlot]:
        return slots_of(self.bucket, self.first, self.last)

    @property
    def _has_shape(self) -> bool:
        # A scalar stays 1-D, by which its state is told from a count of steps.
        return is_whole(self.bucket) and self.slots[0].shape != ()

    @property
    def is_here(self) -> bool:
        """Whether this rank updates it: it owns some of it, or there is nothing to own, as DDP's optimizer does."""
        return self.tensor.numel() > 0 or all(slot.shape.numel() == 0 for slot in self.slots)

    @property
    def device(self) -> torch.device:
        """Where it is updated."""
        return self.bucket.residency.device

    def values(self) -> Tensor:
        """What is updated, where it is in memory."""
        if self.bucket.states is not None:
            return torch.empty(0, dtype=self.tensor.dtype, device="cpu")
        return self.tensor.detach()

    def stored(self, key: str) -> Tensor:
        """A state of it that is on a disk."""
        assert self.bucket.states is not None
        return self.bucket.states.tensor(key, self.range.start, self.range.stop)

    def part_of(self, slot: BucketSlot) -> slice:
        """The range of one segment within this master's tensor, flattened."""
        if slot.local_numel == 0:
            return slice(0, 0)
        return slice(slot.local_range.start - self.range.start, slot.local_range.stop - self.range.start)


def is_whole(bucket: Bucket) -> bool:
    """Whether the optimizer is given each parameter of a bucket as a whole, in its shape."""
    return bucket.layout.world_size == 1 and bucket.updates is None


def runs_of(slots: list[BucketSlot]) -> list[list[BucketSlot]]:
    """Maximal runs of adjoining segments, in the order of each bucket."""
    by_bucket: dict[Bucket, list[BucketSlot]] = {}
    for slot in slots:
        by_bucket.setdefault(slot.bucket, []).append(slot)
    runs: list[list[BucketSlot]] = []
    for members in by_bucket.values():
        members.sort(key=lambda slot: slot.index)
        for position, slot in enumerate(members):
            before = members[position - 1] if position else None
            if before is None or not _are_neighbours(before, slot):
                runs.append([])
            runs[-1].append(slot)
    return runs


def _are_neighbours(before: BucketSlot, slot: BucketSlot) -> bool:
    """Whether one follows the other without a gap.

    Over a gap a run would end in the middle of what a kernel treats as the end of a parameter (see ``ALIGNMENT``). And
    over one rank gradients are not laid out as a bucket, so that each parameter is a run of its own.
    """
    segments = slot.bucket.layout.segments
    adjoining = slot.index == before.index + 1 and segments[before.index].stop == segments[slot.index].start
    return adjoining and slot.bucket.layout.world_size > 1
