"""Scikit-learn's handwritten digits, and a small vision transformer that classifies them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_zero.zoo.optimization import decay_by_shape


class DigitsData(LightningDataModule):
    """Images of 8 x 8 pixels in 0..1, shape (1, 8, 8), with their digits; every fifth is for validation.

    Arguments:
        batch_size: Images per rank and step.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str | None = None) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        held_out = torch.arange(len(labels)) % 5 == 0
        self.train = TensorDataset(images[~held_out], labels[~held_out])
        self.validation = TensorDataset(images[held_out], labels[held_out])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, self.batch_size)


class DigitClassifier(LightningModule):
    """A vision transformer on patches of 2 x 2 pixels.

    Arguments:
            width: Number of features per patch.
            depth: Number of blocks.
            heads: Attention heads per block; must divide ``width``.
            optimizer: Creates the optimizer from the parameters, for example ``partial(torch.optim.AdamW, lr=1e-3)``.
            warmup_steps: Optimizer steps until the full learning rate; cosine decay follows.
    """

    counted = "images"  # unit of `count`

    def __init__(
        self,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} must divide width={width}")
        # Without the optimizer: a checkpoint should contain plain values only, which torch.load accepts with
        # weights_only=True.
        self.save_hyperparameters(ignore=["optimizer"])
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.position = nn.Parameter(0.5 * torch.randn(16, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        self.optimizer = optimizer
        self.warmup_steps = warmup_steps
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) pixels -> (batch, 10) logits."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position  # (batch, 16, width)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(dim=1)))

    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[0])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images).float(), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        images, labels = batch
        logits = self(images).float()
        self.log("validation/loss", F.cross_entropy(logits, labels), batch_size=len(images), sync_dist=True)
        self.accuracy(logits, labels)
        self.log("validation/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return decay_by_shape(self, self.optimizer, self.warmup_steps)
