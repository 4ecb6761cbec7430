"""Keep the versions of modules, an attribute of state dicts, where the contents of a checkpoint are rebuilt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

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
