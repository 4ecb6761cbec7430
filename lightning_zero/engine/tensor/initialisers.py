"""Methods that initialise modules, which are called again when a module on the meta device receives its values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

from torch import nn

from lightning_zero.engine.compat import calls_on_stack

OWN = ("reset_parameters", "_reset_parameters")
APPLIED = "_init_weights"
OF_ADAPTERS = "reset_lora_parameters"


def running() -> set[str]:
    """The labels of such methods on the stack, so that what they write now will be written again.

    The innermost constructor of a model of transformers counts as the model's ``_init_weights``: since version 5 of
    transformers, it calls that method at its end only on other devices.
    """
    labels, model = set(), None
    for name, owner in calls_on_stack((*OWN, APPLIED, OF_ADAPTERS, "__init__")):
        if name != "__init__":
            if _is_called_again(name, owner):
                labels.add(label(name, owner))
        elif model is None and _is_of_transformers(owner):
            model = owner
    return labels if model is None else labels | {label(APPLIED, model)}


def _is_of_transformers(owner: Any) -> bool:
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(owner).__mro__)


def label(name: str, owner: nn.Module) -> str:
    """Identifies a method of a module's class, on all ranks and for copies of the module."""
    return f"{type(owner).__module__}.{type(owner).__qualname__}.{name}"


def _is_called_again(name: str, owner: Any) -> bool:
    if not isinstance(owner, nn.Module):
        return False  # a function of the same name, or a method of another object
    return name == OF_ADAPTERS or takes(getattr(owner, name, None), 1 if name == APPLIED else 0)


def takes(method: Any, count: int) -> TypeGuard[Callable[..., Any]]:
    """Whether a method requires exactly ``count`` positional arguments."""
    if not callable(method):
        return False
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return count == 0
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in by_position) == count
