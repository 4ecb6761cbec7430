"""A job whose processes are killed repeats at most one step and ends with the weights of an undisturbed job."""

from __future__ import annotations

import os

import pytest

from tests.resilience.jobs import fault, run

MOMENTS = ["start", "forward", "backward", "update", "copy", "commit", "end"]
OFFLOADS = {"device": {}, "cpu": {"offload": "cpu"}, "nvme": {"offload": {"optimizer": "nvme", "path": "disk"}}}


def killed_at(moments, stage, ranks):
    """A kill at each of the moments, of one rank or of all in turn, in different steps of one job."""
    victims = [[0], [1], [0, 1]]
    return [
        fault(number, 1 + 2 * number, victims[(number + stage) % 3] if ranks == 2 else [0], moment)
        for number, moment in enumerate(moments)
    ]


@pytest.mark.behaviour(
    "The Trainer",
    '`resilience="memory"`: a job whose processes are killed at any moment continues in the step that was running',
)
@pytest.mark.parametrize(
    ("stage", "offload", "moments"),
    [
        pytest.param(1, "device", ["backward", "commit"], id="stage 1"),
        pytest.param(2, "device", ["update", "copy"], id="stage 2"),
        pytest.param(3, "device", MOMENTS, id="stage 3, at every moment"),
        pytest.param(1, "cpu", MOMENTS, id="stage 1, offloaded, at every moment", marks=pytest.mark.exhaustive),
        pytest.param(2, "nvme", MOMENTS, id="stage 2, on a disk, at every moment", marks=pytest.mark.exhaustive),
    ],
)
def test_kills_leave_no_trace_in_the_weights(stage, offload, moments, tmp_path):
    options = {"stage": stage, "strategy": OFFLOADS[offload]}
    expected = run(tmp_path / "whole", options)
    found = run(tmp_path / "killed", options | {"faults": killed_at(moments, stage, 2)})
    found.same_as(expected)
    assert len(found.begun) == 1 + len(moments)
    found.repeats_at_most(1)
    assert not os.listdir(tmp_path / "killed" / "memory"), "the job has ended, and its slots are still there"
