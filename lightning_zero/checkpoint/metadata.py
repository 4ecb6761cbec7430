"""Read the metadata of ``torch.distributed.checkpoint`` (DCP) as data, and check that pieces cover each tensor once."""

from __future__ import annotations

import io
import itertools
import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from lightning_zero.checkpoint.checksums import NoCheckpointError
from lightning_zero.checkpoint.pickles import Scan, UnsafeFileError
from lightning_zero.engine import compat

_StorageInfo, _ = compat.dcp_internals()

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # in torch 2.1 and earlier, these classes were in this module
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.serialization": {"_get_layout"},
    "builtins": {"getattr"},  # Python 3.11.0 to 3.11.3 pickle enum members as calls of getattr
}
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}

_DIMENSIONS = 8  # maximum number of dimensions along which a tensor is divided: each one doubles the check's time
_CORNERS = 2**21  # maximum number of corners of all of a tensor's pieces that are compared


class _Record:
    """Stand-in for an object of one of DCP's classes. It stores the object's state, and runs no code of the class."""

    def __init__(self, *_: Any) -> None:
        pass


class _Properties(_Record):
    """Stand-in for ``TensorProperties``, whose state is a tuple."""

    dtype: Any

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._classes: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(vars(torch).get(name), torch.dtype)):
            return vars(torch)[name]  # both are immutable
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if name not in _CLASSES.get(module, ()) and not (module.split(".")[0] == "pathlib" and name in _PATHS):
            raise UnsafeFileError.of(f"it contains {module}.{name}, which is not data")
        if name not in self._classes:  # a new class, so that nothing in the file can change an existing class
            base = _Properties if name == "TensorProperties" else _Record
            self._classes[name] = type(name, (base,), {})
        return self._classes[name]


def load_dcp_metadata(data: bytes) -> dcp.Metadata:
    """Load a ``.metadata`` file, which says which pieces of tensors and which other values are in which file.

    Raises:
        UnsafeFileError: if the file contains more than metadata; nothing that it names is imported or called.
        NoCheckpointError: if the file is not metadata written by ``FileSystemWriter``.
        Exception: of various classes, if the file is damaged.
    """
    Scan().run(data)
    found = _Unpickler(data).load()
    if not _is(found, dcp.Metadata) or not isinstance(found.storage_data, dict):
        raise NoCheckpointError("it is not metadata written by DCP's FileSystemWriter")
    state: dict[str, Any] = {}
    for name, stored in found.state_dict_metadata.items():
        state[_text(name)] = dcp.BytesStorageMetadata() if _is(stored, dcp.BytesStorageMetadata) else _tensor(stored)
    storage = {}
    for index, place in found.storage_data.items():
        info = _StorageInfo(_text(place.relative_path), _integer(place.offset), _integer(place.length))
        info.transform_descriptors = getattr(place, "transform_descriptors", None)
        offset = getattr(index, "offset", None)
        storage[dcp.MetadataIndex(_text(index.fqn), None if offset is None else _size(offset))] = info
    save_id = getattr(getattr(found, "storage_meta", None), "save_id", None)
    return dcp.Metadata(state, _paths(found.planner_data), storage, dcp.StorageMeta(save_id=save_id))


def _is(value: Any, kind: type) -> bool:
    """Whether a stand-in stands for an object of this class."""
    return isinstance(value, _Record) and type(value).__name__ == kind.__name__


def _tensor(stored: Any) -> dcp.TensorStorageMetadata:
    dtype = stored.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: {type(dtype).__name__}")
    chunks = [dcp.ChunkStorageMetadata(_size(chunk.offsets), _size(chunk.sizes)) for chunk in stored.chunks]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), _size(stored.size), chunks)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"name: {type(value).__name__}")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise TypeError(f"a size or an offset is {value if type(value) is int else type(value).__name__}")
    return value


def _size(values: Iterable[Any]) -> torch.Size:
    return torch.Size(map(_integer, values))


def _paths(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    """Return each value's path, by its name. The lists that the paths describe may have a limited number of gaps."""
    lists: dict[tuple[str | int, ...], set[int]] = {}
    for name, path in (planner_data or {}).items():
        if not isinstance(path, tuple) or not 0 < len(path) < 100 or not {str, int}.issuperset(map(type, path)):
            raise TypeError(f"the path of {name} is not a tuple of keys")
        for length, key in enumerate(path):
            if isinstance(key, int):
                lists.setdefault(path[:length], set()).add(_integer(key))
    if sum(max(indices) - len(indices) for indices in lists.values()) > 2**16:
        raise ValueError("its lists have many gaps")
    return dict(planner_data or {})


def wrong_pieces(shape: Sequence[int], chunks: Sequence[dcp.ChunkStorageMetadata]) -> str | None:
    """Return what is wrong with a tensor's pieces, or None if each element of the tensor is in exactly one piece.

    If the corners of a box count alternately as +1 and -1, boxes tile a larger box exactly if their corners add up to
    those of the larger box at each point. Only dimensions in which a piece is not whole need to be compared.
    """
    for chunk in chunks:
        fits = len(chunk.offsets) == len(chunk.sizes) == len(shape)
        if not fits or any(first + size > whole for first, size, whole in zip(chunk.offsets, chunk.sizes, shape)):
            return f"has a piece of shape {tuple(chunk.sizes)} at {tuple(chunk.offsets)}, outside of {tuple(shape)}"
    numel, covered = prod(shape), sum(prod(chunk.sizes) for chunk in chunks)
    if covered < numel:
        return f"lacks {numel - covered} of its {numel} elements"
    divided = [dim for dim, whole in enumerate(shape) if any(chunk.sizes[dim] != whole for chunk in chunks)]
    if covered > numel or len(divided) > _DIMENSIONS or len(chunks) << len(divided) > _CORNERS:
        return f"has {len(chunks)} pieces with {covered} elements in place of {numel}"
    if not numel:
        return None
    corners: Counter[tuple[int, ...]] = Counter()
    boxes = [(chunk.offsets, chunk.sizes, 1) for chunk in chunks] + [((0,) * len(shape), shape, -1)]
    for offsets, sizes, sign in boxes:
        for ends in itertools.product((0, 1), repeat=len(divided)):
            corner = tuple(offsets[dim] + end * sizes[dim] for dim, end in zip(divided, ends))
            corners[corner] += -sign if sum(ends) % 2 else sign
    return "has pieces that overlap" if any(corners.values()) else None
