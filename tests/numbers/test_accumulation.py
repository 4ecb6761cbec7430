"""Gradient accumulation: its result, and when it communicates."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import rank
from tests.support.arithmetic import difference, expected_traffic, padded_units
from tests.support.models import OddModel, adam_with_large_eps, sgd_nesterov
from tests.support.trainer import Learner, fit, fit_ddp
from tests.support.training import CLOSE, Recipe, batch, prepare, same_runs, train_ddp, train_zero
from tests.support.workers import world_size

ACCUMULATION = pytest.mark.behaviour(
    "The numbers", "Gradient accumulation, with a shorter last window of an epoch, and with clipping"
)

# Stage 1 adds up micro-batches locally and reduces the sum, as DDP's `no_sync` does. Stages 2 and 3 hold a shard of the
# gradients only, so they reduce each micro-batch and add up the sums: the same number, rounded in a different order.
BOUND = {1: 0, 2: CLOSE, 3: CLOSE}


def train_both(stage: int, recipe: Recipe, bound: float) -> None:
    same_runs(train_zero(recipe, stage), train_ddp(recipe), bound)


@pytest.mark.exhaustive(but=1)
@ACCUMULATION
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_three_micro_batches_per_step_train_as_under_ddp(run_on, stage):
    recipe = Recipe(optimizer=adam_with_large_eps, steps=8, micro_batches=3)
    run_on(2, train_both, stage=stage, recipe=recipe, bound=BOUND[stage])


def clip_by_norm(parameters) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.1)


@pytest.mark.exhaustive(but=1)
@ACCUMULATION
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_three_micro_batches_per_step_with_clipping_train_as_under_ddp(run_on, stage):
    recipe = Recipe(optimizer=sgd_nesterov, steps=8, micro_batches=3, clip=clip_by_norm)
    run_on(2, train_both, stage=stage, recipe=recipe, bound=CLOSE)


def count_collectives(stage: int, micro_batches: int) -> None:
    """Count over two steps in the middle of training, each with its gather of updated weights."""
    from lightning_zero.engine import Engine

    module, optimizer = prepare(Recipe())
    engine = Engine(module, [optimizer], stage=stage)
    padded = padded_units(engine.units, OddModel(), world_size())
    assert len(padded) == 4, "three blocks, and what is outside of them"
    reports = []
    for step in range(4):
        for index in range(micro_batches):
            loss = module(*batch(step * micro_batches + index))
            if stage == 1 and index < micro_batches - 1:
                with engine.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reports.append(engine.report())
    counted = difference(reports[3], reports[1])
    expected = expected_traffic(padded, stage, steps=2, backwards=2 * micro_batches)
    assert counted == expected, f"{counted} instead of {expected}"
    assert reports[3].steps == 4 and reports[3].backwards == 4 * micro_batches
    assert reports[3].padded_numel == sum(padded.values())
    assert reports[3].numel == sum(p.numel() for p in OddModel().parameters())
    engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The numbers",
    "Accumulation communicates gradients",
    notes={1: "once a step", 2: "once a micro-batch", 3: "once a micro-batch"},
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_reduced_once_per_step_at_stage_1_else_once_per_micro_batch(run_on, stage, size, micro_batches):
    run_on(size, count_collectives, stage=stage, micro_batches=micro_batches)


def fit_both(stage: int, bound: float, gradient_clip_val: float | None) -> None:
    learner = partial(Learner, optimizer=sgd_nesterov, batches=7)
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": gradient_clip_val, "max_epochs": 3}
    reference, run = fit_ddp(learner, **options), fit(f"zero{stage}", learner, **options)
    assert len(run.losses) == 3 * 7
    same_runs(run, reference, bound)
    # The second epoch's windows: batches 7 to 9, 10 to 12, and 13 alone. Count from the end of one to that of the next:
    padded = padded_units(run.units, reference.module, world_size())
    for before, after, micro_batches in [(9, 12, 3), (12, 13, 1)]:
        counted = difference(run.reports[after], run.reports[before])
        expected = expected_traffic(padded, stage, steps=1, backwards=micro_batches)
        assert counted == expected, f"batches {before} to {after}: {counted} instead of {expected}"
        assert run.reports[after].steps - run.reports[before].steps == 1


@pytest.mark.exhaustive(but=1)
@ACCUMULATION
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_trainer_accumulates_seven_batches_in_threes_as_under_ddp_with_the_expected_traffic(run_on, stage):
    run_on(2, fit_both, stage=stage, bound=BOUND[stage], gradient_clip_val=None)


@pytest.mark.exhaustive(but=1)
@ACCUMULATION
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_trainer_accumulates_seven_batches_in_threes_and_clips_as_under_ddp(run_on, stage):
    run_on(2, fit_both, stage=stage, bound=CLOSE, gradient_clip_val=0.1)


class Direct(nn.Module):
    """A module that also uses weights of its submodules directly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + x @ self.first.weight
        hidden.register_hook(self.fail)
        last = self.third(torch.relu(self.second(hidden)))
        return (last + hidden @ self.third.weight).square().sum() + self.second.weight.square().sum()

    def fail(self, _: Tensor) -> None:
        if self.fails:
            raise ZeroDivisionError


def reduce_weights_used_directly() -> None:
    from lightning_zero.engine import Engine

    module = Direct()
    engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage=1)
    calls = []
    for micro_batches in (1, 2, 2):
        engine.reset_counters()
        for number in range(micro_batches):
            with engine.no_sync() if number + 1 < micro_batches else nullcontext():
                module(torch.ones(2, 8)).backward()
        calls.append(engine.report().calls["reduce_scatter"])
        assert "reduction" not in engine.report().at_rest or engine.report().at_rest["reduction"] == 0
        module.zero_grad()
    assert calls[1:] == [1, 1], "in the first step, the number of gradients is not known yet"
    engine.close()


def test_weights_used_outside_of_their_modules_are_reduced_once_a_step(run_on):
    run_on(2, reduce_weights_used_directly)


def fail_in_a_micro_batch(stage: int, zeroes: bool, dtype: torch.dtype) -> None:
    """Four micro-batches. The second has a loss of zero and fails in the middle of backward."""
    from lightning_zero.engine import Engine
    from lightning_zero.engine.access import full_grad

    generator = torch.Generator().manual_seed(rank())
    inputs = [torch.randn(4, 8, generator=generator).to(dtype) for _ in range(4)]
    module, reference = Direct().to(dtype), Direct().to(dtype)
    engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage=stage)
    wrapped = DistributedDataParallel(reference)
    seen = []
    for own, model, no_sync in ((module, module, engine.no_sync), (reference, wrapped, wrapped.no_sync)):
        for number, x in enumerate(inputs):
            own.fails = number == 1
            may_fail = pytest.raises(ZeroDivisionError) if own.fails else nullcontext()
            with no_sync() if number < 3 else nullcontext(), may_fail:
                ((number != 1) * model(x)).backward()
            if own.fails and zeroes:
                own.zero_grad()
            if number == 1 and stage == 1:
                seen.append([p.grad.clone() if p.grad is not None else None for p in own.parameters()])
    bounds = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(*seen or [0, 0], **bounds)
    for parameter, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_grad(parameter), expected.grad, **bounds)
    engine.close()


@ACCUMULATION
@pytest.mark.parametrize("zeroes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_micro_batch_that_fails_leaves_the_gradients_of_the_earlier_ones(run_on, stage, dtype, zeroes):
    run_on(2, fail_in_a_micro_batch, stage=stage, dtype=dtype, zeroes=zeroes)
