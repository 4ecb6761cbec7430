"""Optimizer and schedule of the zoo's models: weight decay by shape, warm-up and cosine decay."""

import math
from collections.abc import Callable

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def decay_by_shape(
    module: LightningModule, optimizer: Callable[..., Optimizer], warmup_steps: int
) -> OptimizerLRSchedulerConfig:
    """Return value for ``configure_optimizers``: weight decay for matrices, none for biases, norms and the like.

    Arguments:
        module: The module whose trainable parameters are optimized, attached to its Trainer.
        optimizer: Creates the optimizer from parameter groups, for example ``partial(torch.optim.AdamW, lr=1e-3)``.
        warmup_steps: See :func:`warmup_cosine`.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    made = optimizer(
        [
            {"params": [p for p in trainable if p.ndim >= 2]},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
        ]
    )
    scheduler = warmup_cosine(made, warmup_steps, int(module.trainer.estimated_stepping_batches))
    return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def warmup_cosine(optimizer: Optimizer, warmup_steps: int, total_steps: int, floor: float = 0.05) -> LambdaLR:
    """Linear warm-up over ``warmup_steps``, then cosine decay to ``floor`` times the full learning rate.

    Arguments:
        optimizer: Its learning rates are the peak.
        warmup_steps: Optimizer steps before the peak.
        total_steps: Optimizer steps of the whole run.
        floor: The final learning rate as a fraction of the peak.
    """

    def scale(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, scale)
