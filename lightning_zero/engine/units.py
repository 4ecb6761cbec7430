"""Which modules form units: the modules whose parameters are gathered and released together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

LARGE_LAYER = 2**20
"""Parameters from which on a layer outside of every block is a unit of its own (an embedding, a head)."""

Units = str | type[nn.Module] | Sequence[type[nn.Module]] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Owner:
    """A place that holds a parameter: ``module._parameters[attribute]``. Tied parameters have several."""

    module: nn.Module
    attribute: str


@dataclass
class UnitPlan:
    """A unit before anything is cut: its module, and its parameters with everyone who holds them.

    Attributes:
        name: qualified name of the module; the root's is ``""``.
        module: whose forward gathers the unit. The root unit has no such forward: it is gathered by the step.
        parameters: by qualified name, each once, in the order of ``module.named_parameters()``.
        owners: the holders of each parameter, by the same name.
    """

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    owners: dict[str, list[Owner]] = field(default_factory=dict)

    @property
    def is_root(self) -> bool:
        return self.name == ""


def plan_units(root: nn.Module, units: Units = "auto") -> list[UnitPlan]:
    """Choose the units of a module, the root unit first.

    Automatic units are what every rank runs whatever its data: the children of an ``nn.Sequential``, composite blocks
    repeated in an outermost ``nn.ModuleList``, and large layers outside of both. The stages of a hierarchical vision
    model, of which each is wider than the one before, are opened: their blocks are the units. A list of experts or of
    heads, chosen by data, stays inside its block. Parameters tied across units go to the root unit, which covers them
    all.

    Args:
        root: the whole module.
        units: ``"auto"``; a module class or several; or a predicate of (qualified name, module).

    Raises:
        TypeError: if ``units`` is none of these.
        ValueError: if a set of classes or a predicate matches no module.
    """
    chosen = list(_chosen(root, units))
    plans = [UnitPlan("", root), *(UnitPlan(name, module) for name, module in chosen)]
    plan_of_module = {id(inner): plan for plan in plans for inner in plan.module.modules()}
    holders: dict[int, list[tuple[str, Owner]]] = {}
    for prefix, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                holders.setdefault(id(parameter), []).append((name, Owner(module, attribute)))
    for name, parameter in root.named_parameters():
        owners = [owner for _, owner in holders[id(parameter)]]
        covering = {id(plan_of_module[id(owner.module)]): plan_of_module[id(owner.module)] for owner in owners}
        plan = next(iter(covering.values())) if len(covering) == 1 else plans[0]
        plan.parameters[name] = parameter
        plan.owners[name] = owners
    return [plan for plan in plans if plan.parameters]


def _chosen(root: nn.Module, units: Units) -> Iterator[tuple[str, nn.Module]]:
    if units == "auto":
        yield from _automatic("", root)
    else:
        yield from select_modules(root, units, option="units", word="auto")


def select_modules(root: nn.Module, wanted: Units, *, option: str, word: str) -> list[tuple[str, nn.Module]]:
    """The outermost modules, with their qualified names, that an option of the user's names.

    Args:
        root: the whole module.
        wanted: a module class or several; or a predicate of (qualified name, module).
        option, word: for the errors: the option's name, and the word that it takes beside these.

    Raises:
        TypeError: if ``wanted`` is none of these.
        ValueError: if it matches no module with parameters.
    """
    if isinstance(wanted, type):
        wanted = (wanted,)
    if isinstance(wanted, (list, tuple, set, frozenset)) and wanted and all(isinstance(u, type) for u in wanted):
        classes = tuple(wanted)
        matches = list(_outermost("", root, lambda _, module: isinstance(module, classes)))
        what = ", ".join(sorted(cls.__name__ for cls in classes))
    elif callable(wanted):
        matches = list(_outermost("", root, wanted))
        what = f"the predicate {getattr(wanted, '__name__', wanted)!r}"
    else:
        raise TypeError(
            f"{option}={wanted!r} is not understood: write {word!r}, a module class or a list of classes "
            f"({option}=[Block]), or a predicate ({option}=lambda name, module: ...)."
        )
    if not matches:
        present = ", ".join(sorted({type(module).__name__ for module in root.modules()}))
        raise ValueError(f"{option}: no module matches {what}. The model is made of: {present}.")
    return matches


def _outermost(
    prefix: str, module: nn.Module, matches: Callable[[str, nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if matches(path, child):
            if _has_parameters(child):
                yield path, child
        else:
            yield from _outermost(path, child, matches)


def _automatic(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    repeated = _is_repeated_blocks(module)
    in_sequence = isinstance(module, nn.Sequential)
    in_stages = (repeated or in_sequence) and _are_stages(module)
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if not _has_parameters(child):
            continue
        if in_stages and any(_is_composite(block) for _, block in _automatic(path, child)):
            yield from _automatic(path, child)
        elif repeated or (in_sequence and not _holds_units(child)):
            yield path, child
        elif isinstance(child, (nn.ModuleList, nn.ModuleDict)) and not _is_repeated_blocks(child):
            continue  # heads or experts, chosen by data: they belong to whoever chooses
        elif not _is_composite(child) and _own_numel(child) >= LARGE_LAYER:
            yield path, child
        else:
            yield from _automatic(path, child)


def _is_repeated_blocks(module: nn.Module) -> bool:
    """Whether this is a ModuleList of composite modules of which at least two are of one class."""
    if not isinstance(module, nn.ModuleList):
        return False
    children = [child for child in module if _has_parameters(child)]
    return (
        all(map(_is_composite, children))
        and len(children) >= 2
        and len({type(child) for child in children}) < len(children)
    )


def _are_stages(module: nn.Module) -> bool:
    """Whether the children are the stages of a hierarchical model: three or more of a class, no two of the same shapes.

    Layers of a transformer, with experts or without, are of one or two kinds; so their lists of experts stay closed.
    """
    children = [child for child in module.children() if _has_parameters(child)]
    shapes = {tuple(parameter.shape for parameter in child.parameters()) for child in children}
    return len(children) >= 3 and len({type(child) for child in children}) == 1 and len(shapes) == len(children)


def _holds_units(module: nn.Module) -> bool:
    """Whether a child of a Sequential is itself a sequence of units (the stages of a ResNet)."""
    return isinstance(module, nn.Sequential) or any(_is_repeated_blocks(inner) for inner in module.modules())


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _own_numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))
