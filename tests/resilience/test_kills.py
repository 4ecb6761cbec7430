"""A job whose processes are killed repeats at most one step and ends with the weights of an undisturbed job."""

from __future__ import annotations

import os
from itertools import product

import pytest

from tests.resilience.jobs import fault, run
from tests.support.selection import exhaustive_but

MOMENTS = ["start", "forward", "backward", "update", "copy", "commit", "end"]
OFFLOADS = {"device": {}, "cpu": {"offload": "cpu"}, "nvme": {"offload": {"optimizer": "nvme", "path": "disk"}}}


def killed_at_every_moment(stage, ranks):
    """A kill at each moment, of one rank or of all in turn, in different steps of one job."""
    victims = [[0], [1], [0, 1]]
    return [
        fault(number, 1 + 2 * number, victims[(number + stage) % 3] if ranks == 2 else [0], moment)
        for number, moment in enumerate(MOMENTS)
    ]


@pytest.mark.behaviour(
    "The Trainer",
    '`resilience="memory"`: a job whose processes are killed at any moment continues in the step that was running',
)
@pytest.mark.parametrize(
    ("stage", "offload"),
    exhaustive_but([(3, "device")], product([1, 2, 3], OFFLOADS)),
)
def test_a_kill_at_every_moment_leaves_no_trace_in_the_weights(stage, offload, tmp_path):
    options = {"stage": stage, "strategy": OFFLOADS[offload]}
    expected = run(tmp_path / "whole", options)
    found = run(tmp_path / "killed", options | {"faults": killed_at_every_moment(stage, 2)})
    found.same_as(expected)
    assert len(found.begun) == 1 + len(MOMENTS)
    found.repeats_at_most(1)
    assert not os.listdir(tmp_path / "killed" / "memory"), "the job has ended, and its slots are still there"
