"""The three kinds of entries in an optimizer's state. Each kind is split, gathered and loaded differently.

By element: a tensor with one number for each element of the parameter (``exp_avg``), sharded like the parameter.
Small: a count or an option (``step``), equal on all ranks that have the entry. Its value is sent to the other ranks.
Owned: any other tensor (factors, preconditioners, quantised blocks), possibly inside a list, a dict or a tensor made of
other tensors. Only the rank that owns the whole parameter has the tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.compat import is_made_of_tensors, tree_leaves, tree_map, tree_map_only
from lightning_zero.engine.tensor.sharded_tree import walk

# Names of entries that are small, not by element, even if both the entry and its parameter are zero-dimensional.
_COUNTERS = {"step", "mu_product", "eta", "mu"}


class Small:
    """A small entry in a form that can be sent to other ranks: its value, and whether it is kept on the device.

    Args:
        is_on_device: whether the entry is kept on the parameter's device, not in host memory.
    """

    def __init__(self, value: Any, dtype: torch.dtype | None = None, is_on_device: bool = False) -> None:
        self.value = value if dtype is None else torch.tensor(value, dtype=dtype, device="cpu")
        self.is_on_device = is_on_device or isinstance(value, Tensor) and value.device.type != "cpu"

    def of_parameter(self, device: torch.device) -> Any:
        """A new copy of the value, for a parameter on ``device``."""
        value = copied(self.value)
        return value.to(device) if self.is_on_device else value

    def __reduce__(self) -> Any:
        if not isinstance(self.value, Tensor):
            return Small, (self.value,)
        return Small, (self.value.tolist(), self.value.dtype, self.is_on_device)  # 10 times faster than pickled tensors


@dataclass(frozen=True)
class Owned:
    """Describes a tensor to ranks that do not have the tensor; ``number`` is its index among the entry's tensors."""

    number: int
    shape: torch.Size
    dtype: torch.dtype


def is_by_element(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether an entry has one number for each element of its parameter or master, whose shape is ``shape``."""
    if not isinstance(value, Tensor) or is_made_of_tensors(value):
        return False
    return value.shape == shape and (value.dim() > 0 or key not in _COUNTERS)


_CLASS, _CONTEXT, _PERMUTED = "__tensor_class__", "__context__", "permuted"
"""Two keys and a value that are written to checkpoints, and so must never change."""


def in_plain_tensors(value: Any) -> Any:
    """Replace each tensor made of other tensors (such as an 8-bit tensor) by a dict of its class and inner tensors.

    A tensor whose dimensions are permuted in memory also becomes a dict, which records the permutation: with another
    order in memory, products with the tensor would be rounded differently.
    """
    return walk(value, _in_plain)


def _in_plain(tensor: Tensor) -> Any:
    if is_made_of_tensors(tensor):
        names, context = tensor.__tensor_flatten__()
        kind, inner = type(tensor), {name: in_plain_tensors(getattr(tensor, name)) for name in names}
        return {_CLASS: f"{kind.__module__}:{kind.__qualname__}", _CONTEXT: context, **inner}
    order = _order_in_memory(tensor) if type(tensor) is Tensor else None
    return tensor if order is None else {_CLASS: _PERMUTED, _CONTEXT: order, "values": tensor.permute(order)}


def as_made_of_tensors(tree: Any) -> Any:
    """Undo ``in_plain_tensors``. Dicts remain if they have meta tensors, or a class neither imported nor in torchao."""
    return walk(tree, _put_together, lambda part: isinstance(part, dict) and _CLASS in part)


def _put_together(part: dict[str, Any]) -> Any:
    items = {key: as_made_of_tensors(item) for key, item in part.items()}
    if items[_CLASS] == _PERMUTED:
        order = items[_CONTEXT]
        return items["values"].permute([order.index(dim) for dim in range(len(order))])
    module, _, name = str(items[_CLASS]).partition(":")
    if module.partition(".")[0] == "torchao":
        with suppress(ImportError):
            import_module(module)
    kind = getattr(sys.modules.get(module), name, None)
    tensors = {key: item for key, item in items.items() if key not in (_CLASS, _CONTEXT)}
    is_tensor = isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")
    if not is_tensor or any(isinstance(item, Tensor) and item.is_meta for item in tensors.values()):
        return items
    return kind.__tensor_unflatten__(tensors, items[_CONTEXT], None, None)  # type: ignore[union-attr]


def _order_in_memory(tensor: Tensor) -> list[int] | None:
    """The order of dimensions in which a tensor is contiguous; None if it is the usual order or does not exist."""
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def described(value: Any) -> Any:
    """An entry in a form for other ranks: ``Owned`` replaces non-scalar tensors, ``Small`` replaces the rest."""
    count = iter(range(sys.maxsize))
    return tree_map(lambda leaf: Owned(next(count), leaf.shape, leaf.dtype) if _is_owned(leaf) else Small(leaf), value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an entry that ``described`` replaces by ``Owned``, in the order of ``Owned.number``."""
    return list(filter(_is_owned, tree_leaves(value)))


def _is_owned(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def resolved(entry: Any, of_owned: Callable[[Owned], Any], device: torch.device) -> Any:
    """Turn an entry from ``described`` back into values; ``of_owned`` returns the tensor for each ``Owned``."""
    return tree_map(lambda leaf: of_owned(leaf) if isinstance(leaf, Owned) else leaf.of_parameter(device), entry)


def copied(value: Any) -> Any:
    if type(value) is Tensor:  # the usual case; a fast path, since each step copies many values
        return value.clone()
    return as_made_of_tensors(tree_map_only(Tensor, Tensor.clone, in_plain_tensors(value)))


def comparable(value: Any) -> Any:
    """A comparable form of a small entry: parameters may share a master only if their small entries are equal."""
    if not isinstance(value, Tensor):
        return repr(value)
    return float(value) if value.numel() == 1 else id(value)


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of an entry from ``in_plain_tensors``.

    The inner tensors of 8-bit tensors and the like are not cast: their dtypes do not follow the parameter's.
    """

    def cast(part: Any) -> Any:
        return part.to(dtype) if isinstance(part, Tensor) and part.is_floating_point() else part

    def is_tensor(part: Any) -> bool:
        return isinstance(part, Tensor) or (isinstance(part, dict) and part.get(_CLASS, _PERMUTED) != _PERMUTED)

    return walk(value, cast, is_tensor)


def placed(key: str, value: Any, group: dict[str, Any], device: torch.device) -> Any:
    """A copy of a small entry where torch's ``load_state_dict`` would put it: usually on the parameter's device."""
    if key != "step":  # the value may be a list of tensors (LBFGS)
        return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), value)
    if not isinstance(value, Tensor):
        return value
    if group.get("capturable") or group.get("fused"):
        return value.to(device, torch.float32, copy=True)
    # ``step`` may be on the user's default device, but CPU kernels require it on the CPU.
    return value.to("cpu", copy=True) if device.type == "cpu" else copied(value)
