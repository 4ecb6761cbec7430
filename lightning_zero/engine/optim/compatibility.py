"""Which optimizers can update a part of a parameter without the rest."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from typing import Any, TypeGuard

from torch.optim import Optimizer

from lightning_zero.engine.config import EngineConfig

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"}
)
"""The optimizers of ``torch.optim`` that update each element from its own gradient and state alone."""

_WHY_NOT = {
    "LBFGS": "it takes inner products of whole gradients and calls the closure several times",
    "Adafactor": "it factors the second moment over the rows and columns of each matrix",
    "Muon": "it orthogonalises each whole matrix",
    "SparseAdam": "it takes sparse gradients, which cannot be laid in a flat buffer",
}


def check_optimizers(optimizers: Iterable[Optimizer], config: EngineConfig, *, ranks: int) -> None:
    """Refuse optimizers that cannot update a part of a parameter without the rest, where they would have to.

    Args:
        ranks: over which parameters are sharded. One rank alone has them whole, unless it offloads their states.

    Raises:
        TypeError: if one is not elementwise, or not known to be and ``allow_any_optimizer`` is not set.
    """
    if ranks > 1 or config.offloads_optimizer:
        for optimizer in optimizers:
            _check_is_elementwise(optimizer, config.allow_any_optimizer, ranks)


def _check_is_elementwise(optimizer: Optimizer, allow_any: bool, ranks: int) -> None:
    cls = type(optimizer)
    known = _known_base(cls)
    if known.__name__ in ELEMENTWISE and steps_as(optimizer, known):
        return
    in_parts = "each rank holds only a part of every parameter" if ranks > 1 else "offload updates parameters in pieces"
    instead = "strategy='ddp'" if ranks > 1 else "leave offload out"
    if known.__name__ in _WHY_NOT:
        raise TypeError(
            f"{cls.__name__} cannot be used with ZeRO: {_WHY_NOT[known.__name__]}, while {in_parts}. Use an "
            f"elementwise optimizer ({', '.join(sorted(ELEMENTWISE))}) or {instead}."
        )
    if not allow_any:
        raise TypeError(
            f"{cls.__name__} is not known to be elementwise, that is, to update each element from its own gradient and "
            f"state alone; {in_parts}. If you know that it is, pass ZeroStrategy(allow_any_optimizer=True); otherwise "
            f"use one of {', '.join(sorted(ELEMENTWISE))} or {instead}."
        )


def is_torchs_elementwise(cls: type) -> bool:
    """Whether a class is one of torch's own optimizers that are known to be elementwise."""
    return cls.__name__ in ELEMENTWISE and _known_base(cls) is cls


def steps_as(optimizer: Optimizer, known: type) -> bool:
    """Whether ``step`` does no more with parameters than that of a base class.

    A class of torch's own counts as itself, also where something has wrapped its ``step`` (a profiler, a mock).
    """
    classes = type(optimizer).__mro__
    steps = [vars(cls)["step"] for cls in classes[: classes.index(known)] if "step" in vars(cls)]
    # torch wraps the method of every class that is instantiated
    return all(_only_wraps(inspect.unwrap(step), vars(optimizer)) for step in steps)


def _known_base(cls: type) -> type:
    return next((base for base in cls.__mro__ if base.__module__.startswith("torch.optim")), Optimizer)


def _only_wraps(step: Any, attributes: dict[str, Any]) -> bool:
    """Whether a ``step`` reaches parameters by ``super().step()`` alone, as far as its source can show that.

    Of the optimizer it may use attributes that are numbers, strings and the like. It may not pass the optimizer on,
    call other methods or read ``param_groups``, in which there are parts of parameters while the optimizer updates.
    """
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(step))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return False
    if any(ast.unparse(decorator) not in _HARMLESS_DECORATORS for decorator in function.decorator_list):
        return False
    own, plain = function.args.args[0].arg, (bool, int, float, str, type(None))
    allowed: set[int] = set()  # uses of the optimizer, and of ``super()``
    for node in (node for node in ast.walk(function) if isinstance(node, ast.Attribute)):
        if node.attr == "step" and _is_super(node.value):
            allowed |= {id(node.value), *(id(argument) for argument in node.value.args)}
        elif isinstance(node.ctx, ast.Store) or (node.attr in attributes and isinstance(attributes[node.attr], plain)):
            allowed.add(id(node.value))
    uses = (node for node in ast.walk(function) if _is_super(node) or (isinstance(node, ast.Name) and node.id == own))
    return all(id(node) in allowed for node in uses)


def _is_super(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


_HARMLESS_DECORATORS = {"torch.no_grad()", "torch.no_grad", "override", "typing.override"}
