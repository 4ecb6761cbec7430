"""A project with its own Hydra configuration, which uses lightning_zero's groups: stage, trainer and so on.

    python examples/own_hydra_project/train.py network=large
    torchrun --nproc-per-node 2 examples/own_hydra_project/train.py

The network learns to tell the two arms of a spiral apart, from generated points.
"""

import math
from functools import partial

import hydra
import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401  - registers the strategies, so that `trainer.strategy=zero2` works as well


class Spirals(LightningDataModule):
    """Points (x, y) on two spiral arms with a little noise; the label is the arm."""

    def __init__(self, points: int, batch_size: int) -> None:
        super().__init__()
        self.points = points
        self.batch_size = batch_size

    def make(self, points: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        label = torch.arange(points) % 2
        radius = torch.rand(points, generator=generator)
        angle = 2 * math.pi * radius + math.pi * label
        arms = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        return TensorDataset(arms + 0.02 * torch.randn(points, 2, generator=generator), label)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.make(self.points, seed=1), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.make(self.points // 4, seed=2), self.batch_size)


class SpiralClassifier(LightningModule):
    def __init__(self, width: int, depth: int, optimizer: partial[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer"])
        self.optimizer = optimizer
        widths = [2, *[width] * depth]
        hidden = [nn.Sequential(nn.Linear(i, o), nn.GELU()) for i, o in zip(widths, widths[1:], strict=False)]
        self.network = nn.Sequential(*hidden, nn.Linear(width, 2))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        points, labels = batch
        return nn.functional.cross_entropy(self.network(points), labels)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    seed_everything(config.seed)
    trainer: Trainer = instantiate(config.trainer, logger=instantiate(config.logger))
    model = SpiralClassifier(**config.network, optimizer=instantiate(config.optimizer))
    trainer.fit(model, Spirals(**config.data))
    if trainer.is_global_zero:
        print(f"validation loss {trainer.callback_metrics['val/loss'].item():.8f}")


if __name__ == "__main__":
    main()
