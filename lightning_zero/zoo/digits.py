"""Scikit-learn's handwritten digits, and a small vision transformer that classifies them."""

from collections.abc import Callable

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_zero.zoo.supervised import Supervised


class DigitsData(LightningDataModule):
    """Images of 8 x 8 pixels in [0, 1], shape (1, 8, 8), with their digits; every fifth image is for validation.

    Arguments:
        batch_size: Number of images per rank and step.
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
        if len(self.train) < self.batch_size:
            raise ValueError(f"batch_size={self.batch_size} exceeds the number of training images, {len(self.train)}")

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, self.batch_size)


class DigitClassifier(Supervised):
    """A vision transformer on patches of 2 x 2 pixels.

    Arguments:
        width: Number of features per patch.
        depth, heads: See ``lightning_zero.zoo.gpt.GPT``.
        optimizer, warmup_steps, float8: See ``Supervised``.
    """

    def __init__(
        self,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        warmup_steps: int = 20,
        float8: str | None = None,
    ) -> None:
        super().__init__("accuracy", MulticlassAccuracy(num_classes=10, average="micro"), optimizer, warmup_steps)
        if width % heads:
            raise ValueError(f"heads={heads} must divide width={width}")
        self.save_hyperparameters(ignore=["optimizer"])  # a function, which torch.load(weights_only=True) rejects
        self.float8 = float8
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.position = nn.Parameter(0.5 * torch.randn(16, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) pixels -> (batch, 10) logits."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position  # (batch, 16, width)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(dim=1)))
