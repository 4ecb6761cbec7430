"""Operator dispatch of sharded and lazy tensors.

- Pointwise operators, with scalars or with tensors of the same sharding, run on the local range.
- Norms, as needed for clipping, run on the local range, followed by one reduction over ranks.
- Views are recorded, and replayed when they are used.
- All other operators run on gathered full values; in-place operators then write the local range back.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.comm.process_group import ReduceOp, wait_for
from lightning_zero.engine.compat import (
    foreach_norm,
    let_foreach_take,
    tree_flatten,
    tree_map,
    tree_unflatten,
    untraced,
)
from lightning_zero.engine.config import LOW_PRECISION
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor, local_range_of
from lightning_zero.engine.tensor.wrapper import RecordedView, WrapperTensor, replay

aten = torch.ops.aten


def _is_view(func: Any) -> bool:
    """Whether an operator returns a view, or a list of views, of its first argument."""
    schema = func._schema
    aliases = schema.arguments[0].alias_info if schema.arguments else None
    return aliases is not None and not aliases.is_write and len(schema.returns) == 1


def _views(func: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(args[0], WrapperTensor):
        return NotImplemented
    if func is aten.as_strided.default:
        func = _as_strided
    if func is _as_strided or str(func._schema.returns[0].type) == "Tensor":
        return RecordedView(args[0], [(func, args[1:], kwargs)])
    if func is aten.unbind.int:  # one view for each row, so a row's view must not unbind all rows again
        dim = args[1] if len(args) > 1 else 0
        return [RecordedView(args[0], [(aten.select.int, (dim, row), {})]) for row in range(args[0].shape[dim])]
    count = len(func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs))

    def item(position: int) -> Callable[..., Tensor]:
        return lambda value, *rest, **options: func(value, *rest, **options)[position]

    return [RecordedView(args[0], [(item(position), args[1:], kwargs)]) for position in range(count)]


def _as_strided(value: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """``as_strided`` with an offset from the start of ``value``, which may lie in the memory of a bucket."""
    return torch.as_strided(value, size, stride, value.storage_offset() + (storage_offset or 0))


def _conj(func: Any, args: Any, kwargs: Any) -> Any:
    """Conjugate or negate at once, since kernels that are called from here take lazy results for the original."""
    return _act(aten.conj_physical.default if func is aten._conj.default else aten.neg.default, args, kwargs)


def _change_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """Refuse to change a shape in place; return the tensor itself if its shape stays."""
    shape, stride = args[0].shape, args[0].stride()
    changed = func(torch.empty_strided(shape, stride, device="meta"), *args[1:], **kwargs)
    if (changed.shape, changed.stride()) == (shape, stride):
        return args[0]
    raise RuntimeError(
        f"{func._schema.name.removeprefix('aten::')}() would change the shape of a sharded tensor in place: use the "
        "operator without the underscore, which returns a view."
    )


@cache
def _targets(func: Any) -> list[int | str]:
    """Positions and names of the arguments that an operator writes to."""
    found: list[int | str] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(argument.name if argument.kwarg_only else position)
    return found


_Handler = Callable[[Any, Any, Any], Any]


@cache
def _handler_of(func: Any) -> _Handler | None:
    """The operator's handler; None to run the operator on full values."""
    if func in _HANDLERS:
        return _HANDLERS[func]
    if func.namespace == "c10d":
        return None
    if torch.Tag.inplace_view in func.tags and func is not aten.detach_.default:
        return _change_shape
    if torch.Tag.pointwise in func.tags or func in _LOCAL:
        return _act_locally
    if func._schema.name.startswith("aten::_foreach_"):
        return _act_on_lists
    return _views if _is_view(func) else None


@cache
def _only_reads(func: Any) -> bool:
    """Whether an operator without a handler of its own writes nothing, so that it can run on full values at hand."""
    return _handler_of(func) in (None, _act_locally) and not _targets(func) and func.namespace != "c10d"


def _at_hand(args: Any) -> list[Any] | None:
    """An operator's arguments, with full values in place of sharded tensors; None if a value needs communication."""
    found = []
    for arg in args:
        value = arg.whole_at_hand() if isinstance(arg, WrapperTensor) else arg
        if isinstance(arg, (list, tuple)) or (value is None and arg is not None):
            return None  # a list may contain sharded tensors
        found.append(value)
    return found


def _act_on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on full values, and write back the values that it may have changed."""
    written: list[tuple[WrapperTensor, Tensor]] = []
    targets = _targets(func)
    is_collective = func.namespace == "c10d"  # the schema of a collective does not mark the arguments that it writes to

    def to_whole(value: Any, is_written: bool) -> Any:
        if not isinstance(value, WrapperTensor):
            return value
        whole = value.whole()
        if is_written:
            whole = whole.clone()  # so that an operator that fails leaves the original unchanged
            written.append((value, whole))
        return whole

    def convert(key: int | str, value: Any) -> Any:
        return tree_map(partial(to_whole, is_written=is_collective or key in targets), value)

    new_args = [convert(position, arg) for position, arg in enumerate(args)]
    out = func(*new_args, **{name: convert(name, arg) for name, arg in kwargs.items()})
    if is_collective:
        for work in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(work, torch.ScriptObject):
                wait_for(work)
    for handle, whole in written:
        handle.write_whole(whole)
    originals = {id(whole): handle for handle, whole in written}
    return tree_map(lambda value: originals.get(id(value), value), out)


def _act_locally(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a pointwise operator on local ranges; return NotImplemented if full values have to be used."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedTensor)]
    if not sharded or any(isinstance(t, RecordedView) for t in tensors):
        return NotImplemented
    slot, targets = sharded[0].slot, _targets(func)
    in_place = targets == [0] and args[0] is sharded[0]
    if bool(targets) is not in_place or any(tensor.slot is not slot for tensor in sharded):
        return NotImplemented
    # A plain tensor, such as a loss or an incoming gradient, may differ between ranks. The result then differs, too,
    # and cannot be sharded. In-place operators are assumed to write equal values on all ranks, as in DDP, except to
    # copies, which each rank may train with its own data.
    plain = [tensor for tensor in tensors if not isinstance(tensor, ShardedTensor)]
    has_own = any(tensor.own_values is not None for tensor in sharded)
    if (plain or has_own) and not in_place:
        return NotImplemented
    has_values = func is not aten.copy_.default and any(tensor.dim() or not slot.shape for tensor in plain)
    if in_place and sharded[0].is_copy and (has_own or has_values):
        return NotImplemented
    if slot.shape != torch.broadcast_shapes(slot.shape, *(tensor.shape for tensor in plain)):
        return NotImplemented
    # Full values at hand are cheaper and give the same bits as under DDP, but writes must reach wider master weights.
    is_wider = in_place and sharded[0].local.dtype != sharded[0].dtype
    if not is_wider and all(tensor.whole_at_hand() is not None for tensor in sharded):
        return NotImplemented

    local_leaves = [_local_value(leaf, sharded[0], in_place) for leaf in leaves]
    local_args, local_kwargs = tree_unflatten(local_leaves, spec)
    device = local_kwargs.pop("device", None)
    if device is not None and torch.device(device) != slot.device:
        return NotImplemented
    local_kwargs = {name: value for name, value in local_kwargs.items() if name not in _OF_MEMORY}
    out = func(*local_args, **local_kwargs)
    if in_place:
        sharded[0].written(local_args[0])
        return args[0]
    return ShardedTensor(slot, out) if isinstance(out, Tensor) else NotImplemented


def _local_value(value: Any, of: ShardedTensor, in_place: bool) -> Any:
    """An argument of an operator on the local range of ``of``, or with ``in_place`` of one that writes to ``of``.

    A wider master weight is written at full precision. Arguments in the dtype of ``of`` are then converted, since some
    operators, such as ``lerp_``, require the same dtype of all arguments.
    """
    if not isinstance(value, Tensor):
        return value
    if in_place and value is of:
        return of.local
    if isinstance(value, ShardedTensor):
        local = value.local.to(value.dtype)
    else:
        local = _beside(local_range_of(value, of.slot) if value.dim() > 0 else value, of.local)
    return local.to(of.local.dtype) if in_place and local.dtype == of.dtype else local


def _beside(value: Tensor, local: Tensor) -> Tensor:
    """Move a value to the device of the local range: operators on offloaded ranges run on the host."""
    if value.device == local.device:
        return value
    return (value.whole() if isinstance(value, WrapperTensor) else value).to(local.device)


def _act_on_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``_foreach_*`` operators on local ranges, with one call for each combination of rank group and device."""
    if not isinstance(args[0], (list, tuple)):  # a number to the power of tensors
        return NotImplemented
    first, in_place = list(args[0]), bool(_targets(func))
    members: dict[Any, list[int]] = {}  # positions in ``first`` by (group, device); by None if not sharded
    for position, tensor in enumerate(first):
        sharded = _communicating(tensor)
        # devices differ if some ranges are offloaded to the host
        key = (sharded.slot.group, sharded.local.device) if sharded is not None else None
        members.setdefault(key, []).append(position)
    if len(members) > 1:
        out: list[Any] = [None] * len(first)
        for chosen in members.values():
            parts = [
                [arg[i] for i in chosen] if isinstance(arg, (list, tuple)) and len(arg) == len(first) else arg
                for arg in args
            ]
            for i, result in zip(chosen, func(*parts, **kwargs) or ()):
                out[i] = result
        return None if in_place else out

    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and any(isinstance(t, Tensor) for t in arg)]
    if None in members or not all(
        isinstance(t, ShardedTensor) and t.slot is other.slot for tensors in lists for t, other in zip(tensors, first)
    ):
        return NotImplemented
    if func is aten._foreach_norm.Scalar:
        return _norms_of_list(first, float(args[1] if len(args) > 1 else kwargs.get("ord", 2)))
    has_own = any(t.own_values is not None for tensors in lists for t in tensors)
    if has_own and not (in_place and first[0].is_parameter):
        return NotImplemented
    is_plain = any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values()))
    if is_plain and not in_place or func._schema.name in _REDUCTIONS_OF_LISTS:
        return NotImplemented
    local_ranges, *others = (
        [_local_value(value, of, in_place) for value, of in zip(arg, first)]
        if isinstance(arg, (list, tuple))
        else _local_value(arg, first[0], in_place)
        for arg in args
    )
    found = func(local_ranges, *others, **kwargs)
    if not in_place:
        return [ShardedTensor(tensor.slot, local) for tensor, local in zip(first, found)]
    for tensor, local in zip(first, local_ranges):
        tensor.written(local)
    return None


def _norms_of_list(tensors: list[ShardedTensor], order: float) -> list[Tensor]:
    """Compute norms of many sharded tensors with one reduction, as needed for clipping by norm."""
    names = [tensor.slot.name for tensor in tensors]
    # Identifies the operation in the rendezvous: ranks must compute norms of the same parameters in the same order.
    what = (
        f"the norms of {len(names)} tensor(s) from '{names[0]}' to '{names[-1]}' "
        f"(checksum of all names: {zlib.crc32(' '.join(names).encode()):x})"
    )
    return list(_norms(tensors, order, what).unbind())


def _norms(tensors: list[ShardedTensor], order: float, what: str | None = None) -> Tensor:
    """Vector norms: those of the norms of each tensor's ranges, which are gathered by summing rows, one a rank.

    Of order 0, the number of elements that are not zero, the ranges' norms are added up.
    """
    slot = tensors[0].slot
    everyone = slot.bucket.communicator.everyone
    neutral: dict[torch.dtype, Tensor] = {}  # one kernel for all of a dtype, since a rank owns a part of few parameters
    norms = foreach_norm([_counted_here(tensor, order, neutral) for tensor in tensors], order)
    parts = torch.stack(norms).to(slot.device)  # offloaded gradients are in host memory, see ``_act_on_lists``
    rows = parts.new_zeros(everyone.size, len(parts))
    rows[everyone.rank] = parts
    rows = slot.reduce(rows, ReduceOp.SUM, what)
    return torch.linalg.vector_norm(rows, order or 1, dim=0).to(tensors[0].dtype.to_real())


def _counted_here(tensor: ShardedTensor, order: float, neutral: dict[torch.dtype, Tensor]) -> Tensor:
    """This rank's range; a ``neutral`` value, which changes no norm, if it is empty or another rank counts it."""
    local = tensor.local
    # powers in a norm would overflow in fp16
    dtype = torch.float32 if local.dtype in LOW_PRECISION else local.dtype
    if local.numel() > 0 and tensor.slot.share.is_counted_here:
        return local.to(dtype)
    if dtype not in neutral:
        neutral[dtype] = local.new_full((1,), float("inf") if order < 0 else 0.0, dtype=dtype)
    return neutral[dtype]


def _communicating(tensor: Any) -> ShardedTensor | None:
    """The tensor if it is sharded and its full value would need communication; otherwise None."""
    return tensor if isinstance(tensor, ShardedTensor) and tensor.whole_at_hand() is None else None


def _vector_norm(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = _communicating(args[0])
    if tensor is None or len(args) > 2 or kwargs.get("dim") or kwargs.get("keepdim") or kwargs.get("dtype"):
        return NotImplemented
    return _norms([tensor], float(args[1] if len(args) > 1 else kwargs.get("ord", 2)))[0]


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``copy_``. A parameter copied to itself, as after ``dcp.load``, is updated from its local range."""
    target, source = args[:2]
    if isinstance(target, ShardedTensor) and isinstance(source, ShardedTensor) and target.is_parameter:
        if source.is_parameter and source.slot is target.slot:
            target.written(target.local)
            return target
    return _act_locally(func, args, kwargs)


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``to(dtype)``. Values already gathered in that dtype, as under autocast, are used without another gather."""
    dtype = kwargs.get("dtype")
    if isinstance(args[0], LazyTensor) and not kwargs.keys() - {"dtype", "non_blocking", "memory_format"}:
        return args[0].cast(dtype)
    value = args[0].whole_at_hand(dtype) if dtype is not None else None
    return _act_locally(func, args, kwargs) if value is None else func(value, *args[1:], **kwargs)


def _unscale(func: Any, args: Any, kwargs: Any) -> Any:
    """Unscale gradients for ``GradScaler``, on local ranges; then reduce ``found_inf``, so that ranks agree."""
    gradients, found_inf, inverse_scale = args
    sharded = [gradient for gradient in gradients if isinstance(gradient, ShardedTensor)]
    if any(isinstance(gradient, RecordedView) for gradient in gradients):
        return NotImplemented
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        part = gradient.local if isinstance(gradient, ShardedTensor) else gradient
        alike.setdefault((part.device, part.dtype), []).append(part)
    for parts in alike.values():
        found = _beside(found_inf, parts[0])  # gradients may be offloaded to the host
        func(parts, found, _beside(inverse_scale, parts[0]))
        if found is not found_inf:
            found_inf.copy_(found)  # keeps an earlier inf, since ``found`` was copied from ``found_inf``
    sharded[0].slot.reduce(found_inf, ReduceOp.MAX)
    return None


def _of_the_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that needs a tensor's shape and dtype, but not its values."""
    tensor = args[0]
    if isinstance(tensor, ShardedTensor) and func in _LOCAL:
        return _act_locally(func, args, kwargs)
    lazy, device = _lazy_base(tensor), tensor.device
    if lazy is not None and lazy.records_writes:  # the result has values, from which the tensor may be initialised
        device = torch.get_default_device()
    return func(torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape), *args[1:], **kwargs)


def _as_if_alone(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator about the sizes of storages, for forward-mode AD: gathered values may lie in a larger one."""

    def on_meta(tensor: Any) -> Any:
        if isinstance(tensor, RecordedView):
            return replay(on_meta(tensor._viewed), tensor._view_steps)
        if not isinstance(tensor, WrapperTensor):
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return func(*map(on_meta, args), **kwargs)


_NEW = "empty_like full_like ones_like zeros_like rand_like randn_like new_empty new_full new_ones new_zeros"
_HANDLERS: dict[Any, _Handler] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    **dict.fromkeys((aten.detach.default, aten.alias.default), lambda func, args, kwargs: args[0].alias()),
    **dict.fromkeys((aten._conj.default, aten._neg_view.default), _conj),
    aten._has_same_storage_numel.default: _as_if_alone,
    aten._new_zeros_with_same_feature_meta.default: _as_if_alone,
    aten.copy_.default: _copy,
    aten._to_copy.default: _cast,
    aten.linalg_vector_norm.default: _vector_norm,
    **{getattr(aten, name).default: _of_the_shape for name in _NEW.split()},
}
_REDUCTIONS_OF_LISTS = {"aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum"}
_OF_MEMORY = ("layout", "memory_format", "pin_memory")  # arguments that do not apply to a local range

# Operators that run on the local range, although torch does not tag them as pointwise.
_LOCAL = {
    aten.clone.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
}


def _lazy_base(tensor: Any) -> LazyTensor | None:
    """The lazy tensor that holds the values of ``tensor``: ``tensor`` itself, or its base if it is a view; or None."""
    base = tensor._viewed if isinstance(tensor, RecordedView) else tensor
    return base if isinstance(base, LazyTensor) else None


def _write(lazy: LazyTensor, func: Any, args: Any, kwargs: Any) -> Any:
    target, *others = args
    steps = target._view_steps if isinstance(target, RecordedView) else []

    def kept(value: Any) -> Any:
        """A copy, since user code may change the values before the operator is repeated."""
        if not isinstance(value, Tensor):
            return value
        return (value.whole() if isinstance(value, WrapperTensor) else value).detach().clone()

    lazy.apply(steps, func, *tree_map(kept, (others, kwargs)))
    return target


def _act(func: Any, args: Any, kwargs: Any) -> Any:
    # a short way for parameters that a model reads outside of their module, which takes a tenth off its step
    if not kwargs and _only_reads(func) and (at_hand := _at_hand(args)) is not None:
        return func(*at_hand)
    if _targets(func) == [0] and (lazy := _lazy_base(args[0])) is not None and lazy.lazy_values.write is None:
        return _write(lazy, func, args, kwargs)
    handler = _handler_of(func)
    out = handler(func, args, kwargs) if handler is not None else NotImplemented
    return _act_on_whole(func, args, kwargs) if out is NotImplemented else out


WrapperTensor.act = staticmethod(untraced(_act))  # where a graph breaks at an operator, it would be traced
let_foreach_take(ShardedTensor)
