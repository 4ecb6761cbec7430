"""Fingerprints of training data: hashes that show whether data have changed. Large data are read only in part."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_zero.engine import compat

MOST_BYTES = 2**30
"""Maximum number of bytes read from files."""
MOST_SAMPLES = 2_000
"""Maximum number of samples read from a dataset. Fewer are read if this many samples would exceed ``SAMPLE_BYTES``."""
LEAST_SAMPLES = 16
SAMPLE_BYTES = 2**26
_BLOCK = 2**20


class _Hash:
    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self.nbytes = 0

    def add(self, *parts: bytes) -> None:
        for part in parts:
            self.digest.update(len(part).to_bytes(8, "little"))  # so that ("ab", "c") differs from ("a", "bc")
            self.digest.update(part)
            self.nbytes += len(part)


def fingerprint_of_files(paths: Iterable[str | Path]) -> dict[str, Any]:
    """Fingerprint files, including all files in folders, by relative path, size and content.

    Beyond ``MOST_BYTES`` in total, only the beginning of large files is read.

    Raises:
        FileNotFoundError: if a path does not exist.
    """
    found: list[tuple[str, Path]] = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"data={path} is neither a file nor a folder")
        folder, files = (path, path.rglob("*")) if path.is_dir() else (path.parent, [path])
        found += [(file.relative_to(folder).as_posix(), file) for file in files if file.is_file()]
    found.sort(key=lambda each: each[0])
    sizes = [file.stat().st_size for _, file in found]
    most = MOST_BYTES if sum(sizes) <= MOST_BYTES else MOST_BYTES // len(found)
    state, read = _Hash(), 0
    for (name, file), size in zip(found, sizes):
        state.add(name.encode(), size.to_bytes(8, "little"))
        left = most
        with file.open("rb") as stream:
            while block := stream.read(min(_BLOCK, left)):
                state.add(block)
                left -= len(block)
        read += most - left
    return {
        "fingerprint": state.digest.hexdigest(),
        "method": "BLAKE2b of file names, sizes and contents",
        "files": len(found),
        "bytes": sum(sizes),
        "bytes_read": read,
    }


def fingerprint_of_datasets(datasets: Sequence[Any]) -> dict[str, Any]:
    """Fingerprint datasets by their lengths and by evenly spread samples, as ``dataset[index]`` returns them.

    As transforms may be random, the generators of Python, NumPy and torch are seeded before reading, and their states
    are restored afterwards. ``fingerprint`` is None if a dataset cannot be indexed.
    """
    state, read, length = _Hash(), 0, 0
    for dataset in datasets:
        has_samples = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not has_samples:
            why = f"{type(dataset).__name__} cannot be indexed: pass its files as RunManifest(data=[...])"
            return {"fingerprint": None, "method": why}
        state.add(len(dataset).to_bytes(8, "little"))
        length += len(dataset)
        with isolate_rng():
            torch.manual_seed(0)
            np.random.seed(0)
            random.seed(0)
            before = state.nbytes
            if len(dataset):
                _add(state, dataset[0])  # this sample's size determines how many samples are read
            most = max(LEAST_SAMPLES, min(MOST_SAMPLES, SAMPLE_BYTES // max(1, state.nbytes - before)))
            count = min(len(dataset), most)
            for index in range(1, count):
                _add(state, dataset[index * len(dataset) // count])
            read += count
    return {
        "fingerprint": state.digest.hexdigest(),
        "method": "BLAKE2b of evenly spread samples and the number of samples",
        "samples": length,
        "samples_read": read,
    }


def datasets_of(loaders: Any) -> list[Any]:
    """Return the datasets of a loader or collection of loaders; a loader without a ``dataset`` counts as a dataset."""
    return [getattr(loader, "dataset", loader) for loader in compat.tree_leaves(loaders)]


def _add(state: _Hash, value: Any) -> None:
    """Add a sample's values, structure, types and shapes to a hash."""
    state.add(type(value).__name__.encode())
    if isinstance(value, Tensor):
        state.add(str((value.dtype, tuple(value.shape))).encode())
        state.add(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        state.add(str((value.dtype, value.shape)).encode(), value.tobytes())
    elif isinstance(value, Mapping):
        state.add(str(len(value)).encode())
        for key in sorted(value, key=str):
            _add(state, key)
            _add(state, value[key])
    elif isinstance(value, (list, tuple)):
        state.add(str(len(value)).encode())
        for each in value:
            _add(state, each)
    elif is_dataclass(value):
        for field in fields(value):
            _add(state, getattr(value, field.name))
    elif hasattr(value, "__array_interface__"):  # PIL images
        _add(state, np.asarray(value))
    else:
        state.add(value if isinstance(value, bytes) else pickle.dumps(value, protocol=4))
