"""The ordinary parameter that modules compute with in the place of a sharded one: it notices what is written to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_data: Any = nn.Parameter.data


class View(nn.Parameter):
    """A view of a bucket's whole buffer.

    A module may write to its own parameters in its forward: in place, which the version counts, or through ``data``,
    which nothing counts but this class.
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
        """Point to a tensor of the same shape."""
        _data.__set__(self, tensor)

    def look(self) -> None:
        """Take what is shown for what was written last."""
        self._asked, self._version_seen = False, self._version

    @property
    def may_be_written(self) -> bool:
        """Whether anything may have been written since the last ``look``."""
        return self._asked or self._version != self._version_seen
