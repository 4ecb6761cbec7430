"""Choice of units: modules whose parameters are gathered and released together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from os.path import commonprefix

from torch import Tensor, nn
from torch.jit import ScriptModule

from lightning_zero.engine.config import Modules

LARGE_LAYER = 2**20
"""A layer outside all blocks (an embedding, a head) with at least this many elements is a unit of its own. The limit is
lower in small models: see ``share_of``."""

UNIT_NUMEL = 2**20
"""Neighbouring blocks are merged into units of up to this many elements: latency dominates in smaller messages. A model
of up to this many elements is one unit, which stays gathered for the step. Each of its buckets has at most a quarter of
the model, so gathered parameters and gradients in reduction take at most 8 bytes a parameter. On two ranks, a rank's
shards take another 8 bytes, as much as DDP in all. With more units, steps of ordinary small models took a third longer
(``benchmarks/tiny.py``)."""

LEAST_UNITS = 4
"""Minimum number of units after merging, if there are enough blocks. With fewer units, each would hold much of a model.

On two ranks with default options and four equal units, the gradients being reduced at one time take at most as many
bytes as all parameters. Gradients and gathered parameters (stage 3) together take at most 7/4 of that. These limits are
1/4 and 7/16 of DDP's 16 bytes per parameter."""

TINY = 2**16
"""A layer, or a bucket, of fewer elements than this is never separated from its neighbours: the overhead of a message
would exceed the time to send the values."""


@dataclass(frozen=True)
class Owner:
    """A module that holds a parameter, as ``module._parameters[attribute]``. Tied parameters have several owners.

    Attributes:
        may_be_fused: whether the module is in an ``nn.TransformerEncoderLayer``, which torch may run as one kernel in
            evaluation, but only if no module in the layer has forward hooks. The kernel reads all weights of the layer.
    """

    module: nn.Module
    attribute: str
    may_be_fused: bool


@dataclass
class UnitPlan:
    """A unit before it is sharded.

    Attributes:
        name: qualified name of the block, or of the first and the last of several blocks; ``""`` for the root unit.
        blocks: modules whose forward gathers the unit. The root unit is gathered when a step begins; it has blocks only
            if the whole module is one unit.
        parameters, owners: the unit's parameters and their owners, by qualified name; each parameter occurs once, in
            the order of ``root.named_parameters()``. Parameters of TorchScript modules are left out.
    """

    name: str
    blocks: list[nn.Module]
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    owners: dict[str, list[Owner]] = field(default_factory=dict)

    @property
    def is_root(self) -> bool:
        return self.name == ""


def plan_units(root: nn.Module, units: Modules = "auto", unit_numel: int | None = None) -> list[UnitPlan]:
    """Choose the units of a module; the root unit comes first.

    Automatic blocks are modules that every rank runs regardless of its data: the children of an ``nn.Sequential``,
    composite modules repeated in an outermost ``nn.ModuleList``, and large layers outside such containers. The stages
    of a hierarchical vision model, each wider than the previous stage, are divided into their blocks. Modules selected
    at run time (experts, heads) stay in their block. A block that is a container without a forward, such as a list of
    two layers, is divided into these layers. Each block becomes a unit, or several small blocks become one unit.
    Parameters tied across units belong to the root unit.

    Args:
        root: the whole module.
        units: ``"auto"``, one or more module classes, or a predicate of (qualified name, module).
        unit_numel: neighbouring blocks in a list or sequence are merged into units of up to this many elements, and a
            root of up to this many elements is one unit. With None, this is ``UNIT_NUMEL`` for automatic units, which
            are also merged less if fewer than ``LEAST_UNITS`` units would remain besides the root unit; other units are
            not merged.
    """
    is_automatic = unit_numel is None and units == "auto" and UNIT_NUMEL > 0
    if unit_numel is None:
        unit_numel = UNIT_NUMEL if is_automatic else 0
    first_names: dict[nn.Module, str] = {}
    if units == "auto":
        chosen = _automatic("", root, min(LARGE_LAYER, share_of(root)) if is_automatic else LARGE_LAYER)
    else:
        chosen = iter(select_modules(root, units, option="units"))
    for name, block in chosen:
        first_names.setdefault(block, name)
    blocks = [(name, block) for block, name in first_names.items()]
    if _numel(root) <= unit_numel:
        plans = [UnitPlan("", [block for _, block in blocks])]
    else:
        merged = _merged(root, blocks, unit_numel, LEAST_UNITS if is_automatic else 1)
        plans = [UnitPlan("", []), *merged]
    plan_of_module = {id(inner): plans[0] for inner in root.modules()}
    plan_of_module |= {id(inner): plan for plan in plans for block in plan.blocks for inner in block.modules()}
    owners: dict[nn.Parameter, list[Owner]] = {}
    encoder_layers = (module for module in root.modules() if isinstance(module, nn.TransformerEncoderLayer))
    fused = {inner for layer in encoder_layers for inner in layer.modules()}
    for module in root.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append(Owner(module, attribute, module in fused))
    scripted = set(map(id, torchscript_parameters(root).values()))
    for name, parameter in root.named_parameters():
        if id(parameter) in scripted:
            continue
        covering = {plan_of_module[id(owner.module)].name for owner in owners[parameter]}
        plan = plan_of_module[id(owners[parameter][0].module)] if len(covering) == 1 else plans[0]
        plan.parameters[name] = parameter
        plan.owners[name] = owners[parameter]
    return [plan for plan in plans if plan.parameters]


def torchscript_parameters(root: nn.Module) -> dict[str, Tensor]:
    """The parameters of TorchScript modules, by qualified name.

    They stay whole on every rank: the compiled code uses its own references, which views cannot replace.
    """
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, module in root.named_modules()
        if isinstance(module, ScriptModule)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def share_of(root: nn.Module) -> int:
    """The number of elements in one of ``LEAST_UNITS`` equal parts of a module, but at least ``TINY``."""
    return max(_numel(root) // LEAST_UNITS, TINY)


def _merged(root: nn.Module, blocks: list[tuple[str, nn.Module]], unit_numel: int, least: int) -> list[UnitPlan]:
    """Merge consecutive blocks into units of up to ``unit_numel`` elements; a larger block is a unit of its own.

    The limit is lowered until there are at least ``least`` units (or one unit per block, if there are fewer blocks).
    """
    if least > 1:
        unit_numel = min(unit_numel, -(-sum(_numel(block) for _, block in blocks) // least))
    groups: list[list[tuple[str, nn.Module]]] = []
    numel = 0
    for name, block in blocks:
        numel += _numel(block)
        if not groups or numel > unit_numel or not _follow_one_another(root, groups[-1][-1][0], name):
            groups.append([])
            numel = _numel(block)
        groups[-1].append((name, block))
    if unit_numel and len(groups) < min(least, len(blocks)):  # for example, one block has most of the elements
        return _merged(root, blocks, unit_numel // 2, least)
    names = [(group[0][0], group[-1][0]) for group in groups]
    return [
        UnitPlan(first if first == last else f"{first} to {last}", [block for _, block in group])
        for (first, last), group in zip(names, groups)
    ]


def _follow_one_another(root: nn.Module, name: str, other: str) -> bool:
    """Whether the innermost module that contains both modules is a list or sequence, so that they run in order."""
    common = commonprefix([name.split("."), other.split(".")])
    return isinstance(root.get_submodule(".".join(common)), (nn.Sequential, nn.ModuleList))


def select_modules(root: nn.Module, wanted: Modules, *, option: str) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules that an option selects, with qualified names.

    Args:
        wanted: one or more module classes, or a predicate of (qualified name, module).
        option: the option's name, for error messages.

    Raises:
        ValueError: if there are none, or if one of them has no forward.
    """
    if callable(wanted) and not isinstance(wanted, type):
        matches = list(_outermost("", root, wanted))
        what = f"the predicate {getattr(wanted, '__name__', wanted)!r}"
    else:
        assert not isinstance(wanted, str)
        classes = (wanted,) if isinstance(wanted, type) else tuple(wanted)
        matches = list(_outermost("", root, lambda _, module: isinstance(module, classes)))
        what = " or ".join(sorted(cls.__name__ for cls in classes))
    if not matches:
        present = ", ".join(sorted({type(module).__name__ for module in root.modules()}))
        raise ValueError(f"{option}: no submodule with parameters matches {what}. The model contains: {present}.")
    for name, module in matches:
        if not _has_forward(module):
            inside = sorted({type(inner).__name__ for _, inner in _outermost("", module, lambda _, m: _has_forward(m))})
            instead = f"Name the modules in it: {option}=[{', '.join(inside)}]." if inside else "Leave it out."
            raise ValueError(
                f"{option}: {what} matches {name!r} ({type(module).__name__}), which has no forward, so it is never "
                f"called as a module. {instead}"
            )
    return matches


def _outermost(
    prefix: str, module: nn.Module, matches: Callable[[str, nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if matches(path, child):
            if _may_be_block(child):
                yield path, child
        else:
            yield from _outermost(path, child, matches)


def _automatic(
    prefix: str, module: nn.Module, large: int, *, is_divided: bool = False, in_container: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks in a module.

    Args:
        large: the number of elements from which a layer outside all blocks is a block.
        is_divided: whether blocks in the module's children take their place.
        in_container: whether the module is (a part of) one block that is a container without a forward: the forward of
            an outer module runs its layers. Those of fewer than ``TINY`` elements (norms, gates) stay in the enclosing
            unit, which saves messages.
    """
    in_sequence = isinstance(module, nn.Sequential)
    in_order = in_container or in_sequence or _is_repeated_blocks(module)
    is_divided = is_divided or (in_order and _are_stages(module))
    for path, child in _children(prefix, module):
        if in_order and not _has_forward(child):
            if is_divided or not in_container or not _are_experts(child, module):
                yield from _automatic(path, child, large, is_divided=is_divided, in_container=True)
        elif in_order:
            holds_units = in_sequence and _holds_units(child)
            inside = list(_automatic(path, child, large)) if is_divided or holds_units else []
            if holds_units or any(_is_composite(block) for _, block in inside):
                yield from inside
            elif not in_container or _is_composite(child) or _numel(child) >= TINY:
                yield path, child
        elif isinstance(child, (nn.ModuleList, nn.ModuleDict)) and not _is_run_as_a_whole(child):
            continue  # heads or experts, selected at run time: they stay in the enclosing unit
        elif not _is_composite(child) and _has_forward(child) and _numel(child, recurse=False) >= large:
            yield path, child
        else:
            yield from _automatic(path, child, large)


def _children(prefix: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children that may be or contain blocks, with qualified names."""
    named = ((f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children())
    return [(path, child) for path, child in named if _may_be_block(child)]


def _is_repeated_blocks(module: nn.Module) -> bool:
    """Whether a module is a ModuleList of composite modules, of which at least two have the same class."""
    if not isinstance(module, nn.ModuleList):
        return False
    children = [child for _, child in _children("", module)]
    return all(map(_is_composite, children)) and len({type(child) for child in children}) < len(children)


def _is_run_as_a_whole(container: nn.Module) -> bool:
    """Whether every rank runs all modules of a list or dict: of repeated blocks, or of a model's different parts.

    Such a dict may have an embedding, a list of blocks and a norm, as in nanoGPT, or an encoder and a decoder.
    """
    children = [child for _, child in _children("", container)]
    are_different = len({type(child) for child in children}) == len(children)
    return _is_repeated_blocks(container) or any(
        _is_repeated_blocks(child) or (are_different and any(map(_is_repeated_blocks, child.modules())))
        for child in children
    )


def _are_stages(module: nn.Module) -> bool:
    """Whether a module's children are stages of a hierarchical model: three or more, of one class and different shapes.

    Transformer layers, with or without experts, have one or two sets of shapes, so they are not mistaken for stages.
    """
    children = [child for _, child in _children("", module)]
    shapes = {tuple(parameter.shape for parameter in child.parameters()) for child in children}
    return len(children) >= 3 and len({type(child) for child in children}) == 1 and len(shapes) == len(children)


def _are_experts(modules: nn.Module, container: nn.Module) -> bool:
    """Whether modules are selected at run time: of one class and shape, beside a router with an output for each."""
    experts = [expert for _, expert in _children("", modules)]
    kinds = {(type(expert), tuple(parameter.shape for parameter in expert.parameters())) for expert in experts}
    beside = (
        parameter for _, other in _children("", container) if other is not modules for parameter in other.parameters()
    )
    return len(kinds) == 1 and any(parameter.shape[:1] == (len(experts),) for parameter in beside)


def _holds_units(module: nn.Module) -> bool:
    """Whether a child of a Sequential contains units of its own, as a stage of a ResNet does."""
    return isinstance(module, nn.Sequential) or any(_is_repeated_blocks(inner) for inner in module.modules())


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. Containers such as ``nn.ModuleList`` cannot, so their hooks never run."""
    return "forward" in vars(module) or getattr(type(module), "forward", None) is not nn.Module.forward


def _may_be_block(module: nn.Module) -> bool:
    """Whether a module has parameters, and accepts hooks, unlike a TorchScript module."""
    return not isinstance(module, ScriptModule) and any(True for _ in module.parameters())


def _numel(module: nn.Module, recurse: bool = True) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse))
