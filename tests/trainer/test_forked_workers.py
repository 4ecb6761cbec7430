"""A dataset reads parameters in forked worker processes, which cannot communicate with the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_zero import ZeroStrategy
from tests.support.trainer import make_trainer
from tests.support.training import same_values
from tests.trainer.cases import Net


def read(module: nn.Module) -> Tensor:
    return module.head.weight.detach().clone().sum()


def run(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return module(torch.ones(1, 6)).sum()


class Reading(Dataset[Any]):
    """Samples that depend on the module's current parameters."""

    def __init__(self, module: nn.Module, look: Callable[[nn.Module], Tensor]) -> None:
        self.module, self.look = module, look

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((6,), index + self.look(self.module).item()), index % 3


def fit(strategy: Any, look: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Net()
    loader = DataLoader(Reading(module, look), batch_size=2, num_workers=1, multiprocessing_context="fork")
    make_trainer(strategy, max_epochs=3).fit(module, loader)
    return dict(module.state_dict())


def equals_ddp(look: Callable[[nn.Module], Tensor], strategies: list[Any]) -> None:
    expected = fit("ddp", look)
    for strategy in strategies:
        same_values(fit(strategy, look), expected, str(strategy))


@pytest.mark.parametrize("look", [read, pytest.param(run, marks=pytest.mark.exhaustive)])
@pytest.mark.behaviour(
    "The Trainer",
    "A dataset reads weights, or runs the module, in forked DataLoader workers",
    notes={3: "an error in the worker says what to write"},
)
def test_a_worker_reads_the_values_of_its_epochs_start_at_stages_1_and_2(run_on, look):
    run_on(2, equals_ddp, look=look, strategies=["zero1", "zero2", ZeroStrategy(stage=2, offload="cpu")])


def test_a_worker_reads_the_values_of_its_epochs_start_on_one_rank(run_on):
    run_on(1, equals_ddp, look=read, strategies=["zero3", ZeroStrategy(stage=3, offload="cpu")])


def is_refused(look: Callable[[nn.Module], Tensor], what: str) -> None:
    message = f"{what} requires every rank, but this is a forked process, such as a DataLoader's worker"
    with pytest.raises(RuntimeError, match=message):
        fit("zero3", look)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("look", "what"),
    [
        (read, "'head.weight'"),
        pytest.param(run, "the gather of unit 'root'", marks=pytest.mark.exhaustive),
    ],
)
def test_a_worker_that_requires_the_other_ranks_gets_an_error(run_on, look, what):
    run_on(2, is_refused, look=look, what=what)
