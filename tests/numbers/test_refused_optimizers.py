"""An optimizer that is not elementwise cannot work on shards: it is refused before the first step, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, Adafactor, Muon, Optimizer, SparseAdam

from tests.support.models import OddModel, Square
from tests.support.trainer import Learner, make_trainer
from tests.support.training import Recipe, batch, same_runs, train_ddp, train_zero


class SignDescent(Optimizer):
    """Elementwise, and unknown to anybody else."""

    def __init__(self, params: Any, lr: float = 0.001) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])
        return loss


REFUSED = [LBFGS, Adafactor, Muon, SparseAdam, SignDescent]


def make(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    return kind(model.parameters(), lr=0.001)


def refuse(stage: int, kind: type[Optimizer], **options: Any) -> None:
    """Square has matrices only, which is all that Muon takes."""
    from lightning_zero.engine import Engine

    module = Square()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises((TypeError, ValueError), match=rf"\b{kind.__name__}\b.*elementwise"):
        optimizer = make(kind, module)
        Engine(module, [optimizer], stage=stage, **options)
        module(*batch(0)).backward()
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_an_optimizer_that_is_not_known_to_be_elementwise_is_refused_by_name(run_on, stage, kind):
    run_on(2, refuse, stage=stage, kind=kind)


@pytest.mark.parametrize("kind", [LBFGS, Adafactor, Muon, SparseAdam], ids=lambda kind: kind.__name__)
def test_one_that_is_known_not_to_be_elementwise_is_refused_in_any_case(run_on, kind):
    run_on(2, refuse, stage=3, kind=kind, allow_any_optimizer=True)


def sign_descent(model: nn.Module) -> Optimizer:
    return make(SignDescent, model)


def train_both(stage: int) -> None:
    recipe = Recipe(OddModel, sign_descent)
    same_runs(train_zero(recipe, stage, allow_any_optimizer=True), train_ddp(recipe))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_unknown_elementwise_optimizer_trains_as_under_ddp_when_the_user_allows_it(run_on, stage):
    run_on(2, train_both, stage=stage)


class LearnerWithLBFGS(Learner):
    def configure_optimizers(self) -> Optimizer:
        return LBFGS(self.parameters())


def refuse_in_the_trainer(stage: int) -> None:
    trainer = make_trainer(f"zero{stage}")
    with pytest.raises((TypeError, ValueError), match=r"\bLBFGS\b.*elementwise"):
        trainer.fit(LearnerWithLBFGS())
    assert trainer.global_step == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_trainer_refuses_it_before_the_first_step(run_on, stage):
    run_on(2, refuse_in_the_trainer, stage=stage)
