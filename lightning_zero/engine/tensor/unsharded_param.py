"""The unsharded parameter that modules compute with instead of the sharded parameter; detects writes by modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_data: Any = nn.Parameter.data


class View(nn.Parameter):
    """A parameter that is a view of a bucket's gathered buffer.

    A module may write to its parameters in forward. A write in place changes the tensor's version; a write through
    ``data`` does not, so this class records each access to ``data``.
    """

    _asked = False
    _version_seen = -1
    _hooks_before_reduction: OrderedDict[int, Callable[[Tensor], Any]] | None = None

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook; modules call this in forward. The hook runs before the reduction, when ``grad`` is local."""
        if self._hooks_before_reduction is None:
            self._hooks_before_reduction = OrderedDict()
        handle = RemovableHandle(self._hooks_before_reduction)
        self._hooks_before_reduction[handle.id] = hook
        return handle

    @property
    def data(self) -> Tensor:
        self._asked = True
        return _data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)


# Functions, not methods: a view of a fake tensor (``lightning_zero.planning``) is a FakeTensor, not a ``View``.


def show(view: Tensor, tensor: Tensor) -> None:
    """Make the view refer to another tensor of the same shape."""
    _data.__set__(view, tensor)


def mark_seen(view: Any) -> None:
    """Mark all writes so far as handled; ``may_be_written`` then detects only later writes."""
    view._asked, view._version_seen = False, view._version


def call_hooks_before_reduction(view: Any) -> None:
    """Call the hooks that modules have registered on the view in forward."""
    for hook in list(view._hooks_before_reduction.values()):
        hook(view)


def may_be_written(view: Any) -> bool:
    """Whether the view may have been written to since the last ``mark_seen``."""
    return getattr(view, "_asked", False) or view._version != getattr(view, "_version_seen", -1)
