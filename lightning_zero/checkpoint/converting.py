"""A checkpoint of one form written as another, with everything in it."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zero.checkpoint.commit import Destination, new_label
from lightning_zero.checkpoint.exporting import memory_of, part_of, write_values
from lightning_zero.checkpoint.reading import OpenedCheckpoint
from lightning_zero.checkpoint.saving import by_name, content_of, save_in_parts, save_whole
from lightning_zero.engine.stored import StoredTensor
from lightning_zero.processes import CHECKPOINT_KEY

_ALIGNMENT = 64  # bytes; that of torch.save
_count = itertools.count()

NAMES = "optimizer_names"
"""Under our key in a file: the names of each optimizer's parameters, by which a folder keeps its state."""


def bytes_of(checkpoint: dict[str, Any]) -> int:
    """Of all tensors, of tied ones once."""
    tensors = {memory_of(leaf): leaf for leaf in tree_leaves(checkpoint) if isinstance(leaf, Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values())


def write_full(opened: OpenedCheckpoint, out: str, advance: Callable[[int], Any] = lambda _: None) -> None:
    """Write one ordinary Lightning file.

    ``torch.save`` takes tensors in memory. So stored ones are written one after another to a file without a name first,
    and saved from its mapping: the system keeps of that in memory what there is room for.

    Args:
        opened: of any form.
        out: replaced if it exists.
        advance: called with the bytes of stored tensors that were read.

    Raises:
        OSError: if it cannot be written; then everything is as before.
        DamagedCheckpointError: if some values cannot be read; likewise.
    """
    checkpoint = opened.checkpoint
    fs, place = url_to_fs(out)
    folder = os.path.dirname(place) if isinstance(fs, LocalFileSystem) else None
    if folder:
        os.makedirs(folder, exist_ok=True)
    stored = {id(leaf): leaf for leaf in tree_leaves(checkpoint) if isinstance(leaf, StoredTensor)}
    places = {}
    with tempfile.TemporaryFile(dir=folder) as file:
        for key, tensor in stored.items():
            places[key] = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
            write_values(file, tensor, advance)
        file.flush()
        size = os.fstat(file.fileno()).st_size
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
    # each a storage of its own, as torch.save writes whole storages; tied ones are one tensor
    mapped = {key: _at(mapping, places[key], tensor) for key, tensor in stored.items()}
    ready = tree_map_only(StoredTensor, lambda tensor: mapped[id(tensor)], checkpoint)
    if opened.names_of_optimizers and not _are_numbers(opened.names_of_optimizers):
        ready[CHECKPOINT_KEY] = {**ready.get(CHECKPOINT_KEY, {}), NAMES: opened.names_of_optimizers}
    save_whole(ready, Destination(out, new_label(next(_count))))


def _at(mapping: Any, place: int, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(mapping, dtype=like.dtype, count=like.numel(), offset=place).reshape(like.shape)


def write_sharded(opened: OpenedCheckpoint, out: str, advance: Callable[[int], Any] = lambda _: None) -> None:
    """Write a folder in the format of ``torch.distributed.checkpoint``.

    The optimizers' state is by the parameters' names there; where nobody knows them, by their numbers.

    Args:
        opened: of any form.
        out: replaced if it exists.
        advance: called with the bytes that were read.

    Raises:
        OSError: if it cannot be written; then everything is as before.
        DamagedCheckpointError: if some values cannot be read; likewise.
    """
    rest = dict(opened.checkpoint)
    tree: dict[str, Any] = {"state_dict": rest.pop("state_dict", {})}
    states = rest.pop("optimizer_states", [])
    ours = dict(rest.pop(CHECKPOINT_KEY, None) or {})
    names = ours.pop(NAMES, None) or opened.names_of_optimizers or [[]] * len(states)
    tree |= {f"optimizer_{i}": by_name(state, of_one) for i, (state, of_one) in enumerate(zip(states, names))}
    if "masters" in ours:
        tree[CHECKPOINT_KEY] = {"masters": ours.pop("masters")}
    if ours:
        rest[CHECKPOINT_KEY] = ours
    read = {}

    def noticed(tensor: Tensor) -> Tensor:
        key = memory_of(tensor)
        if key not in read:
            read[key] = _reported(tensor, advance)
        return read[key]

    content = content_of(tree_map_only(Tensor, noticed, tree), rest)
    save_in_parts(content, Destination(out, new_label(next(_count))), opened.written_by)


def _are_numbers(names: list[list[str]]) -> bool:
    """Whether nobody knew the parameters' names when the checkpoint was written."""
    return all(name.isdecimal() for of_one in names for name in of_one)


def _reported(tensor: Tensor, advance: Callable[[int], Any]) -> Tensor:
    """The same tensor, of which whatever is read is told."""

    def read(start: int, stop: int) -> Tensor:
        part = part_of(tensor, start, stop)
        advance(part.nbytes)
        return part

    return StoredTensor(getattr(tensor, "stored_name", ""), tensor.shape, tensor.dtype, read)


def with_prefix(opened: OpenedCheckpoint, prefix: str) -> OpenedCheckpoint:
    """The same with a prefix before the name of each parameter and buffer."""
    if not prefix:
        return opened

    def renamed(values: dict[str, Any]) -> dict[str, Any]:
        return {f"{prefix}{name}": value for name, value in values.items()}

    checkpoint = dict(opened.checkpoint)
    checkpoint["state_dict"] = renamed(checkpoint["state_dict"])
    ours = dict(checkpoint.get(CHECKPOINT_KEY) or {})
    if "masters" in ours:
        checkpoint[CHECKPOINT_KEY] = {**ours, "masters": renamed(ours["masters"])}
    names = opened.names_of_optimizers
    if names is not None:
        names = [[f"{prefix}{name}" for name in of_one] for of_one in names]
    return dataclasses.replace(opened, checkpoint=checkpoint, names_of_optimizers=names)
