"""Fingerprints of training data: hashes that show whether data have changed. Large data are read only in part."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import IterableDataset

MOST_BYTES = 2**30  # maximum number of bytes read from files
MOST_SAMPLES = 2_000  # maximum number of samples read from a dataset
SAMPLE_BYTES = 2**26  # fewer samples are read, but at least ``LEAST_SAMPLES``, if they would exceed this
LEAST_SAMPLES = 16
_BLOCK = 2**20


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
    digest = hashlib.blake2b(digest_size=16)
    for (name, file), size in zip(found, sizes):
        _update(digest, (name.encode(), size.to_bytes(8, "little")))
        left = most
        with file.open("rb") as stream:
            while block := stream.read(min(_BLOCK, left)):
                left -= _update(digest, (block,))
    method = "BLAKE2b of file names, sizes and contents"
    return {"fingerprint": digest.hexdigest(), "method": method, "files": len(found), "bytes": sum(sizes)}


def fingerprint_of_datasets(datasets: Sequence[Any]) -> dict[str, Any]:
    """Fingerprint datasets by their lengths and by evenly spread samples, as ``dataset[index]`` returns them.

    As transforms may be random, the generators of Python, NumPy and torch are seeded before reading, and their states
    are restored afterwards. ``fingerprint`` is None if a dataset cannot be indexed.
    """
    digest, length = hashlib.blake2b(digest_size=16), 0
    for dataset in datasets:
        has_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not has_index:
            why = f"{type(dataset).__name__} cannot be indexed: pass its files as RunManifest(data=[...])"
            return {"fingerprint": None, "method": why}
        _update(digest, (len(dataset).to_bytes(8, "little"),))
        length += len(dataset)
        with isolate_rng():
            torch.manual_seed(0)
            np.random.seed(0)
            random.seed(0)
            # the first sample's size determines how many samples are read
            size = _update(digest, _parts_of(dataset[0])) if len(dataset) else 1
            count = min(len(dataset), max(LEAST_SAMPLES, min(MOST_SAMPLES, SAMPLE_BYTES // size)))
            for index in range(1, count):
                _update(digest, _parts_of(dataset[index * len(dataset) // count]))
    method = "BLAKE2b of evenly spread samples and the number of samples"
    return {"fingerprint": digest.hexdigest(), "method": method, "samples": length}


def _update(digest: Any, parts: Iterable[bytes]) -> int:
    """Add parts to a hash, each with its length, so that "ab", "c" differ from "a", "bc"; return their total length."""
    total = 0
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
        total += len(part)
    return total


def _parts_of(value: Any) -> Iterator[bytes]:
    """Yield a sample's structure, types, shapes and values."""
    yield type(value).__name__.encode()
    if isinstance(value, Tensor):
        yield str((value.dtype, tuple(value.shape))).encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif hasattr(value, "__array_interface__") and np.asarray(value).dtype != object:  # of NumPy or PIL
        array = np.asarray(value)
        yield str((array.dtype, array.shape)).encode()
        yield array.tobytes()
    elif isinstance(value, (Mapping, list, tuple)) or is_dataclass(value):
        if is_dataclass(value):
            value = [getattr(value, field.name) for field in fields(value)]
        elif isinstance(value, Mapping):
            value = [part for key in sorted(value, key=str) for part in (key, value[key])]
        yield str(len(value)).encode()
        for each in value:
            yield from _parts_of(each)
    else:
        yield value if isinstance(value, bytes) else pickle.dumps(value, protocol=4)
