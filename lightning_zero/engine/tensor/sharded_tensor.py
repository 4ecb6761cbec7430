"""Sharded tensor: each rank holds a contiguous range of a parameter, a reduced gradient or an optimizer state.

User code sees a tensor of the full shape; ``dispatch`` implements the operators.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.compat import SlotsOfDTensor
from lightning_zero.engine.plan.share import Box, boxes_of
from lightning_zero.engine.tensor.identity import like, set_contents, with_attributes
from lightning_zero.engine.tensor.wrapper import WrapperTensor, flat_range, new_wrapper, reader

if TYPE_CHECKING:  # importing these takes a while, and only checkpoints need them
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


_data: Any = nn.Parameter.data
_grad: Any = nn.Parameter.grad


class View(nn.Parameter):
    """A parameter over a bucket's gathered buffer; in a forward, the module's own parameters (see ``exchange``).

    A module may write to its parameters in forward. A write in place changes the tensor's version; a write through
    ``data`` does not, so this class records each access to ``data``.

    Attributes:
        slot: the parameter's slot; exists only in forward.
    """

    slot: Any

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook in forward, like ``ShardedTensor``'s method."""
        return self.slot.parameter.register_post_accumulate_grad_hook(hook)

    @property
    def grad(self) -> Tensor | None:
        """In forward, the parameter's gradient, which the stand-in has. The compiler looks at this tensor itself."""
        slot = self.__dict__.get("slot")
        return _grad.__get__(self) if slot is None or torch.compiler.is_compiling() else slot.parameter.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if (slot := self.__dict__.get("slot")) is None:
            _grad.__set__(self, value)
        else:
            slot.parameter.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    _grad = grad  # as torch's own ``grad``, also under this name

    @property
    def data(self) -> Tensor:
        values: Tensor = _data.__get__(self)
        if (slot := self.__dict__.get("slot")) is not None:
            slot.bucket.is_data_read = True
            if not torch.compiler.is_compiling():
                slot.read_as_data = slot.read_as_data or []
                slot.read_as_data.append(weakref.ref(values))
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        slot = self.slot
        check_same_shape(slot.name, self, value)
        if torch.compiler.is_compiling():
            with torch.no_grad():
                self.copy_(value)
            return
        value = value.whole() if isinstance(value, WrapperTensor) else value.detach().to(self)
        segment = slot.bucket.segment_view(slot.index)
        if value.is_set_to(segment):
            slot.puts_data_back = True
        elif not slot.puts_data_back and _data.__get__(self).is_set_to(segment):
            increment_version(self)  # a graph may have saved values that ``leave_forward`` will replace
        slot.read_as_data = slot.read_as_data or []
        show(self, value)

    def as_strided(self, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:  # type: ignore[override]
        """With an offset from the start of the parameter, not of the buffer."""
        return super().as_strided(size, stride, self.storage_offset() + (storage_offset or 0))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return with_attributes(self, self.detach().clone()).__reduce_ex__(protocol)


def check_same_shape(name: str, parameter: Tensor, value: Tensor) -> None:
    """Raise a ValueError if a value that user code assigns to a parameter's ``data`` has another shape."""
    if value.shape != parameter.shape:
        raise ValueError(
            f"{name}: .data of shape {tuple(parameter.shape)} cannot be replaced by a tensor of shape "
            f"{tuple(value.shape)} while the module is sharded. Change shapes before the strategy sets up the module."
        )


def take_added_gradient(leaf: Tensor) -> Tensor:
    """Remove and return the gradient that autograd has added to a leaf, also if this is a view in forward."""
    gradient: Tensor = _grad.__get__(leaf)
    _grad.__set__(leaf, None)
    return gradient


def show(view: Tensor, tensor: Tensor) -> None:
    """Make the view refer to another tensor of the same shape.

    A function, not a method: a view of a fake tensor (``lightning_zero.planning``) is a FakeTensor, not a ``View``.
    """
    _data.__set__(view, tensor)


# -- sharded tensors ---------------------------------------------------------------------------------------------------


# A ``BucketSlot`` (``engine/state/slot.py``, in a room above this one), which provides shape, range and communication.
Slot = Any


class ShardedTensor(WrapperTensor):
    """A tensor of which this rank holds one range, ``local`` (1-D), as determined by the tensor's slot in a bucket.

    Args:
        slot: the tensor's slot, which provides shape, range and communication.
        local: this rank's range; None if ``keep`` provides it, or, without ``keep``, for the parameter itself, whose
            range the slot provides. The range's dtype may be wider than the tensor's (an fp32 master weight of a bf16
            parameter), and the range may be in host memory although the tensor is on another device.
        dtype: the dtype that user code sees.
        keep: any object that must live as long as this tensor; its method ``local`` returns the range if ``local`` is
            None. By default, the tensor is a parameter or a copy, which becomes an ordinary tensor when the engine is
            closed.

    Attributes:
        kept_gradient: a parameter's ``grad``; other tensors do not have this attribute.
    """

    slot: Slot
    kept_gradient: Tensor | None
    _own_range: Tensor | None = None
    kept_object: Any = None

    @staticmethod
    def __new__(
        cls,
        slot: Slot,
        local: Tensor | None = None,
        dtype: torch.dtype | None = None,
        *,
        keep: Any = None,
    ) -> ShardedTensor:
        dtype = dtype or (local.dtype if local is not None else slot.dtype)
        self = new_wrapper(cls, slot.shape, dtype=dtype, device=slot.device)
        self.slot, self._own_range = slot, local
        self.kept_object = Copy() if local is not None and keep is None else keep
        if keep is None or self.is_copy:
            slot.remember(self)
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradient; for a module's parameter, ``kept_gradient``, to which autograd cannot add on its own."""
        return self.kept_gradient if "kept_gradient" in self.__dict__ else _grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _grad.__set__(self, value)  # with torch's checks
        if "kept_gradient" in self.__dict__:
            _grad.__set__(self, None)
            self.kept_gradient = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    _grad = grad  # as torch's own ``grad``, also under this name

    @property
    def local(self) -> Tensor:
        if self.is_parameter:
            return self.slot.local_parameter()
        if (own := self.own_values) is not None:
            return local_range_of(own, self.slot)
        self.slot.bucket.background.synchronize()  # background work may be writing to the range
        return self.kept_object.local() if self._own_range is None else self._own_range

    def show(self, local: Tensor | None, keep: Any) -> None:
        """Replace the local range and ``kept_object``."""
        self._own_range, self.kept_object = local, keep

    def range_of(self, value: Tensor) -> Tensor:
        """This rank's range of a value for this tensor, such as a mask: see ``local_range_of``."""
        return local_range_of(value, self.slot)

    def at_rest(self) -> Tensor:
        """Like ``local``, but for reading only; a lazy tensor if the range is on a disk."""
        return self.slot.parameter_at_rest() if self.is_parameter else self.local

    @property
    def is_parameter(self) -> bool:
        """Whether this is a parameter or its alias (``detach()``), not a copy or another tensor derived from it."""
        return self._own_range is None and self.kept_object is None

    @property
    def is_copy(self) -> bool:
        """Whether this belongs to user code alone: neither a parameter nor its gradient or optimizer state."""
        return isinstance(self.kept_object, Copy)

    @property
    def own_values(self) -> Tensor | None:
        """All values that this rank has, if this is a copy to which ranks may have written different values."""
        return self.kept_object.whole if isinstance(self.kept_object, Copy) else None

    def whole_at_hand(self, dtype: torch.dtype | None = None) -> Tensor | None:
        if (own := self.own_values) is not None:
            return own.to(dtype or self.dtype)
        if (reading := reader.get()) is not None:
            return reading.whole(self).to(self.device, dtype or self.dtype)
        return self.slot.whole_parameter(dtype or self.dtype) if self.is_parameter else None

    def whole(self) -> Tensor:
        value = self.whole_at_hand()
        return self.slot.collect(self.local.to(self.dtype)) if value is None else value

    def alias(self) -> Tensor:
        kind = ShardedDTensor if isinstance(self, ShardedDTensor) else ShardedTensor  # not the project's own class
        return kind(self.slot, self._own_range, self.dtype, keep=self.kept_object)

    def write_whole(self, value: Tensor) -> None:
        if self.is_parameter:
            self.slot.write_parameter(value)
        elif self.is_copy:
            self.kept_object.whole = value.detach()
        else:
            local = self.local
            local.copy_(local_range_of(value, self.slot))
            self.written(local)

    def written(self, local: Tensor) -> None:
        """Update all copies of this rank's range, after a write to ``local``, which ``self.local`` has returned."""
        if self.is_parameter:
            self.slot.written_locally(local)

    def data_ptr(self) -> int:
        """No address, but a number by which aliases are known: projects count distinct parameters by ``data_ptr()``."""
        return abs(hash((id(self.slot), id(self.kept_object))))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Like ``Tensor``'s method, but the hook runs at the end of backward, when ``grad`` is the reduced gradient."""
        if not self.is_parameter:
            return super().register_post_accumulate_grad_hook(hook)
        handle = RemovableHandle(self.slot.hooks_after_reduction)
        self.slot.hooks_after_reduction[handle.id] = hook
        return handle

    def __repr__(self) -> str:  # type: ignore[override]
        start, stop = self._range
        kind = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{kind}ShardedTensor({self.slot.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"this rank holds [{start}, {stop}) of {self.numel()} elements{grad})"
        )

    # Methods called by torch.distributed.checkpoint, which reads and writes boxes, each a view of the local range.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        box = next(box for box in self._boxes() if box.offsets == tuple(index.offset))
        return self.local[box.start - self.slot.offset : box.stop - self.slot.offset].view(box.sizes)

    def _boxes(self) -> list[Box]:
        if not self.numel():  # DCP expects one entry for an empty tensor, too
            return [Box((0,) * self.dim(), tuple(self.shape), 0)]
        return boxes_of(self.slot.share, *self._range) if self.slot.share.is_counted_here else []

    @property
    def _range(self) -> tuple[int, int]:
        return self.slot.offset, self.slot.offset + self.slot.local_numel

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                if (reading := reader.get()) is not None and self.own_values is None:
                    copy = reading.whole(self).clone()
                else:  # the copy is sharded, too, so that a copied module takes only a shard's memory
                    copy = ShardedTensor(self.slot, self.local.clone(), self.dtype)
                    if (own := self.own_values) is not None:
                        copy.write_whole(own.clone())
            memo[id(self)] = like(self, copy)
        return memo[id(self)]

    @WrapperTensor.data.setter  # type: ignore[attr-defined]
    def data(self, value: Tensor) -> None:
        if value.dtype != self.dtype:
            if self.is_copy and self.is_leaf and isinstance(value, ShardedTensor) and value.slot is self.slot:
                # ``copied.half()``: the engine does not use the copy, so the copy may have any dtype
                gradient, other = self.grad, like(self, value.detach())
                other.grad = gradient.to(value.dtype) if gradient is not None else None
                set_contents(self, other)
                return
            raise TypeError(
                f"{self.slot.name}: a sharded parameter keeps its dtype, {self.dtype}; .data cannot be set to "
                f"{value.dtype}. Convert the module before the strategy sets it up, or choose Trainer(precision=...); "
                "or convert a copy of the module, as in copy.deepcopy(module).half()."
            )
        check_same_shape(self.slot.name, self, value)
        if self.is_parameter:
            if isinstance(value, ShardedTensor) and value.slot is self.slot and value.is_parameter:
                return  # an alias
            self.slot.detach_aliases()
        elif self.is_copy:  # which shares memory only with its own aliases
            own = value.own_values if isinstance(value, ShardedTensor) else value
            self.show(local_range_of(value.detach(), self.slot).to(self.local, copy=True), Copy())
            if own is not None and not isinstance(own, WrapperTensor):
                self.write_whole(own.to(self.device, copy=True))
            return
        WrapperTensor.data.__set__(self, value)  # type: ignore[attr-defined]


class Copy:
    """What the aliases of a copy share: once ranks may have written different values to it, all that this rank has."""

    whole: Tensor | None = None


class ShardedDTensor(ShardedTensor, SlotsOfDTensor):
    """A sharded parameter that was a DTensor, and becomes one again when the engine closes (see ``set_contents``)."""


def local_range_of(value: Tensor, slot: Slot) -> Tensor:
    """Return this rank's range (1-D) of a tensor that has the slot's shape or can be expanded to it.

    A sharded tensor of another slot is gathered.
    """
    if isinstance(value, ShardedTensor) and value.slot is slot:
        return value.local
    value = value if value.shape == slot.shape else value.expand(slot.shape)
    return slot.share.range_of(slot.offset, slot.offset + slot.local_numel, partial(flat_range, value))
