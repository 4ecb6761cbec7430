"""Small blocks merged into one unit, which is the default: DDP's numbers with few messages."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import OddModel, Square, adam, adam_with_large_eps, adamw_with_decay_groups, several_groups
from tests.support.training import CLOSE, Recipe, batch, prepare, same_runs, same_tensors, train_ddp, train_zero
from tests.support.workers import world_size

BLOCK = 229  # elements of a block of OddModel
UNIT_NUMELS = {"pairs": 2 * BLOCK, "blocks": 3 * BLOCK, "everything": 2**20}
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
GROUPINGS = pytest.mark.parametrize("grouping", UNIT_NUMELS)


def units_of(module: nn.Module, unit_numel: int) -> list[str]:
    from lightning_zero.engine.plan.units import plan_units

    return [plan.name for plan in plan_units(module, unit_numel=unit_numel)]


def compare(recipe: Recipe, stage: int, bound: float = 0, **options: object) -> None:
    same_runs(train_zero(recipe, stage, **options), train_ddp(recipe), bound)


@pytest.mark.exhaustive(but=2)
@GROUPINGS
@STAGES
@pytest.mark.parametrize("size", [1, 2, 4])
def test_merged_units_train_as_ddp(run_on, stage, size, grouping):
    assert (
        units_of(OddModel(), UNIT_NUMELS[grouping])
        == {
            "pairs": ["", "blocks.0 to blocks.1", "blocks.2"],
            "blocks": ["", "blocks.0 to blocks.2"],
            "everything": [""],
        }[grouping]
    )
    if size == 4:  # DDP adds up in a different order
        recipe, bound = Recipe(optimizer=adam_with_large_eps), CLOSE
    else:
        recipe, bound = Recipe(), 0.0
    run_on(size, compare, recipe=recipe, stage=stage, bound=bound, unit_numel=UNIT_NUMELS[grouping])


RECIPES = {
    "decay_groups": Recipe(optimizer=adamw_with_decay_groups, clip=partial(nn.utils.clip_grad_norm_, max_norm=0.3)),
    "several_groups": Recipe(optimizer=several_groups),
    "accumulated": Recipe(micro_batches=3),
    "bf16": Recipe(dtype=torch.bfloat16),
}


@pytest.mark.exhaustive(but=2)
@GROUPINGS
@STAGES
@pytest.mark.parametrize("name", ["decay_groups", "several_groups"])
def test_merged_units_with_parameter_groups_and_clipping_train_as_ddp(run_on, stage, grouping, name):
    run_on(2, compare, recipe=RECIPES[name], stage=stage, bound=CLOSE, unit_numel=UNIT_NUMELS[grouping])


@GROUPINGS
@STAGES
@pytest.mark.exhaustive
def test_merged_units_with_accumulation_train_as_ddp(run_on, stage, grouping):
    bound = 0 if stage == 1 else CLOSE
    run_on(2, compare, recipe=RECIPES["accumulated"], stage=stage, bound=bound, unit_numel=UNIT_NUMELS[grouping])


def compare_with_single_units(recipe: Recipe, stage: int, **options: object) -> None:
    same_runs(train_zero(recipe, stage, **options), train_zero(recipe, stage, unit_numel=0))


@pytest.mark.exhaustive(but=2)
@GROUPINGS
@STAGES
@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "units"},
        {"prefetch": 0, "overlap": False},
        {"prefetch": 2},
        {"offload": "cpu"},
        {"bucket_numel": 100},
    ],
    ids=str,
)
def test_merging_units_changes_no_bit_under_any_option(run_on, stage, grouping, options):
    unit_numel = UNIT_NUMELS[grouping]
    run_on(2, compare_with_single_units, recipe=Recipe(steps=5), stage=stage, unit_numel=unit_numel, **options)


@GROUPINGS
@STAGES
@pytest.mark.exhaustive
def test_merging_units_changes_no_bit_in_bf16(run_on, stage, grouping):
    recipe = RECIPES["bf16"]
    run_on(2, compare_with_single_units, recipe=recipe, stage=stage, unit_numel=UNIT_NUMELS[grouping])


def count_messages(stage: int, unit_numel: int, model: type[Square] = Square, layers: int = 12) -> tuple[int, int]:
    from lightning_zero.engine import Engine

    module, optimizer = prepare(Recipe(model=partial(model, layers=layers)))
    engine = Engine(module, [optimizer], stage=stage, unit_numel=unit_numel)
    for step in range(3):
        module(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            engine.reset_counters()
    calls = engine.report().calls
    engine.close()
    return calls["all_gather"], calls["reduce_scatter"]


@pytest.mark.parametrize(
    "stage, layers, gathers, reductions",
    [(2, 1, 12, 12), (2, 4, 3, 3), (2, 12, 1, 1), (3, 1, 23, 12), (3, 4, 5, 3), (3, 12, 1, 1)],
)
def test_a_step_gathers_and_reduces_once_per_unit(run_on, stage, layers, gathers, reductions):
    """Stage 3 gathers each unit twice, except the last, with which the backward pass begins."""
    found = run_on(2, count_messages, stage=stage, unit_numel=layers * 32 * 32)
    assert found == [(gathers, reductions)] * 2


class Shared(Square):
    """The first block computes a bias that the other blocks return, as T5's blocks do with their position bias."""

    class Layer(Square.Layer):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
            if bias is None:
                bias = torch.sin(self.linear(x))
            return super().forward(x + bias), bias

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, bias = torch.linspace(-1, 1, self.width).requires_grad_() * tokens.unsqueeze(-1), None
        for layer in self.layers:
            x, bias = layer(x, bias=bias)
        return (x.mean(-1) - targets).square().mean()


def test_a_tensor_that_blocks_return_unchanged_begins_no_backward_of_theirs(run_on):
    found = run_on(2, count_messages, stage=3, unit_numel=0, model=Shared, layers=5)
    assert found == [(9, 5)] * 2


class Twice(nn.Module):
    """Blocks that run again, out of order, some without a graph, one not in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Square.Layer(8) for _ in range(6))
        self.step = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.step += 1
        x = torch.linspace(-1, 1, 8) * tokens.unsqueeze(-1)
        with torch.no_grad():
            x = self.layers[5](self.layers[1](x))
        for index in (3, 0, 3, 1, 2, 0, 4) if self.step % 2 else (5, 4, 5):
            x = self.layers[index](x)
        return (x.mean(-1) - targets).square().mean()


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
@STAGES
def test_blocks_may_run_again_in_any_order(run_on, stage, layers):
    recipe = Recipe(model=Twice, optimizer=adam)
    run_on(2, compare_with_plain_gradients, recipe=recipe, stage=stage, unit_numel=layers * 64)


def compare_with_plain_gradients(recipe: Recipe, stage: int, unit_numel: int) -> None:
    """With different unused parameters in each step, for which DDP needs find_unused_parameters."""
    from lightning_zero.engine import Engine

    module, optimizer = prepare(recipe)
    reference, plain = prepare(recipe)
    engine = Engine(module, [optimizer], stage=stage, unit_numel=unit_numel)
    for step in range(6):
        module(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = []
        for other in range(world_size()):
            reference.step = step
            losses.append(reference(*batch(step, of=other)))
        (sum(losses) / world_size()).backward()
        plain.step()
        plain.zero_grad()
        assert all(b.is_replicated or not b.is_ready for b in engine.buckets), "something was left gathered"
    same_tensors(engine.full_state_dict(), dict(reference.state_dict()), CLOSE)
    engine.close()


def states_of_all_parameters(stage: int) -> None:
    """Also of a parameter without elements, whose neighbours in the bucket another rank owns."""
    from lightning_zero.engine import Engine

    module, optimizer = prepare(Recipe())
    engine = Engine(module, [optimizer], stage=stage, unit_numel=UNIT_NUMELS["everything"])
    module(*batch(0)).backward()
    optimizer.step()
    assert set(optimizer.state_dict()["state"]) == set(range(len(list(module.parameters()))))
    engine.close()


@STAGES
def test_each_parameter_of_a_merged_unit_has_its_state(run_on, stage):
    run_on(2, states_of_all_parameters, stage=stage)
