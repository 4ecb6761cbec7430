"""Verify a checkpoint's bytes against their checksums (CRC-32)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from lightning_zero.checkpoint.files import Files
from lightning_zero.io.text import listed

ADVICE = "Load another checkpoint, or copy this one again from an intact source."
NO_CHECKSUM = -1  # marks bytes that are known to be damaged: no CRC-32 has this value, so their verification fails
_AT_ONCE = 2**23  # bytes per read; with smaller reads, a disk takes twice as long


class DamagedCheckpointError(ValueError):
    """A checkpoint differs from what was written: it is truncated or altered, or a file is missing."""

    @classmethod
    def of(cls, path: object, what: str) -> DamagedCheckpointError:
        return cls(f"{path} is damaged: {what}. {ADVICE}")


class NoCheckpointError(ValueError):
    """The path contains no checkpoint, or only fragments that cannot be recognised as one."""


@dataclass(slots=True)
class Extent:
    """A range of bytes in a file, written and verified as a unit.

    Attributes:
        file: the file's name in the folder; empty for a checkpoint that is a single file.
        holds: the names of the tensors and other values in the range, or of the archive's record, for messages.
    """

    file: str
    start: int
    length: int
    crc32: int | None
    holds: list[str]
    is_checked: bool = False

    def __str__(self) -> str:
        where = f" in {self.file}" if self.file else ""
        return f"{listed(self.holds)}{where}, bytes {self.start} to {self.start + self.length}"


def verify(
    files: Files, extents: Iterable[Extent], progress: Callable[[int], None] | None, share: tuple[int, int]
) -> None:
    """Verify a share of the extents against their checksums, and mark the extents that match.

    Args:
        progress: called with the number of bytes of each read.
        share: ``(number, of)``: divide the extents into ``of`` shares, and verify share ``number``, counted from 0.

    Raises:
        DamagedCheckpointError: if extents are damaged; the message names them.
    """
    wrong = []
    room = memoryview(bytearray(_AT_ONCE))
    for name, parts in groupby(_share(extents, *share), lambda extent: extent.file):
        with files.open(name) as file:
            for extent in parts:
                crc32, left = 0, extent.length
                file.seek(extent.start)
                while left and (count := file.readinto(room[: min(left, _AT_ONCE)])):  # type: ignore[attr-defined]
                    crc32, left = zlib.crc32(room[:count], crc32), left - count
                    if progress is not None:
                        progress(count)
                extent.is_checked = crc32 == extent.crc32
                if not extent.is_checked:
                    wrong.append(str(extent))
    if wrong:
        raise DamagedCheckpointError.of(files.path, listed(wrong, 20))


def _share(extents: Iterable[Extent], number: int, of: int) -> list[Extent]:
    """Divide the extents into ``of`` contiguous shares of about equal size in bytes, and return one share.

    With one process per file, each process verifies roughly its own rank's file, which it is also likely to load.
    """
    ordered = sorted(extents, key=lambda extent: (len(extent.file), extent.file, extent.start))  # file 9 before file 10
    total = sum(extent.length for extent in ordered) or 1
    share, before = [], 0
    for extent in ordered:
        middle = before + extent.length / 2
        if min(int(middle * of / total), of - 1) == number:
            share.append(extent)
        before += extent.length
    return share
