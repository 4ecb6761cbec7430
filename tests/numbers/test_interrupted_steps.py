"""Ctrl-C anywhere within a step of an optimizer with offloaded states: the next steps are as under plain PyTorch."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from lightning_zero.engine import Engine
from lightning_zero.engine.config import OffloadConfig
from lightning_zero.engine.tensor.sharded_tree import whole
from tests.support.training import same_values

STEPS = range(4)
INTERRUPTED = 1


class Linear(nn.Module):
    """A module whose gradients depend only on the number of the step, not on the weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.alone = nn.Parameter(torch.randn(40))
        self.layer = nn.Linear(30, 1, bias=False)

    def forward(self, step):
        return (self.alone * (step + 1)).sum() + self.layer(torch.full((1, 30), step + 2.0)).sum()


def train(module, optimizer, steps, interrupt=None):
    """Run steps; ``interrupt`` runs one of them. Return copies of the weights."""
    for step in steps:
        optimizer.zero_grad()
        module(step).backward()
        optimizer.step() if interrupt is None or step != INTERRUPTED else interrupt(optimizer.step)
    return [p.detach().clone() for p in module.parameters()]


def call_interrupted(number, function):
    """Call a function, and raise a KeyboardInterrupt before one line of this package; return whether it was reached."""
    lines = 0

    def on_line(frame, event, _):
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == number:
                raise KeyboardInterrupt
        return on_line

    def on_call(frame, *_):
        return on_line if frame.f_globals.get("__name__", "").startswith("lightning_zero") else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def interrupt_in_every_line(stride, **options):
    plain = Linear(), Linear()
    applied = train(plain[0], Adam(plain[0].parameters(), lr=0.1), STEPS)
    lost = train(plain[1], Adam(plain[1].parameters(), lr=0.1), [step for step in STEPS if step != INTERRUPTED])
    number, goes_on = 1, True
    while goes_on:
        module = Linear()
        optimizer = Adam(module.parameters(), lr=0.1)
        engine = Engine(module, [optimizer], **options)

        def interrupt(step, number=number):
            nonlocal goes_on
            goes_on = call_interrupted(number, step)

        weights = train(module, optimizer, STEPS, interrupt)
        engine.close()
        for found, *allowed in zip(weights, applied, lost):
            assert any(torch.equal(found, each) for each in allowed), f"interrupted in line {number} of the step"
        number += stride
    assert number > 300, "a step takes as many lines"


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("place", ["nvme", "cpu"])
@pytest.mark.parametrize("stage", [1, 3])
def test_ctrl_c_in_a_step_loses_at_most_that_step(run_on, tmp_path, stage, place, stride):
    offload = OffloadConfig(optimizer=place, path=str(tmp_path) if place == "nvme" else None)
    run_on(1, interrupt_in_every_line, stage=stage, stride=stride, offload=offload, timeout=120)


class Fails(SGD):
    """Its first step raises an error after the update."""

    fails = True

    def step(self, closure=None):
        loss = super().step(closure)
        if self.fails:
            self.fails = False
            raise ZeroDivisionError
        return loss


def gradients_after_an_error(zeroes, **options):
    module = Linear()
    optimizer = Fails(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], whole_parameters=False, **options) if options else None
    module(0).backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    if zeroes:
        optimizer.zero_grad()
    module(1).backward()
    optimizer.step()
    found = [whole(each).detach().clone() for p in module.parameters() for each in (p, p.grad)]
    if engine is not None:
        engine.close()
    return found


def accumulate_as_in_plain_torch(zeroes):
    expected = gradients_after_an_error(zeroes)
    for stage in (1, 2, 3):
        same_values(gradients_after_an_error(zeroes, stage=stage), expected, f"stage {stage}")


@pytest.mark.parametrize("zeroes", [True, False])
def test_gradients_of_a_step_that_raised_are_added_to_unless_they_are_cleared(run_on, zeroes):
    run_on(2, accumulate_as_in_plain_torch, zeroes=zeroes)
