"""Exchange the contents of tensor objects that optimizers, tied modules and other code refer to."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.compat import PARAMETER_MARK, gradient_hooks, set_gradient_hooks, swap_tensor


def set_contents(tensor: Tensor, other: Tensor) -> None:
    """Give ``tensor`` the contents of ``other``. ``tensor`` keeps its identity, hooks, and attributes set by users.

    A parameter also stays an instance of the project's own class of parameters, if it has one. Unlike
    ``torch.utils.swap_tensors``, this accepts tensors that have weak references (from weight averaging or
    ``nn.LSTM``): the references stay valid, since the object stays the same.
    """
    hooks, kind = gradient_hooks(tensor), project_class(tensor)
    exchange(tensor, other)
    if kind is not None:
        tensor.__class__ = joined(type(tensor), kind)
    if hooks is not None:
        set_gradient_hooks(tensor, hooks)  # autograd's hooks were exchanged with the contents


def exchange(tensor: Tensor, other: Tensor) -> None:
    """Exchange class and contents of two tensors. Attributes set by users stay with ``tensor``."""
    own = attributes_of_users(tensor)
    tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
    exchange_memory(tensor, other)
    for name in getattr(type(tensor), "__slots__", ()):  # of a DTensor
        value = getattr(tensor, name, None)
        setattr(tensor, name, getattr(other, name, None))
        setattr(other, name, value)
    tensor.__dict__.update(own)


def exchange_memory(tensor: Tensor, other: Tensor) -> None:
    """Exchange class, memory and autograd's data of two tensors, which both keep their Python attributes."""
    try:
        swap_tensor(tensor, other)
    except RuntimeError:  # torch refuses tensors to which the cache of ``torch.autocast`` has weak references
        torch.clear_autocast_cache()
        swap_tensor(tensor, other)
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__


def inner_of(tensor: Tensor) -> Tensor:
    """The values of a parameter that extends FSDP2's all-gather (see ``extensions.py``); any other tensor unchanged."""
    if not hasattr(tensor, "fsdp_pre_all_gather"):
        return tensor
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner: Tensor = getattr(tensor, names[0])
    has_values = inner.shape == tensor.shape and inner.dtype == tensor.dtype  # quantised tensors have only their codes
    return inner if has_values else tensor


def wrapper_of(tensor: Tensor) -> Callable[[Tensor], Any]:
    """A function that wraps other values as ``inner_of`` unwraps a tensor."""
    if inner_of(tensor) is tensor:
        return lambda values: values
    kind: Any = type(tensor)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return lambda values: kind.__tensor_unflatten__({names[0]: values}, context, values.shape, values.stride())


def project_class(tensor: Tensor) -> Any:
    """The project's own subclass of ``nn.Parameter`` that a parameter was constructed with; None if there is none."""
    kind: Any = type(tensor)
    kind = getattr(kind, "project_class", kind)
    return kind if issubclass(kind, nn.Parameter) and kind is not nn.Parameter else None


@cache
def joined(kind: type, project_class: Any) -> Any:
    """A class derived from a class of this package and from a project's parameter class, whose name it has."""
    if kind is nn.Parameter:
        return project_class
    names = {"project_class": project_class, "__module__": project_class.__module__}
    return types.new_class(project_class.__name__, (kind, project_class), exec_body=lambda body: body.update(names))


def like(tensor: Tensor, values: Tensor) -> Any:
    """The values, as a parameter if ``tensor`` is one, with the same ``requires_grad``."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad)


def with_attributes(tensor: Tensor, values: Tensor) -> Any:
    """Like ``like``, and with the attributes that user code has set on ``tensor``."""
    values = like(tensor, values)
    values.__dict__.update(attributes_of_users(tensor))
    return values


def attributes_of_users(tensor: Tensor) -> dict[str, Any]:
    """The attributes that user code has set on a tensor."""
    return {name: value for name, value in tensor.__dict__.items() if name not in _TENSOR_ATTRIBUTES}


_TENSOR_ATTRIBUTES = {
    "slot",
    "_own_range",
    "kept_object",
    "kept_gradient",
    "lazy_values",
    "_viewed",
    "_view_steps",
    PARAMETER_MARK,
}
