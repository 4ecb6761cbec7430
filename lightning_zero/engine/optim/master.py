"""Masters: the tensors that an optimizer updates instead of parameters.

A master is this rank's part of neighbouring parameters in a bucket. On a single rank without offloaded states, each
parameter has its own master of the same shape, so that any optimizer works.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.compat import let_foreach_take
from lightning_zero.engine.config import LOW_PRECISION
from lightning_zero.engine.offload import place_of
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.slot import BucketSlot, slots_of
from lightning_zero.engine.tensor.identity import attributes_of_users
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor, local_range_of
from lightning_zero.engine.tensor.sharded_tree import walk


class MasterTensor(nn.Parameter):
    """A tensor that an optimizer updates. It has the attributes that user code has set on the master's parameters."""

    master: weakref.ref[Master]

    def __getattr__(self, name: str) -> Any:
        """Called only for an attribute that ``step`` has not set on this tensor."""
        slots = self.__dict__["master"]().slots if "master" in self.__dict__ else []
        values = [attributes_of_users(slot.parameter).get(name, self) for slot in slots]
        if all(value is self for value in values):
            raise AttributeError(f"'Parameter' object has no attribute {name!r}", name=name, obj=self)
        first, shape = values[0], slots[0].shape
        is_whole = len(slots) == 1 and (self.shape == shape or self.numel() == shape.numel() == 1)
        if not is_whole and not all(isinstance(value, _COMPARABLE) and value == first for value in values):
            raise RuntimeError(
                f"{name!r} of '{slots[0].name}' cannot be read in the optimizer's step, which updates parts of "
                "parameters, and several as one tensor. Pass ZeroStrategy(whole_parameters=True), or put the value "
                "into a param group."
            )
        return walk(first, lambda t: t.local.view(t.shape) if isinstance(t, ShardedTensor) else t)


_COMPARABLE = (bool, int, float, str, type(None))
let_foreach_take(MasterTensor)


class Master:
    """This rank's part of a run of neighbouring segments: one leaf tensor that is a slice of the bucket's shard.

    Attributes:
        first, last: indices of the first and last segment, inclusive.
        range: the slice of the shard that belongs to the segments.
        tensor: the tensor that the optimizer updates. It is 1-D unless the optimizer updates whole parameters, and
            empty if this rank owns no part of the segments.
    """

    def __init__(self, run: list[BucketSlot]) -> None:
        self.bucket, self.first, self.last = run[0].bucket, run[0].index, run[-1].index
        self.bucket.promote()
        owned = [slot.local_range for slot in run if slot.local_numel]
        self.range = slice(owned[0].start, owned[-1].stop) if owned else slice(0, 0)
        part = self.bucket.residency.leaf(self.range)
        # A scalar parameter gets a 1-D master, so that its states differ in shape from step counts.
        shape = run[0].share.own_shape
        has_shape = is_whole(self.bucket) and shape != () and part.numel() == shape.numel()
        self.tensor = self._of(part.view(shape) if has_shape else part)
        self._place = place_of(self.tensor)  # not a tensor, which would count as one that user code keeps
        self.device = self.bucket.residency.device
        self.bucket.has_master(self)

    def leaf(self, values: Tensor) -> MasterTensor:
        """Make a tensor for an optimizer to update, with all values of this master or some of them."""
        leaf = self._of(values)
        if type(leaf) is MasterTensor and leaf.shape == self.tensor.shape:  # neither a FakeTensor nor a chunk
            leaf.__dict__ = self.tensor.__dict__  # attributes that an earlier ``step`` has set
        return leaf

    def _of(self, values: Tensor) -> MasterTensor:
        tensor = MasterTensor(values)
        tensor.master = weakref.ref(self)
        return tensor

    @property
    def slots(self) -> list[BucketSlot]:
        return slots_of(self.bucket, self.first, self.last)

    @property
    def rounds(self) -> bool:
        """Whether updates round the values or their states stochastically."""
        return self.bucket.residency.plan.rounds

    @property
    def is_here(self) -> bool:
        """Whether this rank updates the master: this rank owns elements of it, or the parameters are empty."""
        return self.tensor.numel() > 0 or all(slot.share.own_shape.numel() == 0 for slot in self.slots)

    def take_over_data(self) -> None:
        """Copy values that an optimizer's ``step`` has assigned to ``data`` to the shard."""
        if place_of(self.tensor) != self._place:
            values = self.bucket.residency.leaf(self.range).view(self.tensor.shape)
            values.copy_(self.tensor.detach())
            self.tensor.data = values

    def write_state(self, key: str, values: Tensor) -> None:
        """Write the optimizer state ``key`` to the disk, in a field that may have to be added."""
        assert self.bucket.states is not None
        self.bucket.states.add_fields({field_of(key, values.dtype): values.dtype})
        self.bucket.states.write(field_of(key, values.dtype), self.range.start, values.reshape(-1))

    def state_on_disk(self, key: str, dtype: torch.dtype) -> Tensor:
        """This master's optimizer state ``key``, which is on a disk, as a lazy tensor."""
        assert self.bucket.states is not None
        return self.bucket.states.tensor(field_of(key, dtype), self.range, self.tensor.shape)

    def part_of(self, slot: BucketSlot) -> slice:
        """The range of a slot's segment within this master's flattened tensor."""
        if slot.local_numel == 0:
            return slice(0, 0)
        return slice(slot.local_range.start - self.range.start, slot.local_range.stop - self.range.start)


def field_of(key: str, dtype: torch.dtype) -> str:
    """The field on a disk for an optimizer state, which may have another dtype for large parameters (bitsandbytes)."""
    return f"{key}: {dtype}"


def is_whole(bucket: Bucket) -> bool:
    """Whether the optimizer updates entire parameters of a bucket in their original shapes, each on its owning rank."""
    return bucket.layout.is_whole or is_alone(bucket)


def is_alone(bucket: Bucket) -> bool:
    """Whether a bucket is on a single rank without offload, so that its optimizer updates ordinary whole tensors."""
    return not bucket.layout.is_sharded and bucket.updates is None


def runs_of(slots: list[BucketSlot]) -> list[list[BucketSlot]]:
    """Group slots into maximal runs of adjacent segments, in each bucket's order.

    A run ends at a gap: kernels may round the last elements of a tensor differently (see ``ALIGNMENT``), so the
    elements before a gap must also be the last of a master. In a whole bucket, each segment is a separate run. The same
    holds with one rank, so that each parameter has a master in its own shape.
    """
    by_bucket: dict[Bucket, list[BucketSlot]] = {}
    for slot in slots:
        by_bucket.setdefault(slot.bucket, []).append(slot)
    runs: list[list[BucketSlot]] = []
    for bucket, members in by_bucket.items():
        ends, segments = -1, bucket.layout.segments  # ``ends``: index of the segment that would continue the run
        for slot in sorted(members, key=lambda slot: slot.index):
            start = segments[slot.index].start
            apart = bucket.layout.is_whole or not bucket.layout.is_sharded
            if slot.index != ends or segments[ends - 1].stop != start or apart:
                runs.append([])
            runs[-1].append(slot)
            ends = slot.index + 1
    return runs


@torch.no_grad()
def restore_digits(slot: BucketSlot, saved: Tensor) -> None:
    """Restore a parameter's saved master weight, except for elements whose rounded value has changed since saving.

    If the parameter is now in fp32, only elements that equal the saved weight rounded to low precision are restored.
    """
    bucket, is_low = slot.bucket, slot.dtype in LOW_PRECISION
    if not is_low and slot.dtype != torch.float32:
        return
    bucket.promote()
    if bucket.master_dtype in LOW_PRECISION:
        return  # there are no master weights
    shard = slot.local_parameter()
    digits = local_range_of(saved, slot).to(shard)
    for dtype in (slot.dtype,) if is_low else LOW_PRECISION:
        rounded = shard.to(dtype).to(shard)
        is_unchanged = digits.to(dtype).to(shard) == rounded
        shard.copy_(torch.where(is_unchanged if is_low else is_unchanged & (rounded == shard), digits, shard))
    if not is_low or bucket.states is not None:
        slot.written_locally(shard)
