"""Operator dispatch of sharded and lazy tensors.

- Pointwise operators, with scalars or with tensors of the same sharding, run on the local range.
- Sums, norms and similar reductions run on the local range, followed by one reduction over ranks.
- Views are recorded, and replayed when they are used.
- All other operators gather the full value and compute; in-place operators then write the local range back.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.comm.process_group import ReduceOp, wait_for
from lightning_zero.engine.compat import current_graph_task, tree_flatten, tree_map, tree_unflatten
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor, local_range_of
from lightning_zero.engine.tensor.slot import Slot
from lightning_zero.engine.tensor.wrapper import RecordedView, WrapperTensor

aten = torch.ops.aten


def _is_view(func: Any) -> bool:
    """Whether an operator returns a view, or a list of views, of its first argument."""
    schema = func._schema
    aliases = schema.arguments[0].alias_info if schema.arguments else None
    return aliases is not None and not aliases.is_write and len(schema.returns) == 1


def _views(func: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(args[0], WrapperTensor):
        return NotImplemented
    if str(func._schema.returns[0].type) == "Tensor":
        return RecordedView(args[0], [(func, args[1:], kwargs)])
    count = len(func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs))

    def item(position: int) -> Callable[..., Tensor]:
        return lambda value, *rest, **options: func(value, *rest, **options)[position]

    return [RecordedView(args[0], [(item(position), args[1:], kwargs)]) for position in range(count)]


@cache
def _targets(func: Any) -> list[int | str]:
    """Positions and names of the arguments that an operator writes to."""
    found: list[int | str] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(argument.name if argument.kwarg_only else position)
    return found


class _Kind(NamedTuple):
    """How an operator is handled.

    Attributes:
        act: handler to try before the operator runs on full values; None if there is none.
        only_reads: whether full values without communication give the same result, and nothing is written to.
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
    """An operator's arguments with full values for sharded tensors; None if some value needs communication."""
    found = []
    for arg in args:
        if isinstance(arg, WrapperTensor):
            whole = arg.whole_at_hand()
            if whole is None:
                return None
            found.append(whole)
        elif isinstance(arg, (list, tuple)):
            return None  # which may contain sharded tensors
        else:
            found.append(arg)
    return found


def _act_on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    written: list[tuple[WrapperTensor, Tensor]] = []
    targets = _targets(func)

    def to_whole(target: bool) -> Callable[[Any], Any]:
        def convert(value: Any) -> Any:
            if not isinstance(value, WrapperTensor):
                return value
            whole = value.whole()
            if target:
                whole = whole.clone()  # so that an operator that fails leaves the original unchanged
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
    """A collective of ``torch.distributed``, on full values; all are written back, as its schema names no outputs."""
    given: list[tuple[WrapperTensor, Tensor]] = []

    def to_whole(value: Any) -> Any:
        if isinstance(value, WrapperTensor):
            given.append((value, value.whole().clone()))
            return given[-1][1]
        return value

    out = func(*tree_map(to_whole, args), **tree_map(to_whole, kwargs))
    for value in out if isinstance(out, (list, tuple)) else [out]:
        if isinstance(value, torch.ScriptObject):
            wait_for(value)
    for handle, whole in given:
        handle.write_whole(whole)
    originals = {id(whole): handle for handle, whole in given}
    return tree_map(lambda value: originals.get(id(value), value), out)


def _act_locally(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a pointwise operator on local ranges; NotImplemented where full values give another result."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedTensor)]
    in_place = bool(_targets(func))
    if not sharded or any(isinstance(t, RecordedView) for t in tensors):
        return NotImplemented
    if any(tensor._slot is not sharded[0]._slot for tensor in sharded):
        return NotImplemented
    slot = sharded[0]._slot
    if in_place and (args == () or args[0] is not sharded[0] or "out" in kwargs):
        return NotImplemented
    plain = [tensor for tensor in tensors if not isinstance(tensor, ShardedTensor)]
    # A plain tensor may differ between ranks (a loss, an incoming gradient). Then the result does, too, and cannot be
    # one sharded value. A write is assumed to be the same on all ranks, as under DDP.
    if plain and not in_place:
        return NotImplemented
    # Full values without communication are cheaper, and bit-equal to DDP. But a write must reach wider master weights.
    if all(tensor.whole_at_hand() is not None for tensor in sharded) and not (
        in_place and sharded[0].local.dtype != sharded[0].dtype
    ):
        return NotImplemented
    if slot.shape != torch.broadcast_shapes(slot.shape, *(tensor.shape for tensor in plain)):
        return NotImplemented

    def to_local(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            # in place, a wider master weight is written in its own precision
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
    """Move a value to the device of the local range: offloaded ranges are computed with on the host."""
    return value if value.device == local.device else value.to(local.device)


def _act_on_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """``_foreach_*`` operators: on local ranges for sharded tensors of the first list, apart from the others."""
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
    """An argument of a ``_foreach_*`` operator with sharded tensors replaced by local ranges, also in lists.

    Not a closure: a recursive closure is a reference cycle, which would delay the freeing of gradients.
    """
    if isinstance(value, ShardedTensor):
        return value.local
    if isinstance(value, Tensor):
        return _beside(value, local)
    return [_local_arguments(item, local) for item in value] if isinstance(value, (list, tuple)) else value


def _kind_in_list(tensor: Any, is_norm: bool) -> Any:
    """A key of the tensors in a list that can be handled together: group of ranks and device; None for full values."""
    if not isinstance(tensor, ShardedTensor) or tensor.whole_at_hand() is not None:
        return None
    return tensor._slot.group, None if is_norm else tensor.local.device  # some may be offloaded to the host


def _act_apart(func: Any, args: Any, kwargs: Any, kinds: list[Any]) -> Any:
    """Run a ``_foreach_*`` operator separately on the tensors of each kind."""
    out: list[Any] = [None] * len(kinds)
    for chosen in ([i for i, kind in enumerate(kinds) if kind == wanted] for wanted in dict.fromkeys(kinds)):
        parts = [
            [arg[i] for i in chosen] if isinstance(arg, (list, tuple)) and len(arg) == len(out) else arg for arg in args
        ]
        for i, result in zip(chosen, func(*parts, **kwargs) or ()):
            out[i] = result
    return None if _targets(func) else out


def _foreach_norm(args: Any, kwargs: Any) -> list[Tensor]:
    """Norms of many sharded tensors with one reduction, as clipping by norm needs them."""
    tensors, order = args[0], float(args[1]) if len(args) > 1 else float(kwargs.get("ord", 2))
    slot: Slot = tensors[0]._slot
    parts = [_partial_norm(tensor.local, order).to(slot.device) for tensor in tensors]
    names = [tensor._slot.name for tensor in tensors]
    # Identifies the operation in the rendezvous: norms of the same parameters in the same order.
    what = (
        f"the norms of {len(names)} tensors, '{names[0]}' to '{names[-1]}' ({zlib.crc32(' '.join(names).encode()):x})"
    )
    return list(_finish_norm(torch.stack(parts), order, slot, what).to(tensors[0].dtype.to_real()).unbind())


def _partial_norm(local: Tensor, order: float) -> Tensor:
    """This rank's part of a vector norm, to be summed over ranks (compared for infinite orders)."""
    if local.dtype in (torch.float16, torch.bfloat16):
        local = local.float()  # powers in a norm would overflow in fp16
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
    total = slot.reduce(parts, ReduceOp.SUM, what)
    return total if order == 0 else total ** (1.0 / order)


def _extreme_over_ranks(part: Tensor, slot: Slot, *, largest: bool, what: str | None = None) -> Tensor:
    """Maximum or minimum over ranks. NaN if any part has one, as in torch; backends differ in that."""
    if not part.is_floating_point():
        return slot.reduce(part, ReduceOp.MAX if largest else ReduceOp.MIN, what)
    signed, nan = part if largest else -part, part.isnan()
    flagged = torch.stack([signed.masked_fill(nan, -float("inf")), nan.to(part.dtype)])
    found, nan = slot.reduce(flagged, ReduceOp.MAX, what).unbind()
    return (found if largest else -found).masked_fill(nan > 0, float("nan"))


def _own(tensor: Any) -> ShardedTensor | None:
    """The argument of a reduction if it is sharded and its full value would need communication; otherwise None."""
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
    total = tensor._slot.reduce(tensor.local.sum(), ReduceOp.SUM)
    total = total / tensor.numel() if func is aten.mean.default else total
    return total.to(tensor.dtype) if tensor.is_floating_point() else total


def _extreme(func: Any, args: Any, kwargs: Any) -> Any:
    """max, min, all, any: on local ranges, then over ranks."""
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
    """``add_``; on a parameter's ``.grad`` within a backward it is autograd accumulating a local gradient."""
    target = args[0]
    if isinstance(target, ShardedTensor) and current_graph_task() != -1:
        if target._slot.accumulate(target, args[1]):
            return target
    return _act_locally(func, args, kwargs)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """``copy_``; a parameter copied to itself (as after ``dcp.load``) is updated from its local range."""
    own = [tensor._slot if isinstance(tensor, ShardedTensor) and tensor.is_parameter else None for tensor in args[:2]]
    if own[0] is not None and own[0] is own[1]:
        own[0].written_locally(own[0].local_parameter())
        return args[0]
    target, source = args[:2]
    if (
        own[0] is not None
        and not isinstance(source, WrapperTensor)
        and source.shape == target.shape
        and source.dtype == target.dtype
        and own[0].may_be_written_whole(source)
    ):
        own[0].write_parameter(source)
        return target
    return _act_locally(func, args, kwargs)


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    """``to(dtype)``: values gathered in that dtype, as under autocast, are used without another gather."""
    dtype = kwargs.get("dtype")
    value = args[0].whole_at_hand(dtype) if dtype is not None else None
    return _act_locally(func, args, kwargs) if value is None else func(value, *args[1:], **kwargs)


def _unscale(func: Any, args: Any, kwargs: Any) -> Any:
    """Unscaling by ``GradScaler``: on local ranges; then ``found_inf`` is reduced, so that ranks agree."""
    gradients, found_inf, inverse_scale = args
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
            found_inf.copy_(found)  # ``found`` started with the earlier value
    sharded = next(gradient for gradient in gradients if isinstance(gradient, ShardedTensor))
    sharded._slot.reduce(found_inf, ReduceOp.MAX)
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


_REDUCTIONS_OF_LISTS = {"aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum"}

# Pointwise operators that torch does not tag as such.
_LOCAL = {
    aten.clone.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
}


def _act(func: Any, args: Any, kwargs: Any) -> Any:
    kind = _kind_of(func)
    if kind.only_reads and not kwargs and (at_hand := _at_hand(args)) is not None:
        return func(*at_hand)
    out = kind.act(func, args, kwargs) if kind.act is not None else NotImplemented
    return _act_on_whole(func, args, kwargs) if out is NotImplemented else out


WrapperTensor.act = staticmethod(_act)
