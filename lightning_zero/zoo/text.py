"""Windows of bytes from text files, by default from the source code of the running Python's standard library."""

import os
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

# Tests are repetitive, and site-packages differs between machines with the same Python.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of ``context`` bytes; the targets are the same bytes shifted by one."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def standard_library() -> Path:
    """Return the folder with the source of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def text_files(root: Path, suffix: str = "") -> list[Path]:
    """Return the files under ``root`` whose names end with ``suffix``, in the same order on every machine."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]  # skipped folders are not walked
        found += [Path(folder, name) for name in names if name.endswith(suffix) and name not in SKIPPED_FOLDERS]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_split(path: Path | None, max_bytes: int, percent: float) -> tuple[bytes, bytes]:
    """Read at most ``max_bytes``; return text for training, and the last ``percent`` % of each file for validation.

    ``path=None`` means the folder of the standard library.
    """
    root = standard_library() if path is None else path
    files = [root] if root.is_file() else text_files(root, ".py" if path is None else "")
    training, validation, left = bytearray(), bytearray(), max_bytes
    for file in files:
        text = file.read_bytes()[:left]
        left -= len(text)
        cut = len(text) - int(len(text) * percent / 100)
        training += text[:cut]
        validation += text[cut:]
        if not left:
            break
    return bytes(training), bytes(validation)


class TextData(LightningDataModule):
    """Windows of bytes from text, split into training and validation data in the same way on every machine.

    Arguments:
        path: A file or a folder; None is the standard library of the running Python.
        max_bytes: Maximum number of bytes to read.
        validation_percent: Percentage of each file, at its end, that is held out for validation.
        context: Bytes per window.
        batch_size: Windows per rank and step.
        workers: Number of worker processes that load batches; 0 loads them in the training process.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        ValueError: There is less than one batch of text for training, or less than one window for validation.
    """

    def __init__(
        self,
        path: str | None = None,
        context: int = 256,
        batch_size: int = 16,
        max_bytes: int = 32_000_000,
        validation_percent: float = 10.0,
        workers: int = 0,
    ) -> None:
        super().__init__()
        self.path = None if path is None else Path(path)
        self.context = context
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.validation_percent = validation_percent
        self.workers = workers

    def setup(self, stage: str | None = None) -> None:
        if self.path is not None and not self.path.exists():
            raise FileNotFoundError(f"path={self.path} is neither a file nor a folder")
        texts = read_split(self.path, self.max_bytes, self.validation_percent)
        for text, use in zip(texts, ("training", "validation"), strict=True):
            if len(text) <= self.context:
                where = self.path or standard_library()
                raise ValueError(
                    f"path={where} has {len(text)} bytes of text for {use} with "
                    f"validation_percent={self.validation_percent}; at least {self.context + 1} are needed"
                )
        # bytearray, because torch.frombuffer expects writable memory
        self.train, validation = (
            Windows(torch.frombuffer(bytearray(text), dtype=torch.uint8), self.context) for text in texts
        )
        if len(self.train) < self.batch_size:
            raise ValueError(f"batch_size={self.batch_size} exceeds the number of training windows, {len(self.train)}")
        # Shuffle in a fixed order, so that validation on a few batches covers more than the first file.
        order = torch.randperm(len(validation), generator=torch.Generator().manual_seed(0))
        self.validation = Subset(validation, order.tolist())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(
            self.train,
            self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.validation, self.batch_size, num_workers=self.workers)
