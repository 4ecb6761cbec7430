"""Base class of the zoo's models: cross entropy, a metric, weight decay by shape, warm-up and cosine decay."""

import math
from collections.abc import Callable

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric

from lightning_zero.zoo.muon import groups_of


class Supervised(LightningModule):
    """Trains on batches of (inputs, class indices). ``forward`` returns logits; classes are the last dimension.

    Arguments:
        name, metric: The name to log the validation metric under, and the metric, computed from logits and targets.
        optimizer: Creates the optimizer from parameter groups, for example ``partial(torch.optim.AdamW, lr=1e-3)``.
        warmup_steps: Optimizer steps until the learning rate peaks. It then decays along a cosine to a twentieth.
    """

    def __init__(self, name: str, metric: Metric, optimizer: Callable[..., Optimizer], warmup_steps: int) -> None:
        super().__init__()
        self.metric_name, self.metric = name, metric
        self.optimizer, self.warmup_steps = optimizer, warmup_steps

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, -2).float(), targets.flatten())
        self.log("loss", loss, prog_bar=True, logger=False)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        inputs, targets = batch
        logits = self(inputs).float()
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        self.log("validation/loss", loss, batch_size=len(inputs), sync_dist=True)
        self.metric(logits, targets)
        self.log(f"validation/{self.metric_name}", self.metric, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.optimizer(groups_of(self, self.optimizer))
        warmup, total_steps = self.warmup_steps, int(self.trainer.estimated_stepping_batches)

        def scale(step: int) -> float:
            """Learning-rate factor. torch's schedule saves its length: in a longer resumed run, the rate would rise."""
            if step < warmup:
                return (step + 1) / warmup
            progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
            return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * progress))

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, scale), "interval": "step"}}
