"""What of a checkpoint has checksums, and holding it against them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lightning_zero.checkpoint.files import Files
from lightning_zero.engine.sources import listed

ADVICE = "Take another checkpoint, or copy this one again from where it is whole."
NO_CHECKSUM = -1
"""One that no bytes have: of what is damaged already."""

_AT_ONCE = 2**20  # bytes, which a processor's own memory has room for


class DamagedCheckpointError(ValueError):
    """A checkpoint is not as it was written: truncated, altered, or a piece of it is missing."""


class Extent(NamedTuple):
    """Bytes of a file that have a checksum.

    Attributes:
        file: its name in the folder; empty for a checkpoint that is one file.
        holds: names of what they hold, as the checkpoint's ``tensors`` has them.
    """

    file: str
    start: int
    length: int
    crc32: int
    holds: Callable[[], str]


def verify(
    files: Files, extents: Iterable[Extent], progress: Callable[[int], None] | None, share: tuple[int, int]
) -> None:
    """Hold extents, or a share of them, against their checksums.

    Args:
        progress: is told of each number of bytes that was read.
        share: ``(number, of)``.

    Raises:
        DamagedCheckpointError: naming all that is damaged.
    """
    wrong = []
    by_file: dict[str, list[Extent]] = {}
    room = memoryview(bytearray(_AT_ONCE))
    for extent in _share(list(extents), *share):
        by_file.setdefault(extent.file, []).append(extent)
    for name, parts in by_file.items():
        with files.open(name) as file:
            for extent in sorted(parts, key=lambda extent: extent.start):
                if _checksum(file, extent, room, progress) != extent.crc32:
                    wrong.append(_told(extent))
    if wrong:
        raise DamagedCheckpointError(f"{files.path} is damaged: {listed(wrong, 20)}. {ADVICE}")


def _share(extents: list[Extent], number: int, of: int) -> list[Extent]:
    """One of several shares of about as many bytes."""
    loads = [0] * of
    mine = []
    for extent in sorted(extents, key=lambda extent: (-extent.length, extent.file, extent.start)):
        least = loads.index(min(loads))
        loads[least] += extent.length
        if least == number:
            mine.append(extent)
    return mine


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


def _told(extent: Extent) -> str:
    where = f" in {extent.file}" if extent.file else ""
    return f"{extent.holds()}{where}, bytes {extent.start} to {extent.start + extent.length}"
