"""Chrome traces of real ranks: each unit's phases by name, and gathers under way while other units compute."""

from __future__ import annotations

import json
import time
import timeit
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch import nn

from lightning_zero import ZeroStrategy
from lightning_zero.engine.comm.counters import Phases
from tests.support.workers import rank
from tests.trainer.cases import Net, fit, shared_folder


class Block(nn.Sequential):
    pass


class Blocks(Net):
    """Wide enough for units that are gathered and released one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Linear(6, 160),
            *(Block(nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 160)) for _ in range(3)),
            nn.Linear(160, 6),
        )


UNITS = ["blocks.1", "blocks.2", "blocks.3"]


def traced(stage: int, overlap: bool) -> list[dict[str, Any]]:
    """Spans of this rank's third to fifth step, recorded by a Trainer's profiler."""
    profiler = PyTorchProfiler(dirpath=shared_folder(), filename=f"trace-{stage}-{overlap}")
    strategy = ZeroStrategy(stage, units=Block, overlap=overlap)
    fit(strategy, Blocks(), profiler=profiler, max_epochs=3, limit_val_batches=0, num_sanity_val_steps=0)
    (file,) = sorted(shared_folder().glob(f"*trace-{stage}-{overlap}-{rank()}*.json"))[-1:]
    events = json.loads(file.read_text())["traceEvents"]
    return sorted((event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"])


def named(spans: list[dict[str, Any]], phase: str, unit: str) -> list[tuple[float, float]]:
    found = [span for span in spans if span["name"] == f"zero::{phase} {unit}"]
    return [(span["ts"], span["ts"] + span["dur"]) for span in found]


def phases(stage: int) -> None:
    spans = traced(stage, overlap=True)
    each = [
        "forward",
        "reduce",
        "wait for reduction",
        *(["gather", "wait for gather", "backward"] if stage == 3 else []),
    ]
    for phase in each:
        for unit in [*UNITS, "root"]:
            if (phase, unit) != ("backward", "root"):
                assert named(spans, phase, unit), f"{phase} {unit}"
    assert any("Optimizer.step" in span["name"] for span in spans)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_traces_name_units_and_phases(run_on, stage):
    run_on(2, phases, stage=stage)


def gathered_during_forward(overlap: bool) -> None:
    """Check that a unit's gather is under way while the previous unit computes, exactly if `overlap`."""
    spans = traced(3, overlap)
    shares = []
    for before, unit in zip(UNITS, UNITS[1:]):
        for begin, end in named(spans, "forward", before):
            started = max((s for s, _ in named(spans, "gather", unit) if s < end), default=None)
            if started is None:
                continue
            arrived = min(e for s, e in named(spans, "wait for gather", unit) if s >= started)
            shares.append(started < begin and arrived > end)
    assert shares and all(shares) == any(shares) == overlap


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("overlap", [True, False])
def test_with_overlap_a_unit_is_gathered_while_the_previous_one_computes(run_on, overlap):
    run_on(2, gathered_during_forward, overlap=overlap)


def test_a_label_costs_next_to_nothing_without_a_profiler():
    """Compare with torch's own label, which costs the same whether a profiler runs or not."""
    phases, calls = Phases(torch.device("cpu")), 20_000

    def ours() -> None:
        with phases("gather", "blocks.0"):
            pass

    def torchs() -> None:
        with torch.profiler.record_function("gather blocks.0"):
            pass

    ours_s, torchs_s = (min(timeit.repeat(label, number=calls, repeat=5)) / calls for label in (ours, torchs))
    assert ours_s < torchs_s / 5 and ours_s < 5e-6


def test_phase_times_are_kept_only_while_a_monitor_measures():
    phases = Phases(torch.device("cpu"))
    for phases.measures in (False, True, True, False):
        with phases("wait for gather", ""):
            time.sleep(0.01)
    taken = phases.take()
    assert set(taken) == {("wait for gather", "root")} and 0.02 <= taken["wait for gather", "root"] < 1
    assert phases.take() == {}
