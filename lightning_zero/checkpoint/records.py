"""Parse archives of ``torch.save``: the offsets and checksums of records, and the tensor in a small archive."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.restricted import load_torch
from lightning_zero.engine.compat import dtype_by_storage_name

_LOCAL_HEADER = 30
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END, _END_64, _LOCATOR_64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_FOLDER = 0x10
"""Attribute bit of directories; torch treats such a record as empty."""

_SEE_EXTRA = 0xFFFFFFFF


class BrokenArchiveError(ValueError):
    """The bytes are not a complete archive of ``torch.save``."""


class Record(NamedTuple):
    """An uncompressed record of an archive.

    Attributes:
        start, length: bytes in the archive.
        crc32: of these bytes; None in an archive without checksums (``torch.serialization.set_crc32_options``).
        entry: offset of the record's entry in the archive's central directory.
    """

    name: str
    start: int
    length: int
    crc32: int | None
    entry: int


def records_of(archive: IO[bytes]) -> list[Record]:
    """List the records of a zip archive written by torch.save: uncompressed, without a comment at the end.

    Not by ``zipfile``, which takes three times as long: a checkpoint has an archive for each piece of a tensor.

    Raises:
        BrokenArchiveError: if the bytes are not a complete archive.
    """
    try:
        return _records(archive)
    except (struct.error, OSError, UnicodeDecodeError) as error:
        raise BrokenArchiveError("its directory of records is not at its end") from error


def ends_as_archive(file: IO[bytes]) -> bool:
    """Whether the file ends like a zip archive."""
    file.seek(0, io.SEEK_END)
    file.seek(-min(file.tell(), _END.size), io.SEEK_END)
    return file.read(4) == b"PK\x05\x06"


def _records(archive: IO[bytes]) -> list[Record]:
    end = archive.seek(-_END.size, io.SEEK_END)
    signature, _, _, _, count, nbytes, start, _ = _END.unpack(archive.read(_END.size))
    if signature != b"PK\x05\x06":
        raise BrokenArchiveError("its directory of records is not at its end")
    if end >= _LOCATOR_64.size:
        archive.seek(end - _LOCATOR_64.size)
        signature, _, end_64, _ = _LOCATOR_64.unpack(archive.read(_LOCATOR_64.size))
        if signature == b"PK\x06\x07":
            archive.seek(end_64)
            *_, count, nbytes, start = _END_64.unpack(archive.read(_END_64.size))
    if start + nbytes > end:
        raise BrokenArchiveError("its directory of records is not where its end has it")
    archive.seek(start)
    directory = archive.read(nbytes)
    found, position = [], 0
    for _ in range(count):
        (
            signature,
            _,
            _,
            _,
            method,
            _,
            _,
            crc32,
            packed,
            length,
            of_name,
            of_extra,
            of_comment,
            *_,
            attributes,
            header,
        ) = _ENTRY.unpack_from(directory, position)
        entry = start + position
        position += _ENTRY.size
        encoded = directory[position : position + of_name]
        name = encoded.decode()
        extra = directory[position + of_name : position + of_name + of_extra]
        position += of_name + of_extra + of_comment
        if _SEE_EXTRA in (packed, length, header):
            length, packed, header = _large(extra, length, packed, header)
        archive.seek(header)
        local = archive.read(_LOCAL_HEADER + of_name)
        lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        begin = header + _LOCAL_HEADER + lengths
        is_record = signature == b"PK\x01\x02" and local[:4] == b"PK\x03\x04" and not method and packed == length
        if not is_record or local[_LOCAL_HEADER:] != encoded or begin + length > start or attributes & _FOLDER:
            raise BrokenArchiveError(f"record {name} is not where the directory has it")
        found.append(Record(name, begin, length, crc32, entry))
    if not any(record.crc32 for record in found):
        return [record._replace(crc32=None) for record in found]
    return found


def _large(extra: bytes, *values: int) -> tuple[int, ...]:
    """Read those of the values that are stored with 64 bits, consecutively, in the entry's extra field."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            return tuple(next(numbers, value) if value == _SEE_EXTRA else value for value in values)
        position += 4 + length
    return values


def read_checked(archive: IO[bytes], record: Record) -> bytes:
    """Read a record and verify its checksum.

    Raises:
        BrokenArchiveError: if the checksum differs.
    """
    archive.seek(record.start)
    data = archive.read(record.length)
    if record.crc32 is not None and zlib.crc32(data) != record.crc32:
        raise BrokenArchiveError(f"the checksum of record {record.name} does not match")
    return data


class BufferFile(io.RawIOBase):
    """Read-only binary stream over a buffer; only the bytes that are read are copied."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer, self._position = buffer, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._buffer)}[whence]
        if base + offset < 0:
            raise OSError("negative")
        self._position = base + offset
        return self._position

    def readinto(self, target: Any) -> int:
        part = self._buffer[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)


@dataclass
class _Storage:
    key: str
    dtype: torch.dtype


class _Description(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _describe(storage: _Storage, offset: int, shape: Any, strides: Any, *_: Any) -> _Description:
    return _Description(storage, offset, tuple(shape), tuple(strides))


class _NotPlain(Exception):
    """The archive does not contain exactly one plain tensor."""


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _describe
        if (module, name) == ("collections", "OrderedDict"):
            return dict  # backward hooks, always empty
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise _NotPlain

    def persistent_load(self, reference: Any) -> _Storage:
        _, dtype, key, _, _ = reference
        if not isinstance(dtype, torch.dtype):
            raise _NotPlain  # an UntypedStorage, used for dtypes without a storage class
        return _Storage(key, dtype)


_DTYPES = dtype_by_storage_name()


class Plain(NamedTuple):
    """Layout of an archive with one plain tensor; an archive of equal length and ``head`` differs in its values alone.

    Attributes:
        head: all bytes before the values.
        numel: of the storage.
    """

    head: bytes
    dtype: torch.dtype
    numel: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def tensor_in(buffer: memoryview, known: dict[Any, Plain], kind: Any) -> Tensor:
    """Load the only tensor of a ``torch.save`` archive; a plain one becomes a view of the buffer.

    The tensor must not be modified. Its address depends on the buffer's and is usually not aligned.

    Args:
        known: cache of layouts; the archive's layout is added.
        kind: cache key: tensors with the same shape and dtype are likely to have archives of the same layout.
    """
    plain = known.get((kind, len(buffer)))
    if plain is None or bytes(buffer[: len(plain.head)]) != plain.head:
        plain = _plain_in(buffer)
        if plain is None:
            return load_torch(io.BytesIO(buffer))
        known[kind, len(buffer)] = plain
    if plain.numel == 0:
        return torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
    flat = torch.frombuffer(buffer, dtype=plain.dtype, count=plain.numel, offset=len(plain.head))
    return flat.as_strided(plain.shape, plain.strides, plain.offset)


def _plain_in(buffer: memoryview) -> Plain | None:
    archive = BufferFile(buffer)
    try:
        records = {record.name.split("/", 1)[-1]: record for record in records_of(archive)}  # type: ignore[arg-type]
        pickled = records["data.pkl"]
        found = _TensorUnpickler(io.BytesIO(buffer[pickled.start : pickled.start + pickled.length])).load()
        if not isinstance(found, _Description):
            return None
        data, order = records[f"data/{found.storage.key}"], records.get("byteorder")
        if order is not None and bytes(buffer[order.start : order.start + order.length]) != sys.byteorder.encode():
            return None
    except _NotPlain:
        return None
    dtype = found.storage.dtype
    head, numel = bytes(buffer[: data.start]), data.length // dtype.itemsize
    return Plain(head, dtype, numel, found.offset, found.shape, found.strides)
