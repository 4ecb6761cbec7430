"""Read the records of ``torch.save`` archives, and quickly load and save archives of a single tensor."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
import zlib
from functools import lru_cache
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.restricted import load_tensor, load_torch

SMALL = 2**16
"""Maximum size in bytes of a small tensor: writing its values takes less time than the overhead of ``torch.save``."""

_LOCAL_HEADER, _ENTRY = 30, 46  # bytes before the file name in a zip's local headers and directory entries
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


class ArchiveLayout(NamedTuple):
    """Layout of an archive of one plain tensor. Archives with the same length and ``head`` have the same layout."""

    head: bytes
    """The bytes before the values."""
    dtype: torch.dtype
    numel: int
    """Number of elements in the storage."""
    view: tuple[Any, ...]
    """The tensor's shape, strides and storage offset."""


def tensor_in(buffer: memoryview, known: dict[Any, ArchiveLayout], kind: Any) -> Tensor:
    """Load an archive's only tensor, usually as a view of ``buffer``: do not modify the tensor, which may be unaligned.

    With a cached layout, this is fifty times as fast as ``torch.load``, which would also copy the values.

    Args:
        known: cache of layouts, to which the archive's layout is added.
        kind: cache key, such as shape and dtype: tensors of the same kind usually have archives of the same layout.
    """
    layout = known.get((kind, len(buffer)))
    if layout is not None and bytes(buffer[: len(layout.head)]) == layout.head:
        flat = torch.frombuffer(buffer, dtype=layout.dtype, count=layout.numel, offset=len(layout.head))
        return flat.as_strided(*layout.view)
    records = {record.name.partition("/")[2]: record for record in records_of(io.BytesIO(buffer))}

    def bytes_of(name: str) -> memoryview:
        return buffer[records[name].start :][: records[name].length]

    if "byteorder" in records and bytes(bytes_of("byteorder")) != sys.byteorder.encode():
        return load_torch(io.BytesIO(buffer))
    tensor = load_tensor(bytes(bytes_of("data.pkl")), lambda key: bytes_of(f"data/{key}"))
    numel = tensor.untyped_storage().nbytes() // tensor.itemsize
    if numel and type(tensor) is Tensor and not tensor.is_conj() and not tensor.is_neg():
        head = bytes(buffer[: records["data/0"].start])
        view = (tensor.shape, tensor.stride(), tensor.storage_offset())
        known[kind, len(buffer)] = ArchiveLayout(head, tensor.dtype, numel, view)
    return tensor


def archived(tensor: Tensor) -> bytearray:
    """Archive a contiguous CPU tensor 40 times as fast as ``torch.save``; only the serialization id differs."""
    template, start, checksums = _template(tensor.dtype, tuple(tensor.shape))
    archive = bytearray(template)
    values = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    archive[start : start + len(values)] = values
    for place in checksums:
        struct.pack_into("<I", archive, place, zlib.crc32(values))
    return archive


@lru_cache(maxsize=1024)
def _template(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, int, tuple[int, int]]:
    """Return an archive of zeros, the offset of its values, and the two offsets where their checksum is stored."""
    buffer = io.BytesIO()
    torch.save(torch.zeros(shape, dtype=dtype, device="cpu"), buffer)
    archive = buffer.getvalue()
    data = next(record for record in records_of(buffer) if record.name.endswith("/data/0"))
    stop = data.start + data.length
    assert archive[stop : stop + 4] == b"PK\x07\x08", "torch.save's archive format has changed"
    return archive, data.start, (stop + 4, archive.rindex(data.name.encode()) - _ENTRY + 16)
