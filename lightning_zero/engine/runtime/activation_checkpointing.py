"""Activation checkpointing of selected modules with torch's checkpoint, which recomputes their forward in backward.

(Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.) Checkpointing is applied by hooks, so
module names, classes and state dicts do not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lightning_zero.engine.compat import checkpoint_generator, is_compiled, peek_interpreter_stack
from lightning_zero.engine.config import Modules
from lightning_zero.engine.plan.units import UnitPlan, select_modules
from lightning_zero.engine.runtime.activation_offload import ActivationStore
from lightning_zero.engine.runtime.compile_hooks import OwnHook
from lightning_zero.engine.runtime.saved_tensors import is_watched_by_others

# Hooks can advance ``checkpoint_generator``. Options are passed to it by position; newer torch versions add options.
_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(checkpoint_generator).parameters.items()
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
}


class CheckpointedModule:
    """Hooks that apply activation checkpointing to one module until they are removed.

    The schedule's hooks run outside these hooks: a unit is gathered before its checkpointed region begins, and again
    when the region is recomputed. ``store`` keeps the module's inputs until recomputation.
    """

    def __init__(self, module: nn.Module, store: ActivationStore | None = None) -> None:
        self._store = store
        self._recomputing = 0  # number of nested recomputations in progress
        self._regions: list[Generator[None, None, None]] = []
        self._handles = [
            module.register_forward_pre_hook(OwnHook(self._before), with_kwargs=True),
            module.register_forward_hook(OwnHook(self._after), prepend=True, always_call=True),
        ]

    def recover(self) -> None:
        """End regions whose forward was interrupted by Ctrl-C or ``sys.exit``: torch then calls no forward hooks."""
        while self._regions:
            self._regions.pop().close()

    def remove(self) -> None:
        self.recover()
        for handle in self._handles:
            handle.remove()
        self._store = None

    def _before(self, from_compiled: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._recomputing:
            if from_compiled and not is_compiled(module):
                # the recomputation would run uncompiled, and would save different tensors
                raise RuntimeError(
                    f"activation_checkpointing: {type(module).__name__} cannot be checkpointed inside compiled "
                    "code. Compile the checkpointed modules themselves (block.compile()) instead of the modules "
                    "that contain them."
                )
            region = self._region(module, args, kwargs)
            next(region)
            self._regions.append(region)

    def _region(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[None, None, None]:
        # An outer region or ``save_on_cpu`` stores inputs in its own way. Under ``torch.func``, inputs have no storage.
        are_inputs_kept = torch.is_grad_enabled() and not is_watched_by_others() and peek_interpreter_stack() is None
        if self._store is not None and are_inputs_kept:
            function, args, kwargs = self._store.take_out(function, args, kwargs)
        options = {**_OPTIONS, "fn": function, "context_fn": lambda: (nullcontext(), self)}
        return checkpoint_generator(*options.values(), *args, **kwargs)

    def _after(self, *_: Any) -> None:
        if not self._recomputing and self._regions:
            next(self._regions.pop(), None)

    # Torch enters this object as a context manager (``context_fn``) around each recomputation of a region.

    def __enter__(self) -> None:
        self._recomputing += 1

    def __exit__(self, *_: object) -> None:
        self._recomputing -= 1


def modules_to_checkpoint(module: nn.Module, plans: list[UnitPlan], wanted: Modules | None) -> list[nn.Module]:
    """The modules that the option ``activation_checkpointing`` selects."""
    if wanted is None:
        return []
    if wanted != "units":
        return [inner for _, inner in select_modules(module, wanted, option="activation_checkpointing")]
    blocks = [block for plan in plans for block in plan.blocks]
    if not blocks:
        raise ValueError(
            "activation_checkpointing='units': the module's only unit is the root unit, so nothing would be "
            "checkpointed. Name classes of modules instead, for example activation_checkpointing=[Block]."
        )
    return blocks
