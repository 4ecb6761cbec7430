"""The package's layout: which room may import which others, and what only a single place may import."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
import torch.utils.data.dataloader
import torchmetrics
from lightning import fabric, pytorch

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_zero"

# From top to bottom: a room imports from itself and from rooms below it. "face" is what projects import by name.
ROOMS = (
    "face",
    "commands",
    "reporting",
    "planning",
    "zoo",
    "callbacks",
    "strategies",
    "callbacks.restarts",
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


def test_a_room_imports_nothing_from_the_rooms_above_it():
    wrong = [
        f"{module} imports {other}"
        for module in FILES
        for other in sorted(_own_imports(module))
        if ROOMS.index(_room_of(other)) < ROOMS.index(_room_of(module))
    ]
    assert not wrong


def test_imports_form_no_cycle():
    try:
        tuple(TopologicalSorter({module: _own_imports(module) for module in FILES}).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


ENGINE = f"{PACKAGE}.engine"
OUTSIDE = {module: tree for module, tree in TREES.items() if not f"{module}.".startswith(f"{ENGINE}.")}


def test_other_rooms_import_only_what_is_at_the_engines_door():
    exported = {alias.name for node in TREES[ENGINE].body if isinstance(node, ast.ImportFrom) for alias in node.names}
    imported = {
        (name.removeprefix(f"{ENGINE}."), module)
        for module, tree in OUTSIDE.items()
        for name in _imported_by(tree)
        if name.startswith(f"{ENGINE}.")
    }
    assert sorted(f"{module} imports {name}" for name, module in imported if name not in exported) == []
    public = next(ast.literal_eval(node.value) for node in TREES[ENGINE].body if isinstance(node, ast.Assign))
    assert exported - {name for name, _ in imported} <= {*public}, "exported, but imported by no other room"
    assert len(exported) <= 40


def test_other_rooms_ask_the_engine_and_do_not_reach_through_it():
    """What an engine holds is its own; its communicator may be passed on to a function that needs one."""
    parts = {"background", "buckets", "join", "masters", "reducer", "rendezvous", "schedule"}
    wrong = []
    for module, tree in OUTSIDE.items():
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Attribute)):
            names = ast.unparse(node).split(".")
            if "engine" in names[:-1]:
                reached = names[names.index("engine") + 1 :]
                if reached[0] in parts or (reached[0] == "communicator" and len(reached) > 1):
                    wrong.append(f"{module}: {'.'.join(names)}")
    assert sorted(wrong) == []


LARGE = {
    "engine.runtime.reducer.GradientReducer": 21,
    "engine.state.bucket.Bucket": 32,
    "planning.fake_run.fake_run": 97,
}
"""Functions of more than 60 lines and classes of more than 20 attributes that have not been divided yet."""


def test_no_function_is_long_and_no_class_has_many_attributes():
    sizes = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            name = f"{module.partition('.')[2]}.{getattr(node, 'name', '')}"
            if isinstance(node, ast.FunctionDef) and (lines := node.end_lineno - node.lineno + 1) > 60:
                sizes[name] = lines
            elif isinstance(node, ast.ClassDef) and (attributes := len(_own_attributes(node))) > 20:
                sizes[name] = attributes
    assert {name: size for name, size in sizes.items() if size > LARGE.get(name, 0)} == {}


def _own_attributes(node: ast.ClassDef) -> set[str]:
    """The names that a class's methods assign as attributes of ``self``."""
    written = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return {each.attr for each in written if isinstance(each.value, ast.Name) and each.value.id == "self"}


def test_only_the_communication_room_uses_torch_distributed():
    """Checkpoints, tensors and compat may import the checkpoint format's library, ``torch.distributed.checkpoint``.

    The command `train` may start processes with torchrun's library.
    """
    launches = ("torch.distributed.elastic", "torch.distributed.launcher")
    may_know_the_format = ("checkpoint", "convert", "engine.tensor", "engine.compat")
    wrong = []
    for module, tree in TREES.items():
        room = _room_of(module)
        attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        used = {name for name in _imported_by(tree) if f"{name}.".startswith("torch.distributed.")}
        used |= {"torch.distributed" for node in attributes if ast.unparse(node) == "torch.distributed"}
        if room in may_know_the_format:
            used = {name for name in used if not name.startswith("torch.distributed.checkpoint")}
        if room == "commands":
            used = {name for name in used if not name.startswith(launches)}
        wrong += [f"{module} uses {name}" for name in sorted(used) if room != "engine.comm"]
    assert not wrong


def test_the_engine_does_not_import_lightning():
    packages = {"lightning", "lightning_fabric", "pytorch_lightning"}
    wrong = [
        f"{module} imports {name}"
        for module in FILES
        if module.startswith(f"{PACKAGE}.engine")
        for name in _imported_by(TREES[module])
        if name.partition(".")[0] in packages
    ]
    assert not wrong


# Private attributes of torch's objects. No file but compat may name them, on whichever object.
PRIVATE_ATTRIBUTES = {
    "_backward_hooks",
    "_backward_pre_hooks",
    "_cdata",
    "_checkpoint_offset",
    "_compiled_call_impl",
    "_flat_weights",
    "_flat_weights_names",
    "_global_optimizer_post_hooks",
    "_global_optimizer_pre_hooks",
    "_init_flat_weights",
    "_is_param",
    "_local_tensor",
    "_optimizer_load_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks",
    "_post_accumulate_grad_hooks",
    "_spec",
    "_torchdynamo_orig_callable",
    "_wrapped_by_lr_sched",
}


def _is_private(name: str) -> bool:
    """Whether a part of a dotted name is private; operators of ``torch.ops`` and their schemas are not."""
    parts = [part for part in name.split(".") if part.startswith("_") and not part.startswith("__")]
    return bool(parts) and not name.startswith("torch.ops.")


def _private_names(tree: ast.Module) -> Iterator[str]:
    """Private names of torch in a file: those of modules, also under an alias, and attributes of its objects."""
    real = {"torch": "torch"}  # full names of the names in the file that refer to something in torch
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            real |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.partition(".")[0] == "torch"]
            real |= {alias.asname: alias.name for alias in names if alias.asname is not None}
            yield from (alias.name for alias in names if _is_private(alias.name))

    def full_name(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return real.get(node.id)
        if isinstance(node, ast.Attribute) and (holder := full_name(node.value)) is not None:
            return f"{holder}.{node.attr}"
        return None

    for node in ast.walk(tree):  # ``aten = torch.ops.aten``
        if isinstance(node, ast.Assign) and (value := full_name(node.value)) is not None:
            real |= {target.id: value for target in node.targets if isinstance(target, ast.Name)}
    yield from filter(_is_private, real.values())
    for node in ast.walk(tree):
        if (name := full_name(node)) is not None and isinstance(node, ast.Attribute) and _is_private(name):
            yield name
        elif isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES:
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in PRIVATE_ATTRIBUTES:
            yield repr(node.value)


def test_private_names_of_torch_are_used_in_one_place_only():
    homes = {f"{PACKAGE}.engine.compat", f"{PACKAGE}.engine.comm.process_group"}
    assert not [
        f"{module}: {name}" for module in FILES if module not in homes for name in _private_names(TREES[module])
    ]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch._C as c", "torch._C"),
        ("from torch._C import _functorch", "torch._C._functorch"),
        ("import torch\nx = torch.nn._reduction", "torch.nn._reduction"),
        ("from torch.optim import optimizer as o\no._use_grad", "torch.optim.optimizer._use_grad"),
        ("from torch import autograd\na = autograd\na._grad", "torch.autograd._grad"),
        ("def f(storage): return storage._cdata", "storage._cdata"),
        ("getattr(tensor, '_local_tensor', tensor)", "'_local_tensor'"),
    ],
)
def test_private_names_of_torch_are_recognised_however_they_are_reached(code, name):
    assert name in set(_private_names(ast.parse(code)))


# -- Lightning, torchmetrics and torch's data loaders -----------------------------------------------------------------

LIGHTNING = ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics")
INTERNALS = f"{PACKAGE}.strategies.lightning_internals"
PRIVATE = re.compile(r"_[A-Za-z]\w*(?<!__)")


@functools.cache
def _lightnings_names() -> set[str]:
    """Private names in ``lightning_internals``, and those that only Lightning, torchmetrics and data loaders define."""
    defined = re.compile(r"(?:\bself\.|\bdef |\bclass |^)(_[A-Za-z]\w*)", re.MULTILINE)
    sources = [Path(inspect.getfile(torch.utils.data.dataloader)), *Path(torchmetrics.__path__[0]).glob("*.py")]
    sources += (path for package in (pytorch, fabric) for path in Path(package.__path__[0]).rglob("*.py"))
    theirs = {name for path in sources for name in defined.findall(path.read_text(encoding="utf-8"))}
    ours = {name for path in FILES.values() for name in defined.findall(path.read_text(encoding="utf-8"))}
    torchs = {*dir(torch.Tensor), *dir(torch.nn.Module()), "_metadata"}  # the last belongs to state dicts
    used = PRIVATE.findall(" ".join(_strings_and_attributes(TREES[INTERNALS])))
    return {name for name in theirs - ours - torchs if not name.endswith("__")} | {*used}


def _strings_and_attributes(tree: ast.Module) -> Iterator[str]:
    """String constants without spaces, and attributes of objects other than ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.value
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            yield node.attr


def _private_names_of_lightning(tree: ast.Module) -> Iterator[str]:
    """Private names of the packages that a file imports, and the private attributes of their objects that it names."""
    imported = (name for name in _imported_by(tree) if name.partition(".")[0] in LIGHTNING)
    yield from filter(_is_private, imported)
    for text in _strings_and_attributes(tree):
        yield from _lightnings_names() & {*text.split(".")}


def test_private_names_of_lightning_are_used_in_one_place_only():
    """Objects in the engine are torch's, since it imports no Lightning; converters name entries of files."""
    others = (f"{PACKAGE}.engine", f"{PACKAGE}.convert")
    wrong = [
        f"{module}: {name}"
        for module, tree in TREES.items()
        if module != INTERNALS and not module.startswith(others)
        for name in _private_names_of_lightning(tree)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import lightning.pytorch._graveyard", "lightning.pytorch._graveyard"),
        (
            "from lightning.fabric.utilities.seed import _set_rng_states as s",
            "lightning.fabric.utilities.seed._set_rng_states",
        ),
        ("def f(trainer): return trainer.fit_loop._data_source", "_data_source"),
        ("results = trainer._logger_connector._first_loop_iter", "_first_loop_iter"),
        ("getattr(metric, '_reductions')", "_reductions"),
        ("loaders = attrgetter('_combined_loader.flattened')", "_combined_loader"),
        ("workers = iterator._index_queues", "_index_queues"),
    ],
)
def test_private_names_of_lightning_are_recognised_however_they_are_reached(code, name):
    assert name in set(_private_names_of_lightning(ast.parse(code)))
