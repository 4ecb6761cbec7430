"""bf16: the dtypes of communication and accumulation, and which values keep their dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from tests.support.arithmetic import difference, padded_units
from tests.support.models import OddModel, Repeated, Square, adam
from tests.support.trainer import Learner, fit, fit_ddp
from tests.support.training import Recipe, batch, prepare, same_on_every_rank, same_runs, train_ddp, train_zero
from tests.support.workers import rank

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
# "mixed": fp32 parameters, gathered and computed with in bf16. "true": the module's own parameters are bf16.
KINDS = pytest.mark.parametrize("kind", ["mixed", "true"])


def engine_options(kind: str) -> dict[str, Any]:
    return {"compute_dtype": torch.bfloat16} if kind == "mixed" else {}


class Weight(nn.Module):
    """One weight, whose gradient is the input, so the summands can be chosen exactly."""

    def __init__(self, dtype: torch.dtype, value: float, elements: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(1, elements, bias=False, dtype=dtype)
        nn.init.constant_(self.linear.weight, value)

    def forward(self, x: float) -> Tensor:
        return self.linear(torch.tensor([x], dtype=self.linear.weight.dtype)).sum()


def descend(stage: int, kind: str, value: float, gradients: list[list[float]]) -> Tensor:
    """Apply `w -= sum of the micro-batches' gradients` for each list in turn; return the full weight."""
    from lightning_zero.engine import Engine

    module = Weight(torch.float32 if kind == "mixed" else torch.bfloat16, value)
    optimizer = SGD(module.parameters(), lr=1.0)
    engine = Engine(module, [optimizer], stage=stage, **engine_options(kind))
    for micro_batches in gradients:
        for index, x in enumerate(micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "mixed"):
                loss = module(x)
            if stage == 1 and index < len(micro_batches) - 1:
                with engine.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = engine.full_state_dict()["linear.weight"]
    assert weight.dtype == module.linear.weight.dtype
    assert engine.buckets[0].full.dtype == torch.bfloat16
    engine.close()
    assert (weight == weight[0]).all()
    return weight[0].float()


# bf16 has 8 significant bits: from 1 on its numbers are 2**-7 apart, so adding 2**-9 to 1 in bf16 leaves 1.
TINY = 2.0**-9


def add_up_micro_batches(stage: int, kind: str) -> None:
    # 1 + 8 * 2**-9 = 1 + 2**-6 is representable in bf16; summed in bf16 the result would stay 1.
    assert descend(stage, kind, 0.0, [[1.0] + [TINY] * 8]) == -(1 + 8 * TINY)


@pytest.mark.behaviour(
    "The numbers", "In bf16, gradients of micro-batches and ranks are summed, and masters kept, in fp32"
)
@STAGES
@KINDS
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_micro_batches_are_summed_in_fp32(run_on, stage, kind, size):
    run_on(size, add_up_micro_batches, stage=stage, kind=kind)


def add_up_ranks(stage: int, kind: str) -> None:
    # The mean of 2 and 2 * 2**-9 is 1 + 2**-9. 1 minus that is -2**-9; after a reduction in bf16 it would be 0.
    assert descend(stage, kind, 1.0, [[2.0 if rank() == 0 else 2 * TINY]]) == -TINY


@pytest.mark.behaviour(
    "The numbers", "In bf16, gradients of micro-batches and ranks are summed, and masters kept, in fp32"
)
@STAGES
@KINDS
def test_gradients_of_ranks_are_summed_in_fp32(run_on, stage, kind):
    run_on(2, add_up_ranks, stage=stage, kind=kind)


def add_up_steps(stage: int, kind: str) -> None:
    # Each step subtracts 2**-10 from 1, less than bf16's spacing there (2**-8 below 1); 16 steps subtract 2**-6.
    assert descend(stage, kind, 1.0, [[TINY / 2]] * 16) == 1 - 16 * TINY / 2


@pytest.mark.behaviour(
    "The numbers", "In bf16, gradients of micro-batches and ranks are summed, and masters kept, in fp32"
)
@STAGES
@KINDS
@pytest.mark.parametrize("size", [1, 2])
def test_masters_are_in_fp32_so_that_small_updates_add_up(run_on, stage, kind, size):
    run_on(size, add_up_steps, stage=stage, kind=kind)


def read_the_optimizers_state(stage: int, kind: str) -> None:
    from lightning_zero.engine import Engine

    module, optimizer = prepare(Recipe(dtype=torch.float32 if kind == "mixed" else torch.bfloat16))
    engine = Engine(module, [optimizer], stage=stage, **engine_options(kind))
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "mixed"):
        loss = module(*batch(0))
    loss.backward()
    optimizer.step()
    for state in optimizer.state_dict()["state"].values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    engine.close()


@STAGES
@KINDS
def test_the_optimizers_state_is_in_fp32(run_on, stage, kind):
    run_on(2, read_the_optimizers_state, stage=stage, kind=kind)


def count_bytes(stage: int, precision: str) -> None:
    from lightning_zero import ZeroStrategy

    # Without normalisation layers, whose weights autocast uses in fp32.
    run = fit(ZeroStrategy(stage=stage), partial(Learner, Square, batches=9), max_epochs=1, precision=precision)
    counted = difference(run.reports[8], run.reports[2])
    psi = run.reports[8].padded_numel
    elements, nbytes = counted["elements"], counted["bytes"]
    last = padded_units(run.units, run.module, 2)[run.units[-1].name]  # backward begins with it
    assert elements == {"all_gather": 6 * (2 * psi - last if stage == 3 else psi), "reduce_scatter": 6 * psi}
    assert nbytes == {"all_gather": 2 * elements["all_gather"], "reduce_scatter": 4 * elements["reduce_scatter"]}


@STAGES
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_weights_are_gathered_in_bf16_and_gradients_reduced_in_fp32(run_on, stage, precision):
    run_on(2, count_bytes, stage=stage, precision=precision)


def train_beside_ddp() -> None:
    reference = fit_ddp(precision="bf16-mixed")
    for stage in (1, 2, 3):
        same_runs(fit(f"zero{stage}", precision="bf16-mixed"), reference)
    exact = fit_ddp()
    assert not torch.equal(reference.losses[0], exact.losses[0]), "this was computed in fp32"


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The numbers", "`bf16-mixed`")
@pytest.mark.parametrize("size", [1, 2])
def test_bf16_mixed_equals_ddp_bit_for_bit(run_on, size):
    run_on(size, train_beside_ddp)


def train_repeated_layers(precision: str) -> None:
    learner = partial(Learner, Repeated)
    reference = fit_ddp(learner, precision=precision)
    for stage in (1, 2, 3):
        same_runs(fit(f"zero{stage}", learner, precision=precision), reference)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The numbers", "`bf16-mixed`: a weight used several times in a step, as often as DDP casts it")
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_gradients_of_a_weight_used_many_times_are_added_as_under_ddp(run_on, precision):
    run_on(2, train_repeated_layers, precision=precision)


def train_beside_fp32(stage: int) -> None:
    # DDP rounds the weights to bf16 at each step, which masters avoid, so the reference is the run in fp32.
    learner = partial(Learner, batches=10)
    reference = fit_ddp(learner)
    run = fit(f"zero{stage}", learner, precision="bf16-true")
    same_on_every_rank(run.weights)
    for loss, expected in zip(run.losses, reference.losses, strict=True):
        # Roundings of 2**-8 along the way, few of which add up: one percent.
        assert abs(loss - expected) <= 0.01 * abs(expected), f"{loss} instead of {expected}"
    assert {weight.dtype for weight in run.weights.values()} == {torch.bfloat16}
    assert not torch.equal(run.losses[0].float(), reference.losses[0]), "this was computed in fp32"


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The numbers", "`bf16-true`", notes=dict.fromkeys((1, 2, 3), "fp32 masters: follows fp32"))
@STAGES
def test_losses_of_bf16_true_follow_fp32_within_the_precision_of_bf16(run_on, stage):
    run_on(2, train_beside_fp32, stage=stage)


def train_all_stages(kind: str) -> None:
    recipe = Recipe(dtype=torch.float32 if kind == "mixed" else torch.bfloat16)
    first, *others = [train_zero(recipe, stage, **engine_options(kind)) for stage in (1, 2, 3)]
    for other in others:
        same_runs(other, first)


@pytest.mark.exhaustive(but=1)
@KINDS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_three_stages_give_the_same_bits_in_bf16(run_on, kind, size):
    run_on(size, train_all_stages, kind=kind)


class WithBuffers(nn.Module):
    """Float, double and integer buffers, an integer parameter used as an index, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.model = OddModel()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("total", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("narrow", torch.tensor([1.0, 2.0], dtype=torch.float16))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.order = nn.Parameter(torch.tensor([5, 3, 1, 0, 2, 4]), requires_grad=False)
        self.frozen = nn.Parameter(torch.tensor([1 / 3, 1.0]), requires_grad=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        assert not self.order.is_floating_point()
        self.seen += tokens.shape[0]
        self.total += tokens.double().mean()
        weighting = self.norm(tokens.to(self.norm.weight.dtype)).square().mean()
        return self.model(tokens[:, self.order], targets) + weighting * self.frozen.sum()


def trainable_adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)


def keep_buffers(stage: int, precision: str) -> None:
    learner = partial(Learner, WithBuffers, trainable_adam)
    reference, run = fit_ddp(learner, precision=precision), fit(f"zero{stage}", learner, precision=precision)
    assert list(run.weights) == list(reference.weights)
    for name, expected in reference.weights.items():
        value = run.weights[name]
        assert value.dtype == expected.dtype, f"{name} became {value.dtype}"
        assert value.shape == expected.shape
        if not name.startswith("model.model.") and "norm" not in name:
            assert torch.equal(value, expected), f"{name}: {value} instead of {expected}"
    assert run.weights["model.order"].tolist() == [5, 3, 1, 0, 2, 4]
    assert run.weights["model.seen"] == 4 * 10


@pytest.mark.behaviour("The numbers", "Buffers keep their dtype; integers keep their values")
@STAGES
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_buffers_keep_their_dtype_and_integers_their_values(run_on, stage, precision):
    run_on(2, keep_buffers, stage=stage, precision=precision)


def train_with_buffers(stage: int) -> None:
    recipe = Recipe(model=WithBuffers, optimizer=trainable_adam)
    run, reference = train_zero(recipe, stage), train_ddp(recipe)
    # After the last forward, a rank's buffers are its own, as under DDP, which broadcasts them before each forward.
    same_runs(run, reference)


@pytest.mark.exhaustive(but=1)
@STAGES
def test_in_fp32_a_model_with_buffers_integers_and_frozen_parameters_trains_as_under_ddp(run_on, stage):
    run_on(2, train_with_buffers, stage=stage)


def keep_exact_masters(stage: int) -> None:
    """After 20 steps in bf16-mixed the weights have fp32 precision: they are not all representable in bf16."""
    weights = train_zero(Recipe(OddModel, adam), stage, compute_dtype=torch.bfloat16).weights
    weight = weights["head.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


@STAGES
@pytest.mark.parametrize("size", [1, 2])
def test_full_weights_of_a_mixed_run_are_the_fp32_masters(run_on, stage, size):
    run_on(size, keep_exact_masters, stage=stage)
