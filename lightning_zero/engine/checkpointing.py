"""Activation checkpointing of chosen modules: torch's own, which computes their forward again in backward.

(Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.) It is put around a module by hooks, so that names,
classes and state dicts stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator

from lightning_zero.engine.schedule import OwnHook

# The one of torch's ways in that suits hooks takes all options by position; there are more of them in later versions.
_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(_checkpoint_without_reentrant_generator).parameters.items()
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
}


class CheckpointedModule:
    """Hooks that checkpoint one module until they are removed.

    They come within the schedule's, which are there already: a unit is gathered before its region begins, and once
    again, by the recomputing call of the module, within it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._recomputing = False
        self._regions: list[Generator[None, None, None]] = []
        self._handles = [
            module.register_forward_pre_hook(OwnHook(self._before), with_kwargs=True),
            module.register_forward_hook(OwnHook(self._after), prepend=True, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._recomputing:
            options = {**_OPTIONS, "fn": module, "context_fn": self._contexts}
            region = _checkpoint_without_reentrant_generator(*options.values(), *args, **kwargs)
            next(region)
            self._regions.append(region)

    def _after(self, *_: Any) -> None:
        if not self._recomputing and self._regions:
            next(self._regions.pop(), None)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._recomputation()

    @contextmanager
    def _recomputation(self) -> Generator[None, None, None]:
        before, self._recomputing = self._recomputing, True
        try:
            yield
        finally:
            self._recomputing = before
