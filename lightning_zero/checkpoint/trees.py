"""Divide the contents of a checkpoint into what DCP can store and what it cannot, and check their structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_zero.checkpoint.checksums import NoCheckpointError
from lightning_zero.checkpoint.form import CHECKPOINT_KEY
from lightning_zero.engine.compat import tree_leaves
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
    for name, value in _structure_of(checkpoint):
        if type(value).__module__.partition(".")[0] == "omegaconf":
            raise NoCheckpointError(
                f"{path} is not a checkpoint: {name} has a {type(value).__name__}, where a dictionary, list or plain "
                "value belongs."
            )


def _structure_of(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values that this package reads as dicts and lists, each after the name of the entry with the value."""
    for name in ("state_dict", "optimizer_states"):
        yield name, checkpoint.get(name)
    yield from ((CHECKPOINT_KEY, value) for value in _all_in(checkpoint.get(CHECKPOINT_KEY)))
    for name, value in checkpoint.items():
        if not str(name).startswith("optimizer_") or not isinstance(value, (dict, list)):
            continue
        for state in value if isinstance(value, list) else [value]:
            groups = state.get("param_groups") if isinstance(state, dict) else None
            parts = [state, groups, state.get("state") if isinstance(state, dict) else None]
            for group in groups if isinstance(groups, list) else ():
                parts += [group, group.get("params") if isinstance(group, dict) else None]
            yield from ((name, part) for part in parts)


def _all_in(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _all_in(item)
