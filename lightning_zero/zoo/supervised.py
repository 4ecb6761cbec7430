"""Base class of the zoo's models: cross entropy, a metric, weight decay by shape, warm-up and cosine decay."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric


class Supervised(LightningModule):
    """Trains on batches of (inputs, class indices). ``forward`` returns logits; classes are the last dimension.

    Arguments:
        name, metric: The name to log the validation metric under, and the metric, computed from logits and targets.
        optimizer: Creates the optimizer from parameter groups, for example ``partial(torch.optim.AdamW, lr=1e-3)``.
        warmup_steps: Optimizer steps until the learning rate peaks. It then decays along a cosine to a twentieth.

    Attributes:
        float8: torchao's recipe by which the linear layers of blocks compute in float8; None if they do not.
    """

    float8: str | None = None

    def __init__(self, name: str, metric: Metric, optimizer: Callable[..., Optimizer], warmup_steps: int) -> None:
        super().__init__()
        self.metric_name, self.metric = name, metric
        self.optimizer, self.warmup_steps = optimizer, warmup_steps

    def configure_model(self) -> None:
        if self.float8 is None:
            return
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-untyped]

        device, gathers = self.trainer.strategy.root_device, self.float8 == "tensorwise"
        emulates = device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)
        config = Float8LinearConfig.from_recipe_name(self.float8)
        config = replace(config, enable_fsdp_float8_all_gather=gathers, emulate=emulates)
        convert_to_float8_training(self, module_filter_fn=_may_be_float8, config=config)

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


def _may_be_float8(layer: nn.Module, name: str) -> bool:
    return type(layer) is nn.Linear and "blocks." in name and not any(size % 16 for size in layer.weight.shape)


def groups_of(module: nn.Module, optimizer: Any) -> list[dict[str, Any]]:
    """Group a module's trained parameters into matrices, and one-dimensional parameters without weight decay.

    Args:
        module: a module whose repeated blocks are numbered, as in ``nn.ModuleList`` or ``nn.Sequential``.
        optimizer: function that creates an optimizer from groups, such as ``partial(torch.optim.AdamW, lr=1e-3)``. For
            ``pytorch_optimizer.Muon``, Muon trains the matrices in blocks, and AdamW, which suits embeddings and heads
            (Jordan et al., "Muon", 2024), trains the rest.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in trained.items() if p.ndim >= 2}
    rest = {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 0.0}
    if getattr(optimizer, "func", optimizer).__name__ != "Muon":
        return [{"params": list(matrices.values())}, rest]
    hidden = {name for name, p in matrices.items() if p.ndim == 2 and re.search(r"\.\d+\.", name)}
    groups = [
        {"params": [p for name, p in matrices.items() if name in hidden], "use_muon": True},
        {"params": [p for name, p in matrices.items() if name not in hidden], "use_muon": False},
        {**rest, "use_muon": False},
    ]
    return [group for group in groups if group["params"]]
