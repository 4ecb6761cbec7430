"""Base class for callbacks that collect values in each evaluation."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class EvaluationCallback(Callback):
    """A callback with the same hooks for validation and test: at the start, after each batch, and at the end."""

    @abstractmethod
    def start(self, pl_module: LightningModule) -> None:
        """Called before the first batch."""

    @abstractmethod
    def update(self, pl_module: LightningModule, outputs: Any, batch: Any) -> None:
        """Called after each batch, with the step's outputs."""

    @abstractmethod
    def end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last batch."""

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start(pl_module)

    def _update(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.update(pl_module, outputs, batch)

    def _end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end(trainer, pl_module)

    on_validation_epoch_start = on_test_epoch_start = _start
    on_validation_batch_end = on_test_batch_end = _update
    on_validation_epoch_end = on_test_epoch_end = _end
