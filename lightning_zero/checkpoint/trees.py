"""Divide the contents of a checkpoint into what DCP can store and what it cannot, and put them together again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.checksums import NoCheckpointError
from lightning_zero.checkpoint.form import CHECKPOINT_KEY
from lightning_zero.engine.compat import FakeTensor, nbytes_of, tree_leaves
from lightning_zero.engine.tensor import sharded_tree
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.wrapper import WrapperTensor


def split(value: Any) -> tuple[Any, Any]:
    """Split nested dicts and lists into a tree without sharded tensors, and one of sharded tensors only (or None)."""
    if isinstance(value, WrapperTensor):
        return None, value
    if isinstance(value, (dict, list, tuple)):
        parts = {key: split(item) for key, item in (value.items() if isinstance(value, dict) else enumerate(value))}
        sharded = {key: tensor for key, (_, tensor) in parts.items() if tensor is not None}
        if sharded:
            hollow = {key: left for key, (left, _) in parts.items()}
            return (hollow if isinstance(value, dict) else list(hollow.values())), sharded
    return value, None


def expressible(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a tree that DCP can flatten, and the containers that DCP cannot restore, with None in place of leaves.

    These containers are empty or have keys that are not strings, as in ``get_extra_state`` or optimizers' groups.
    """

    def walk(value: Any) -> tuple[Any, Any, bool]:
        if not isinstance(value, (dict, list, tuple)):
            return value, None, False
        parts = [walk(item) for item in (value.values() if isinstance(value, dict) else value)]
        is_odd = not parts or any(odd for *_, odd in parts)
        items, hollow = [item for item, *_ in parts], [item for _, item, _ in parts]
        if isinstance(value, dict):
            is_odd = is_odd or not all(isinstance(key, str) for key in value)
            return dict(zip(value, items)), dict(zip(value, hollow)), is_odd
        # DCP would store a tuple as one object, so a tuple with sharded tensors becomes a list.
        is_list = isinstance(value, list) or any(isinstance(leaf, WrapperTensor) for leaf in tree_leaves(items))
        return items if is_list else value, hollow, is_odd

    plain: dict[str, Any] = {}
    containers: dict[str, Any] = {}
    for key, values in tree.items():
        if not isinstance(values, dict):
            plain[key], hollow, is_odd = walk(values)
            if is_odd:
                containers[key] = hollow
            continue
        for name, value in values.items():
            plain.setdefault(key, {})[name], hollow, is_odd = walk(value)
            if is_odd:
                containers.setdefault(key, {})[name] = hollow
    return {key: plain.get(key, {}) for key in tree}, containers


def flattened(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return a tree's leaves and their paths by DCP's dotted names, like ``flatten_state_dict`` of DCP.

    Only dicts, and lists with dicts or tensors, are flattened. DCP also flattens other mappings, which would then lose
    their class; OmegaConf's would be resolved.

    Raises:
        ValueError: if two leaves have the same name.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for path, leaf in _leaves(tree):
        name = ".".join(map(str, path))
        if name in leaves:
            raise ValueError(
                f"Two values in this sharded checkpoint have the name {name!r}: rename one of the keys, or write "
                "ZeroStrategy(checkpoint='full')."
            )
        leaves[name], paths[name] = leaf, path
    return leaves, paths


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, list) and _is_flattened(value):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, number))
    else:
        yield path, value


def _is_flattened(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_flattened, value))
    return isinstance(value, (dict, Tensor))


def check_structure(path: str, checkpoint: Mapping[str, Any]) -> None:
    """Refuse OmegaConf's containers in place of dicts and lists: reading them would resolve interpolations.

    Raises:
        NoCheckpointError: if a part of the checkpoint that this package reads is such a container.
    """
    parts = [(name, checkpoint.get(name)) for name in ("state_dict", "optimizer_states")]
    for name, value in checkpoint.items():
        if name == CHECKPOINT_KEY or (str(name).startswith("optimizer_") and isinstance(value, (dict, list))):
            parts += [(name, part) for part in _all_in(value)]
    for name, part in parts:
        if type(part).__module__.partition(".")[0] == "omegaconf":
            raise NoCheckpointError(
                f"{path} is not a checkpoint: {name} has a {type(part).__name__}, where a dictionary, list or plain "
                "value belongs."
            )


def _all_in(value: Any) -> Iterator[Any]:
    """Yield a value and all values within it, but no hyperparameters of an optimizer's groups, which are the user's."""
    yield value
    if isinstance(value, dict) and "params" in value:
        value = [value["params"]]
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _all_in(item)


# -- tensors -----------------------------------------------------------------------------------------------------------


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is one block of memory, unlike sparse and nested tensors."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor can be written element by element, unlike sparse, nested and quantized tensors."""
    return is_dense(tensor) and not tensor.is_quantized


def is_view_of_parameter(value: Any) -> bool:
    """Whether a value is a view of a sharded parameter. User code may save such views, which have no shards."""
    return isinstance(value, WrapperTensor) and not isinstance(value, (ShardedTensor, LazyTensor))


def identity(tensor: Tensor) -> Any:
    """Return a key that is equal for tied tensors (the same memory), and different for all other tensors."""
    if isinstance(tensor, ShardedTensor):
        return sharded_tree.identity(tensor)
    if isinstance(tensor, LazyTensor) or not is_dense(tensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def bytes_of(checkpoint: Any) -> int:
    """Return the total size of all tensors in bytes, counting tied tensors once, and fake tensors not at all."""
    leaves = tree_leaves(checkpoint)
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor))
    return sum({identity(tensor): nbytes_of(tensor) for tensor in tensors}.values())


# -- versions of modules, an attribute of state dicts ------------------------------------------------------------------


Path = tuple[Any, ...]

_ATTRIBUTE = "_metadata"
"""Its value maps each module's name to a dict with its version, which ``load_state_dict`` passes to the module."""


def own_versions(state: Any) -> dict[Path, Any]:
    """Return a state dict's own versions in the form of ``versions_in``; nothing for other dicts."""
    return {(): getattr(state, _ATTRIBUTE)} if type(state) is OrderedDict and hasattr(state, _ATTRIBUTE) else {}


def versions_in(tree: Any, path: Path = ()) -> dict[Path, Any]:
    """Return the versions of each state dict within nested dicts and lists, keyed by the state dict's path."""
    found: dict[Path, Any] = {}
    if own := own_versions(tree):
        found[path] = own[()]
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            found |= versions_in(value, (*path, key))
    return found


def with_versions(tree: Any, versions: Mapping[Path, Any]) -> Any:
    """Return the tree with versions from ``versions_in``. Dicts and lists that contain state dicts change in place."""
    top = [tree]
    for path, of_one in versions.items():
        above: Any = top
        *before, key = (0, *path)
        for each in before:
            above = above[each]
        above[key] = OrderedDict(above[key])
        setattr(above[key], _ATTRIBUTE, of_one)
    return top[0]


def renamed(state: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, Any]:
    """Return a state dict with other names. ``name_of`` maps names, and also prefixes of names, which end in a dot."""
    versions = {
        path: {name_of(f"{name}." if name else "").rstrip("."): each for name, each in of_all.items()}
        for path, of_all in own_versions(state).items()
    }
    return with_versions({name_of(name): value for name, value in state.items()}, versions)
