"""Read ``torch.save`` files as data: scanned first, and then loaded with torch's restricted unpickler."""

from __future__ import annotations

import collections
import io
import os
import pathlib
import pickle
import struct
import sys
import typing
import zipfile
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.pickles import Scan, UnsafeFileError
from lightning_zero.checkpoint.trees import bytes_of
from lightning_zero.engine import compat
from lightning_zero.io.sizes import in_bytes
from lightning_zero.io.untrusted import open_regular

_PLAIN_TYPES: dict[str, Any] = {
    f"builtins.{kind.__name__}": kind for kind in (bool, bytes, dict, float, int, list, str, tuple)
}
_PLAIN_TYPES |= {f"typing.{name}": getattr(typing, name) for name in "Any Dict List Optional Tuple Union".split()}
_PLAIN_TYPES |= {f"{module}.PosixPath": pathlib.PosixPath for module in ("pathlib", "pathlib._local")}  # Python 3.13
_PLAIN_TYPES |= {"collections.defaultdict": collections.defaultdict}
"""Types that OmegaConf's containers name. The scan permits no calls of them except those that make plain values."""

_BYTES, _TIMES = 2**26, 8
"""The tensors of a file may take eight times the file's size, as with views of one storage, and 64 MiB more."""


def load_torch(
    file: str | os.PathLike[str] | IO[bytes],
    *,
    weights_only: bool | None = None,
    mmap: bool = False,
    stand_in: Callable[[str], Any] = lambda _: None,
) -> Any:
    """Call ``torch.load`` with tensors on the CPU and, by default, only the classes that torch and the user allow.

    OmegaConf's containers are loaded as well, without resolving their interpolations.

    Args:
        file: a path, or a stream at its start.
        weights_only: ``False`` unpickles objects of any class; only for trusted files.
        mmap: see ``torch.load``; requires a path.
        stand_in: returns, for the dotted name of a class or function, an object to use in its place, or None.

    Raises:
        UnsafeFileError: if the file contains more than data, or takes far more memory or time than its size justifies.
        Exception: of various classes, if the file is damaged.
    """
    if weights_only is False:
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=False)
    is_stream = not isinstance(file, (str, os.PathLike))
    stream: IO[bytes] = file if is_stream else open_regular(file)  # type: ignore[assignment, arg-type]
    try:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        allowed = _allowed(_names_in(stream, size, stand_in), stand_in)
        stream.seek(0)
    finally:
        if not is_stream:
            stream.close()
    with torch.serialization.safe_globals(allowed):
        try:
            loaded = torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "weights_only" not in str(error):
                raise
            is_script = "TorchScript" in str(error)
        else:
            check_size(bytes_of(loaded), size)
            return loaded
    # torch's own message recommends options that would run the file's code, so it must not be this error's context.
    raise ValueError("it is a TorchScript archive" if is_script else "it is not a pickle of plain values")


def _scanned(pickled: bytes | IO[bytes], stand_in: Callable[[str], Any] = lambda _: None) -> Scan:
    default, _ = compat.allowed_globals()
    scan = Scan(default | _PLAIN_TYPES.keys())
    try:
        return scan.run(pickled)
    except ValueError:
        _allowed(scan.names, stand_in)  # raises if a name is not allowed, which explains the refusal best
        raise


def _names_in(stream: IO[bytes], size: int, stand_in: Callable[[str], Any]) -> set[str]:
    """Scan the pickles in a file, and return the names of classes and functions in them."""
    head = stream.read(4)
    stream.seek(0)
    if head == b"PK\x03\x04":
        reader = compat.PyTorchFileReader(stream)
        if sum(map(reader.get_record_size, reader.get_all_records())) > size:
            raise UnsafeFileError.of("its records are compressed, which torch.save does not do")
        return _scanned(reader.get_record("data.pkl"), stand_in).names
    # Before torch 1.6, a file began with a magic number, the version, properties of the system, and the values.
    scanned = _scanned(stream, stand_in)
    names = set(scanned.names)
    if scanned.value == torch.serialization.MAGIC_NUMBER:
        for _ in range(4):
            names |= _scanned(stream, stand_in).names
    return names


def _allowed(names: set[str], stand_in: Callable[[str], Any] = lambda _: None) -> list[Any]:
    """Return (object, name) for each of these names that neither torch nor the user allows yet."""
    default, users = compat.allowed_globals()
    found, unsafe = [], []
    for name in sorted(names - default - users):
        value = stand_in(name) or _PLAIN_TYPES.get(name) or _container(name)
        found.append((value, name))
        if value is None:
            unsafe.append(name[:100] if name.replace(".", "").isidentifier() else repr(name[:100]))
    if unsafe:
        raise UnsafeFileError.of(f"it contains {', '.join(unsafe[:3])}, which is not data")
    return found


def _container(name: str) -> Any:
    """Return OmegaConf's container or node of this dotted name; None if there is none."""
    module, _, kind = name.rpartition(".")
    if module.partition(".")[0] != "omegaconf":
        return None
    from omegaconf import base, dictconfig, listconfig, nodes

    found = vars(sys.modules.get(module, nodes)).get(kind)
    is_container = found in (dictconfig.DictConfig, listconfig.ListConfig, base.ContainerMetadata, base.Metadata)
    return found if is_container or (isinstance(found, type) and issubclass(found, nodes.ValueNode)) else None


def check_size(nbytes: int, size: int) -> None:
    """Refuse tensors whose copies would take far more memory or disk space than a file of this size justifies."""
    if nbytes > _BYTES + _TIMES * size:
        raise UnsafeFileError.of(f"its tensors would take {in_bytes(nbytes)}, but the file has only {in_bytes(size)}")


# -- archives ----------------------------------------------------------------------------------------------------------

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
    pickled = bytes(bytes_of("data.pkl"))
    _allowed(_scanned(pickled).names)  # raises if the pickle names more than data
    return compat.unpickle_weights(io.BytesIO(pickled), lambda key: bytes_of(f"data/{key}"))
