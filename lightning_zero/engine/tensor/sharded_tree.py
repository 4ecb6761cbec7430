"""Walk over nested dicts, lists and tuples that contain sharded tensors, and convert these tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.wrapper import WrapperTensor

Leaf = Callable[[Tensor], Any]
"""A function that converts a tensor. If it gathers, all ranks must convert the same tensors in the same order."""


def walk(
    tree: Any, act: Callable[[Any], Any], wanted: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Tensor)
) -> Any:
    """The tree with converted leaves. Changed containers are replaced by shallow copies; others are kept.

    Args:
        act: returns a leaf's replacement; called once for all aliases of a sharded parameter, which share the result.
        wanted: whether to convert a leaf; by default, all tensors are converted.
    """
    known: dict[Any, Any] = {}

    def step(tree: Any) -> Any:
        if wanted(tree):
            if not isinstance(tree, ShardedTensor):
                return act(tree)
            key = identity(tree)
            if key not in known:
                known[key] = act(tree)
            return known[key]
        if not isinstance(tree, (dict, list, tuple)):
            return tree
        items = list(tree.values() if isinstance(tree, dict) else tree)
        changed = [step(item) for item in items]
        if all(after is before for after, before in zip(changed, items)):
            return tree
        if isinstance(tree, tuple):
            return type(tree)(*changed) if hasattr(tree, "_fields") else type(tree)(changed)
        copied = copy.copy(tree)  # keeps the container's class, and a state dict's attributes
        for key, item in zip(tree if isinstance(tree, dict) else range(len(changed)), changed):
            copied[key] = item
        return copied

    with torch.no_grad():
        return step(tree)


def identity(tensor: ShardedTensor) -> Any:
    """A key that all aliases of a parameter in one dtype share; any other tensor has a key of its own."""
    return (id(tensor.slot), tensor.dtype) if tensor.is_parameter else id(tensor)


def is_in_parts(value: Any) -> bool:
    """Whether a value is a sharded tensor, or a view of one."""
    return isinstance(value, WrapperTensor) and not isinstance(value, LazyTensor)


def gathered(tensor: Tensor) -> Tensor:
    """The full value, possibly in memory that other tensors use, too. Collective."""
    return (tensor.whole() if is_in_parts(tensor) else tensor).detach()  # type: ignore[attr-defined]


def in_parts(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged: sharded tensors are later written by all ranks, or gathered."""
    return tensor


def whole(tensor: Tensor) -> Tensor:
    """The full value, in new memory on the tensor's device. Collective."""
    return gathered(tensor).clone()


def on_cpu(tensor: Tensor) -> Tensor:
    """Like ``whole``, but on the CPU. Collective."""
    return gathered(tensor).to("cpu", copy=True)


def on_meta(tensor: Tensor) -> Tensor:
    """A meta tensor of the full shape, for ranks that join the gather but do not keep the value. Collective."""
    return torch.empty_like(gathered(tensor), device="meta")
