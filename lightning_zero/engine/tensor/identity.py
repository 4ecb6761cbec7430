"""Replace the contents of a tensor object that optimizers, tied modules and other code refer to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_zero.engine.compat import PARAMETER_MARK, gradient_hooks, set_gradient_hooks, slot_names, swap_tensor


def become(tensor: Tensor, other: Tensor) -> None:
    """Give ``tensor`` the contents of ``other``. ``tensor`` keeps its identity, hooks and attributes set by users.

    Unlike ``torch.utils.swap_tensors``, this accepts tensors that have weak references (from weight averaging or
    ``nn.LSTM``): the references stay valid, since the object stays the same.
    """
    own = attributes_of_users(tensor)
    hooks = gradient_hooks(tensor)
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
    for name in slot_names(type(tensor)):  # a DTensor has attributes in ``__slots__``
        of_tensor, of_other = (_taken(each, name) for each in (tensor, other))
        for each, values in ((tensor, of_other), (other, of_tensor)):
            for value in values:
                setattr(each, name, value)
    swap_tensor(tensor, other)
    tensor.__dict__.update(own)
    if hooks is not None:
        set_gradient_hooks(tensor, hooks)  # autograd's hooks were swapped with the contents


def attributes_of_users(tensor: Tensor) -> dict[str, Any]:
    """The attributes that code of users has set on a tensor."""
    return {name: value for name, value in tensor.__dict__.items() if name not in _TENSOR_ATTRIBUTES}


def _taken(tensor: Tensor, name: str) -> list[Any]:
    """Remove an attribute from a tensor and return its value in a list, which is empty if there is no attribute."""
    values = [getattr(tensor, name)] if hasattr(tensor, name) else []
    if values:
        delattr(tensor, name)
    return values


_TENSOR_ATTRIBUTES = {"slot", "_local", "keep", PARAMETER_MARK, "_source", "_base_tensor", "_steps"}
