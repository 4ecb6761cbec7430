"""Sizes that no world size divides, more ranks than elements, and one to four ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.support.models import OddModel, Scalars, adam_with_large_eps, sgd_nesterov
from tests.support.training import CLOSE, Recipe, same_on_every_rank, same_runs, train_ddp, train_zero
from tests.support.workers import world_size

SHAPES = pytest.mark.behaviour(
    "The numbers",
    "Shapes that no world size divides, scalars, empty parameters, more ranks than elements; 1 to 4 ranks",
)


def train_both(stage: int, recipe: Recipe) -> None:
    run = train_zero(recipe, stage)
    # Two numbers have the same sum in either order; DDP's ring and the engine add three or four in different orders.
    same_runs(run, train_ddp(recipe), bound=0 if world_size() <= 2 else CLOSE)
    same_on_every_rank(run.weights)


@pytest.mark.exhaustive(but=2)
@SHAPES
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", [adam_with_large_eps, sgd_nesterov], ids=lambda optimizer: optimizer.__name__)
def test_odd_shapes_scalars_and_parameters_without_elements_train_as_under_ddp(run_on, stage, size, optimizer):
    shapes = {tuple(p.shape) for p in OddModel().parameters()}
    assert shapes >= {(7, 15), (15, 3), (17, 15), (16, 17), (15,), (), (0, 5)}
    run_on(size, train_both, stage=stage, recipe=Recipe(OddModel, optimizer))


@SHAPES
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_units_with_fewer_elements_than_ranks_train_as_under_ddp(run_on, stage, size):
    assert [sum(p.numel() for p in layer.parameters()) for layer in Scalars().layers] == [2, 1, 2]
    run_on(size, train_both, stage=stage, recipe=Recipe(Scalars, adam_with_large_eps))


def train_alone(stage: int) -> None:
    report = train_zero(Recipe(steps=3, micro_batches=2), stage).report
    assert not dist.is_initialized()
    assert report.world_size == 1
    assert report.steps == 3 and report.backwards == 6
    assert sum(report.calls.values()) == sum(report.elements.values()) == sum(report.bytes.values()) == 0


@pytest.mark.behaviour("The numbers", "One rank launches no collective")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_launches_no_collective_and_needs_no_process_group(run_on, stage):
    run_on(1, train_alone, stage=stage)
