"""Divide the contents of a checkpoint into what DCP can store and what it cannot, and put them together again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.checksums import NoCheckpointError
from lightning_zero.checkpoint.form import CHECKPOINT_KEY
from lightning_zero.engine import LazyTensor, ShardedTensor, WrapperTensor, compat, sharded_tree

Path = tuple[Any, ...]
"""Keys and indices from the top of nested dicts and lists to a value; in DCP's metadata, keys are strings."""


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """The keys and values of a dict, or the indices and values of a list or tuple; nothing for other values.

    Iterating over OmegaConf's containers would resolve their interpolations.
    """
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def values_in(tree: Any, enters: Callable[[Any], bool] = lambda _: True, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the values at all levels of nested dicts and lists, with their paths.

    Args:
        enters: whether to also yield what a value contains; by default, always.
    """
    for key, value in items_of(tree):
        yield (*path, key), value
        if enters(value):
            yield from values_in(value, enters, (*path, key))


def split(value: Any, path: Path = ()) -> tuple[Any, list[tuple[Path, Tensor]]]:
    """Return nested dicts and lists with None in place of sharded tensors, and these tensors with their paths."""
    if isinstance(value, WrapperTensor):
        return None, [(path, value)]
    hollow, sharded = {}, []
    for key, item in items_of(value):
        hollow[key], found = split(item, (*path, str(key)))
        sharded += found
    if not sharded:
        return value, []
    return (hollow if isinstance(value, dict) else list(hollow.values())), sharded


def by_dotted_name(leaves: Iterable[tuple[Path, Any]]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return leaves and their paths by DCP's dotted names, of which two must not be equal."""
    named: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for path, leaf in leaves:
        name = ".".join(map(str, path))
        if name in named:
            raise ValueError(
                f"Two values in this sharded checkpoint have the name {name!r}: rename one of the keys, or write "
                "ZeroStrategy(checkpoint='full')."
            )
        named[name], paths[name] = leaf, path
    return named, paths


def leaves_of(tree: Any) -> Iterator[tuple[Path, Any]]:
    """Yield a tree's leaves with their paths, like ``flatten_state_dict`` of DCP.

    Containers that DCP could not restore are leaves, which are pickled: empty ones, and dicts with keys that are not
    strings, as in ``get_extra_state`` or optimizers' groups. DCP also flattens other mappings, which would then lose
    their class; OmegaConf's would be resolved.
    """
    return ((path, value) for path, value in values_in(tree, _is_flattened) if not _is_flattened(value))


def _is_flattened(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(isinstance(key, str) for key in value)
    return isinstance(value, list) and any(isinstance(item, Tensor) or _is_flattened(item) for item in value)


def odd_keys(tree: Any) -> dict[Path, Any]:
    """Return the keys in a tree that are not strings, keyed by the path of their value, written in strings."""
    return {tuple(map(str, path)): path[-1] for path, _ in values_in(tree) if not isinstance(path[-1], str)}


def put(tree: dict[str, Any], path: Path, value: Any, keys: Mapping[Path, Any]) -> None:
    """Insert a value at a path from DCP's metadata, creating containers as needed; ``keys`` is from ``odd_keys``."""
    here: Any = tree
    for length, key in enumerate(path, 1):
        key = keys.get(path[:length], key)
        if isinstance(here, list):
            here.extend([None] * (key + 1 - len(here)))
        if length == len(path):
            here[key] = value
        elif (here[key] if isinstance(here, list) else here.get(key)) is None:
            here[key] = [] if isinstance(path[length], int) else {}
        here = here[key]


def check_structure(path: str, checkpoint: Mapping[str, Any]) -> None:
    """Refuse OmegaConf's containers in place of dicts and lists: reading them would resolve interpolations."""
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
    for _, item in items_of(value):
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
    if isinstance(tensor, LazyTensor) or tensor.is_meta or not is_dense(tensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def bytes_of(checkpoint: Any) -> int:
    """Return the total size of all tensors in bytes, counting tied tensors once."""
    tensors = (leaf for leaf in compat.tree_leaves(checkpoint) if isinstance(leaf, Tensor))
    return sum({identity(tensor): compat.nbytes_of(tensor) for tensor in tensors}.values())


# -- versions of modules, an attribute of state dicts ------------------------------------------------------------------


_ATTRIBUTE = "_metadata"
"""Its value maps each module's name to a dict with its version, which ``load_state_dict`` passes to the module."""


def own_versions(state: Any) -> dict[Path, Any]:
    """Return a state dict's own versions in the form of ``versions_in``; nothing for other dicts."""
    return {(): getattr(state, _ATTRIBUTE)} if type(state) is OrderedDict and hasattr(state, _ATTRIBUTE) else {}


def versions_in(tree: Any) -> dict[Path, Any]:
    """Return the versions of each state dict within nested dicts and lists, keyed by the state dict's path."""
    # not within tuples, in which ``with_versions`` could not put them back
    values = [((), tree), *values_in(tree, lambda value: not isinstance(value, tuple))]
    return {path: own[()] for path, value in values if (own := own_versions(value))}


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
