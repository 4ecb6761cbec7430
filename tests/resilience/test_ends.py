"""Ends of a job other than kills: the ordinary end, Ctrl-C, exceptions, non-finite values, cut connections."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.resilience.jobs import command, ended, environment, fault, run
from tests.resilience.test_faults import wait_for
from tests.support.selection import one_at_a_time
from tests.support.warm import DISMANTLED

# -- ordinary ----------------------------------------------------------------------------------------------------------

LAST_THREADS = r"threads at the end: MainThread( lightning_zero-notices){0,2}"
"""The timer and the thread that watches the next rank belong to the process group."""


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stage", "runs", "resilience"),
    [
        pytest.param(3, 3, {}, id="3 times"),
        *(
            pytest.param(each, 50, {}, id=f"50 times at stage {each}", marks=pytest.mark.exhaustive)
            for each in (1, 2, 3)
        ),
        pytest.param(3, 20, None, id="20 times without resilience", marks=pytest.mark.exhaustive),
    ],
)
def test_an_ordinary_end_is_silent_and_leaves_no_memory_and_no_thread(stage, resilience, runs, tmp_path):
    for number in range(runs):
        options = {"stage": stage, "epochs": 1, "resilience": resilience}
        found = run(tmp_path / str(number), options, more=DISMANTLED)
        assert found.code == 0, found.output
        _, begin, after = found.output.partition("ended after step 6\n")
        last_words = f"(ended after step 6|{LAST_THREADS}|)"
        assert begin and all(re.fullmatch(last_words, line) for line in after.splitlines()), found.output
        assert len(re.findall(f"^{LAST_THREADS}$", found.output, re.MULTILINE)) == 2, found.output
        assert not found.memory.exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("offload", ["cpu", {"optimizer": "nvme", "path": "disk"}])
def test_offloading_leaves_no_thread_at_the_end(offload, tmp_path):
    found = run(tmp_path, {"epochs": 1, "strategy": {"offload": offload}}, more=DISMANTLED)
    assert len(re.findall(f"^{LAST_THREADS}$", found.output, re.MULTILINE)) == 2, found.output


@pytest.mark.exhaustive
def test_ctrl_c_keeps_the_state_and_leaves_no_process(uninterrupted, tmp_path):
    options = {"pause": 0.1}
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen(
            command(tmp_path, options, 2, 3, python=sys.executable),
            cwd=tmp_path,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group, as a shell makes it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    wait_for(tmp_path, "rank 1 begins step 4")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(40) != 0
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left
    before = ended(tmp_path, process.returncode)
    assert len(before.begun) == 1 and before.weights is None, before.output
    found = run(tmp_path, options)
    found.same_as(uninterrupted({}))
    assert len(found.continued) == 1 and found.continued[0] >= before.begun[0][-1] - 1


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("stage", "victims", "moment"),
    one_at_a_time([3, 1, 2], [[1], [0], [0, 1]], ["forward", "start", "backward", "update", "end"]),
)
def test_after_one_exception_of_the_project_the_job_continues(stage, victims, moment, uninterrupted, tmp_path):
    found = run(tmp_path, {"stage": stage, "faults": [fault(0, 5, victims, moment, "fail")]})
    assert "ValueError: a mistake of the project" in found.output
    found.same_as(uninterrupted({"stage": stage}))
    assert len(found.begun) == 2
    found.repeats_at_most(1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "rank"), one_at_a_time([3, 1, 2], [1, 0]))
def test_a_loss_that_is_not_finite_once_leaves_no_trace(stage, rank, uninterrupted, tmp_path):
    found = run(tmp_path, {"stage": stage, "finds": True, "faults": [fault(0, 5, [rank], "loss", "nan")]})
    assert "NonFiniteError: A loss or gradient is not finite at step 5" in found.output
    assert found.continued == [5]
    found.same_as(uninterrupted({"stage": stage}))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "rank", "moment"), one_at_a_time([3, 1, 2], [1, 0], ["backward", "start", "update"]))
def test_cut_connections_end_the_attempt_and_the_job_continues(stage, rank, moment, uninterrupted, tmp_path):
    found = run(tmp_path, {"stage": stage, "faults": [fault(0, 5, [rank], moment, "cut")]})
    (cut_at,) = re.findall(r"meets cut at ([\d.]+)", found.output)
    assert time.time() - float(cut_at) < 60
    found.same_as(uninterrupted({"stage": stage}))
    assert len(found.begun) == 2
    found.repeats_at_most(1)


# -- the tuner ---------------------------------------------------------------------------------------------------------

TUNED = {"tunes": True, "epochs": 2}
LOGS = [
    pytest.param(False, id="without a logger"),
    pytest.param(True, id="with a logger", marks=pytest.mark.exhaustive),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("logs", LOGS)
def test_steps_of_the_tuner_are_not_kept(logs, uninterrupted):
    found = uninterrupted({**TUNED, "logs": logs})
    assert not found.continued and found.begun == [list(range(12))], found.output
    found.same_as(uninterrupted({**TUNED, "logs": logs, "resilience": None}))


@pytest.mark.exhaustive
@pytest.mark.parametrize("logs", [False, True])
def test_kills_after_the_tuner_leave_no_trace(logs, uninterrupted, tmp_path):
    options = {**TUNED, "logs": logs}
    steps = [3, 5, 7, 9]
    faults = [fault(number, step, [1], "backward") for number, step in enumerate(steps)]
    found = run(tmp_path, options | {"faults": faults})
    assert found.continued == steps, found.output
    found.same_as(uninterrupted(options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("logs", [False, True])
def test_a_tuner_whose_process_is_killed_starts_again(logs, uninterrupted, tmp_path):
    options = {**TUNED, "logs": logs}
    found = run(tmp_path, options | {"faults": [fault(0, 3, [1], "backward", fit=-1)]})
    assert not found.continued and found.begun == [list(range(12))], found.output
    found.same_as(uninterrupted(options))


@pytest.mark.exhaustive
def test_a_fit_that_begins_with_a_tuner_ends_after_kills(tmp_path):
    """Each attempt tunes again, and then counts steps from 0, as Lightning does with ``ckpt_path`` (docs: restarts)."""
    faults = [fault(number, step, [1], "start") for number, step in enumerate([3, 5, 7, 9])]
    found = run(tmp_path, {"tunes_within": True, "epochs": 2, "faults": faults})
    assert found.code == 0, found.output
    assert len(found.begun) == 5
