"""Buffers of every kind are synchronized with rank 0's in each step, in one message, as under DDP."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine
from tests.support import rank


class Counting(nn.Module):
    """Buffers of several dtypes, an empty one and a transposed one, which differ by rank after each step."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
            self.register_buffer(f"of_{dtype.itemsize}_{dtype.is_floating_point}", torch.zeros(5, dtype=dtype))
        self.register_buffer("scalar", torch.zeros(()))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("transposed", torch.zeros(2, 3).t())

    def forward(self, x):
        seen = {name: buffer.clone() for name, buffer in self.named_buffers()}
        for buffer in self.buffers():
            buffer.add_(1 + rank()) if buffer.dtype is not torch.bool else buffer.fill_(rank() == 0)
        return self.linear(x).sum(), seen


def steps(stage):
    module = Counting()
    engine = Engine(module, stage=stage)
    for step in range(3):
        engine.reset_counters()
        loss, seen = module(torch.ones(1, 3))
        for name, buffer in seen.items():
            assert torch.equal(buffer, torch.full_like(buffer, step)), f"{name}: rank 0 has counted to {step}"
        assert engine.report().calls["control"] == 1, "that message"
        loss.backward()
    assert module.transposed.stride() == (1, 3)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_of_every_kind_are_copied_from_rank_0_in_one_message(run_on, stage):
    run_on(2, steps, stage=stage)


def meetings(stage):
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    engine = Engine(module, stage=stage)
    before = engine.communicator.rendezvous.meetings
    engine.full_state_dict()
    count = engine.communicator.rendezvous.meetings - before
    engine.close()
    return count


@pytest.mark.parametrize(("stage", "expected"), [(1, 0), (3, 1)])
def test_a_full_state_dict_takes_one_rendezvous_or_none_if_all_values_are_local(run_on, stage, expected):
    assert run_on(2, meetings, stage=stage) == [expected] * 2
