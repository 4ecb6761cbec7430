"""What of a checkpoint has checksums, and holding it against them."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, cycle, groupby
from typing import Any

from lightning_zero.checkpoint.files import Files
from lightning_zero.engine.sources import listed

ADVICE = "Take another checkpoint, or copy this one again from where it is whole."
NO_CHECKSUM = -1
"""One that no bytes have: of what is damaged already."""

_AT_ONCE = 2**23
"""Bytes that are read at once: a disk takes twice the time if it is asked for less."""


class DamagedCheckpointError(ValueError):
    """A checkpoint is not as it was written: truncated, altered, or a piece of it is missing."""


class NoCheckpointError(ValueError):
    """What lies at a path is no checkpoint, or so little of one is left that it cannot be told from something else."""


@dataclass(slots=True)
class Extent:
    """Bytes of a file that are written, and verified, together.

    Attributes:
        file: its name in the folder; empty for a checkpoint that is one file.
        crc32: None if they have no checksum.
        holds: names of what they hold, as the checkpoint's ``tensors`` has them, or what tells these.
        is_checked: whether they have been held against their checksum.
    """

    file: str
    start: int
    length: int
    crc32: int | None
    holds: list[str] | Callable[[], list[str]]
    is_checked: bool = False

    def __str__(self) -> str:
        names = self.holds() if callable(self.holds) else self.holds
        where = f" in {self.file}" if self.file else ""
        return f"{listed(names)}{where}, bytes {self.start} to {self.start + self.length}"


def verify(
    files: Files, extents: Iterable[Extent], progress: Callable[[int], None] | None, share: tuple[int, int]
) -> None:
    """Hold extents, or a share of them, against their checksums; those that match are marked so.

    Args:
        progress: is told of each number of bytes that was read.
        share: ``(number, of)``.

    Raises:
        DamagedCheckpointError: naming all that is damaged.
    """
    wrong = []
    for name, parts in groupby(_share(extents, *share), lambda extent: extent.file):
        with files.open(name) as file:
            for extent, crc32 in _checksums(file, list(parts), progress):
                extent.is_checked = crc32 == extent.crc32
                if not extent.is_checked:
                    wrong.append(str(extent))
    if wrong:
        raise DamagedCheckpointError(f"{files.path} is damaged: {listed(wrong, 20)}. {ADVICE}")


def _share(extents: Iterable[Extent], number: int, of: int) -> list[Extent]:
    """One of several shares of about as many bytes, which lie one after another.

    So of as many processes as have written a file each, each reads its own, which it is likely to load as well.
    """
    by_file: dict[str, list[Extent]] = {}
    for extent in extents:
        by_file.setdefault(extent.file, []).append(extent)
    ordered = [extent for parts in by_file.values() for extent in sorted(parts, key=lambda extent: extent.start)]
    ends = list(accumulate(extent.length for extent in ordered))
    middles = [2 * end - extent.length for extent, end in zip(ordered, ends)]  # doubled
    return [
        extent for extent, middle in zip(ordered, middles) if min(middle * of // (2 * ends[-1] or 1), of - 1) == number
    ]


def _checksums(
    file: Any, extents: list[Extent], progress: Callable[[int], None] | None
) -> Iterator[tuple[Extent, int]]:
    """The checksum that each extent has now; they lie one after another."""
    blocks = _blocks(file, extents[0].start, extents[-1].start + extents[-1].length)
    block, position = memoryview(b""), extents[0].start  # of what is left of the block
    for extent in extents:
        crc32, at, stop = 0, extent.start, extent.start + extent.length
        while at < stop:
            if at >= position + len(block):
                position += len(block)
                block = next(blocks, memoryview(b""))
                if not block:
                    break  # truncated since it was opened: the checksum says so
                continue
            part = block[at - position : stop - position]
            crc32, at = zlib.crc32(part, crc32), at + len(part)
            if progress is not None:
                progress(len(part))
        yield extent, crc32


def _blocks(file: Any, start: int, stop: int) -> Iterator[memoryview]:
    """The bytes ``[start, stop)`` of a file; while one block of them is looked at, the next is read."""
    rooms = cycle([memoryview(bytearray(_AT_ONCE)) for _ in range(2)])

    def read(room: memoryview) -> memoryview:
        filled = 0
        while filled < len(room) and (count := file.readinto(room[filled:])):
            filled += count
        return room[:filled]

    file.seek(start)
    lengths = [min(_AT_ONCE, stop - position) for position in range(start, stop, _AT_ONCE)]
    with ThreadPoolExecutor(1) as reader:
        reads = deque(reader.submit(read, next(rooms)[:length]) for length in lengths[:1])
        for length in (*lengths[1:], 0):
            block = reads.popleft().result() if reads else memoryview(b"")
            if length:
                reads.append(reader.submit(read, next(rooms)[:length]))
            yield block
