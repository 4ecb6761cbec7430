"""Verify a checkpoint's bytes against their checksums (CRC-32)."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, cycle, groupby
from typing import Any

from lightning_zero.checkpoint.files import Files
from lightning_zero.engine.init.sources import listed

ADVICE = "Take another checkpoint, or copy this one again from where it is whole."
NO_CHECKSUM = -1
"""Value that no CRC-32 has; marks bytes that are damaged for another reason."""

_AT_ONCE = 2**23
"""Bytes per read: with smaller reads a disk takes twice the time."""


class DamagedCheckpointError(ValueError):
    """A checkpoint differs from what was written: it is truncated or altered, or a file is missing."""


class NoCheckpointError(ValueError):
    """The path contains no checkpoint, or too little of one to recognise it."""


@dataclass(slots=True)
class Extent:
    """A range of bytes in a file that is written and verified as one.

    Attributes:
        file: the file's name in the folder; empty for a checkpoint that is a single file.
        crc32: None if the range has no checksum.
        holds: names of the tensors in the range, as keys of the checkpoint's ``tensors``, or a function that returns
        them. is_checked: whether the range has been verified.
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
    """Verify extents, or this process's share of them, against their checksums, and mark those that match.

    Args:
        progress: called with the number of bytes of each read.
        share: ``(number, of)``: verify share ``number`` of ``of`` shares.

    Raises:
        DamagedCheckpointError: naming all damaged extents.
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
    """Return one of ``of`` contiguous shares with about as many bytes each.

    With as many processes as files, each process reads the file of its own rank, from which it is likely to load as
    well.
    """
    by_file: dict[str, list[Extent]] = {}
    for extent in extents:
        by_file.setdefault(extent.file, []).append(extent)
    ordered = [extent for parts in by_file.values() for extent in sorted(parts, key=lambda extent: extent.start)]
    ends = list(accumulate(extent.length for extent in ordered))
    middles = [2 * end - extent.length for extent, end in zip(ordered, ends)]  # times two, to stay with integers
    return [
        extent for extent, middle in zip(ordered, middles) if min(middle * of // (2 * ends[-1] or 1), of - 1) == number
    ]


def _checksums(
    file: Any, extents: list[Extent], progress: Callable[[int], None] | None
) -> Iterator[tuple[Extent, int]]:
    """Compute the current checksum of each extent. The extents must be contiguous."""
    blocks = _blocks(file, extents[0].start, extents[-1].start + extents[-1].length)
    block, position = memoryview(b""), extents[0].start  # the unread rest of the current block, and its position
    for extent in extents:
        crc32, at, stop = 0, extent.start, extent.start + extent.length
        while at < stop:
            if at >= position + len(block):
                position += len(block)
                block = next(blocks, memoryview(b""))
                if not block:
                    break  # truncated since the checkpoint was opened: the checksum will differ
                continue
            part = block[at - position : stop - position]
            crc32, at = zlib.crc32(part, crc32), at + len(part)
            if progress is not None:
                progress(len(part))
        yield extent, crc32


def _blocks(file: Any, start: int, stop: int) -> Iterator[memoryview]:
    """Read the bytes ``[start, stop)`` of a file in blocks; the next block is read in the background."""
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
