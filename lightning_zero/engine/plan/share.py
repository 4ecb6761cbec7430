"""Shares: the parts of a tensor that tensor parallelism divides over ranks. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The position of a range of this rank's share in the whole tensor, both as matrices with the same number of rows.

    Attributes:
        start, stop: the rows of the flattened whole tensor that contain the range.
        columns: the columns of each such row that belong to this rank.
        first: the range's first element, counted among the elements of these columns.
        width: the number of elements in a row of the whole tensor.
    """

    start: int
    stop: int
    columns: slice
    first: int
    width: int


@dataclass(frozen=True)
class Share:
    """This rank's share of a tensor that is divided along one dimension, as ``torch.chunk`` does.

    Attributes:
        shape: the whole tensor's shape.
        dimension: the divided dimension; None where each rank has the whole tensor.
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
        """Whether sums over all ranks count this rank's elements: of ranks with the same elements, one counts."""
        return self.is_divided or self.index == 0

    def of_another(self, shape: torch.Size) -> Share:
        """The share of another tensor, which each of the same ranks holds in full."""
        return Share(shape, None, self.index, self.count)

    def length(self, index: int) -> int:
        """The length of a rank's share along the dimension."""
        return self._start(index + 1) - self._start(index)

    def _start(self, index: int) -> int:
        assert self.dimension is not None
        size = self.shape[self.dimension]
        return min(index * -(-size // self.count), size)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offsets of this rank's share in the whole tensor."""
        return tuple(self._start(self.index) if each == self.dimension else 0 for each in range(len(self.shape)))

    def shape_of(self, index: int) -> torch.Size:
        """The shape of a rank's share."""
        if self.dimension is None:
            return self.shape
        return torch.Size((*self.shape[: self.dimension], self.length(index), *self.shape[self.dimension + 1 :]))

    @cached_property
    def own_shape(self) -> torch.Size:
        """The shape of this rank's share."""
        return self.shape_of(self.index)

    def own(self, value: Tensor) -> Tensor:
        """This rank's share of ``value``, the whole tensor, as a view."""
        if self.dimension is None:
            return value
        return value.narrow(self.dimension, self._start(self.index), self.length(self.index))

    def rows(self, start: int, stop: int) -> Rows:
        """The position in the whole tensor of ``[start, stop)``, a nonempty range of this rank's flat share."""
        assert self.dimension is not None
        inner = prod(self.shape[self.dimension + 1 :])
        begin, width = self._start(self.index) * inner, self.shape[self.dimension] * inner
        own = self.length(self.index) * inner
        row = start // own
        return Rows(row, -(-stop // own), slice(begin, begin + own), start - row * own, width)
