"""A LightningModule around a transformers model, and its training under any strategy in a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from tests.libraries.models import MODELS, Sample
from tests.support import world_size
from tests.support.trainer import Losses, make_trainer
from tests.support.training import Run, same_runs, same_tensors

STEPS, BATCH = 3, 2


class Learner(LightningModule):
    """Trains a model as its authors show: `forward` takes a batch and returns an output with a loss.

    Arguments:
        name: the model's name in the table.
        change: applied to the new model, for example to add adapters; returns the module to train.
        options: options of the model's configuration.
    """

    def __init__(self, name: str, change: Callable[[nn.Module], nn.Module] = lambda model: model, **options: Any):
        super().__init__()
        self.tiny = MODELS[name]
        self.model = change(self.tiny.make(**options))
        self.validated: list[Tensor] = []

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        return self.model(**batch, **self.tiny.options).loss

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        self.validated.append(self.model(**batch, **self.tiny.options).loss)

    def configure_optimizers(self) -> Optimizer:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def train_dataloader(self) -> DataLoader[Sample]:
        return self._loader(STEPS, seed=1)

    def val_dataloader(self) -> DataLoader[Sample]:
        return self._loader(1, seed=2)

    def _loader(self, batches: int, seed: int) -> DataLoader[Sample]:
        generator = torch.Generator().manual_seed(seed)
        samples = [self.tiny.sample(generator) for _ in range(batches * BATCH * world_size())]
        return DataLoader(samples, batch_size=BATCH)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LearnerRun(Run):
    """A run with its module, the units and the reports after each batch."""

    module: Any = None
    units: Any = None
    reports: Any = None


def fit(strategy: Any, make: Callable[[], LightningModule], **options: Any) -> LearnerRun:
    """Train the module created by ``make``, always from the same seed (NumPy's too: models draw masks with it)."""
    seed_everything(0, verbose=False)
    module, losses = make(), Losses()
    callbacks = [losses, *options.pop("callbacks", [])]
    make_trainer(strategy, callbacks=callbacks, **({"max_epochs": 1} | options)).fit(module)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return LearnerRun(losses.losses, weights, None, module, losses.units, losses.reports)


def same_learning(run: LearnerRun, reference: LearnerRun, bound: float = 0) -> None:
    """Losses, validation and weights agree; see `same_tensors`."""
    same_runs(run, reference, bound)
    for index, (value, expected) in enumerate(zip(run.module.validated, reference.module.validated, strict=True)):
        same_tensors({f"validation {index}": value}, {f"validation {index}": expected}, bound)
