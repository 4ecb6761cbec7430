"""Activation checkpointing of chosen modules by torch's own checkpoint, which recomputes their forward in backward.

(Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.) Applied by hooks, so that module names, classes
and state dicts do not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_zero.engine.compat import checkpoint_generator, peek_interpreter_stack
from lightning_zero.engine.config import Modules
from lightning_zero.engine.plan.units import UnitPlan, select_modules
from lightning_zero.engine.runtime.activation_offload import ActivationStore
from lightning_zero.engine.runtime.compile_hooks import EntryHook, OwnHook, is_compiled
from lightning_zero.engine.runtime.saved_tensors import is_watched_by_others

# This function of torch can be driven by hooks, but takes all options by position; later versions have more of them.
_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(checkpoint_generator).parameters.items()
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
}


class CheckpointedModule:
    """Hooks that checkpoint one module until they are removed.

    The schedule's hooks are around these: a unit is gathered before its region begins, and again within the region when
    the module is called for recomputation.

    Args:
        module: the module to checkpoint.
        store: offloads the module's inputs until they are needed again; None leaves them on the device.
    """

    def __init__(self, module: nn.Module, store: ActivationStore | None = None) -> None:
        self._store = store
        self._recomputing = 0  # nested recomputations under way
        self._regions: list[Generator[None, None, None]] = []
        self._handles = [
            module.register_forward_pre_hook(EntryHook(self._before), with_kwargs=True),
            module.register_forward_hook(OwnHook(self._after), prepend=True, always_call=True),
        ]

    def recover(self) -> None:
        """End regions whose forward was interrupted by Ctrl-C or ``sys.exit``; torch calls no forward hooks then."""
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
                # a recomputation would not be compiled, and would save other tensors
                raise RuntimeError(
                    f"activation_checkpointing= of a {type(module).__name__} inside of compiled code: compile the "
                    "checkpointed modules themselves (block.compile()) instead of what is around them."
                )
            region = self._region(module, args, kwargs)
            next(region)
            self._regions.append(region)

    def _region(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[None, None, None]:
        moving: AbstractContextManager[None] = nullcontext()
        if self._store is not None and _are_inputs_kept():
            call, tensors = self._store.take_out(args, kwargs)
            if tensors:
                function, args, kwargs = partial(call.run, function), (*call.args, *tensors), call.kwargs
                moving = self._store.moving(tensors)
        options = {**_OPTIONS, "fn": function, "context_fn": self._contexts}
        with moving:
            yield from checkpoint_generator(*options.values(), *args, **kwargs)

    def _after(self, *_: Any) -> None:
        if not self._recomputing and self._regions:
            next(self._regions.pop(), None)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Recomputation(self)


def _are_inputs_kept() -> bool:
    """Whether a region that begins now saves its inputs, in memory of their own.

    Within another checkpointed region inputs are recomputed; in ``torch.func`` they have no memory.
    """
    return torch.is_grad_enabled() and not is_watched_by_others() and peek_interpreter_stack() is None


class _Recomputation(AbstractContextManager[None]):
    """Context of each recomputation of a region; there is one for each backward through it."""

    def __init__(self, checkpointed: CheckpointedModule) -> None:
        self._checkpointed = checkpointed

    def __enter__(self) -> None:
        self._checkpointed._recomputing += 1

    def __exit__(self, *_: object) -> None:
        self._checkpointed._recomputing -= 1


def modules_to_checkpoint(module: nn.Module, plans: list[UnitPlan], wanted: Modules | None) -> list[nn.Module]:
    """The modules that the option ``activation_checkpointing`` selects.

    Raises:
        ValueError: if it selects none.
    """
    if wanted is None:
        return []
    if wanted != "units":
        return [inner for _, inner in select_modules(module, wanted, option="activation_checkpointing")]
    blocks = [block for plan in plans for block in plan.blocks]
    if not blocks:
        raise ValueError(
            "activation_checkpointing='units': the module has no unit but the root, so nothing would be checkpointed. "
            "Name the modules instead, activation_checkpointing=[Block]."
        )
    return blocks
