"""Verify a checkpoint's bytes against their checksums (CRC-32)."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import IO

from lightning_zero.checkpoint.files import Files
from lightning_zero.io.text import listed

ADVICE = "Load another checkpoint, or copy this one again from an intact source."
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
        crc32: None for a piece of a sharded checkpoint, which is an archive: its records have checksums.
        holds: the names of the tensors and other values in the range, or of the archive's record, for messages.
    """

    file: str
    start: int
    length: int
    crc32: int | None
    holds: list[str]

    def __str__(self) -> str:
        where = f" in {self.file}" if self.file else ""
        return f"{listed(self.holds)}{where}, bytes {self.start} to {self.start + self.length}"


def verify(files: Files, extents: Iterable[Extent], share: tuple[int, int]) -> None:
    """Verify a share of the extents against their checksums.

    Args:
        share: ``(number, of)``: divide the extents into ``of`` shares, and verify share ``number``, counted from 0.

    Raises:
        DamagedCheckpointError: if extents are damaged; the message names them.
    """
    wrong = []
    room = memoryview(bytearray(_AT_ONCE))
    for name, parts in groupby(share_of(extents, *share), lambda extent: extent.file):
        with files.open(name) as file:
            for extent in parts:
                file.seek(extent.start)
                if extent.crc32 is None:
                    matches = is_intact(file.read(extent.length))
                else:
                    matches = _crc32(file, extent.length, room) == extent.crc32
                if not matches:
                    wrong.append(str(extent))
    if wrong:
        raise DamagedCheckpointError.of(files.path, listed(wrong, 20))


def _crc32(file: IO[bytes], left: int, room: memoryview) -> int:
    """Return the checksum of the next ``left`` bytes of a file, read into ``room`` part by part."""
    crc32 = 0
    while left and (count := file.readinto(room[: min(left, len(room))])):  # type: ignore[attr-defined]
        crc32, left = zlib.crc32(room[:count], crc32), left - count
    return crc32


def share_of(extents: Iterable[Extent], number: int, of: int) -> list[Extent]:
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


# -- archives ----------------------------------------------------------------------------------------------------------

_LOCAL_HEADER = 30  # bytes before the file name in a zip's local headers
_FOLDER = 0x10  # attribute bit that marks folders; torch treats a record with this bit as empty


class BrokenArchiveError(ValueError):
    """The bytes are not a complete ``torch.save`` archive."""


def records_of(archive: IO[bytes]) -> list[Extent]:
    """List the uncompressed records of an archive; they have no checksums if the archive was saved without them.

    Raises:
        BrokenArchiveError: if the bytes are not a complete archive.
    """
    found = []
    try:
        with zipfile.ZipFile(archive) as zipped:
            end = zipped.start_dir
        if sum(info.file_size for info in zipped.infolist()) > end:
            raise BrokenArchiveError("its records overlap or are compressed")
        for info in zipped.infolist():
            name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
            archive.seek(info.header_offset)
            header = archive.read(_LOCAL_HEADER + len(name))
            start = info.header_offset + _LOCAL_HEADER + sum(struct.unpack_from("<2H", header, 26))
            is_stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
            is_there = header[:4] == b"PK\x03\x04" and header[_LOCAL_HEADER:] == name and start + info.file_size <= end
            if not is_stored or not is_there or info.external_attr & _FOLDER:
                raise BrokenArchiveError(f"record {info.filename} is misplaced or compressed")
            found.append(Extent("", start, info.file_size, info.CRC, [info.filename]))
    except (zipfile.BadZipFile, NotImplementedError, struct.error, OSError, UnicodeError) as error:
        raise BrokenArchiveError("it has no intact zip directory at its end") from error
    has_checksums = any(record.crc32 for record in found)  # False if saved with set_crc32_options(False)
    return found if has_checksums else [replace(record, crc32=None) for record in found]


def is_intact(archive: bytes) -> bool:
    """Whether an archive is complete, and its records match their checksums."""
    try:
        records = records_of(io.BytesIO(archive))
    except BrokenArchiveError:
        return False
    data = memoryview(archive)
    return all(record.crc32 in (None, zlib.crc32(data[record.start :][: record.length])) for record in records)
