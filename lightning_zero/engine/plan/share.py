"""Parts of a tensor: the share of a tensor-parallel rank, and boxes, which tile a range. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor


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

    def range_of(self, start: int, stop: int, read: Callable[[int, int], Tensor]) -> Tensor:
        """Elements ``[start, stop)`` of this rank's flattened share, 1-D, of which few others are read.

        Args:
            read: returns a range of the flattened whole tensor.
        """
        if self.dimension is None or start == stop:
            return read(start, stop)
        # Viewed as matrices, the whole tensor and the share have the same number of rows.
        width, own_width = (prod(shape[self.dimension :]) for shape in (self.shape, self.own_shape))
        column = self._start(self.index) * prod(self.shape[self.dimension + 1 :])
        row, stop_row = start // own_width, -(-stop // own_width)
        first, numel = start - row * own_width, stop - start
        if stop_row == row + 1:
            begin = row * width + column + first
            return read(begin, begin + numel)
        rows = read(row * width, stop_row * width).view(-1, width)
        return rows[:, column : column + own_width].reshape(-1)[first : first + numel]


class Box(NamedTuple):
    """A rectangular block of a tensor. Its elements are contiguous in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # index of the first element in the flattened tensor

    @property
    def stop(self) -> int:
        return self.start + prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int, most: int | None = None) -> list[Box]:
    """Divide the elements ``[start, stop)`` of a flattened tensor into at most ``2 * len(shape) - 1`` boxes, in order.

    Ranges of more than ``most`` elements are first divided into ranges of this length.
    """
    begins = range(start, stop, most or max(stop - start, 1))
    ends = (*begins[1:], stop)
    return [box for begin, end in zip(begins, ends) for box in _tiles(tuple(shape), begin, end, 0)]


def boxes_of(share: Share, start: int, stop: int, most: int | None = None) -> list[Box]:
    """Like ``boxes``, for a range of this rank's flattened share of a tensor; ``offsets`` refer to the whole tensor."""
    found = boxes(share.own_shape, start, stop, most)
    if not share.is_divided:
        return found
    return [box._replace(offsets=tuple(map(add, box.offsets, share.offsets))) for box in found]


def _tiles(shape: tuple[int, ...], start: int, stop: int, base: int) -> Iterator[Box]:
    if not shape:
        yield Box((), (), base)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows that are fully in the range: [first, last)
    if first > last:  # the range is within one row
        yield from _within(shape, last, start - last * row, stop - last * row, base)
        return
    if start < first * row:
        yield from _within(shape, first - 1, start - (first - 1) * row, row, base)
    if first < last:
        rest = (0,) * (len(shape) - 1)
        yield Box((first, *rest), (last - first, *shape[1:]), base + first * row)
    if last * row < stop:
        yield from _within(shape, last, 0, stop - last * row, base)


def _within(shape: tuple[int, ...], index: int, start: int, stop: int, base: int) -> Iterator[Box]:
    """Divide a range of row ``index`` into boxes."""
    for box in _tiles(shape[1:], start, stop, base + index * prod(shape[1:])):
        yield Box((index, *box.offsets), (1, *box.sizes), box.start)
