"""Shared by the cases: a small module with its data, a quiet fit, and the comparison of each stage with DDP.

A case is a function of a strategy's name that does what a project might do (train, evaluate, ...) and returns the
values that must equal DDP's. Its docstring is the behaviour in a user's words.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.support.trainer import make_trainer
from tests.support.training import same_values
from tests.support.workers import world_size

Case = Callable[[str], Any]


def behaviours(section: str, *cases: Case) -> pytest.MarkDecorator:
    """Run a test with each case; the case's docstring is its row in docs/reference/compatibility.md."""
    marked = [
        pytest.param(case, id=case.__name__, marks=pytest.mark.behaviour(section, str(case.__doc__).rstrip(".")))
        for case in cases
    ]
    return pytest.mark.parametrize("case", marked)


def same_as_under_ddp(case: Case, bound: float = 0) -> None:
    """Run a case under DDP and under each stage, from the same seed and in an empty folder, and compare."""
    results = {}
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        torch.manual_seed(0)
        results[strategy] = case(strategy)
        shutil.rmtree(shared_folder(), ignore_errors=True)
    assert results["ddp"] is not None, "nothing was compared"
    for stage in ("zero1", "zero2", "zero3"):
        same_values(results[stage], results["ddp"], stage, bound)


def same_as_under_ddp_in_double(case: Case, bound: float) -> None:
    """Compare in 64 bits, where a bound just above the errors of rounding shows that there are no others."""
    torch.set_default_dtype(torch.float64)
    try:
        same_as_under_ddp(case, bound)
    finally:
        torch.set_default_dtype(torch.float32)


class Body:
    """A typical module of either namespace: two blocks, a head and a scale; it logs, evaluates, predicts."""

    lr = 0.01
    log: Any
    parameters: Any

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)) for _ in range(2)))
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)) * self.scale

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Net(Body, LightningModule):
    """For `lightning.pytorch`."""


def data(samples: int = 24, batch_size: int = 4) -> DataLoader[Any]:
    """Samples, of which each of two ranks gets half: three batches by default."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def fit(strategy: str, module: LightningModule | None = None, ckpt_path: Any = None, **options: Any) -> Any:
    """Fit a module, by default a Net, for two epochs with validation; return its trainer and the module."""
    module = Net() if module is None else module
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, data(), data(16), ckpt_path=ckpt_path)
    return trainer, module


def observed(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Weights and buffers, logged values, steps, optimizer states, and the module's own records."""
    return {
        "weights": weights(module),
        "metrics": dict(trainer.callback_metrics),
        "step": trainer.global_step,
        "optimizers": [optimizer_state(optimizer) for optimizer in trainer.optimizers],
        "seen": list(getattr(module, "seen", [])),
    }


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dict, sorted by parameter; it is empty for Lightning's stand-in for no optimizer."""
    state_dict = optimizer.state_dict()
    return {**state_dict, "state": dict(sorted(state_dict.get("state", {}).items()))}


def trained(strategy: str, module: LightningModule | None = None, **options: Any) -> dict[str, Any]:
    """Fit and observe."""
    return observed(*fit(strategy, module, **options))


def shared_folder() -> Path:
    """One folder for all ranks of a case."""
    holder = [str(Path.cwd() / "shared")]
    if world_size() > 1:
        dist.broadcast_object_list(holder)
    return Path(holder[0])
