"""What of a checkpoint has checksums, and holding it against them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from lightning_zero.checkpoint.files import Files
from lightning_zero.engine.sources import listed

ADVICE = "Take another checkpoint, or copy this one again from where it is whole."
NO_CHECKSUM = -1
"""One that no bytes have: of what is damaged already."""

_AT_ONCE = 2**20  # bytes, which a processor's own memory has room for


class DamagedCheckpointError(ValueError):
    """A checkpoint is not as it was written: truncated, altered, or a piece of it is missing."""


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
    room = memoryview(bytearray(_AT_ONCE))
    for name, parts in groupby(_share(extents, *share), lambda extent: extent.file):
        with files.open(name) as file:
            for extent in parts:
                extent.is_checked = _checksum(file, extent, room, progress) == extent.crc32
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


def _checksum(file: Any, extent: Extent, room: memoryview, progress: Callable[[int], None] | None) -> int:
    file.seek(extent.start)
    crc32, left = 0, extent.length
    while left:
        count = file.readinto(room[: min(left, len(room))])
        if not count:
            break  # truncated since it was opened: the checksum says so
        crc32 = zlib.crc32(room[:count], crc32)
        left -= count
        if progress is not None:
            progress(count)
    return crc32
