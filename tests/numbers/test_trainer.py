"""`Trainer(strategy="zero1" | "zero2" | "zero3")` trains as `Trainer(strategy="ddp")` does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tests.support import models
from tests.support.trainer import Learner, ManualLearner, fit, fit_ddp
from tests.support.training import CLOSE, same_on_every_rank, same_runs
from tests.support.workers import world_size

# The plain-torch loops test all optimizers; these are the ones that differ for the Trainer and the strategy.
OPTIMIZERS = [
    models.adam_fused,
    models.adamw_with_decay_groups,
    models.sgd_nesterov,
    models.adagrad_with_initial_accumulator,
    models.several_groups,
]


def fit_both(stage: int, learner: Callable[[], Learner], bound: float = 0) -> None:
    """Train for two epochs under DDP and at a stage, and compare."""
    reference, run = fit_ddp(learner), fit(f"zero{stage}", learner)
    assert len(reference.losses) == 2 * run.module.batches
    same_runs(run, reference, bound)
    same_on_every_rank(run.weights)
    assert dist.is_initialized() == (world_size() > 1)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The numbers",
    "Optimizers and parameter groups through the Trainer",
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
def test_losses_and_weights_through_the_trainer_equal_ddps_over_20_steps(run_on, stage, optimizer):
    run_on(2, fit_both, stage=stage, learner=partial(Learner, optimizer=optimizer, batches=10))


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The numbers",
    "1, 3 and 4 ranks through the Trainer",
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_losses_and_weights_equal_those_of_a_single_device_and_follow_ddps_on_more_ranks(run_on, stage, size):
    learner = partial(Learner, optimizer=models.adam_with_large_eps)
    run_on(size, fit_both, stage=stage, learner=learner, bound=0 if size == 1 else CLOSE)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The Trainer", "Manual optimization")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_manual_optimization_trains_as_under_ddp(run_on, stage):
    run_on(2, fit_both, stage=stage, learner=ManualLearner)


class LearnerWithSchedule(Learner):
    def configure_optimizers(self) -> dict[str, object]:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_learning_rate_schedule_acts_as_under_ddp(run_on, stage):
    run_on(2, fit_both, stage=stage, learner=LearnerWithSchedule)


class LearnerWithLooseParameters(Learner):
    """Parameters of the LightningModule itself, used in `training_step` outside of any submodule's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.5, 2.0]))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.scale.square().sum() + self.scale.abs().mean()

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The module", "Parameters of the LightningModule itself, outside of any layer")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_of_the_lightning_module_itself_train_as_under_ddp(run_on, stage):
    run_on(2, fit_both, stage=stage, learner=LearnerWithLooseParameters)


def read_the_report(stage: int) -> None:
    from lightning_zero import ZeroStrategy

    strategy = ZeroStrategy(stage=stage, prefetch=2)
    assert strategy.engine is None
    run = fit(strategy)
    assert strategy.engine is None
    assert [unit.name for unit in run.units if "blocks" in unit.name] == [f"model.blocks.{i}" for i in range(3)]
    report = strategy.last_report
    assert (report.stage, report.world_size) == (stage, world_size())
    assert report.steps == report.backwards == 10
    psi = sum(p.numel() for p in run.module.parameters())
    assert report.numel == psi <= report.padded_numel


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_the_strategy_exposes_its_units_and_its_last_report(run_on, stage, size):
    run_on(size, read_the_report, stage=stage)


def take_the_name(stage: int | str) -> int:
    from lightning_zero import ZeroStrategy

    strategy = ZeroStrategy(stage=stage)
    fit(strategy, max_epochs=1)
    return strategy.last_report.stage


@pytest.mark.parametrize(
    ("name", "stage"),
    [("os", 1), ("os+g", 2), ("os+g+p", 3), ("o", 1), ("d", 2), ("p", 3)],
)
def test_a_stage_may_be_named_as_in_the_paper(run_on, name, stage):
    assert run_on(1, take_the_name, stage=name) == [stage]
