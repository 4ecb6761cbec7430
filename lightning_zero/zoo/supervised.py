"""Base of the zoo's models: cross entropy, a validation metric, weight decay by shape, warm-up and cosine decay."""

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric

from lightning_zero.zoo.muon import splits_hidden


class Supervised(LightningModule):
    """Trains on batches of inputs and class numbers; ``forward`` returns logits, with the classes last.

    Arguments:
        name, metric: The validation metric, computed from logits and targets.
        optimizer: Creates the optimizer from parameter groups, for example ``partial(torch.optim.AdamW, lr=1e-3)``.
        warmup_steps: Optimizer steps until the full learning rate; cosine decay to a twentieth of it follows.
    """

    def __init__(self, name: str, metric: Metric, optimizer: Callable[..., Optimizer], warmup_steps: int) -> None:
        super().__init__()
        self.metric_name, self.metric = name, metric
        self.optimizer, self.warmup_steps = optimizer, warmup_steps

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, -2).float(), targets.flatten())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        inputs, targets = batch
        logits = self(inputs).float()
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        self.log("validation/loss", loss, batch_size=len(inputs), sync_dist=True)
        self.metric(logits, targets)
        self.log(f"validation/{self.metric_name}", self.metric, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        trainable = {name: p for name, p in self.named_parameters() if p.requires_grad}
        matrices = {name: p for name, p in trainable.items() if p.ndim >= 2}
        groups: list[dict[str, Any]] = [{"params": list(matrices.values())}]
        if splits_hidden(self.optimizer):
            is_hidden = {name: "blocks." in name and p.ndim == 2 for name, p in matrices.items()}
            groups = [
                {"params": [p for name, p in matrices.items() if is_hidden[name] is h], "hidden": h}
                for h in (True, False)
            ]
        # biases, norms and the like
        groups.append({"params": [p for p in trainable.values() if p.ndim < 2], "weight_decay": 0.0})
        optimizer = self.optimizer(groups)
        warmup, total_steps = self.warmup_steps, int(self.trainer.estimated_stepping_batches)

        def scale(step: int) -> float:
            """Hand-written: torch's cosine saves its length, so a resumed run with more steps would begin to rise."""
            if step < warmup:
                return (step + 1) / warmup
            progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
            return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * progress))

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, scale), "interval": "step"}}
