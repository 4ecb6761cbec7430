"""Communication per rank and step: 2 Psi elements at stages 1 and 2, at most 3 Psi at stage 3 (SC20, section 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.support.models import Square, adam
from tests.support.training import Recipe, batch, prepare
from tests.support.workers import world_size

WIDTH, LAYERS, STEPS = 32, 6, 5


def measure(stage: int, prefetch: int, optimizer: Callable[[nn.Module], Optimizer] = adam) -> None:
    from lightning_zero.engine import Engine

    module, optimizer = prepare(Recipe(model=Square, optimizer=optimizer))
    engine = Engine(module, [optimizer], stage=stage, prefetch=prefetch)
    # A layer's 32 * 32 elements are a multiple of 8 * 4: Psi without padding. Each layer's backward needs its weight.
    psi = LAYERS * WIDTH * WIDTH
    for step in range(1 + STEPS):
        module(*batch(step)).backward()
        before = engine.report().elements
        optimizer.step()  # at stages 1 and 2 it begins to gather the new values, nothing else
        moved = Counter(engine.report().elements)
        moved.subtract(before)
        assert +moved == ({} if stage == 3 else {"all_gather": psi})
        optimizer.zero_grad()
        if step == 0:
            engine.reset_counters()
    report = engine.report()
    assert report.numel == report.padded_numel == psi
    # backward begins with the last unit of forward, which is still gathered
    gathered = {1: psi, 2: psi, 3: 2 * psi - WIDTH * WIDTH}[stage]
    assert report.steps == report.backwards == STEPS
    assert report.elements_per_step() == psi + gathered, f"{report.elements_per_step() / psi} Psi"
    assert report.elements["reduce_scatter"] == STEPS * psi
    assert report.elements["all_gather"] == STEPS * gathered
    for kind in ("all_gather", "reduce_scatter"):
        assert report.bytes[kind] == 4 * report.elements[kind]
    # In addition, ranks exchange a few words per unit, independent of its size.
    assert report.bytes.get("control", 0) <= STEPS * LAYERS * 64
    engine.close()
    assert world_size() == report.world_size


@pytest.mark.exhaustive(but=2)
@pytest.mark.behaviour(
    "The numbers",
    "Elements communicated per step, for Psi parameters (DDP: 2 Psi)",
    notes={1: "2 Psi", 2: "2 Psi", 3: "3 Psi at most"},
)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_moves_2_psi_at_stages_1_and_2_and_3_psi_less_the_last_unit_at_stage_3(run_on, stage, size, prefetch):
    run_on(size, measure, stage=stage, prefetch=prefetch)


def muon(module: nn.Module) -> Optimizer:
    return torch.optim.Muon(module.parameters())


@pytest.mark.parametrize("size", [2, 4])  # six matrices: at four ranks shares are unequal
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_owned_matrices_need_as_much_communication_as_shards(run_on, stage, size):
    run_on(size, measure, stage=stage, prefetch=1, optimizer=muon)
