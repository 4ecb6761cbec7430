"""State of the running epoch that Lightning's checkpoints do not contain, for a fit that a signal or a kill interrupts.

Means over the epoch and the states of torchmetrics are not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_zero.engine import compat
from lightning_zero.strategies import lightning_internals as internals

EpochState = dict[str, Any]


def epoch_state(trainer: Trainer) -> EpochState:
    """Return the metrics logged so far, which parameters are frozen, and which modules are in evaluation mode.

    Tensors are copied to CPU memory. The state also says whether training should stop.
    """
    module = trainer.lightning_module
    modes = internals.modes_before_validation(trainer) if trainer.validating else {}
    logged = {name: dict(getattr(internals.logger_connector(trainer), name)) for name in internals.LOGGED}
    return {
        "should_stop": trainer.should_stop,
        "logged": compat.tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), logged),
        "trained": {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)},
        "training": {name: modes.get(name, part.training) for name, part in module.named_modules()},
        "reloaded": internals.epoch_of_loaders(trainer),
        "accumulate": trainer.accumulate_grad_batches,
    }


def set_logged(trainer: Trainer, state: EpochState) -> None:
    """Restore the metrics logged so far, which callbacks and schedulers monitor."""
    device = trainer.lightning_module.device
    for name, logged in state["logged"].items():
        restored = compat.tree_map_only(Tensor, lambda tensor: tensor.to(device), logged)
        getattr(internals.logger_connector(trainer), name).update(restored)


def set_modules(module: LightningModule, state: EpochState) -> None:
    """Restore which parameters are frozen, and the modes of modules."""
    for name, part in module.named_modules():
        part.training = state["training"].get(name, part.training)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(state["trained"].get(name, parameter.requires_grad))


def set_epoch(trainer: Trainer, state: EpochState) -> None:
    """Restore what belongs to the epoch that is about to continue."""
    module = trainer.lightning_module
    internals.set_epoch_of_loaders(trainer, state["reloaded"])
    # ``GradientAccumulationScheduler`` sets this only when an epoch begins.
    trainer.accumulate_grad_batches = state.get("accumulate", trainer.accumulate_grad_batches)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(cls.__name__ == "StochasticWeightAveraging" for cls in type(callback).__mro__):
            with _preserved(trainer):  # the loaded options and buffers already contain what its setup changes
                callback.on_train_epoch_start(trainer, module)


@contextmanager
def _preserved(trainer: Trainer) -> Iterator[None]:
    """Context that leaves the options of optimizers and the buffers of the module as they were."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    buffers = {name: buffer.clone() for name, buffer in trainer.lightning_module.named_buffers()}
    yield
    for group, before in zip(groups, options):
        group.update(before)
    with torch.no_grad():
        for name, buffer in trainer.lightning_module.named_buffers():
            buffer.copy_(buffers[name])
