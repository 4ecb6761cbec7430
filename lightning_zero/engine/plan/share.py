"""Share: one rank's part of a tensor that tensor parallelism divides over ranks. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Locates a range of this rank's share in the tensor; both are viewed as 2-D, with the same number of rows.

    Attributes:
        start, stop: the rows that contain the range.
        columns: the columns of the whole tensor that belong to this rank.
        first: the position of the range's first element among the elements in these rows and columns.
        width: the number of columns of the whole tensor.
    """

    start: int
    stop: int
    columns: slice
    first: int
    width: int


@dataclass(frozen=True)
class Share:
    """This rank's share of a tensor that is divided along one dimension, as by ``torch.chunk``.

    Attributes:
        shape: the whole tensor's shape.
        dimension: the divided dimension; None if each rank has the whole tensor.
        index: this rank's index among the ranks that share the tensor.
        count: the number of these ranks.
    """

    shape: torch.Size
    dimension: int | None = None
    index: int = 0
    count: int = 1

    @property
    def is_divided(self) -> bool:
        return self.dimension is not None

    @property
    def is_counted_here(self) -> bool:
        """Whether sums over ranks include this rank's elements: of ranks with equal elements, only the first counts."""
        return self.is_divided or self.index == 0

    def of_another(self, shape: torch.Size) -> Share:
        """Describe another tensor, which each of these ranks holds in full."""
        return Share(shape, None, self.index, self.count)

    def length(self, index: int) -> int:
        """The size of share number ``index`` along the divided dimension."""
        return self._start(index + 1) - self._start(index)

    def _start(self, index: int) -> int:
        assert self.dimension is not None
        size = self.shape[self.dimension]
        return min(index * -(-size // self.count), size)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offset of this rank's share in the whole tensor along each dimension."""
        return tuple(self._start(self.index) if each == self.dimension else 0 for each in range(len(self.shape)))

    def shape_of(self, index: int) -> torch.Size:
        """The shape of share number ``index``."""
        if self.dimension is None:
            return self.shape
        return torch.Size((*self.shape[: self.dimension], self.length(index), *self.shape[self.dimension + 1 :]))

    @cached_property
    def own_shape(self) -> torch.Size:
        """The shape of this rank's share."""
        return self.shape_of(self.index)

    def own(self, value: Tensor) -> Tensor:
        """Return a view of this rank's share of the whole tensor ``value``."""
        if self.dimension is None:
            return value
        return value.narrow(self.dimension, self._start(self.index), self.length(self.index))

    def rows(self, start: int, stop: int) -> Rows:
        """Locate ``[start, stop)``, a nonempty range of this rank's flattened share, in the whole tensor."""
        assert self.dimension is not None
        inner = prod(self.shape[self.dimension + 1 :])
        begin, width = self._start(self.index) * inner, self.shape[self.dimension] * inner
        own = self.length(self.index) * inner
        row = start // own
        return Rows(row, -(-stop // own), slice(begin, begin + own), start - row * own, width)
