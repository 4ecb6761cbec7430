"""An ordinary Lightning project: only one import and the strategy's name come from lightning_zero.

    python examples/plain_project/train.py --strategy zero3
    torchrun --nproc-per-node 2 examples/plain_project/train.py --strategy zero3

With `--strategy ddp` it prints exactly the same figures: sharding the model states changes none of them.
"""

import argparse

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import lightning_zero  # noqa: F401  - the only added line: it registers zero1, zero2 and zero3 with Lightning


class DigitsData(LightningDataModule):
    """The 1797 handwritten digits that come with scikit-learn, 8 x 8 pixels each."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).div(16).reshape(-1, 1, 8, 8)
        dataset = TensorDataset(images, torch.tensor(labels))
        self.training, self.validation, self.testing = random_split(
            dataset, [1280, 256, 261], generator=torch.Generator().manual_seed(0)
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.testing, self.batch_size)


class DigitsClassifier(LightningModule):
    def __init__(self, width: int = 32, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("val/loss", nn.functional.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("test/accuracy", self.accuracy)

    def configure_optimizers(self) -> dict:
        # Grouped by shape, as in many projects: no weight decay for biases.
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
            lr=self.hparams["learning_rate"],
        )
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Handwritten digits with an ordinary Lightning project.")
    parser.add_argument("--strategy", default="zero3", help="ddp, zero1, zero2 or zero3")
    parser.add_argument("--devices", type=int, default=2, help="processes on this machine")
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--output", default="outputs/plain_project", help="folder for logs and checkpoints")
    arguments = parser.parse_args()

    seed_everything(0)
    checkpoint = ModelCheckpoint(monitor="val/loss", filename="{epoch}", dirpath=f"{arguments.output}/checkpoints")
    trainer = Trainer(
        strategy=arguments.strategy,
        accelerator="cpu",
        devices=arguments.devices,
        max_epochs=arguments.max_epochs,
        callbacks=[checkpoint, LearningRateMonitor(), EarlyStopping(monitor="val/loss", patience=3)],
        logger=CSVLogger(arguments.output),
        log_every_n_steps=5,
        enable_progress_bar=False,
    )
    data = DigitsData()
    trainer.fit(DigitsClassifier(), data)
    validation_loss = trainer.callback_metrics["val/loss"].item()
    (tested,) = trainer.test(ckpt_path="best", datamodule=data, verbose=False)

    if trainer.is_global_zero:
        # The checkpoint is an ordinary file: one process loads it here without a Trainer or a strategy.
        restored = DigitsClassifier.load_from_checkpoint(checkpoint.best_model_path, map_location="cpu")
        images, labels = data.testing[:]
        with torch.inference_mode():
            alone = (restored(images).argmax(dim=1) == labels).float().mean().item()
        print(f"validation loss {validation_loss:.8f}")
        print(f"test accuracy {tested['test/accuracy']:.4f} (the trainer's processes), {alone:.4f} (one process)")
        print(f"checkpoint {checkpoint.best_model_path}")


if __name__ == "__main__":
    main()
