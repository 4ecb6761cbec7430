"""A job whose processes are killed repeats at most ``every_n_steps``, and ends with an undisturbed job's weights."""

from __future__ import annotations

import pytest

from tests.resilience.jobs import fault, run

MOMENTS = ["start", "forward", "backward", "update", "copy", "written", "commit", "end"]
IN_BACKGROUND = "copy", "written", "commit"
OFFLOADS = {"device": {}, "cpu": {"offload": "cpu"}, "nvme": {"offload": {"optimizer": "nvme", "path": "disk"}}}


def killed_at(moments, stage, ranks):
    """A kill at each of the moments, of one rank or of all in turn, in different steps of one job."""
    victims, faults = [[0], [1], [0, 1]], []
    for number, moment in enumerate(moments):
        step = 1 + 2 * number
        until = step + (moment in IN_BACKGROUND)  # training may be a step ahead
        ranks_here = victims_at(moment, victims[(number + stage) % 3] if ranks == 2 else [0])
        faults.append(fault(number, step, ranks_here, moment, until=until))
    return faults


def victims_at(moment, victims):
    return [0] if moment == "commit" else victims  # rank 0 alone commits


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The Trainer",
    '`resilience="memory"`: a job whose processes are killed at any moment continues from the newest state in memory',
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
    assert found.attempts == 1 + len(moments)
    found.repeats_at_most(1)
    assert not found.memory.exists(), "the job has ended, and its states are still there"
