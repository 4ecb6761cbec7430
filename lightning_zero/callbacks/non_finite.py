"""Callback that ends a fit at its first non-finite value, and reports where the value came from."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lightning_zero.callbacks.monitor import elements_of
from lightning_zero.engine import compat, process_group, shard_of
from lightning_zero.io.text import listed
from lightning_zero.strategies import lightning_internals as internals


class NonFiniteError(FloatingPointError):
    """A loss or gradient is infinite or not a number. The weights are still those from before the step."""


class FindNonFinite(Callback):
    """Ends a fit at its first loss or gradient that is not finite, before the optimizer uses it.

    The error names rank, step, micro-batch, module and parameters. To find the cause, the step's micro-batches are
    computed again with hooks, from the same weights, buffers and random numbers. In each step, the callback
    computes the norm of this rank's gradients and waits for it, exchanges one number between ranks, and copies the
    module's buffers. It works with every strategy.

    With manual optimization, the step is not computed again. With ``16-mixed``, only losses are checked, since the
    search for a loss scale produces infinite gradients.

    Raises:
        NonFiniteError: on every rank, during the fit.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[lightning_zero.monitoring.FindNonFinite()], accelerator="cpu", logger=False)
    """

    def __init__(self) -> None:
        self._window: list[_MicroBatch] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._losses: Tensor | None = None  # 0 if the losses since the last optimizer step are finite, otherwise NaN
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._window, self._buffers, self._losses = [], [], None  # an earlier fit may have ended within a step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not pl_module.automatic_optimization:
            return  # batches are not computed again
        if trainer.global_step != self._step:
            # The window is not empty here if the module's `optimizer_step` has called no optimizer.
            self._step, self._window, self._losses = trainer.global_step, [], None
        if not self._window:
            self._buffers = [(buffer, buffer.clone()) for buffer in pl_module.buffers()]
        self._window.append((batch, batch_idx, internals.collect_rng_states()))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # One tensor for any number of losses: with an optimizer that Lightning does not know, no step empties a list.
        found = (elements_of(loss.detach()) * 0).sum()
        self._losses = found if self._losses is None else self._losses + found

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        window, self._window, losses, self._losses = self._window, [], self._losses, None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        looked_at = [] if losses is None else [losses]
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            looked_at += [_elements(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if trainer.strategy.reduce_boolean_decision(are_finite(looked_at)):
            return
        broken = _broken_gradients(pl_module)  # of sharded gradients, each rank has only its own part
        mine = self._search(trainer, pl_module, optimizer, window), broken
        every = process_group.all_gather_objects(mine) if trainer.world_size > 1 else [mine]
        *_, where = min((found for found, _ in every if found is not None), default=("the cause was not found",))
        broken_anywhere = {name for _, names in every for name in names}
        if names := [name for name, _ in pl_module.named_parameters() if name in broken_anywhere]:
            where += f"; gradients that are not finite: {listed(names)}"
        raise NonFiniteError(f"A loss or gradient is not finite at step {trainer.global_step}: {where}")

    def _search(
        self, trainer: Trainer, module: LightningModule, optimizer: Any, window: list[_MicroBatch]
    ) -> _Found | None:
        """Return this rank's finding, or None. All ranks stop at the same micro-batch."""
        rank, found = trainer.global_rank, None
        if broken := [name for name, weight in module.named_parameters() if not are_finite([shard_of(weight)])]:
            found = -1, False, rank, f"rank {rank}: weights that were not finite before the step: {listed(broken)}"
        if not trainer.strategy.reduce_boolean_decision(found is None):
            return found
        if not module.automatic_optimization:
            advice = "find the module with Trainer(detect_anomaly=True)"
            return 0, True, rank, f"with manual optimization, the step is not computed again; {advice}"
        for buffer, before in self._buffers:
            buffer.detach().copy_(before)
        optimizer.zero_grad()
        for number, micro_batch in enumerate(window):
            place = f"micro-batch {number} (batch_idx={micro_batch[1]})"
            if (first := _computed_again(trainer, module, micro_batch)) is not None:
                found = number, False, rank, f"rank {rank}, {place}: {first}"
            elif _broken_gradients(module):  # the case on every rank, if gradients are averaged during backward
                found = number, True, rank, f"{place}: all modules' values and the loss are finite"
            if not trainer.strategy.reduce_boolean_decision(found is None):
                break
        return found


_MicroBatch = tuple[Any, int, dict[str, Any]]
"""What computing it again needs: the batch, its index, and the states of random number generators before the step."""

_Found = tuple[int, bool, int, str]
"""Micro-batch, whether it may be a mere consequence, rank, text. The smallest finding over all ranks is the cause."""


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements of all tensors are finite; waits for the device once."""
    values = [elements_of(tensor) for tensor in tensors]
    floats = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in values]
    floats = [each for each in floats if each.numel() and each.is_floating_point()]
    return bool(get_total_norm(floats, float("inf")).isfinite())


def _elements(gradient: Tensor) -> Tensor:
    """The elements of a gradient on this rank."""
    return gradient if gradient.is_sparse else shard_of(gradient)


def _broken_gradients(module: nn.Module) -> list[str]:
    gradients = ((name, parameter.grad) for name, parameter in module.named_parameters())
    return [name for name, gradient in gradients if gradient is not None and not are_finite([_elements(gradient)])]


def _computed_again(trainer: Trainer, module: LightningModule, micro_batch: _MicroBatch) -> str | None:
    """Compute a micro-batch again, with hooks on all modules, and describe the first value that is not finite."""
    batch, index, rng_states = micro_batch
    internals.set_rng_states(rng_states)
    strategy, recorder = trainer.strategy, _Recorder()
    no_sync = strategy.block_backward_sync() if hasattr(strategy, "block_backward_sync") else nullcontext()
    arguments = internals.arguments_of_step(trainer, batch, index)
    with torch.enable_grad(), ExitStack() as hooks, no_sync:
        for name, inner in module.named_modules():
            if name:  # not the root: DDP runs ``training_step`` as the root module's forward
                title = f"{name} ({type(inner).__name__})"
                hooks.enter_context(inner.register_forward_pre_hook(partial(recorder.enter, title), with_kwargs=True))
                hooks.enter_context(inner.register_forward_hook(partial(recorder.leave, title)))
        for tensor in _floats(batch):
            recorder.note(tensor, "the batch")
        result = internals.call_strategy_hook(trainer, "training_step", *arguments)
        loss = result["loss"] if isinstance(result, dict) else result
        recorder.note(loss, "the loss")
        loss.backward()  # on every rank, since backward gathers parameters at stage 3
    return recorder.first


@dataclass
class _Recorder:
    """Records the first non-finite value that hooks on all modules find."""

    first: str | None = None  # description of that value
    _inputs_of: dict[int, str] = field(default_factory=dict)  # by tensor id: the innermost module with this input
    _kept: dict[int, Tensor] = field(default_factory=dict)  # by id, which stays unique as long as the tensor is kept

    def enter(self, name: str, _module: nn.Module, *inputs: Any) -> None:
        for tensor in _floats(inputs):
            self.note(tensor, f"the input of {name}")
            self._inputs_of[id(tensor)] = name
            self._follow(tensor)

    def leave(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in _floats(output):
            self.note(tensor, f"the output of {name}")
            self._follow(tensor, f"the gradient that arrives at the output of {name}")

    def note(self, tensor: Tensor, what: str) -> None:
        if self.first is None and not are_finite([tensor.detach()]):
            bad = int((~elements_of(tensor.detach()).isfinite()).sum())
            self.first = f"{what} is not finite ({bad} of {tensor.numel()} elements) and is the first such value"

    def _follow(self, tensor: Tensor, otherwise: str = "") -> None:
        if tensor.requires_grad and id(tensor) not in self._kept:
            self._kept[id(tensor)] = tensor

            def look(gradient: Tensor) -> None:
                taker = self._inputs_of.get(id(tensor))
                self.note(gradient, f"in backward, the gradient that {taker} computes" if taker else otherwise)

            tensor.register_hook(look)


def _floats(values: Any) -> list[Tensor]:
    tensors = [leaf for leaf in compat.tree_leaves(values) if isinstance(leaf, Tensor)]
    return [leaf for leaf in tensors if leaf.is_floating_point() or leaf.is_complex()]
