"""Read ``torch.save`` files as data, with torch's restricted unpickler."""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import sys
import typing
from collections.abc import Callable
from typing import IO, Any

import torch

from lightning_zero.checkpoint.checksums import BrokenArchiveError, records_of
from lightning_zero.checkpoint.files import Files
from lightning_zero.checkpoint.pickles import UnsafeFileError, scan
from lightning_zero.checkpoint.trees import bytes_of
from lightning_zero.engine import compat
from lightning_zero.io.text import in_bytes

_PLAIN_TYPES: dict[str, Any] = {
    f"builtins.{kind.__name__}": kind for kind in (bool, bytes, dict, float, int, list, str, tuple)
}
_PLAIN_TYPES |= {f"typing.{name}": getattr(typing, name) for name in "Any Dict List Optional Tuple Union".split()}
_PLAIN_TYPES |= {f"{module}.PosixPath": pathlib.PosixPath for module in ("pathlib", "pathlib._local")}  # Python 3.13
_PLAIN_TYPES |= {"collections.defaultdict": collections.defaultdict}
"""Types that OmegaConf's containers name. No calls of them are permitted except those that make plain values."""

_BYTES, _TIMES = 2**26, 8
"""The tensors of a file may take eight times the file's size, as with views of one storage, and 64 MiB more."""


def load_torch(
    source: Files | bytes | memoryview,
    *,
    weights_only: bool | None = None,
    stand_in: Callable[[str], Any] = lambda _: None,
) -> Any:
    """Load a ``torch.save`` file with tensors on the CPU and, by default, only classes that torch and the user allow.

    Tensors are views of the source: of the memory-mapped file if the source is a local file. OmegaConf's containers are
    loaded as well, without resolving their interpolations.

    Args:
        source: a file, or its bytes.
        weights_only: ``False`` unpickles objects of any class; only for trusted files.
        stand_in: returns, for the dotted name of a class or function, an object to use in its place, or None.

    Raises:
        UnsafeFileError: if the file contains more than data, or takes far more memory or time than its size justifies.
        Exception: of various classes, if the file is damaged.
    """
    data = source.all() if isinstance(source, Files) else memoryview(source)
    is_archive = data[:4] == b"PK\x03\x04"
    with source.open() if isinstance(source, Files) else io.BytesIO(data) as stream:
        if weights_only is False:
            path = source.root if isinstance(source, Files) and source.is_local else None
            is_mapped = is_archive and path is not None
            return torch.load(path or stream, map_location="cpu", mmap=is_mapped, weights_only=False)
        try:
            loaded = _load_archive(stream, data, stand_in) if is_archive else _load_older(stream, stand_in)
        except pickle.UnpicklingError:
            pass  # torch's message recommends options that would run the file's code, so it must not be shown
        else:
            check_size(bytes_of(loaded), len(data))
            return loaded
    raise ValueError("it is not a pickle of plain values")


def _load_archive(stream: IO[bytes], data: memoryview, stand_in: Callable[[str], Any]) -> Any:
    """Load an archive with tensors that are views of it; ``torch.load`` would copy them, or reserve memory for them."""
    records = {record.holds[0].partition("/")[2]: record for record in records_of(stream)}

    def part(name: str) -> memoryview:
        if name not in records:
            raise BrokenArchiveError(f"record {name} is missing")
        return data[records[name].start :][: records[name].length]

    if "constants.pkl" in records:
        raise ValueError("it is a TorchScript archive")
    pickled = io.BytesIO(part("data.pkl"))
    with torch.serialization.safe_globals(_allowed_in(pickled, 1, stand_in)):
        if "byteorder" in records and bytes(part("byteorder")) != sys.byteorder.encode():
            stream.seek(0)
            return torch.load(stream, map_location="cpu", weights_only=True)
        return compat.unpickle_weights(pickled, lambda key: part(f"data/{key}"))


def _load_older(stream: IO[bytes], stand_in: Callable[[str], Any]) -> Any:
    """Load a file of torch before 1.6: pickles of a magic number, the version, the system, the values and the keys."""
    with torch.serialization.safe_globals(_allowed_in(stream, 5, stand_in)):
        return torch.load(stream, map_location="cpu", weights_only=True)


def _allowed_in(stream: IO[bytes], count: int, stand_in: Callable[[str], Any]) -> list[Any]:
    """Check the pickles that a stream begins with, and return what to allow for them; see ``_allowed``."""
    default, _ = compat.allowed_globals()
    names: set[str] = set()
    try:
        for _ in range(count):
            scan(stream, default | _PLAIN_TYPES.keys(), names)
    except ValueError:
        _allowed(names, stand_in)  # raises if a name is not allowed, which explains the refusal best
        raise
    stream.seek(0)
    return _allowed(names, stand_in)


def _allowed(names: set[str], stand_in: Callable[[str], Any]) -> list[Any]:
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
