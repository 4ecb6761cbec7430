"""On two ranks in fp32, losses and weights equal DistributedDataParallel's bit for bit with every optimizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.support import models
from tests.support.models import adam
from tests.support.training import Recipe, batch, same_on_every_rank, same_runs, same_tensors, train_ddp, train_zero

OPTIMIZERS = [
    models.adam,
    models.adam_fused,
    models.adam_foreach,
    models.adam_amsgrad,
    models.adamw_with_decay_groups,
    models.adamw_with_decay_groups_fused,
    models.sgd_nesterov,
    models.sgd_nesterov_fused,
    models.sgd_nesterov_foreach,
    models.adagrad_with_initial_accumulator,
    models.rmsprop,
    models.nadam,
    models.several_groups,
    models.with_an_empty_group,
]


def train_both(stage: int, optimizer: Callable[[nn.Module], Optimizer]) -> None:
    recipe = Recipe(optimizer=optimizer, steps=20)
    reference, run = train_ddp(recipe), train_zero(recipe, stage)
    same_runs(run, reference)
    same_on_every_rank(run.weights)
    assert not torch.equal(run.weights["embed.weight"], train_ddp(Recipe(steps=0)).weights["embed.weight"])


@pytest.mark.exhaustive(but=2)
@pytest.mark.behaviour(
    "The numbers",
    "Adam, AdamW, SGD with momentum, Adagrad, RMSprop, NAdam; `fused`, `foreach`; groups, also empty ones",
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
def test_losses_and_weights_equal_ddps_over_20_steps(run_on, stage, optimizer):
    run_on(2, train_both, stage=stage, optimizer=optimizer)


def keep_the_users_optimizer(stage: int) -> None:
    """The object, its groups' hyperparameters and the parameters in them are the user's at all times."""
    from lightning_zero.engine import Engine

    model = models.OddModel()
    optimizer = models.adamw_with_decay_groups(model)
    groups = optimizer.param_groups
    held = [[id(p) for p in group["params"]] for group in groups]
    engine = Engine(model, [optimizer], stage=stage)
    for index in range(2):
        assert optimizer.param_groups is groups
        assert [[id(p) for p in group["params"]] for group in groups] == held
        assert {id(p) for p in model.parameters()} == {i for ids in held for i in ids}
        assert [p.shape for p in model.parameters()] == [p.shape for p in models.OddModel().parameters()]
        model(*batch(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    assert [[id(p) for p in group["params"]] for group in groups] == held


@pytest.mark.behaviour(
    "The module",
    "`optimizer.param_groups` hold the module's own parameters, whose shapes, names and identity never change",
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_param_groups_hold_the_modules_own_parameters_before_between_and_after_steps(run_on, stage):
    run_on(2, keep_the_users_optimizer, stage=stage)


def change_the_learning_rate(stage: int) -> None:
    """A scheduler writes `param_groups[...]["lr"]` between steps."""

    def optimizer_with_schedule(model: nn.Module) -> Optimizer:
        optimizer = adam(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    recipe = Recipe(optimizer=optimizer_with_schedule)
    reference = train_ddp(recipe)
    same_runs(train_zero(recipe, stage), reference)
    assert not torch.equal(reference.weights["embed.weight"], train_ddp(Recipe()).weights["embed.weight"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_learning_rate_schedule_acts_as_under_ddp(run_on, stage):
    run_on(2, change_the_learning_rate, stage=stage)


def train_with_two_optimizers(stage: int) -> None:
    """The second optimizer steps every other time only."""
    from lightning_zero.engine import Engine

    def train(engine_stage: int | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = models.OddModel()
        blocks = list(module.blocks.parameters())
        rest = [p for p in module.parameters() if not any(p is q for q in blocks)]
        first, second = torch.optim.Adam(blocks, lr=0.01), torch.optim.SGD(rest, lr=0.1, momentum=0.9)
        if engine_stage is None:
            model, engine = DistributedDataParallel(module), None
        else:
            model, engine = module, Engine(module, [first, second], stage=engine_stage)
        for index in range(10):
            model(*batch(index)).backward()
            first.step()
            if index % 2:
                second.step()
            first.zero_grad()
            second.zero_grad()
        if engine is not None:
            engine.close()
        return {name: value.clone() for name, value in module.state_dict().items()}

    same_tensors(train(stage), train(None), bound=0)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The numbers", "Two optimizers that step at different times")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_optimizers_that_step_at_different_times_train_as_under_ddp(run_on, stage):
    run_on(2, train_with_two_optimizers, stage=stage)
