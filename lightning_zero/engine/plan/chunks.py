"""Divide a range of a flattened tensor into boxes: rectangular blocks of the tensor. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from operator import add
from typing import NamedTuple

from lightning_zero.engine.plan.share import Share


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

    A box of more than ``most`` elements is split further, but only along its first dimension whose size is above 1.
    """
    found = _tiles(tuple(shape), start, stop, 0) if stop > start else iter(())
    return [part for box in found for part in (_cut(box, most) if most is not None else [box])]


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


def _cut(box: Box, most: int) -> Iterator[Box]:
    dimension = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    if dimension is None or prod(box.sizes) <= most:
        yield box
        return
    row = prod(box.sizes[dimension + 1 :])
    rows = max(most // row, 1)
    for first in range(0, box.sizes[dimension], rows):
        count = min(rows, box.sizes[dimension] - first)
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dimension] += first
        sizes[dimension] = count
        yield Box(tuple(offsets), tuple(sizes), box.start + first * row)
