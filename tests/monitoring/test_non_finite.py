"""``FindNonFinite``: the first value that is not finite is named with its rank, micro-batch, module and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.monitoring import FindNonFinite, NonFiniteError
from tests.support.trainer import make_trainer
from tests.support.workers import rank

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "zero3_offload"]
BAD_RANK, BAD_BATCH = 1, 3


class Overflows(nn.Module):
    """Finite in forward; in backward, if `now` is set, the gradient of its input is infinite."""

    now = False

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sqrt(torch.zeros_like(x) * x).sum() if self.now else x * 1.0


class Net(LightningModule):
    """Dropout and batch statistics, and one value that breaks on one rank in one batch."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        self.broken = broken
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.middle = nn.Sequential(nn.Linear(8, 8), Overflows())
        self.last = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        is_bad = rank() == BAD_RANK and batch_idx == BAD_BATCH
        Overflows.now = is_bad and self.broken == "backward"
        hidden = self.first(batch)
        if is_bad and self.broken == "forward":
            hidden = hidden / (hidden * 0)
        found = self.last(self.middle(hidden))
        if is_bad and self.broken == "loss":
            found = found * float("inf")
        loss = found.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def error_of(strategy: str, broken: str) -> str:
    torch.manual_seed(5)
    module = Net(broken)
    batches = [torch.randn(4, 8) for _ in range(8)]
    if broken == "batch" and rank() == BAD_RANK:
        batches[BAD_BATCH][1, 2] = float("nan")
    trainer = make_trainer(
        strategy, callbacks=[FindNonFinite()], max_epochs=1, accumulate_grad_batches=2, use_distributed_sampler=False
    )
    said = ""
    try:
        trainer.fit(module, DataLoader(batches, batch_size=None))
    except NonFiniteError as error:
        said = str(error)
    return said


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("forward", "the input of middle (Sequential) is not finite"),
        ("backward", "in backward, the gradient that middle.1 (Overflows) computes is not finite"),
        ("loss", "the loss is not finite"),
        ("batch", "the batch is not finite"),
    ],
)
def test_every_rank_names_the_first_value_that_is_not_finite(run_on, strategy, broken, expected):
    found = run_on(2, error_of, strategy=strategy, broken=broken)
    assert found[0] == found[1]
    assert found[0].startswith("A loss or gradient is not finite at step 1: rank 1, micro-batch 1 (batch_idx=3): ")
    assert expected in found[0]
    assert "gradients that are not finite: first.0.weight, first.0.bias" in found[0]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_run_without_non_finite_values_completes(run_on, strategy):
    assert run_on(2, error_of, strategy=strategy, broken="") == ["", ""]


class ByHand(Net):
    """Uses manual optimization, and breaks the loss on one rank."""

    def __init__(self) -> None:
        super().__init__("loss")
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Poisoned(Net):
    """One weight is infinite from the beginning."""

    def __init__(self) -> None:
        super().__init__("")
        with torch.no_grad():
            self.last.weight[0, 3] = float("inf")


def error_of_other(strategy: str, kind: type[Net]) -> str:
    trainer = make_trainer(strategy, callbacks=[FindNonFinite()], max_epochs=1)
    try:
        trainer.fit(kind(), DataLoader([torch.randn(4, 8) for _ in range(12)], batch_size=None))
    except NonFiniteError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        (ByHand, 3, "the step is not computed again; find the module with Trainer(detect_anomaly=True)"),
        (Poisoned, 0, "weights that were not finite before the step: last.weight"),
    ],
)
def test_the_error_says_if_weights_were_not_finite_or_optimization_is_manual(run_on, strategy, kind, step, expected):
    found = run_on(2, error_of_other, strategy=strategy, kind=kind)
    assert found[0] == found[1] and found[0].startswith(f"A loss or gradient is not finite at step {step}: ")
    assert expected in found[0]


def test_a_non_finite_value_is_found_in_a_single_process_without_zero(run_on):
    (found,) = run_on(1, error_of_other, strategy="auto", kind=Poisoned)
    assert "rank 0: weights that were not finite before the step: last.weight" in found


class Raw(ByHand):
    """Steps an optimizer that Lightning does not know."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(Net.training_step(self, batch, batch_idx))
        optimizer.step()


class Skips(Net):
    """Computes gradients, but does not step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()


@pytest.mark.parametrize("make", [Raw, lambda: Skips("")], ids=["raw optimizer", "no step"])
def test_nothing_piles_up_if_lightning_sees_no_optimizer_step(make):
    finder = FindNonFinite()
    trainer = make_trainer("auto", callbacks=[finder], max_epochs=1, accelerator="cpu", devices=1)
    trainer.fit(make(), DataLoader([torch.randn(4, 8) for _ in range(12)], batch_size=None))
    assert len(finder._window) <= 1 and (finder._losses is None or finder._losses.numel() == 1)


class Breaks(LightningModule):
    """A complex weight, or an embedding with sparse gradients; one gradient is NaN where `value` is."""

    def __init__(self, kind: str, value: float) -> None:
        super().__init__()
        self.kind, self.value = kind, value
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.table = nn.Embedding(5, 3, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.phase * 1 if self.kind == "complex" else self.table(torch.tensor([0, 2, 2]))
        found.register_hook(lambda gradient: gradient * self.value)
        return found.abs().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("kind", "name"), [("complex", "phase"), ("sparse", "table.weight")])
def test_complex_and_sparse_gradients_are_checked(kind, name):
    def fit(value: float) -> None:
        trainer = make_trainer("auto", callbacks=[FindNonFinite()], max_epochs=1, accelerator="cpu", devices=1)
        trainer.fit(Breaks(kind, value), DataLoader([torch.zeros(1)] * 3, batch_size=None))

    fit(1.0)
    with pytest.raises(NonFiniteError, match=f"gradients that are not finite: {name}"):
        fit(float("nan"))
