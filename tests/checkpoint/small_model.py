"""A model with difficult cases for checkpoints, and its data, independent of DeepSpeed, FSDP and this package."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

BEFORE, AFTER = 3, 2  # steps before the checkpoint is written, and after


class SmallModel(nn.Module):
    """Tied weights, a frozen layer, buffers of integers and of floats, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.blocks = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mask", torch.arange(3), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.embedding(tokens)))
        self.mean.lerp_(hidden.detach().mean(0).to(self.mean.dtype), 0.1)
        self.seen += 1
        hidden = hidden + self.blocks(hidden) * self.scale
        return nn.functional.cross_entropy(self.head(hidden).float(), targets)


def make_model() -> SmallModel:
    """Create the same model on every call, rank and machine."""
    torch.manual_seed(0)
    return SmallModel()


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Two groups with their own learning rates; the second is not in the module's order."""
    decayed, others = [], []
    for name, parameter in model.named_parameters():  # by name: FSDP's parameters are flat
        if parameter.requires_grad:
            (decayed if name.endswith("weight") and "norm" not in name else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others[::-1], "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's batch for a step: 6 tokens and their targets."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(7, (6,), generator=generator), torch.randint(7, (6,), generator=generator)


class SmallLearner(LightningModule):
    """The model for a Trainer. Its batch depends only on the step, wherever a run begins.

    Args:
        rank: the rank whose batches it sees.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 5})
        self.model = make_model()
        self.rank = rank
        self.losses: list[float] = []

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets)

    def training_step(self, _: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(*batch(self.global_step, self.rank))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(range(BEFORE + AFTER))
