"""LightningModules around the small models, and a Trainer run in a worker under any strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.support.models import CLASSES, VOCABULARY, OddModel, adam
from tests.support.training import Run, trained_once
from tests.support.workers import world_size

ClipGradients = Callable[[LightningModule, Optimizer], Tensor]


class Learner(LightningModule):
    """An ordinary LightningModule that does not know ZeRO.

    Arguments:
        batches: number of batches per rank and epoch.
        clip: called by `configure_gradient_clipping`, if given; its return values are kept in `norms`.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module] = OddModel,
        optimizer: Callable[[nn.Module], Optimizer] = adam,
        batches: int = 5,
        clip: ClipGradients | None = None,
    ) -> None:
        super().__init__()
        self.model = model()
        self.make_optimizer = optimizer
        self.batches = batches
        self.clip = clip
        self.norms: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(*batch)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if self.clip is None:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            self.norms.append(self.clip(self, optimizer))

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self.model)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        # Lightning adds the sampler that gives each rank its share.
        samples = 4 * self.batches * world_size()
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(VOCABULARY, (samples, 6), generator=generator)
        targets = torch.randint(CLASSES, (samples, 6), generator=generator)
        return DataLoader(TensorDataset(tokens, targets), batch_size=4)


class ManualLearner(Learner):
    """Like `Learner`, with manual optimization; `clip` is called with the module and the optimizer before the step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.model(*batch)
        self.manual_backward(loss)
        if self.clip is not None:
            self.norms.append(self.clip(self, optimizer.optimizer))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


class Losses(Callback):
    """Records this rank's loss of each batch and, under ZeRO, the engine's report after each batch."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.reports: list[Any] = []
        self.units: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append((outputs["loss"] if isinstance(outputs, dict) else outputs).detach().clone())
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None:
            self.reports.append(engine.report())
            self.units = list(trainer.strategy.units)


@dataclass(frozen=True)
class TrainerRun(Run):
    """Result of a run with a Trainer: module, the report after each batch, units, and norms seen by clipping."""

    module: Learner | None = None
    reports: list[Any] = field(default_factory=list)
    units: list[Any] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)


def make_trainer(strategy: Any, cls: Any = Trainer, **options: Any) -> Any:
    """A quiet Trainer, of any namespace, on all ranks of the pool; on one rank "ddp" means a single device."""
    import lightning_zero  # noqa: F401  (registers the strategies)

    if world_size() == 1 and strategy == "ddp":
        strategy = "auto"
    logging.getLogger(cls.__module__.partition(".trainer")[0]).setLevel(logging.WARNING)
    # With a sampler DDP shuffles even on one device, but the single-device strategy does not.
    defaults = {"max_epochs": 2, "enable_checkpointing": False, "use_distributed_sampler": world_size() > 1}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return cls(**({"accelerator": "cpu", "devices": world_size(), "strategy": strategy} | quiet | defaults | options))


def fit(
    strategy: Any, learner: Callable[..., Learner] = Learner, ckpt_path: str | None = None, **options: Any
) -> TrainerRun:
    """Train a new `learner` under `strategy`.

    Arguments:
        strategy: a name or a strategy.
        learner: creates the LightningModule.
        ckpt_path: checkpoint to resume from.
        options: of the Trainer; `callbacks` are kept.
    """
    torch.manual_seed(0)
    module = learner()
    losses = Losses()
    trainer = make_trainer(strategy, callbacks=[losses, *options.pop("callbacks", [])], **options)
    trainer.fit(module, ckpt_path=ckpt_path)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return TrainerRun(losses.losses, weights, None, module, losses.reports, losses.units, module.norms)


@trained_once
def fit_ddp(learner: Callable[..., Learner] = Learner, **options: Any) -> TrainerRun:
    """The reference: ``fit`` under DDP, or on a single device if there is one rank."""
    return fit("ddp", learner, **options)
