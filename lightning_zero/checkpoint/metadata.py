"""Read the metadata of ``torch.distributed.checkpoint`` (DCP) as data, and check that pieces cover each tensor once."""

from __future__ import annotations

import io
import pickle
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from lightning_zero.checkpoint.checksums import NoCheckpointError
from lightning_zero.checkpoint.pickles import UnsafeFileError, scan

_MODULES = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",  # torch 2.1 and earlier
    "torch.serialization",
    "pathlib",
    "pathlib._local",  # Python 3.13
}


class _Record:
    """Stand-in for an object of one of DCP's classes. It stores the object's state, and runs no code of the class."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # that of TensorProperties
            state = {"dtype": state[0]}
        self.__dict__.update(state)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._classes: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(vars(torch).get(name), torch.dtype)):
            return vars(torch)[name]  # both are immutable
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        # Python 3.11.0 to 3.11.3 pickle enum members as calls of getattr
        if module not in _MODULES and (module, name) != ("builtins", "getattr"):
            raise UnsafeFileError.of(f"it contains {module}.{name}, which is not data")
        # a new class, so that nothing in the file can change an existing class
        return self._classes.setdefault(name, type(name, (_Record,), {}))


def load_dcp_metadata(data: bytes) -> Any:
    """Load a ``.metadata`` file, which says which pieces of tensors and which other values are in which file.

    Returns:
        An object with the attributes of DCP's ``Metadata``.

    Raises:
        UnsafeFileError: if the file contains more than metadata; nothing that it names is imported or called.
        NoCheckpointError: if the file is not metadata written by ``FileSystemWriter``.
        Exception: of various classes, if the file is damaged.
    """
    scan(io.BytesIO(data), (), set())
    found = _Unpickler(data).load()
    if not is_one("Metadata", found) or not isinstance(found.storage_data, dict):
        raise NoCheckpointError("it is not metadata written by DCP's FileSystemWriter")
    _check_paths(found.planner_data)
    return found


def is_one(kind: str, value: Any) -> bool:
    """Whether a value stands for an object of the class with this name."""
    return isinstance(value, _Record) and type(value).__name__ == kind


def _check_paths(planner_data: Any) -> None:
    """Check the paths of the values by name. The lists that they describe may have a limited number of gaps."""
    lists: dict[tuple[str | int, ...], set[int]] = {}
    for name, path in (planner_data or {}).items():
        if not isinstance(path, tuple) or not 0 < len(path) < 100 or not {str, int}.issuperset(map(type, path)):
            raise TypeError(f"the path of {name} is not a tuple of keys")
        for length, key in enumerate(path):
            if isinstance(key, int):
                lists.setdefault(path[:length], set()).add(key)
    if sum(max(indices) - len(indices) for indices in lists.values()) > 2**16:
        raise ValueError("its lists have many gaps")


def wrong_pieces(shape: Sequence[int], chunks: Sequence[Any]) -> str | None:
    """Return what is wrong with a tensor's pieces, or None if each element of the tensor is in exactly one piece.

    A random number is drawn for each coordinate of a dimension. The volume of a box is the product of the differences
    between its ends, so the volumes of boxes that tile a larger box add up to its volume. Other boxes do so only by
    chance, with a probability of about 2**-64.
    """
    for chunk in chunks:
        fits = len(chunk.offsets) == len(chunk.sizes) == len(shape)
        if not fits or any(
            min(first, size) < 0 or first + size > whole
            for first, size, whole in zip(chunk.offsets, chunk.sizes, shape)
        ):
            return f"has a piece of shape {tuple(chunk.sizes)} at {tuple(chunk.offsets)}, outside of {tuple(shape)}"
    lacking = prod(shape) - sum(prod(chunk.sizes) for chunk in chunks)
    if lacking > 0:
        return f"lacks {lacking} of its {prod(shape)} elements"
    draw = random.Random()  # a generator of its own: the run's random numbers must not change
    places: list[dict[int, int]] = [defaultdict(lambda: draw.getrandbits(64)) for _ in shape]

    def volume(offsets: Iterable[int], sizes: Iterable[int]) -> int:
        return prod(place[first + size] - place[first] for place, first, size in zip(places, offsets, sizes))

    covered = sum(volume(chunk.offsets, chunk.sizes) for chunk in chunks)
    is_tiled = lacking == 0 and covered == volume((0,) * len(shape), shape)
    return None if is_tiled else "has pieces that overlap"
