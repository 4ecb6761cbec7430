"""A parameter's slot in a bucket; conversion of parameters to sharded tensors and back to ordinary tensors."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_zero.engine.comm.tensor_parallel import Placed, is_dtensor
from lightning_zero.engine.compat import accumulation_hooks, gradient_hooks, set_accumulation_hooks, set_gradient_hooks
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.tensor.identity import exchange, exchange_memory, set_contents
from lightning_zero.engine.tensor.sharded_tensor import (
    Copy,
    ShardedDTensor,
    ShardedTensor,
    View,
    local_range_of,
    show,
)

Derived = tuple[str, int, str, int, str]
"""The name of a tensor derived from a parameter: the parameter's name, the number of its copies so far, "alias" or
"copy", the tensor's number among these, and its dtype."""


class BucketSlot:
    """A parameter's range of a bucket, to which the parameter, its gradient and copies of them refer.

    Attributes:
        name, shape, dtype, device: those of the parameter.
        share: this rank's share of the parameter; the full parameter unless tensor parallelism divides it.
        offset, local_numel: start and length of this rank's range of the flattened share.
        local_range: this rank's range as a slice of the bucket's shard.
        hooks_after_reduction: hooks that users registered with ``register_post_accumulate_grad_hook``, by id.
        read_as_data: tensors that ``data`` has returned in the running forward; None if ``data`` was not used.
        puts_data_back: whether the last forward that replaced the parameter's ``data`` also put it back.
    """

    def __init__(self, bucket: Bucket, index: int) -> None:
        segment = bucket.layout.segments[index]
        self.bucket, self.index = bucket, index
        self.name, self.share, self.shape = segment.name, segment.share, segment.share.shape
        self.dtype = bucket.dtype
        self.placed = Placed(self.share)
        self.find_range()
        self.hooks_after_reduction: dict[int, Callable[[Tensor], Any]] = OrderedDict()
        self.is_in_forward = False  # whether the parameter is an ordinary tensor now
        self.take_gradient: Callable[[Tensor], None] | None = None
        self.read_as_data: list[weakref.ref[Tensor]] | None = None
        self.puts_data_back = False
        self._derived: WeakValueDictionary[tuple[str, int], ShardedTensor] = WeakValueDictionary()
        self._remembered: Counter[str] = Counter()

    def find_range(self) -> None:
        """Set this rank's range of the parameter from the bucket's layout."""
        layout, index = self.bucket.layout, self.index
        start, stop = layout.owned_range(index, layout.rank)
        self.offset, self.local_numel = start - layout.segments[index].start, stop - start
        low, _ = layout.own_range
        self.local_range = slice(start - low, start - low + self.local_numel) if stop > start else slice(0, 0)

    @property
    def device(self) -> torch.device:
        return self.bucket.full.device

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.bucket.parameters[self.index]()  # without ``Bucket.parameter``, for speed
        assert parameter is not None, f"parameter {self.name} was deleted"
        return parameter

    def is_of(self, tensor: Any) -> bool:
        """Whether a tensor is the parameter itself, which is trained; its copies and aliases have the same slot."""
        return self.bucket.parameters[self.index]() is tensor  # the parameter may have been deleted

    @property
    def view(self) -> Tensor:
        """The ordinary tensor that modules compute with instead of the parameter."""
        return self.bucket.views[self.index]

    def enter_forward(self, parameter: nn.Parameter, stand_in: Tensor) -> None:
        """Make the parameter an ordinary tensor, as its module is about to run.

        Args:
            parameter: the module's parameter.
            stand_in: an ordinary tensor. It holds the sharded contents until ``leave_forward``.
        """
        bucket, index = self.bucket, self.index
        self.is_in_forward = True
        if isinstance(stand_in, View):
            stand_in.slot = self
            vars(stand_in)["kept_gradient"] = vars(parameter).pop("kept_gradient")
            exchange_memory(parameter, stand_in)
        else:
            exchange(parameter, stand_in)
        bucket.parameters[index] = weakref.ref(stand_in)  # type: ignore[arg-type]
        if bucket.views[index] is stand_in:
            bucket.views[index] = parameter

    def leave_forward(self, parameter: nn.Parameter, stand_in: Tensor) -> None:
        """Undo ``enter_forward``; changes of ``requires_grad`` and of hooks made in the forward stay."""
        bucket, index = self.bucket, self.index
        self.is_in_forward = False
        if self.read_as_data is not None:
            self._take_over_data(parameter, self.read_as_data)
            self.read_as_data = None
        if isinstance(parameter, View):
            requires_grad = parameter.requires_grad
            exchange_memory(parameter, stand_in)
            vars(parameter)["kept_gradient"] = vars(stand_in).pop("kept_gradient")
            del stand_in.slot  # type: ignore[attr-defined]  # it would form a reference cycle
            if parameter.requires_grad is not requires_grad:
                parameter.requires_grad_(requires_grad)
        else:
            exchange(parameter, stand_in)
        bucket.parameters[index] = weakref.ref(parameter)
        if bucket.views[index] is parameter:
            bucket.views[index] = stand_in
        if gradient_hooks(parameter) is not None:  # they may have been registered in the forward
            for tensor in (parameter, stand_in):  # autograd's hooks were exchanged with the contents
                set_gradient_hooks(tensor, gradient_hooks(tensor))

    @torch.no_grad()
    def _take_over_data(self, parameter: nn.Parameter, earlier: list[weakref.ref[Tensor]]) -> None:
        """If a forward has replaced ``parameter.data``, copy the values to the buffer, and make it a view again.

        Args:
            earlier: tensors that ``data`` has returned. Those over the buffer become copies of the former values.
        """
        segment = self.bucket.segment_view(self.index)
        if parameter.is_set_to(segment):
            return
        former = segment.clone() if earlier else segment
        for reference in earlier:
            if (each := reference()) is not None and each.is_set_to(segment):
                each.data = former
        self.detach_aliases()  # this takes over former writes to the buffer, as if none were to come
        segment.copy_(parameter)
        self.bucket.is_data_read = True
        if self.puts_data_back:  # otherwise, the version was incremented before any use of the new values
            increment_version(parameter)
            self.puts_data_back = False
        show(parameter, segment)

    def remember(self, tensor: ShardedTensor) -> None:
        """Register a tensor derived from the parameter, which becomes an ordinary tensor when the engine is closed."""
        kind = "alias" if tensor.is_parameter else "copy"
        self._derived[kind, self._remembered[kind]] = tensor
        self._remembered[kind] += 1

    @property
    def derived(self) -> dict[Derived, ShardedTensor]:
        """Live tensors that user code derived from the parameter (aliases, copies, averages), by name.

        Ranks match copies by the order in which they are made. Once ranks have made different numbers of copies, no
        copies have equal names.
        """
        copies = self._remembered["copy"]
        return {
            (self.name, copies, *key, str(tensor.dtype)): tensor
            for key, tensor in list(self._derived.items())
            # a tensor may since have received other contents (see ``set_contents``); an alias may be a copy now
            if isinstance(tensor, ShardedTensor) and tensor.slot is self and tensor.is_parameter is (key[0] == "alias")
        }

    def detach_aliases(self) -> None:
        """Make aliases (``p.data``, ``p.detach()``) copies of the present values, before other values replace these."""
        if aliases := [t for t in self.derived.values() if t.is_parameter and not self.is_of(t)]:
            values, copy = self.local_parameter().clone(), Copy()
            for alias in aliases:
                alias.show(values, copy)
                self.remember(alias)

    def local_parameter(self) -> Tensor:
        """This rank's range of the parameter, 1-D, in the dtype of the master weights."""
        self._synchronize()
        return self.bucket.residency.part(self.local_range)

    def parameter_at_rest(self) -> Tensor:
        """Like ``local_parameter``, but for reading only; a lazy tensor if the range is on a disk."""
        self._synchronize()
        return self.bucket.residency.at_rest(self.local_range)

    def _synchronize(self) -> None:
        self.bucket.background.synchronize()  # background work may be using the shard, to which callers may write
        self.bucket.wait()  # a gather may be filling the buffer, of which the shard may be a slice
        if self.bucket.may_be_written(self.index):
            self.bucket.copy_writes_to_masters()

    @property
    def is_written_by_modules(self) -> bool:
        """Whether ``local_parameter`` returns memory that modules compute with and may write to."""
        return self.bucket.is_in_buffer

    def whole_parameter(self, dtype: torch.dtype) -> Tensor | None:
        """The full parameter in a dtype, for immediate use; None if communication would be necessary."""
        bucket = self.bucket
        if self.share.is_divided:
            return None
        if not bucket.layout.is_sharded:  # this rank has all master weights, in full precision
            return self.local_parameter().view(self.shape).to(self.device, self.dtype).to(dtype)
        if bucket.full.dtype != dtype or bucket.awaits_refresh:
            return None
        if bucket.communicator.rendezvous.absent:
            bucket.gather()  # unlike other collectives, a gather works while some ranks have no batch left
        if bucket.is_ready:
            bucket.wait()
            return bucket.views[self.index].detach()
        return None

    def write_parameter(self, value: Tensor) -> None:
        """Write a full (unsharded) value to the parameter."""
        bucket = self.bucket
        bucket.communicator.rendezvous.require_all(f"a write to '{self.name}'")
        bucket.wait()
        with torch.no_grad():
            if bucket.is_ready and not bucket.extensions:
                bucket.segment_view(self.index).copy_(self.share.own(value))
            if not bucket.is_in_buffer:
                bucket.write_to_masters(self.local_range, local_range_of(value, self))
            if bucket.part is not None:
                bucket.part.write(bucket.layout.segments[self.index], self.share.own(value))
            bucket.encode_again()

    def written_locally(self, values: Tensor) -> None:
        """After ``values`` were written to this rank's range of the parameter, update all copies of the range."""
        bucket = self.bucket
        bucket.residency.written(self.local_range, values)
        if bucket.awaits_refresh:
            return
        if bucket.part is not None:
            bucket.part.write(bucket.layout.segments[self.index], self.collect_share(values))
        if bucket.extensions:
            bucket.communicator.rendezvous.meet(f"a write to '{self.name}'")
            bucket.encode_again()
        elif bucket.is_ready and not (bucket.is_in_buffer and not bucket.layout.is_sharded):
            bucket.segment_view(self.index).copy_(self.collect_share(values))

    def collect(self, local: Tensor) -> Tensor:
        """Gather the full tensor of which ``local`` is this rank's range. Collective."""
        if self.share.is_divided and not self.bucket.layout.is_sharded:
            self.bucket.communicator.rendezvous.meet(f"'{self.name}'")
        return self.bucket.communicator.tensor.whole(self.collect_share(local), self.share)

    def collect_share(self, local: Tensor) -> Tensor:
        """Like ``collect``, but only for this rank's tensor-parallel share. Collective if the share is sharded."""
        return self.begin_share(local)()

    def begin_share(self, local: Tensor) -> Callable[[], Tensor]:
        """Begin ``collect_share``; the result ends it."""
        bucket, local = self.bucket, local.to(self.device)
        if not bucket.layout.is_sharded:
            return partial(local.view, self.share.own_shape)
        bucket.communicator.rendezvous.meet(f"'{self.name}'")
        flat = local.new_empty(self.share.own_shape.numel())
        flat[self.offset : self.offset + self.local_numel] = local
        gather = bucket.communicator.broadcast_ranges(flat, self.ranges(), f"the gather of '{self.name}'")
        return lambda: gather.wait().view(self.share.own_shape)

    def ranges(self) -> list[tuple[int, int]]:
        """The range of the flattened share that each rank holds, in the order of ranks."""
        layout, first = self.bucket.layout, self.bucket.layout.segments[self.index].start
        owned = (layout.owned_range(self.index, rank) for rank in range(layout.world_size))
        return [(start - first, stop - first) for start, stop in owned]

    @property
    def group(self) -> Any:
        """Identifies the ranks that the parameter is sharded over; equal for parameters with the same ranks."""
        return self.bucket.communicator

    def reduce(self, value: Tensor, op: Any, what: str | None = None) -> Tensor:
        """Reduce a small tensor over all ranks, in place. Collective. Errors call the reduction ``what``."""
        self.bucket.communicator.rendezvous.meet(what or f"a norm or other reduction of '{self.name}'")
        return self.bucket.communicator.all_reduce(value, op)


class OwnedSlot(BucketSlot):
    """Slot of an optimizer state whose parameter has one owner, which holds the full state; other ranks hold nothing.

    Args:
        slot: the parameter's slot, in a bucket in which each parameter has one owner.
        name: the optimizer state's name, for messages.
    """

    def __init__(self, slot: BucketSlot, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self._owner = slot.bucket.layout.owner(slot.index)
        is_here = self._owner == slot.bucket.layout.rank
        self.bucket, self.index = slot.bucket, slot.index
        self.name, self.shape, self.dtype, self.share = name, shape, dtype, slot.share.of_another(shape)
        self.offset, self.local_numel = 0, shape.numel() if is_here else 0
        self._derived, self._remembered = WeakValueDictionary(), Counter()

    def ranges(self) -> list[tuple[int, int]]:
        """The range of the flattened state that each rank holds: all of it, or nothing."""
        ranks = range(self.bucket.layout.world_size)
        return [(0, self.shape.numel() if rank == self._owner else 0) for rank in ranks]


def make_sharded(bucket: Bucket, parameters: list[nn.Parameter]) -> None:
    """Turn the parameters of a bucket, given in the order of its layout, into sharded tensors."""
    # A parameter refers to its slot, and the slot to the bucket. The bucket's reference to the parameter is weak, so
    # that no cycle keeps them alive.
    for index, parameter in enumerate(parameters):
        slot = BucketSlot(bucket, index)
        slot.placed = bucket.communicator.tensor.placed(slot.name, parameter)
        cls = ShardedDTensor if is_dtensor(parameter) else ShardedTensor
        set_contents(parameter, nn.Parameter(cls(slot), parameter.requires_grad))
        parameter.kept_gradient = None  # type: ignore[attr-defined]
        if (hooks := accumulation_hooks(parameter)) is not None:
            slot.hooks_after_reduction = hooks
            # also if it is empty: after the contents were swapped, torch calls no hooks in the old dictionary
            set_accumulation_hooks(parameter, OrderedDict())


@torch.no_grad()
def repartition(bucket: Bucket, owners: Sequence[int]) -> None:
    """Reshard a bucket so that each parameter's owner holds all of it. Collective. Every ``p.grad`` must be None."""
    slots = slots_of(bucket)
    values = [slot.collect_share(slot.local_parameter()) for slot in slots]
    derived = [(each, each.whole()) for slot in slots for each in slot.derived.values() if not each.is_parameter]
    bucket.repartition(owners, values)
    for slot in slots:
        slot.find_range()
    for each, value in derived:
        each.show(local_range_of(value, each.slot).to(each.local.device, copy=True), each.kept_object)


def make_ordinary(bucket: Bucket, device: torch.device) -> None:
    """Turn the parameters of a bucket into ordinary full tensors on a device; former DTensors become DTensors again."""
    bucket.wait()
    is_exact, slots = bucket.dtype == bucket.full.dtype, slots_of(bucket)
    if is_exact:
        bucket.gather()
        bucket.wait()
    values = [
        (bucket.segment_view(s.index) if is_exact else s.collect_share(s.local_parameter())).to(
            device, s.dtype, copy=True
        )
        for s in slots
    ]
    for slot, value in zip(slots, values):
        parameter = slot.parameter
        parameter.grad = None
        value = bucket.communicator.tensor.shown(value, slot.placed)
        set_contents(parameter, nn.Parameter(value, parameter.requires_grad))
        if bucket.extensions:
            bucket.extensions[slot.index].give_to(parameter)
        set_accumulation_hooks(parameter, slot.hooks_after_reduction)
    bucket.parameters = []
    bucket.release()


def slots_of(bucket: Bucket, first: int = 0, last: int | None = None) -> list[BucketSlot]:
    """The slots of a bucket's parameters, from the first to the last (inclusive), in the order of the layout."""
    references = bucket.parameters[first : None if last is None else last + 1]
    try:  # cheaper than checking each reference; this function runs several times per bucket and step
        return [reference().slot for reference in references]  # type: ignore[union-attr]
    except AttributeError:
        raise AssertionError(
            f"a parameter of unit {bucket.unit_name or 'root'!r} was deleted while the module is sharded: delete "
            "modules and parameters before or after the run"
        ) from None


def slot_of(tensor: Any) -> BucketSlot | None:
    """The slot of a sharded parameter, also in its module's forward; None for any other tensor."""
    if isinstance(tensor, ShardedTensor) and tensor.is_parameter:
        return tensor.slot
    return tensor.__dict__.get("slot") if isinstance(tensor, View) else None
