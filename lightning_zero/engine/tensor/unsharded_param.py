"""The form of a sharded parameter while its module runs: an ordinary parameter over the gathered buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.tensor.identity import with_attributes

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

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook, which stays with the parameter after the forward."""
        if (slot := self.__dict__.get("slot")) is not None:
            slot.has_new_hooks = True
        return super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook in forward. The hook runs before the reduction, when ``grad`` is local."""
        hooks = self.slot.hooks_before_reduction
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

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

    @property
    def data(self) -> Tensor:
        if (slot := self.__dict__.get("slot")) is not None:
            slot.bucket.is_data_read = True
        return _data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        check_same_shape(self.slot.name, self, value)
        if type(value) is Tensor and value.is_set_to(self):
            return  # nothing is written
        with torch.no_grad():
            self.copy_(value)

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


def added_gradient(leaf: Tensor) -> Tensor | None:
    """The gradient that autograd has added to a leaf, also if this is a view in forward."""
    gradient: Tensor | None = _grad.__get__(leaf)
    return gradient


def drop_added_gradient(leaf: Tensor) -> None:
    _grad.__set__(leaf, None)


def show(view: Tensor, tensor: Tensor) -> None:
    """Make the view refer to another tensor of the same shape.

    A function, not a method: a view of a fake tensor (``lightning_zero.planning``) is a FakeTensor, not a ``View``.
    """
    _data.__set__(view, tensor)
