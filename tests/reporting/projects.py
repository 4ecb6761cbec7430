"""A project that does not use `lightning-zero train`: its module can be imported, and saves its hyperparameters."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset[Tensor]):
    """Samples with random noise, as augmentation produces them."""

    def __init__(self, seed: int = 0) -> None:
        self.values = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        return self.values[index] + 0.1 * torch.rand(16)


class Project(LightningModule):
    def __init__(self, width: int = 16, api_key: str = "none", fails_at: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.hparams["fails_at"]:
            raise ArithmeticError("as the test wants it")
        loss = (self.net(batch) - batch).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def loader(seed: int = 0) -> DataLoader[Tensor]:
    return DataLoader(Noisy(seed), batch_size=4)
