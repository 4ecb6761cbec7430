"""Optimizer-in-backward for a Trainer: decide whether updates of offloaded states may start before backward ends.

Updates may start early if no hook between backward and the optimizer step can read or change a gradient, or read the
old parameters.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from lightning_utilities.core.overrides import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine import Engine, slot_of
from lightning_zero.engine.compat import has_backward_hooks, is_step_of_scheduler, step_pre_hooks
from lightning_zero.engine.optim.masters import Masters
from lightning_zero.strategies.lightning_internals import should_accumulate

log = logging.getLogger(__name__)

_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
_HOOKS_OF_MODULES = (*_HOOKS, "backward", "configure_gradient_clipping", "clip_gradients", "optimizer_step")
_PRECISIONS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")


class EarlyUpdates:
    """Decides before each backward pass of a run whether the optimizer may update parameters during that pass."""

    def __init__(self, lightning: ModuleType) -> None:
        self._lightning = lightning
        self._known: dict[tuple[bool, ...], set[str]] = {}

    @contextmanager
    def around_backward(self, engine: Engine, trainer: Any, loss: Tensor) -> Iterator[None]:
        """Context of a backward pass. If allowed, updates start in the last backward pass before an optimizer step."""
        is_automatic = trainer.lightning_module.automatic_optimization  # then there is at most one optimizer
        optimizer: Optimizer | None = trainer.optimizers[0] if is_automatic and trainer.optimizers else None
        trained = tuple(parameter.requires_grad for parameter in engine.module.parameters())
        read = _read_directly(loss)
        reason = _why_to_wait(self._lightning, trainer, optimizer)
        if reason is None and (read is None or not read <= self._known.get(trained, set())):
            reason = "some parameters may receive several gradients"
        log.debug("updates %s", f"wait for the end of backward: {reason}" if reason else "begin in backward")
        if reason is not None or optimizer is None:
            yield
        else:
            with engine.last_backward(optimizer):
                yield
        self._known.setdefault(trained, set()).update(read or ())


def _why_to_wait(lightning: ModuleType, trainer: Any, optimizer: Optimizer | None) -> str | None:
    """Return the reason why updates must wait for the end of the next backward pass, or None if they need not wait."""
    module, precision = trainer.lightning_module, trainer.precision_plugin
    if optimizer is None:
        return "manual optimization"
    if should_accumulate(trainer):
        return "more micro-batches come before the update"
    if trainer.gradient_clip_val:
        return "gradients are clipped"
    plugins = lightning.plugins.precision
    if type(precision) not in [getattr(plugins, name) for name in _PRECISIONS]:
        return f"the precision plugin {type(precision).__name__} may change gradients"
    if getattr(precision, "scaler", None) is not None:
        return "gradients are scaled and may overflow"
    hooked: list[tuple[Any, tuple[str, ...], Any]] = [(module, _HOOKS_OF_MODULES, lightning.LightningModule)]
    hooked += [(callback, _HOOKS, lightning.Callback) for callback in trainer.callbacks]
    for holder, names, base in hooked:
        for name in names:
            if is_overridden(name, holder, base):
                return f"{type(holder).__name__}.{name} is overridden"
    if any(map(has_backward_hooks, module.modules())):
        return "modules have backward hooks"
    if any(not isinstance(getattr(hook, "__self__", None), Masters) for hook in step_pre_hooks(optimizer)):
        return "the optimizer has hooks before its step"
    step = vars(optimizer).get("step")
    is_torchs = (inspect.unwrap(type(optimizer).step).__module__ or "").startswith("torch.optim")
    if not is_torchs or (step is not None and not is_step_of_scheduler(step)):
        return f"{type(optimizer).__name__}.step is not torch's own"
    return None


def _read_directly(loss: Tensor) -> set[str] | None:
    """Return the names of parameters that the loss reads outside of their modules' forward, for example in a penalty.

    Such a parameter may receive several gradients. In the first such backward, updates wait for its end; later, the
    number of gradients to expect is known. Returns None if part of the autograd graph is built only in backward.
    """
    found: set[str] = set()
    seen, ahead = set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":  # reentrant: builds its graph during backward
            return None
        slot = slot_of(getattr(node, "variable", None))
        if slot is not None:
            found.add(slot.name)
        ahead += [following for following, _ in node.next_functions]
    return found
