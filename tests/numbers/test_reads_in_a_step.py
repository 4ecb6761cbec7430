"""In mixed precision, operations that autocast leaves in fp32 use fp32 parameters, as under DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.models import Square, adam_with_large_eps
from tests.support.trainer import Learner, fit, fit_ddp
from tests.support.training import CLOSE, same_runs

WIDTH = 32


class Reader(Learner):
    """Reads parameters directly; the rest of its step runs in bf16 under DDP too, so numbers should equal DDP's."""

    def __init__(self) -> None:
        # Few steps: a difference in fp32's last bit is sometimes one in bf16's last bit.
        super().__init__(Square, adam_with_large_eps, batches=2)
        self.table = nn.Linear(WIDTH, WIDTH, bias=False)  # not in a block: in the root unit
        self.scale = nn.Parameter(torch.tensor([1 / 3, 1.0]))

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        first, table = self.model.layers[0].linear.weight, self.table.weight
        x = torch.linspace(-1, 1, WIDTH)
        read = (F.linear(x, table) + x @ table.T + F.linear(x, first)).float().square().mean()
        looked_up = F.embedding(batch[0], table).square().mean() + table[3].sum() * 0.01
        penalty = sum(p.square().sum() for p in self.parameters()) * 0.01 + first.norm() + table.abs().max()
        return self.model(*batch) * self.scale[0] + read + looked_up + penalty * self.scale.mean()


def read() -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed", "max_epochs": 1}
    reference = fit_ddp(Reader, **options)
    for stage in (1, 2, 3):
        same_runs(fit(f"zero{stage}", Reader, **options), reference, bound=CLOSE)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The numbers", "In mixed precision, a parameter read directly has its fp32 value")
@pytest.mark.parametrize("size", [1, 2])
def test_penalties_norms_and_direct_uses_of_parameters_equal_ddps_within_fp32_precision(run_on, size):
    run_on(size, read)


class Tied(Learner):
    """A head that is the table itself, and a parameter of the LightningModule's own: the usual direct reads."""

    def __init__(self) -> None:
        super().__init__(partial(nn.Linear, WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1 / 3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = torch.linspace(-1, 1, WIDTH)
        control = self.trainer.strategy.engine.report().calls.get("control", 0)
        x = x @ self.model.weight.T + F.linear(x, self.model.weight, self.model.bias)
        loss = (x * self.scale).float().square().mean()
        assert self.trainer.strategy.engine.report().calls.get("control", 0) == control
        return loss


def read_without_asking() -> None:
    for stage in (1, 2, 3):
        fit(f"zero{stage}", Tied, precision="bf16-mixed", max_epochs=1)


def test_direct_reads_of_root_unit_parameters_that_autocast_casts_need_no_communication(run_on):
    run_on(2, read_without_asking)


class Picky(nn.Module):
    """Operations that reject low precision or mixed dtypes, and weights that are computed from other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(6, 6, 6)
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
        self.normed = nn.utils.weight_norm(nn.Linear(6, 6))
        self.filter = nn.Parameter(torch.randn(4, 6))
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = tokens.float() / 11
        x = self.orthogonal(self.bilinear(x, x)).float()
        x = torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(self.filter), 6)
        x = x + self.normed(x) + self.attend(x[None], x[None], x[None])[0][0]
        return (x - targets).square().mean()


def be_picky() -> None:
    learner = partial(Learner, Picky, batches=5)
    reference = fit_ddp(learner, precision="bf16-mixed", max_epochs=1)
    for stage in (1, 2, 3):
        same_runs(fit(f"zero{stage}", learner, precision="bf16-mixed", max_epochs=1), reference)


@pytest.mark.parametrize("size", [1, 2])
def test_modules_that_need_their_parameters_in_fp32_work_as_under_ddp(run_on, size):
    run_on(size, be_picky)


class Outside(Learner):
    """Layers called where autocast is switched off, and a forward in a hook, outside of autocast."""

    def __init__(self) -> None:
        super().__init__(Square, adam_with_large_eps, batches=2)
        self.head, self.recurrent = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.seen: list[Tensor] = []

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = torch.linspace(-1, 1, WIDTH)
        with torch.autocast("cpu", enabled=False):
            hidden, _ = self.recurrent(self.head(x)[None])
            exact = self.model.layers[0](hidden[0])
        return self.model(*batch) + exact.square().mean() + self.head(x).float().square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.seen.append(self.model.layers[0](torch.linspace(-1, 1, WIDTH)))


def call_outside_of_autocast() -> None:
    reference = fit_ddp(Outside, precision="bf16-mixed", max_epochs=1)
    for stage in (1, 2, 3):
        run = fit(f"zero{stage}", Outside, precision="bf16-mixed", max_epochs=1)
        same_runs(run, reference, bound=CLOSE)
        for ours, theirs in zip(run.module.seen, reference.module.seen, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The numbers", "In mixed precision, layers called where autocast is off, and forward passes in hooks"
)
@pytest.mark.parametrize("size", [1, 2])
def test_layers_called_outside_of_autocast_compute_in_fp32(run_on, size):
    run_on(size, call_outside_of_autocast)


class Lookup(Learner):
    """One row of an embedding is looked up 4096 times: added up in bf16, its gradient would stop at 256."""

    def __init__(self) -> None:
        super().__init__(partial(nn.Embedding, 3, WIDTH), plain_sgd, batches=1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(torch.zeros(4096, dtype=torch.int64)).sum()


def plain_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def look_up() -> None:
    for options in ({"precision": "bf16-mixed"}, {"plugins": MixedPrecision("16-mixed", "cpu")}):
        reference = fit_ddp(Lookup, max_epochs=1, **options)
        for stage in (1, 2, 3):
            same_runs(fit(f"zero{stage}", Lookup, max_epochs=1, **options), reference)


@pytest.mark.parametrize("size", [1, 2])
def test_the_gradients_of_an_embedding_are_added_up_in_fp32(run_on, size):
    run_on(size, look_up)
