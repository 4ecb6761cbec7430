"""Open FSDP and FSDP2 checkpoints, from Lightning's strategies or custom loops, by recognising their entries."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_zero.checkpoint.converting import with_lightnings_entries
from lightning_zero.checkpoint.reading import OpenedCheckpoint, by_number, names_by_number, open_checkpoint
from lightning_zero.io.text import listed

_USUAL = ("state_dict", "model", "module", "model_state_dict")


def open_fsdp(path: str | os.PathLike[str], *, model: str | None = None) -> OpenedCheckpoint:
    """Open an FSDP checkpoint like ``open_checkpoint``, and move its entries to Lightning's keys.

    Supports ``torch.distributed.checkpoint`` folders and ``torch.save`` files with full tensors, written by Lightning's
    ``FSDPStrategy`` and ``ModelParallelStrategy`` or with torch's ``get_state_dict``, under any keys. The weights are
    recognised as the only mapping from names to tensors, or the only one under a usual key such as ``model``;
    optimizers by ``state`` and ``param_groups``, nested or flattened.

    Args:
        model: key of the weights if there are several candidates; dotted if nested.

    Raises:
        FileNotFoundError, DamagedCheckpointError: as in ``open_checkpoint``.
        ValueError: as in ``open_checkpoint``; also if the weights are missing, ambiguous or stored in flat parameters.
    """
    opened = open_checkpoint(path)
    tree = dict(opened.as_saved)
    if not any(isinstance(value, (dict, list)) for value in tree.values()):
        tree = {"state_dict": tree}
    mappings = dict(_mappings_in(tree))
    optimizers = {key: mappings.pop(key) for key in list(mappings) if _is_optimizer(mappings[key])}
    name, weights = _weights_of(opened.path, tree, mappings, model)
    if any(key.rsplit(".", 1)[-1].startswith("_flat_param") for key in weights):
        raise ValueError(
            f"{opened.path}: '{name}' contains FSDP's flat parameters, which only an identical FSDP setup can "
            "read. Load it in that setup, and save it with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT."
        )
    _take(tree, name)
    tree = {"state_dict": weights, **tree}
    names = None
    for state in tree.get("optimizer_states", []):
        _warn_of_modules_numbers(opened.path, state)
    if optimizers:
        tree["optimizer_states"], names = [], []
        for key, optimizer in optimizers.items():
            _take(tree, key)
            saved = _nested(optimizer, weights) if _is_flattened(optimizer) else optimizer
            tree["optimizer_states"].append(by_number(saved, f"{opened.path}: '{key}'"))
            names.append(names_by_number(saved))
    return replace(opened, checkpoint=with_lightnings_entries(tree), as_saved=tree, names_of_optimizers=names)


def _weights_of(
    path: str, tree: dict[str, Any], mappings: dict[str, Any], chosen: str | None
) -> tuple[str, dict[str, Tensor]]:
    found = {key: value for key, value in mappings.items() if any(isinstance(item, Tensor) for item in value.values())}
    likely = [name for name in found if chosen in (None, name)]
    if len(likely) > 1:
        likely = [name for name in likely if name.rsplit(".", 1)[-1] in _USUAL] or likely
    if len(likely) != 1:
        there = [f"'{name}' (tensors: {len(found[name])})" for name in found] or [f"'{key}'" for key in tree]
        wanted = "several entries may be the weights" if found else "no weights were found"
        if chosen is not None:
            wanted = f"'{chosen}' is not a mapping from names to tensors"
        advice = " Choose one with --model NAME, or with open_fsdp(path, model=NAME)." if found else ""
        raise ValueError(f"{path}: {wanted}. The checkpoint contains {listed(there, 20)}.{advice}")
    return likely[0], copy.copy(found[likely[0]])  # with the versions of modules


def _mappings_in(tree: dict[str, Any], inside: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted key and the value of each optimizer state dict, and of each other mapping that nests nothing."""
    for key, value in tree.items():
        if not isinstance(value, dict):
            continue
        if _is_optimizer(value) or not any(isinstance(item, (dict, list)) for item in value.values()):
            yield f"{inside}{key}", value
        else:
            yield from _mappings_in(value, f"{inside}{key}.")


def _is_optimizer(value: dict[str, Any]) -> bool:
    return _is_flattened(value) or (isinstance(value.get("param_groups"), list) and "state" in value)


def _is_flattened(value: dict[str, Any]) -> bool:
    """Whether keys look like ``state.NAME.exp_avg``; see ``StateDictOptions.flatten_optimizer_state_dict``."""
    return bool(value) and all(str(key).startswith(("state.", "param_groups.")) for key in value)


def _split(key: str, names: Any) -> tuple[str, str]:
    """Split ``state.NAME.exp_avg`` into ``NAME`` ("" if it is not in ``names``) and ``exp_avg``."""
    name, _, what = key.partition(".")[2].rpartition(".")
    return (name, what) if name in names else ("", what)


def _warn_of_modules_numbers(path: str, optimizer: dict[str, Any]) -> None:
    """Warn if parameters are numbered in the module's order, not in the order of the param groups."""
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    if numbers != list(range(len(numbers))):
        warnings.warn(
            f"In {path}, optimizer parameters are numbered in the module's order, as in FSDP's full-tensor files, "
            "so their order within a param group is lost. If your param groups have a different order than "
            "module.parameters(), save a sharded checkpoint instead (a folder, which contains parameter names).",
            stacklevel=3,
        )


def _nested(flattened: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    """Nest a flattened state. It does not record param groups, so parameters with equal options form one group."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flattened.items():
        name, what = _split(key, weights)
        (state if key.startswith("state.") else options).setdefault(name, {})[what] = value
    groups: list[dict[str, Any]] = []
    for name in dict.fromkeys([*options, *state]):
        mine = options.get(name, {})
        group = next((group for group in groups if {**group, "params": 0} == {**mine, "params": 0}), None)
        if group is None:
            groups.append(group := {**mine, "params": []})
        group["params"].append(name)
    return {"state": state, "param_groups": groups}


def _take(tree: dict[str, Any], dotted: str) -> None:
    """Delete a dotted key, and dictionaries that become empty. Nested dictionaries are copied before they change."""
    key, _, rest = dotted.partition(".")
    if rest:
        tree[key] = dict(tree[key])
        _take(tree[key], rest)
        if tree[key]:
            return
    del tree[key]
