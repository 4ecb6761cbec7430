"""Gradient clipping by norm and by value: by the Trainer, the module's hook, and user code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.models import OddModel, Square, sgd_nesterov
from tests.support.patience import little_patience
from tests.support.trainer import Learner, ManualLearner, fit, fit_ddp
from tests.support.training import CLOSE, Recipe, batch, prepare, same_runs, same_tensors, train_ddp, train_zero
from tests.support.workers import rank, world_size

CLIPPING = pytest.mark.behaviour(
    "The numbers",
    "Clipping by norm (1, 2, infinity) and by value: by the Trainer, in `configure_gradient_clipping`, by hand",
)

# A sum over all shards is taken in a different order from one over all parameters; a maximum and a bound are not sums.
NORMS = [
    pytest.param(1.0, CLOSE, id="norm 1"),
    pytest.param(2.0, CLOSE, id="norm 2"),
    pytest.param(inf, 0, id="norm inf"),
]
# Small compared with these models' gradients, so that every step is clipped. (With SGD, since Adam hides scale.)
MAX_NORM, MAX_VALUE = 0.01, 0.001

# Torch has no infinity norm of a parameter without elements, so each has some; on four ranks a shard may have none.
model = partial(OddModel, rows=2)


def clip_norm_of(parameters: Iterable[nn.Parameter], norm_type: float) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, MAX_NORM, norm_type=norm_type)


def clip_value_of(parameters: Iterable[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(parameters, MAX_VALUE)


def train_both(stage: int, recipe: Recipe, bound: float) -> None:
    reference = train_ddp(recipe)
    same_runs(train_zero(recipe, stage), reference, bound)
    assert not torch.equal(reference.losses[-1], train_ddp(Recipe(model, recipe.optimizer)).losses[-1])


@CLIPPING
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("norm_type", "bound"), NORMS)
def test_torchs_clip_grad_norm_before_a_step_acts_as_under_ddp(run_on, stage, norm_type, bound):
    recipe = Recipe(model, sgd_nesterov, clip=partial(clip_norm_of, norm_type=norm_type))
    run_on(2, train_both, stage=stage, recipe=recipe, bound=bound)


@CLIPPING
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 4])
def test_torchs_clip_grad_norm_acts_as_under_ddp_on_one_rank_and_on_four(run_on, stage, size):
    recipe = Recipe(model, sgd_nesterov, clip=partial(clip_norm_of, norm_type=2.0))
    run_on(size, train_both, stage=stage, recipe=recipe, bound=CLOSE)


def count_reductions(stage: int) -> None:
    from lightning_zero.engine import Engine

    module, optimizer = prepare(Recipe(model))
    engine = Engine(module, [optimizer], stage=stage)
    foreign = nn.Parameter(torch.ones(3))
    foreign.grad = torch.full((3,), 2.0)

    def calls_of(clip: Callable[[], object]) -> int:
        before = engine.report().calls
        clip()
        after = engine.report().calls
        assert after.get("all_gather", 0) == before.get("all_gather", 0)
        return after["control"] - before["control"]

    module(*batch(0)).backward()
    used = [p for p in module.parameters() if p.grad is not None]
    assert len({p.grad.dtype for p in used}) == 1 and len(used) > 5
    squares = sum(p.grad.square().sum() for p in used)
    assert calls_of(lambda: clip_norm_of(used, 2.0)) == 1, "one sum over ranks, not one of each parameter"
    assert calls_of(lambda: clip_value_of(used)) == 0
    # together with unsharded parameters, such as a loss's own
    used_norm = torch.stack([p.grad.norm() for p in used]).norm()
    assert used_norm < squares.sqrt()
    norms: list[Tensor] = []
    assert calls_of(lambda: norms.append(clip_norm_of([used[0], foreign, *used[1:]], 2.0))) == 1
    torch.testing.assert_close(norms[0], (used_norm.square() + 12).sqrt())
    torch.testing.assert_close(foreign.grad, torch.full((3,), 2.0) * MAX_NORM / norms[0])
    torch.testing.assert_close(torch.stack([p.grad.norm() for p in used]).norm(), used_norm * MAX_NORM / norms[0])
    engine.close()


def clip_in_two_groups() -> None:
    """Clip a module sharded over all ranks and one on this rank alone (such as an expert) together."""
    from lightning_zero.engine import Engine

    alone = [dist.new_group([r]) for r in range(world_size())][rank()]
    shared, own = (nn.Linear(6, 4) for _ in range(2))
    with torch.no_grad():
        for p in (*shared.parameters(), *own.parameters()):
            p.fill_(0.5)
    engines = [Engine(shared, stage=3), Engine(own, stage=3, group=alone)]
    (shared(torch.ones(2, 6)).sum() + own(torch.full((2, 6), 1.0 + rank())).sum()).backward()
    expected = 4 * 4 * 6 + 4 * 4 + (2.0 + 2 * rank()) ** 2 * 4 * 6 + 4 * 4
    norm = clip_norm_of([*shared.parameters(), *own.parameters()], 2.0)
    torch.testing.assert_close(norm, torch.tensor(expected).sqrt())
    for engine in engines:
        engine.close()


def test_each_parameters_norm_is_taken_over_the_ranks_that_hold_its_shards(run_on):
    run_on(2, clip_in_two_groups)


@little_patience()
def clip_fewer_on_rank_1() -> None:
    from lightning_zero.engine import Engine

    module, optimizer = prepare(Recipe(Square))
    engine = Engine(module, [optimizer], stage=3)
    module(*batch(0)).backward()
    used = list(module.parameters())
    with pytest.raises(RuntimeError, match=r"the norms of (5|6) tensor.*asked for the norms of (5|6) tensor"):
        clip_norm_of(used[: len(used) - rank()], 2.0)
    engine.close()


def test_clipping_different_parameters_on_each_rank_is_an_error(run_on):
    run_on(2, clip_fewer_on_rank_1)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_takes_one_reduction_however_many_parameters_there_are(run_on, stage):
    run_on(2, count_reductions, stage=stage)


@pytest.mark.exhaustive(but=1)
@CLIPPING
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torchs_clip_grad_value_before_a_step_acts_as_under_ddp(run_on, stage):
    run_on(2, train_both, stage=stage, recipe=Recipe(model, sgd_nesterov, clip=clip_value_of), bound=0)


def fit_both(stage: int, learner: partial[Learner], bound: float, **options: object) -> None:
    reference, run = fit_ddp(learner, **options), fit(f"zero{stage}", learner, **options)
    same_runs(run, reference, bound)
    norms, expected = ({f"norm {i}": norm for i, norm in enumerate(r.norms)} for r in (run, reference))
    same_tensors(norms, expected, bound)
    unclipped = fit_ddp(partial(Learner, model, sgd_nesterov))
    assert not torch.equal(reference.losses[-1], unclipped.losses[-1])


@CLIPPING
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("algorithm", "value", "bound"),
    [pytest.param("norm", MAX_NORM, CLOSE, id="norm"), pytest.param("value", MAX_VALUE, 0, id="value")],
)
def test_the_trainers_own_clipping_acts_as_under_ddp(run_on, stage, algorithm, value, bound):
    options = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    run_on(2, fit_both, stage=stage, learner=partial(Learner, model, sgd_nesterov), bound=bound, **options)


def by_norm(module: LightningModule, optimizer: Optimizer, norm_type: float) -> Tensor:
    return clip_norm_of(module.parameters(), norm_type)


def by_lightnings_method(module: LightningModule, optimizer: Optimizer) -> Tensor:
    module.clip_gradients(optimizer, gradient_clip_val=MAX_VALUE, gradient_clip_algorithm="value")
    return torch.tensor(MAX_VALUE)


@CLIPPING
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("norm_type", "bound"), NORMS)
def test_clipping_in_configure_gradient_clipping_acts_as_under_ddp(run_on, stage, norm_type, bound):
    learner = partial(Learner, model, sgd_nesterov, clip=partial(by_norm, norm_type=norm_type))
    run_on(2, fit_both, stage=stage, learner=learner, bound=bound)


@CLIPPING
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", [Learner, ManualLearner], ids=["automatic", "manual"])
def test_lightnings_clip_gradients_called_by_the_module_acts_as_under_ddp(run_on, stage, kind):
    run_on(2, fit_both, stage=stage, learner=partial(kind, model, sgd_nesterov, clip=by_lightnings_method), bound=0)


@CLIPPING
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("norm_type", "bound"), NORMS)
def test_clipping_in_manual_optimization_acts_as_under_ddp(run_on, stage, norm_type, bound):
    learner = partial(ManualLearner, model, sgd_nesterov, clip=partial(by_norm, norm_type=norm_type))
    run_on(2, fit_both, stage=stage, learner=learner, bound=bound)
