"""Read the records of ``torch.save`` archives, and the tensor in an archive of a single tensor."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from typing import IO, NamedTuple

from torch import Tensor

from lightning_zero.checkpoint.restricted import load_tensor, load_torch

_LOCAL_HEADER = 30  # bytes before the file name in a zip's local headers
_FOLDER = 0x10  # attribute bit that marks folders; torch treats a record with this bit as empty


class BrokenArchiveError(ValueError):
    """The bytes are not a complete ``torch.save`` archive."""


class Record(NamedTuple):
    """Position and checksum of an uncompressed record; ``crc32`` is None if the archive has no checksums."""

    name: str
    start: int
    length: int
    crc32: int | None


def records_of(archive: IO[bytes]) -> list[Record]:
    """List the records of an archive.

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
            found.append(Record(info.filename, start, info.file_size, info.CRC))
    except (zipfile.BadZipFile, NotImplementedError, struct.error, OSError, UnicodeError) as error:
        raise BrokenArchiveError("it has no intact zip directory at its end") from error
    has_checksums = any(record.crc32 for record in found)  # False if saved with set_crc32_options(False)
    return found if has_checksums else [record._replace(crc32=None) for record in found]


def tensor_in(buffer: memoryview) -> Tensor:
    """Load an archive's only tensor, usually as a view of ``buffer``: do not modify the tensor, which may be unaligned.

    ``torch.load`` would copy the values.
    """
    records = {record.name.partition("/")[2]: record for record in records_of(io.BytesIO(buffer))}

    def bytes_of(name: str) -> memoryview:
        return buffer[records[name].start :][: records[name].length]

    if "byteorder" in records and bytes(bytes_of("byteorder")) != sys.byteorder.encode():
        return load_torch(io.BytesIO(buffer))
    return load_tensor(bytes(bytes_of("data.pkl")), lambda key: bytes_of(f"data/{key}"))
