"""The package's layout: which room may import which others, and what only a single place may import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_zero"

# From top to bottom: a room imports from itself and from rooms below it. "face" is what projects import by name.
ROOMS = (
    "face",
    "commands",
    "reporting",
    "planning",
    "zoo",
    "monitoring",
    "pruning",
    "strategies",
    "convert",
    "checkpoint",
    "engine",
    "engine.init",
    "engine.runtime",
    "engine.optim",
    "engine.state",
    "engine.offload",
    "engine.tensor",
    "engine.comm",
    "engine.plan",
    "engine.config",
    "engine.compat",
    "io",
    "version",
)


def _name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {_name_of(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def _room_of(module: str) -> str:
    """The innermost room that contains a module; files in the package's own folder belong to "face"."""
    parts = module.split(".")[1:]
    for length in (2, 1):
        if (room := ".".join(parts[:length])) in ROOMS:
            return room
    return "face"


def _imported_by(tree: ast.Module) -> Iterator[str]:
    """Full names of everything a file imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _own_imports(module: str) -> set[str]:
    """The files of the package that a file imports."""
    imported = set()
    for name in _imported_by(TREES[module]):
        if name.partition(".")[0] == PACKAGE:
            imported.add(name if name in FILES else name.rpartition(".")[0])
    return imported


def test_a_room_imports_nothing_from_above():
    wrong = [
        f"{module} imports {other}"
        for module in FILES
        for other in sorted(_own_imports(module))
        if ROOMS.index(_room_of(other)) < ROOMS.index(_room_of(module))
    ]
    assert not wrong


def test_no_imports_go_in_a_circle():
    try:
        tuple(TopologicalSorter({module: _own_imports(module) for module in FILES}).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_only_the_room_of_communication_calls_torch_distributed():
    """Checkpoints, tensors and compat may import the checkpoint format's library, ``torch.distributed.checkpoint``."""
    may_know_the_format = ("checkpoint", "convert", "engine.tensor", "engine.compat")
    wrong = []
    for module, tree in TREES.items():
        room = _room_of(module)
        attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        used = {name for name in _imported_by(tree) if f"{name}.".startswith("torch.distributed.")}
        used |= {"torch.distributed" for node in attributes if ast.unparse(node) == "torch.distributed"}
        if room in may_know_the_format:
            used = {name for name in used if not name.startswith("torch.distributed.checkpoint")}
        wrong += [f"{module} uses {name}" for name in sorted(used) if room != "engine.comm"]
    assert not wrong


def test_the_engine_does_without_lightning():
    packages = {"lightning", "lightning_fabric", "pytorch_lightning"}
    wrong = [
        f"{module} imports {name}"
        for module in FILES
        if module.startswith(f"{PACKAGE}.engine")
        for name in _imported_by(TREES[module])
        if name.partition(".")[0] in packages
    ]
    assert not wrong


def _private_names(tree: ast.Module) -> Iterator[str]:
    """Private names of torch in a file: imported names, and attributes of torch's modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = ast.unparse(node).split(".")
            if not all(part.isidentifier() for part in parts):  # an attribute of a value, not of a module
                continue
        elif isinstance(node, ast.ImportFrom):
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if (node.module or "").partition(".")[0] == "torch"
                and any(part.startswith("_") for part in f"{node.module}.{alias.name}".split("."))
            )
            continue
        else:
            continue
        if parts[0] in ("torch", "dist") and any(p.startswith("_") and not p.startswith("__") for p in parts):
            yield ".".join(parts)


def test_private_names_of_torch_stand_in_one_place():
    homes = {f"{PACKAGE}.engine.compat", f"{PACKAGE}.engine.comm.process_group"}
    wrong = [f"{module}: {name}" for module in FILES if module not in homes for name in _private_names(TREES[module])]
    assert not wrong
