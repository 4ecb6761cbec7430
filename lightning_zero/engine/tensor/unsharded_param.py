"""The unsharded parameter that modules compute with instead of a sharded one; it detects writes by modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_data: Any = nn.Parameter.data


class View(nn.Parameter):
    """A parameter that is a view of a bucket's gathered buffer.

    A module may write to its own parameters in its forward: in place, which changes the version, or through ``data``,
    which torch does not count, but this class does.
    """

    _asked = False
    _version_seen = -1

    @property
    def data(self) -> Tensor:
        self._asked = True
        return _data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)


# Functions, not methods: a view of a fake tensor (``lightning_zero.planning``) is a FakeTensor, without this class.


def show(view: Tensor, tensor: Tensor) -> None:
    """Make the view refer to another tensor of the same shape."""
    _data.__set__(view, tensor)


def mark_seen(view: Any) -> None:
    """Reset ``may_be_written``: writes so far have been handled."""
    view._asked, view._version_seen = False, view._version


def may_be_written(view: Any) -> bool:
    """Whether the view may have been written to since the last ``mark_seen``."""
    return getattr(view, "_asked", False) or view._version != getattr(view, "_version_seen", -1)
