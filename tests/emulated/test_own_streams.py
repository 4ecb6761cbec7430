"""Modules that compute on their own streams: autograd runs their backward passes on the same streams."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.emulated import device
from tests.numbers.test_offload import OFFLOADS
from tests.support import models, world_size
from tests.support.training import CLOSE, Recipe, same_runs, train_ddp, train_zero


class Branches(nn.Module):
    """Two concurrent branches, one of them on another stream, ordered with the work before and after."""

    def __init__(self, width: int, is_one_layer: bool, is_new_stream: bool) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = self.left if is_one_layer else nn.Linear(width, width)
        self.is_new_stream, self.stream = is_new_stream, None

    def forward(self, x: Tensor) -> Tensor:
        now = torch.accelerator.current_stream()
        if self.stream is None or self.is_new_stream:
            self.stream = torch.Stream(x.device)
        self.stream.wait_stream(now)
        with self.stream:
            left = self.left(x)
        right = self.right(2 * x)
        now.wait_stream(self.stream)
        x.record_stream(self.stream)
        left.record_stream(now)
        return left + right


class Model(nn.Module):
    def __init__(self, width: int = 24, is_one_layer: bool = False, is_new_stream: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, width)
        self.branches = Branches(width, is_one_layer, is_new_stream)
        self.head = nn.Linear(width, models.CLASSES)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.branches(self.embed(tokens))
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), targets.flatten())


MODELS = {
    "two layers": Model,
    "one layer": partial(Model, is_one_layer=True),
    "another stream each time": partial(Model, is_new_stream=True),
}


def out_of_order(recipe: Recipe, stage: int, **options: Any) -> list[str]:
    """Ordering errors; on one rank without frees of the other stream's gradients, which torch releases early."""
    expected = train_ddp(recipe)
    device.races_so_far()
    found = train_zero(recipe, stage, **options)
    races = device.races_so_far()
    same_runs(found, expected, CLOSE)
    return [race for race in races if world_size() > 1 or not race.startswith("freed")]


@pytest.mark.parametrize("units", [[nn.Linear], [Branches]], ids=["a unit a layer", "one unit"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_branches_on_their_own_streams_train_as_ddp(run_on_device, ranks, stage, model, units):
    recipe = Recipe(MODELS[model], steps=3, device=device.NAME)
    assert run_on_device(ranks, out_of_order, recipe=recipe, stage=stage, units=units) == [[]] * ranks


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("offload", ["cpu", "cpu, parameters too", "cpu, gradients too"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_branches_on_their_own_streams_train_as_ddp_with_offloaded_states(run_on_device, ranks, offload, model):
    recipe = Recipe(MODELS[model], steps=3, device=device.NAME)
    options = {"stage": 3, "units": [nn.Linear], "offload": OFFLOADS[offload]}
    assert run_on_device(ranks, out_of_order, recipe=recipe, **options) == [[]] * ranks


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("model", MODELS)
def test_branches_on_their_own_streams_train_as_ddp_when_sharded_within_groups(run_on_device, model):
    recipe = Recipe(MODELS[model], steps=3, device=device.NAME)
    options = {"stage": 3, "units": [nn.Linear], "shard_within": 2}
    assert run_on_device(4, out_of_order, recipe=recipe, **options) == [[]] * 4
