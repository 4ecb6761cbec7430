"""One tensor of which each rank holds a contiguous range: a parameter at rest, and a gradient after its reduction.

To user code it is a tensor of the full shape. What it does is decided by what an operator needs:

- pointwise operators with scalars or with tensors cut alike act on the local range;
- sums, norms and the like act on the local range and are reduced once;
- views are recorded, and replayed when they are used;
- everything else gathers the whole value, computes, and writes the local range back if it was in place.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.pieces import Box, boxes
from lightning_zero.engine.settling import settle

if TYPE_CHECKING:  # they take a while to import, and a checkpoint needs them at the earliest
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

aten = torch.ops.aten


class Slot(Protocol):
    """What a sharded tensor asks of the place it has in a bucket. Slots that are cut alike are the same object."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    offset: int
    local_numel: int
    hooks_after_reduction: dict[int, Callable[[Tensor], Any]]
    """What users registered by ``register_post_accumulate_grad_hook``."""
    take_gradient: Callable[[Tensor], None] | None
    """Takes the gradient of another leaf that user code computed with in its place."""

    @property
    def group(self) -> Any:
        """The same for all that are cut over the same ranks."""

    @property
    def view(self) -> Tensor:
        """The ordinary tensor that modules compute with in the place of the parameter."""

    def remember(self, tensor: ShardedTensor) -> None:
        """Take note of a tensor cut as this slot that was made of its parameter: it is to be ordinary in the end."""

    def local_parameter(self) -> Tensor:
        """The rank's range of the parameter, 1-D, in the dtype of the masters."""

    def parameter_at_rest(self) -> Tensor:
        """As ``local_parameter``; what lies on a disk is read of it when somebody asks for the values."""

    @property
    def is_written_by_modules(self) -> bool:
        """Whether modules compute with the memory that ``local_parameter`` is of, and may write to it themselves."""

    def whole_parameter(self, dtype: torch.dtype) -> Tensor | None:
        """The whole parameter, cast to a dtype, where it can be had without communication, else None.

        Not to be kept: the buffer may be released.
        """

    def write_parameter(self, value: Tensor) -> None:
        """Give the parameter a new whole value."""

    def may_be_written_whole(self, value: Tensor) -> bool:
        """Whether ``write_parameter`` gives it just these values: all of it is here, and none of it is their memory."""

    def written_locally(self, values: Tensor) -> None:
        """The local range of the parameter was written: all copies of it are to have these values."""

    def collect(self, local: Tensor) -> Tensor:
        """The whole of a tensor that is cut as this slot. Collective."""

    def ranges(self) -> list[tuple[int, int]]:
        """What each rank has of the flattened parameter, in the order of ranks."""

    def accumulate(self, target: Tensor, gradient: Tensor) -> bool:
        """Take a local gradient that autograd adds to a tensor, if that is the parameter's ``.grad``."""

    def reduce(self, value: Tensor, op: Any, what: str | None = None) -> Tensor:
        """Reduce a small tensor over ranks, in place. Collective.

        Args:
            what: it is, where it is more than a sum or norm over parts of this parameter.
        """


class Handle(torch.Tensor):
    """What all kinds share: no data of their own, so that whatever reads data directly must be told."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def whole(self) -> Tensor:
        raise NotImplementedError

    def whole_at_hand(self, dtype: torch.dtype | None = None) -> Tensor | None:
        return None

    def write_whole(self, value: Tensor) -> None:
        raise NotImplementedError

    def alias(self) -> Tensor:
        """What ``detach()`` gives."""
        raise NotImplementedError

    def shown(self, start: int, stop: int) -> Tensor:
        """The elements ``[start, stop)`` of the flattened value, 1-D, to be read only."""
        return self.whole().reshape(-1)[start:stop]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # composite operators come here whole then, as autograd is out of the way
            out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        kind = _kind_of(func)
        if kind.only_reads and not kwargs and (at_hand := _at_hand(args)) is not None:
            return func(*at_hand)
        out = kind.act(func, args, kwargs) if kind.act is not None else NotImplemented
        return _act_on_whole(func, args, kwargs) if out is NotImplemented else out

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        array = self.whole().detach().clone().numpy(force=force)
        array.flags.writeable = False  # a copy: a write to it would be lost without a word
        return array

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        return self.whole().detach().clone().__dlpack__(**options)

    def set_(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "set_() gives a tensor other memory, and a sharded one has none of its own to replace: "
            "write the values into it, parameter.data.copy_(values)."
        )

    def storage(self) -> Any:
        # safetensors asks here, and with it save_pretrained() of transformers and PEFT
        raise RuntimeError(
            f"A sharded tensor of shape {tuple(self.shape)} has no memory of its own that could be read or saved: "
            "write 'with lightning_zero.full_parameters(module):' around it, on every rank, or do it after the run."
        )

    def tolist(self) -> Any:
        return self.whole().tolist()

    def __format__(self, format_spec: str) -> str:
        return self.whole().__format__(format_spec) if self.dim() == 0 else object.__format__(self, format_spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self.whole().detach().clone()
        if isinstance(self, torch.nn.Parameter):
            value = torch.nn.Parameter(value, self.requires_grad)
        return value.__reduce_ex__(protocol)


class ShardedTensor(Handle):
    """A tensor of a bucket's slot, of which this rank holds the 1-D range ``local``.

    Args:
        slot: the slot it is cut as.
        local: this rank's range, or None for the parameter itself, whose range the slot keeps. Its dtype may be wider
            than the tensor's own (an fp32 master of a bf16 parameter), and it may be in the host's memory while user
            code sees a tensor on the device.
        dtype: the dtype that user code sees.
        keep: whatever has to live as long as this tensor.
    """

    _slot: Slot
    _local: Tensor | None
    keep: Any

    @staticmethod
    def __new__(
        cls,
        slot: Slot,
        local: Tensor | None = None,
        dtype: torch.dtype | None = None,
        *,
        requires_grad: bool = False,
        keep: Any = None,
    ) -> ShardedTensor:
        dtype = dtype or (local.dtype if local is not None else slot.dtype)
        self = made(cls, slot.shape, dtype=dtype, device=slot.device, requires_grad=requires_grad)
        self._slot, self._local, self.keep = slot, local, keep
        if keep is None:
            slot.remember(self)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def local(self) -> Tensor:
        """This rank's range, 1-D."""
        if self._local is None:
            return self._slot.local_parameter()
        settle()  # whoever asks may write to it
        return self._local

    def show(self, local: Tensor, keep: Any) -> None:
        """Have other values from here on."""
        self._local, self.keep = local, keep

    def at_rest(self) -> Tensor:
        """As ``local``, to be read only; what lies on a disk is read of it when somebody asks for the values."""
        return self._slot.parameter_at_rest() if self._local is None else self.local

    @property
    def slot(self) -> Slot:
        return self._slot

    @property
    def is_parameter(self) -> bool:
        """Whether it is the engine's own parameter (a detached alias of it included), not a value derived from one."""
        return self._local is None

    def whole_at_hand(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """The whole value, in its own dtype or cast to another, where it can be had without communication."""
        return self._slot.whole_parameter(dtype or self.dtype) if self.is_parameter else None

    def whole(self) -> Tensor:
        """The whole value, in the dtype that user code sees. Collective unless it is at hand."""
        value = self.whole_at_hand()
        return self._slot.collect(self.local).to(self.dtype) if value is None else value

    def alias(self) -> Tensor:
        return ShardedTensor(self._slot, self._local, self.dtype, keep=self.keep)

    def write_whole(self, value: Tensor) -> None:
        if self.is_parameter:
            self._slot.write_parameter(value)
        else:
            local = self.local
            local.copy_(local_range_of(value, self._slot))
            self.written(local)

    def written(self, local: Tensor) -> None:
        """What ``local`` has given was written to."""
        if self.is_parameter:
            self._slot.written_locally(local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """As of every tensor; it is called once ``grad`` is the reduced gradient, at the end of backward."""
        if not self.is_parameter:
            return super().register_post_accumulate_grad_hook(hook)
        handle = RemovableHandle(self._slot.hooks_after_reduction)
        self._slot.hooks_after_reduction[handle.id] = hook
        return handle

    def __repr__(self) -> str:  # type: ignore[override]
        start, stop = self._slot.offset, self._slot.offset + self._slot.local_numel
        kind = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{kind}ShardedTensor({self._slot.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"this rank holds [{start}, {stop}) of {self.numel()} elements{grad})"
        )

    # What torch.distributed.checkpoint asks for: the rectangles that this rank has. Each is a view of the local range.

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
        return self.local[box.start - self._slot.offset : box.stop - self._slot.offset].view(box.sizes)

    def _boxes(self) -> list[Box]:
        if not self.numel():  # DCP wants to know it all the same
            return [Box((0,) * self.dim(), tuple(self.shape), 0)]
        return boxes(self.shape, self._slot.offset, self._slot.offset + self._slot.local_numel)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                # a copy is no longer the engine's: it is a value of its own, cut alike, so that a copied module (an
                # average of weights, say) costs each rank its share only
                copy: Tensor = ShardedTensor(self._slot, self.local.clone(), self.dtype)
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            else:
                copy.requires_grad_(self.requires_grad)
            memo[id(self)] = copy
        return memo[id(self)]

    @property
    def data(self) -> Tensor:
        return self.alias()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype != self.dtype:
            raise TypeError(
                f"{self._slot.name}: a sharded parameter keeps its dtype, {self.dtype}; it cannot be {value.dtype}. "
                "Convert the module before the strategy sets it up, or choose Trainer(precision=...)."
            )
        if value.shape != self.shape:
            raise ValueError(
                f"{self._slot.name}: .data of shape {tuple(self.shape)} cannot be replaced by a tensor of shape "
                f"{tuple(value.shape)} while the module is sharded; change shapes before the strategy sets it up."
            )
        with torch.no_grad():
            self.copy_(value)


class _View(Handle):
    """A view of a sharded tensor, recorded: what it shows, and what is written to it, is the tensor's own.

    Args:
        base: what was viewed, a view itself or not.
        steps: the view operators to replay on the whole value.
    """

    _base_tensor: ShardedTensor
    _steps: list[tuple[Any, Any, Any]]

    @staticmethod
    def __new__(cls, base: Any, steps: list[tuple[Any, Any, Any]]) -> _View:
        if isinstance(base, _View):
            base, steps = base._base_tensor, base._steps + steps
        shape = torch.empty(base.shape, dtype=base.dtype, device="meta")
        meta = _replay(shape, steps)
        strides = meta.stride()
        self = made(cls, meta.shape, strides=strides, storage_offset=0, dtype=meta.dtype, device=base.device)
        self._base_tensor, self._steps = base, steps
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def whole(self) -> Tensor:
        base = self._base_tensor
        return _replay(base.whole() if isinstance(base, Handle) else base.detach(), self._steps)

    def alias(self) -> Tensor:
        return _View(self, [])

    def whole_at_hand(self, dtype: torch.dtype | None = None) -> Tensor | None:
        base = self._base_tensor
        if not isinstance(base, Handle):
            return None
        if self.dtype != base.dtype:
            return None  # another reading of the same bits, which a cast would change
        at_hand = base.whole_at_hand(dtype)
        return None if at_hand is None else _replay(at_hand, self._steps)

    def write_whole(self, value: Tensor) -> None:
        base = self._base_tensor
        if not isinstance(base, Handle):  # the engine has ended since
            _replay(base.detach(), self._steps).copy_(value)
            return
        whole = base.whole().clone()
        _replay(whole, self._steps).copy_(value)
        base.write_whole(whole)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"view of {self._base_tensor!r}, shape={tuple(self.shape)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.whole().detach().clone()


def made(cls: Any, shape: torch.Size, **options: Any) -> Any:
    """A handle: a view or alias of an ordinary tensor is ordinary, under ``inference_mode`` too."""
    if not torch.is_inference_mode_enabled():
        return torch.Tensor._make_wrapper_subclass(cls, shape, **options)
    with torch.inference_mode(False):
        return torch.Tensor._make_wrapper_subclass(cls, shape, **options)


def _replay(value: Tensor, steps: list[tuple[Any, Any, Any]]) -> Tensor:
    for func, args, kwargs in steps:
        value = func(value, *args, **kwargs)
    return value


def _is_view(func: Any) -> bool:
    """Whether the result is a view, or a list of views, of the first argument."""
    schema = func._schema
    aliases = schema.arguments[0].alias_info if schema.arguments else None
    return aliases is not None and not aliases.is_write and len(schema.returns) == 1


def _views(func: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(args[0], Handle):
        return NotImplemented
    if str(func._schema.returns[0].type) == "Tensor":
        return _View(args[0], [(func, args[1:], kwargs)])
    count = len(func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs))

    def item(position: int) -> Callable[..., Tensor]:
        return lambda value, *rest, **options: func(value, *rest, **options)[position]

    return [_View(args[0], [(item(position), args[1:], kwargs)]) for position in range(count)]


def local_range_of(value: Tensor, slot: Slot) -> Tensor:
    """This rank's range, 1-D, of a tensor of the slot's shape, or of one that expands to it.

    One that is cut as another slot is gathered for it.
    """
    if isinstance(value, ShardedTensor) and value.slot is slot:
        return value.local
    value = value if value.shape == slot.shape else value.expand(slot.shape)
    return flat_range(value, slot.offset, slot.offset + slot.local_numel)


def flat_range(value: Tensor, start: int, stop: int) -> Tensor:
    """The elements ``[start, stop)`` of a tensor as if it were flattened, 1-D; of a stored one no more is read.

    To be read only, and at once.
    """
    return value.shown(start, stop) if isinstance(value, Handle) else value.reshape(-1)[start:stop]


@cache
def _targets(func: Any) -> list[int | str]:
    """Positions and names of the arguments that an operator writes to."""
    found: list[int | str] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(argument.name if argument.kwarg_only else position)
    return found


class _Kind(NamedTuple):
    """What is done about an operator.

    Attributes:
        act: what to try before whole values; None for nothing.
        only_reads: whether it gives the same from whole values that are at hand, and writes to nothing.
    """

    act: Callable[[Any, Any, Any], Any] | None
    only_reads: bool


@cache
def _kind_of(func: Any) -> _Kind:
    if func in _HANDLERS:
        return _Kind(_HANDLERS[func], False)
    if func.namespace == "c10d":
        return _Kind(_communicate, False)
    if torch.Tag.pointwise in func.tags or func in _LOCAL:
        return _Kind(_act_locally, not _targets(func))
    if func._schema.name.startswith("aten::_foreach_"):
        return _Kind(_act_on_lists, False)
    if _is_view(func):
        return _Kind(_views, False)
    return _Kind(None, not _targets(func))


def _at_hand(args: Any) -> list[Any] | None:
    """The arguments of an operator with whole values in the place of sharded ones; None if not all are at hand."""
    found = []
    for arg in args:
        if isinstance(arg, Handle):
            whole = arg.whole_at_hand()
            if whole is None:
                return None
            found.append(whole)
        elif isinstance(arg, (list, tuple)):
            return None  # which may have some in it
        else:
            found.append(arg)
    return found


def _act_on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    written: list[tuple[Handle, Tensor]] = []
    targets = _targets(func)

    def to_whole(target: bool) -> Callable[[Any], Any]:
        def convert(value: Any) -> Any:
            if not isinstance(value, Handle):
                return value
            whole = value.whole()
            if target:
                whole = whole.clone()  # so that a failing operator leaves the original as it was
                written.append((value, whole))
            return whole

        def convert_all(value: Any) -> Any:
            return tree_map(convert, value) if isinstance(value, (list, tuple, dict)) else convert(value)

        return convert_all

    new_args = [to_whole(position in targets)(arg) for position, arg in enumerate(args)]
    new_kwargs = {name: to_whole(name in targets)(arg) for name, arg in kwargs.items()}
    out = func(*new_args, **new_kwargs)
    for handle, whole in written:
        handle.write_whole(whole)
    if len(written) == 1 and out is written[0][1]:
        return written[0][0]
    originals = {id(whole): handle for handle, whole in written}
    return tree_map(lambda value: originals.get(id(value), value), out)


def _communicate(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective of ``torch.distributed``, on whole values; its schema does not say which of them it writes to."""
    given: list[tuple[Handle, Tensor]] = []

    def to_whole(value: Any) -> Any:
        if isinstance(value, Handle):
            given.append((value, value.whole().clone()))
            return given[-1][1]
        return value

    out = func(*tree_map(to_whole, args), **tree_map(to_whole, kwargs))
    for value in out if isinstance(out, (list, tuple)) else [out]:
        if isinstance(value, torch.ScriptObject):
            dist.Work.unbox(value).wait()
    for handle, whole in given:
        handle.write_whole(whole)
    originals = {id(whole): handle for handle, whole in given}
    return tree_map(lambda value: originals.get(id(value), value), out)


def _act_locally(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a pointwise operator on local ranges, or say NotImplemented where that would not give the whole's answer."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedTensor)]
    in_place = bool(_targets(func))
    if not sharded or any(isinstance(t, _View) for t in tensors):
        return NotImplemented
    if any(tensor._slot is not sharded[0]._slot for tensor in sharded):
        return NotImplemented
    slot = sharded[0]._slot
    if in_place and (args == () or args[0] is not sharded[0] or "out" in kwargs):
        return NotImplemented
    plain = [tensor for tensor in tensors if not isinstance(tensor, ShardedTensor)]
    # A plain tensor may differ by rank (a loss, an incoming gradient), and so does the result then: no longer one value
    # of which each rank may keep a part. A write into the parts is meant alike on all ranks, as under DDP.
    if plain and not in_place:
        return NotImplemented
    # Cheaper, and equal to DDP's in every bit; but a write goes to the masters, where these have more digits.
    if all(tensor.whole_at_hand() is not None for tensor in sharded) and not (
        in_place and sharded[0].local.dtype != sharded[0].dtype
    ):
        return NotImplemented
    if slot.shape != torch.broadcast_shapes(slot.shape, *(tensor.shape for tensor in plain)):
        return NotImplemented

    def to_local(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            # in place, a wider master is written to with its own precision
            return value.local if in_place and value is args[0] else value.local.to(value.dtype)
        if isinstance(value, Tensor):
            return _beside(local_range_of(value, slot) if value.dim() > 0 else value, sharded[0].local)
        return value

    local_args, local_kwargs = tree_unflatten([to_local(leaf) for leaf in leaves], spec)
    if func is aten._to_copy.default and set(local_kwargs) - {"dtype"}:
        target = local_kwargs.get("device")
        if target is not None and torch.device(target) != slot.device:
            return NotImplemented
        local_kwargs = {name: value for name, value in local_kwargs.items() if name in ("dtype", "non_blocking")}
    local_kwargs.pop("memory_format", None)
    out = func(*local_args, **local_kwargs)
    if in_place:
        sharded[0].written(local_args[0])
        return args[0]
    return ShardedTensor(slot, out) if isinstance(out, Tensor) else NotImplemented


def _beside(value: Tensor, local: Tensor) -> Tensor:
    """What is kept in the host's memory is computed with there."""
    return value if value.device == local.device else value.to(local.device)


def _act_on_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """The ``_foreach_*`` operators: on the local ranges of what is sharded in the first list, apart from the rest."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and any(isinstance(t, Tensor) for t in arg)]
    first = args[0]
    in_place = bool(_targets(func))
    is_norm = func is aten._foreach_norm.Scalar
    kinds = [_kind_in_list(tensor, is_norm) for tensor in first]
    if len(set(kinds)) > 1:
        return _act_apart(func, args, kwargs, kinds)
    alike = kinds[:1] != [None] and all(
        isinstance(t, ShardedTensor) and t._slot is other._slot for tensors in lists for t, other in zip(tensors, first)
    )
    plain = any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values()))
    if alike and is_norm:
        return _foreach_norm(args, kwargs)
    if not alike or (plain and not in_place) or func._schema.name in _REDUCTIONS_OF_LISTS:
        return NotImplemented

    locals_of_first, *others = (_local_arguments(arg, first[0].local) for arg in args)
    out = func(locals_of_first, *others, **kwargs)
    if in_place:
        for tensor, local in zip(first, locals_of_first):
            tensor.written(local)
        return None
    return [ShardedTensor(tensor._slot, local) for tensor, local in zip(first, out)]


def _local_arguments(value: Any, local: Tensor) -> Any:
    """An argument of a ``_foreach_*`` operator with local ranges for sharded tensors, in its lists too.

    Not a closure: one that calls itself is a cycle, which would keep the gradients until a garbage collection.
    """
    if isinstance(value, ShardedTensor):
        return value.local
    if isinstance(value, Tensor):
        return _beside(value, local)
    return [_local_arguments(item, local) for item in value] if isinstance(value, (list, tuple)) else value


def _kind_in_list(tensor: Any, is_norm: bool) -> Any:
    """What those tensors of a list share that are acted on together: the ranks, and where parts are; None if whole."""
    if not isinstance(tensor, ShardedTensor) or tensor.whole_at_hand() is not None:
        return None
    return tensor._slot.group, None if is_norm else tensor.local.device  # some may be kept on the host


def _act_apart(func: Any, args: Any, kwargs: Any, kinds: list[Any]) -> Any:
    """On the tensors of each kind in a list."""
    out: list[Any] = [None] * len(kinds)
    for chosen in ([i for i, kind in enumerate(kinds) if kind == wanted] for wanted in dict.fromkeys(kinds)):
        parts = [
            [arg[i] for i in chosen] if isinstance(arg, (list, tuple)) and len(arg) == len(out) else arg for arg in args
        ]
        for i, result in zip(chosen, func(*parts, **kwargs) or ()):
            out[i] = result
    return None if _targets(func) else out


def _foreach_norm(args: Any, kwargs: Any) -> list[Tensor]:
    """Norms of many sharded tensors with one reduction: what clipping by norm asks for."""
    tensors, order = args[0], float(args[1]) if len(args) > 1 else float(kwargs.get("ord", 2))
    slot: Slot = tensors[0]._slot
    parts = [_partial_norm(tensor.local, order).to(slot.device) for tensor in tensors]
    names = [tensor._slot.name for tensor in tensors]
    # Ranks meet for the same: of the same parameters, in one order.
    what = (
        f"the norms of {len(names)} tensors, '{names[0]}' to '{names[-1]}' ({zlib.crc32(' '.join(names).encode()):x})"
    )
    return list(_finish_norm(torch.stack(parts), order, slot, what).to(tensors[0].dtype.to_real()).unbind())


def _partial_norm(local: Tensor, order: float) -> Tensor:
    """What of a vector norm is summed (or, for the infinite orders, compared) over ranks."""
    if local.dtype in (torch.float16, torch.bfloat16):
        local = local.float()  # powers of a norm leave the range of fp16
    if order in (float("inf"), -float("inf")):
        neutral = 0.0 if order > 0 else float("inf")
        if local.numel() == 0:
            return local.new_full((), neutral, dtype=local.dtype.to_real())
        return torch.linalg.vector_norm(local, order)
    if order == 0:
        return (local != 0).sum().to(local.dtype.to_real())
    return torch.linalg.vector_norm(local, order) ** order


def _finish_norm(parts: Tensor, order: float, slot: Slot, what: str | None = None) -> Tensor:
    if order in (float("inf"), -float("inf")):
        return _extreme_over_ranks(parts, slot, largest=order > 0, what=what)
    total = slot.reduce(parts, dist.ReduceOp.SUM, what)
    return total if order == 0 else total ** (1.0 / order)


def _extreme_over_ranks(part: Tensor, slot: Slot, *, largest: bool, what: str | None = None) -> Tensor:
    """As torch's max and min, NaN where any part has one: backends keep or lose it by the order of ranks."""
    if not part.is_floating_point():
        return slot.reduce(part, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN, what)
    signed, nan = part if largest else -part, part.isnan()
    flagged = torch.stack([signed.masked_fill(nan, -float("inf")), nan.to(part.dtype)])
    found, nan = slot.reduce(flagged, dist.ReduceOp.MAX, what).unbind()
    return (found if largest else -found).masked_fill(nan > 0, float("nan"))


def _own(tensor: Any) -> ShardedTensor | None:
    """The argument of a reduction if it is to be reduced part by part."""
    return tensor if isinstance(tensor, ShardedTensor) and tensor.whole_at_hand() is None else None


def _vector_norm(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = _own(args[0])
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if tensor is None or len(args) > 2 or kwargs.get("dim") or kwargs.get("keepdim") or kwargs.get("dtype"):
        return NotImplemented
    return _finish_norm(_partial_norm(tensor.local, float(order)), float(order), tensor._slot).to(
        tensor.dtype.to_real()
    )


def _sum(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = _own(args[0])
    if tensor is None or len(args) > 1 or kwargs:
        return NotImplemented
    total = tensor._slot.reduce(tensor.local.sum(), dist.ReduceOp.SUM)
    total = total / tensor.numel() if func is aten.mean.default else total
    return total.to(tensor.dtype) if tensor.is_floating_point() else total


def _extreme(func: Any, args: Any, kwargs: Any) -> Any:
    """max, min, all, any: of the parts, then over ranks."""
    tensor = _own(args[0])
    if tensor is None or len(args) > 1 or kwargs or tensor.numel() == 0:
        return NotImplemented
    largest = func in (aten.max.default, aten.any.default)
    boolean = func in (aten.all.default, aten.any.default) or tensor.dtype is torch.bool
    local = tensor.local.bool().to(torch.uint8) if boolean else tensor.local
    if local.numel():
        part = local.max() if largest else local.min()
    elif boolean:
        part = local.new_full((), 0 if largest else 1)
    else:
        limits = torch.iinfo(local.dtype) if not local.is_floating_point() else None
        least, most = (limits.min, limits.max) if limits is not None else (-float("inf"), float("inf"))
        part = local.new_full((), least if largest else most)
    found = _extreme_over_ranks(part, tensor._slot, largest=largest)
    return found.bool() if boolean else found.to(tensor.dtype)


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].alias()


def _accumulate(func: Any, args: Any, kwargs: Any) -> Any:
    """``add_``: from inside a backward pass, onto a parameter's ``.grad``, it is autograd accumulating a local one."""
    target = args[0]
    if isinstance(target, ShardedTensor) and torch._C._current_graph_task_id() != -1:
        if target._slot.accumulate(target, args[1]):
            return target
    return _act_locally(func, args, kwargs)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """``copy_``: of a parameter to itself, as after ``dcp.load`` into its local range, it is that range that counts."""
    own = [tensor._slot if isinstance(tensor, ShardedTensor) and tensor.is_parameter else None for tensor in args[:2]]
    if own[0] is not None and own[0] is own[1]:
        own[0].written_locally(own[0].local_parameter())
        return args[0]
    target, source = args[:2]
    if (
        own[0] is not None
        and not isinstance(source, Handle)
        and source.shape == target.shape
        and source.dtype == target.dtype
        and own[0].may_be_written_whole(source)
    ):
        own[0].write_parameter(source)
        return target
    return _act_locally(func, args, kwargs)


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    """``to(dtype)``: what was gathered in that dtype is not gathered again in its own to be cast, as by autocast."""
    dtype = kwargs.get("dtype")
    value = args[0].whole_at_hand(dtype) if dtype is not None else None
    return _act_locally(func, args, kwargs) if value is None else func(value, *args[1:], **kwargs)


def _unscale(func: Any, args: Any, kwargs: Any) -> Any:
    """What a ``GradScaler`` does before a step: on local ranges; what is not finite on one rank is so on all."""
    gradients, found_inf, inverse_scale = args
    if any(isinstance(gradient, _View) for gradient in gradients):
        return NotImplemented
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        part = gradient.local if isinstance(gradient, ShardedTensor) else gradient
        alike.setdefault((part.device, part.dtype), []).append(part)
    for parts in alike.values():
        found = _beside(found_inf, parts[0])  # gradients may be kept on the host
        func(parts, found, _beside(inverse_scale, parts[0]))
        if found is not found_inf:
            found_inf.copy_(found)  # it has begun with what was found before
    sharded = next(gradient for gradient in gradients if isinstance(gradient, ShardedTensor))
    sharded._slot.reduce(found_inf, dist.ReduceOp.MAX)
    return None


_HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.add_.Tensor: _accumulate,
    aten.copy_.default: _copy,
    aten._to_copy.default: _cast,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.sum.default: _sum,
    aten.mean.default: _sum,
    aten.max.default: _extreme,
    aten.min.default: _extreme,
    aten.all.default: _extreme,
    aten.any.default: _extreme,
}

# Whoever asks for many at once if torch's own kernels can take them, as clipping does, may ask for these: that is one
# reduction over ranks for all, not one each.
_foreach_utils._foreach_supported_types.append(ShardedTensor)

_REDUCTIONS_OF_LISTS = {"aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum"}

# Act on each element alone, though torch does not tag them so.
_LOCAL = {
    aten.clone.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
}
