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

    def show(self, tensor: Tensor) -> None:
        """Make the view refer to another tensor of the same shape."""
        _data.__set__(self, tensor)

    def look(self) -> None:
        """Reset ``may_be_written``: writes so far have been handled."""
        self._asked, self._version_seen = False, self._version

    @property
    def may_be_written(self) -> bool:
        """Whether the view may have been written to since the last ``look``."""
        return self._asked or self._version != self._version_seen
