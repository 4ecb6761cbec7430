"""Convert checkpoints between the full and the sharded form, with all of their contents."""

from __future__ import annotations

import copy
import dataclasses
import mmap
import os
import tempfile
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.exporting import write_values
from lightning_zero.checkpoint.form import CHECKPOINT_KEY, NAMES
from lightning_zero.checkpoint.reading import OpenedCheckpoint, by_number, names_by_number
from lightning_zero.checkpoint.saving import by_name, content_of, write_file, write_folder
from lightning_zero.checkpoint.trees import own_versions, renamed, with_versions
from lightning_zero.engine import LazyTensor, as_made_of_tensors, compat, sharded_tree

_ALIGNMENT = 64  # bytes, as in torch.save


def write_full(opened: OpenedCheckpoint, out: str) -> None:
    """Write a full checkpoint: one ordinary Lightning file.

    ``torch.save`` needs tensors in memory. Tensors that are still on disk are therefore copied one by one to an unnamed
    temporary file, and saved from a memory mapping of this file, whose pages the system can evict.
    """
    checkpoint, names = _whole(opened)
    fs, place = url_to_fs(out)
    folder = os.path.dirname(place) if isinstance(fs, LocalFileSystem) else None
    if folder:
        os.makedirs(folder, exist_ok=True)
    stored = {id(leaf): leaf for leaf in compat.tree_leaves(checkpoint) if isinstance(leaf, LazyTensor)}
    places = {}
    with tempfile.TemporaryFile(dir=folder) as file:
        for key, tensor in stored.items():
            places[key] = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
            write_values(file, tensor)
        file.flush()
        size = os.fstat(file.fileno()).st_size
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
    # Each tensor gets a storage of its own, since torch.save writes entire storages. Tied names share one tensor.
    mapped = {key: _at(mapping, places[key], tensor) for key, tensor in stored.items()}
    ready = sharded_tree.walk(checkpoint, lambda tensor: mapped[id(tensor)], lambda leaf: isinstance(leaf, LazyTensor))
    ready = as_made_of_tensors(ready)
    if any(not name.isdecimal() for of_one in names.values() for name in of_one):  # numbers stand for unknown names
        ready[CHECKPOINT_KEY] = {**ready.get(CHECKPOINT_KEY, {}), NAMES: names}
    write_file(ready, Destination(out))


def _at(mapping: Any, place: int, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return torch.frombuffer(mapping, dtype=like.dtype, count=like.numel(), offset=place).reshape(like.shape)


def write_sharded(opened: OpenedCheckpoint, out: str) -> None:
    """Write a sharded checkpoint: a folder in the format of ``torch.distributed.checkpoint``.

    Optimizer states are keyed by parameter name or, where names are unknown, by parameter number.
    """
    checkpoint, names = _whole(opened)
    ours = dict(checkpoint.pop(CHECKPOINT_KEY, None) or {})
    names = ours.pop(NAMES, names)
    rest, tree = {}, {}
    for key, value in checkpoint.items():
        if key == "optimizer_states" and _is_lightnings(opened) and any(value):
            for number, state in enumerate(value):
                tree[f"optimizer_{number}"] = by_name(state, names.get(f"optimizer_{number}", []))
        elif _is_optimizers(value):
            tree[key] = by_name(value, names.get(key, []))
        elif key == "state_dict" and value or not _is_lightnings(opened) and _has_tensors(value):
            tree[key] = value
        else:
            rest[key] = value
    if "masters" in ours:
        tree[CHECKPOINT_KEY] = {"masters": ours.pop("masters")}
    if ours:
        rest[CHECKPOINT_KEY] = ours
    content = content_of(with_versions(tree, own_versions(checkpoint)), rest)
    write_folder(content, Destination(out), opened.written_by)


def _whole(opened: OpenedCheckpoint) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the contents in full form, and the parameter names by the optimizer's key in the sharded form.

    A Trainer's checkpoint, whatever its strategy, becomes the dictionary of an ordinary Trainer file. Other
    checkpoints, such as Fabric's, keep their own keys.
    """
    if _is_lightnings(opened):
        of_all = opened.names_of_optimizers or []
        return dict(opened.checkpoint), {f"optimizer_{number}": of_one for number, of_one in enumerate(of_all)}
    checkpoint, names = copy.copy(opened.as_saved), {}
    for key, value in checkpoint.items():
        if _is_optimizers(value):
            of_one = names_by_number(value)
            if all(isinstance(name, str) for name in of_one):
                checkpoint[key], names[key] = by_number(value), of_one
    return checkpoint, names


def _is_lightnings(opened: OpenedCheckpoint) -> bool:
    return "state_dict" in opened.as_saved or "pytorch-lightning_version" in opened.as_saved


def _is_optimizers(value: Any) -> bool:
    return isinstance(value, dict) and {"state", "param_groups"} <= value.keys()


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in compat.tree_leaves(value))


def with_prefix(opened: OpenedCheckpoint, prefix: str) -> OpenedCheckpoint:
    """Prepend a prefix, with or without its final dot, to all parameter and buffer names of a Trainer checkpoint."""
    prefix = f"{prefix.removesuffix('.')}." if prefix else ""

    def with_it(name: str) -> str:
        return f"{prefix}{name}"

    checkpoint = dict(opened.checkpoint)
    checkpoint["state_dict"] = renamed(checkpoint["state_dict"], with_it)
    ours = dict(checkpoint.get(CHECKPOINT_KEY) or {})
    if "masters" in ours:
        checkpoint[CHECKPOINT_KEY] = {**ours, "masters": renamed(ours["masters"], with_it)}
    names = opened.names_of_optimizers
    if names is not None:
        names = [list(map(with_it, of_one)) for of_one in names]
    return dataclasses.replace(opened, checkpoint=checkpoint, as_saved=checkpoint, names_of_optimizers=names)


def with_lightnings_entries(checkpoint: dict[str, Any], *, steps: int = 0) -> dict[str, Any]:
    """Add missing entries that a Trainer and other readers of Lightning checkpoints need."""
    from lightning import __version__

    entries = {"pytorch-lightning_version": __version__, "epoch": 0, "global_step": steps, "lr_schedulers": []}
    return {**entries, **checkpoint}
