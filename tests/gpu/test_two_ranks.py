"""Two ranks that share one GPU train as under DDP. They use Gloo, since NCCL refuses two ranks on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.numbers.test_offload import OFFLOADS, Wide, train
from tests.support import whole
from tests.support.models import clip, exact_sgd
from tests.support.training import CLOSE, Recipe, same_runs, same_values, train_ddp, train_zero

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def is_ddps(recipe: Recipe, stage: int, **options: Any) -> None:
    found = train_zero(recipe, stage, **options)
    assert found.losses[0].device.type == torch.device(recipe.device).type
    same_runs(found, train_ddp(recipe), CLOSE)  # some kernels add in an order that differs from run to run


@STAGES
def test_a_run_equals_ddps(run_on, device, stage):
    run_on(2, is_ddps, timeout=170, recipe=Recipe(steps=4, device=device), stage=stage)


@STAGES
def test_a_run_that_clips_and_accumulates_equals_ddps(run_on, device, stage):
    recipe = Recipe(Wide, steps=4, micro_batches=3, clip=clip, device=device)
    run_on(2, is_ddps, timeout=170, recipe=recipe, stage=stage, units=[nn.Linear])


@pytest.mark.parametrize("stage", [1, 3])
def test_owners_of_whole_parameters_train_as_under_ddp(run_on, device, stage):
    recipe = Recipe(whole.Layered, whole.muon_and_adamw, steps=4, device=device)
    run_on(2, is_ddps, timeout=170, recipe=recipe, stage=stage)


def is_as_without_offload(recipe: Recipe, stage: int, offload: str) -> None:
    same_values(train(recipe, stage, offload), train(recipe, stage, None), offload, CLOSE)


@STAGES
@pytest.mark.parametrize("offload", OFFLOADS)
def test_offload_changes_nothing(run_on, device, stage, offload):
    recipe = Recipe(Wide, exact_sgd, steps=4, device=device)
    run_on(2, is_as_without_offload, timeout=170, recipe=recipe, stage=stage, offload=offload)
