"""A warning names hyperparameters that differ between ranks; parameters may stay unsynchronised, as under DDP."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_zero.engine import Engine
from tests.support import rank
from tests.support.trainer import Learner, make_trainer
from tests.trainer.cases import Net, data, same_as_under_ddp, weights

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def texts_of(function):
    """The texts of this library's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(each.message) for each in caught if "Parameter group" in str(each.message)]


# ----------------------------------------------------------------------------------------------------- hyperparameters


def steps_with(change, stage=2, steps=3):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    groups = [{"params": part.parameters(), "betas": (0.9, 0.99)} for part in module]
    optimizer = AdamW(groups, lr=0.1, weight_decay=0.5)
    engine = Engine(module, [optimizer], stage=stage)
    calls = []

    def train():
        for step in range(steps):
            engine.reset_counters()
            if step == 1:
                change(optimizer)
            module(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            calls.append(engine.report().calls["control"])

    found = texts_of(train)
    engine.close()
    return found, calls


def raise_learning_rate(optimizer):
    optimizer.param_groups[1]["lr"] = 0.1 * (1 + rank())


def change_betas(optimizer):
    optimizer.param_groups[0].update(betas=(0.9, 0.8 + 0.1 * rank()), weight_decay=torch.tensor(rank() / 2))


def schedule(optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@STAGES
def test_a_learning_rate_that_differs_by_rank_is_named_in_one_warning(run_on, stage):
    (first, _), (second, _) = run_on(2, steps_with, change=raise_learning_rate, stage=stage)
    assert len(first) == 1
    assert second == [], "rank 0 warns"
    assert "Parameter group 1 of AdamW has different hyperparameters" in first[0]
    assert "lr=0.1 on rank 0; lr=0.2 on rank 1" in first[0]


def test_any_hyperparameter_is_compared(run_on):
    ((text,), _), _, _ = run_on(3, steps_with, change=change_betas)
    assert "group 0" in text
    assert "betas=(0.9, 0.8), weight_decay=0.0 on rank 0; betas=(0.9, 0.9), weight_decay=0.5 on rank 1" in text


def write_in_another_type(optimizer):
    optimizer.param_groups[0]["lr"] = 1 if rank() else 1.0


@pytest.mark.parametrize("change", [schedule, write_in_another_type])
def test_the_comparison_takes_no_message_of_its_own(run_on, change):
    for texts, calls in run_on(2, steps_with, change=change):
        assert texts == []
        assert calls[1:] == [1, 1], "the bitmap of used parameters"


class MonitorsItsOwnLoss(Learner):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "own", "interval": "step"}}

    def training_step(self, batch, batch_idx):
        self.log("own", float(batch_idx if rank() else -batch_idx))
        return super().training_step(batch, batch_idx)


def monitor_own_loss():
    return texts_of(lambda: make_trainer("zero3").fit(MonitorsItsOwnLoss()))


def test_a_scheduler_that_monitors_each_ranks_own_value_is_noticed(run_on):
    first, second = run_on(2, monitor_own_loss)
    assert len(first) == 1 and second == []
    assert "lr=0.1 on rank 0; lr=0.01" in first[0]


# ------------------------------------------------------------------------------------------------- local parameters


class Growing(Net):
    """A layer is added in the second epoch; a tensor that no module has is trained from the start."""

    def __init__(self):
        super().__init__()
        self.outside = [nn.Parameter(torch.ones(6))]
        self.grows = True

    def forward(self, x):
        x = x * self.outside[0]
        return super().forward(self.added(x) if hasattr(self, "added") else x)

    def on_train_epoch_start(self):
        if self.current_epoch == 1 and self.grows:
            torch.manual_seed(rank())
            self.added = nn.Linear(6, 6)
            self.trainer.optimizers[0].add_param_group({"params": list(self.added.parameters()), "lr": 0.1})

    def configure_optimizers(self):
        return torch.optim.Adam([*self.parameters(), *self.outside], lr=self.lr)


def grow(strategy):
    module = Growing()
    trainer = make_trainer(strategy, max_epochs=3)
    trainer.fit(module, data())
    return weights(module), module.outside


@pytest.mark.behaviour(
    "The Trainer", "Parameters outside of the module, and layers added in mid-run, train unsynchronised"
)
def test_parameters_that_are_not_synchronised_train_as_under_ddp(run_on):
    run_on(2, same_as_under_ddp, case=grow)
