"""Kills in other jobs than those of test_kills: one process, other precisions, several fits, after a fit, at random."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time

import pytest

from tests.resilience.jobs import ended, fault, run
from tests.resilience.test_faults import started
from tests.resilience.test_kills import MOMENTS, OFFLOADS, killed_at, victims_at
from tests.support.selection import exhaustive_but, one_at_a_time

STAGES = exhaustive_but([3], [1, 2, 3])


def leaves_no_trace(found, expected, kills, repeats=1):
    """A job continued after each kill, repeated at most `repeats` steps, and ended as if nothing had happened."""
    found.same_as(expected)
    assert found.attempts == 1 + kills, found.output
    found.repeats_at_most(repeats)
    assert not found.memory.exists()


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "moments"), one_at_a_time([3, 1, 2], [["copy", "update"], MOMENTS]))
def test_a_job_of_one_process_continues_after_kills(stage, moments, uninterrupted, tmp_path):
    found = run(tmp_path, {"stage": stage, "faults": killed_at(moments, stage, ranks=1)}, ranks=1)
    leaves_no_trace(found, uninterrupted({"stage": stage}, ranks=1), len(moments))


# -- the second kill ---------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "moment", "victims"), one_at_a_time([3, 1, 2], ["load", "fit", "start"], [[0], [1]]))
def test_a_job_killed_again_while_it_recovers_continues(stage, moment, victims, uninterrupted, tmp_path):
    faults = [fault(0, 5, [1], "backward"), fault(1, 0, victims, moment, until=99)]
    found = run(tmp_path, {"stage": stage, "faults": faults})
    leaves_no_trace(found, uninterrupted({"stage": stage}), kills=2)


# -- how often the state is kept, and in which precision ---------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
def test_with_every_n_steps_at_most_n_steps_are_repeated(stage, uninterrupted, tmp_path):
    faults = [fault(0, 9, [1], "end"), fault(1, 15, [0], "copy", until=16)]
    options = {"stage": stage, "resilience": {"every_n_steps": 5}}
    found = run(tmp_path, options | {"faults": faults})
    leaves_no_trace(found, uninterrupted({"stage": stage}), kills=2, repeats=5)
    assert found.continued == [5, 10]


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_kills_between_and_in_micro_batches_in_bf16_leave_no_trace(stage, precision, uninterrupted, tmp_path):
    faults = [fault(0, 2, [1], "micro-batch"), fault(1, 5, [0], "commit", until=6), fault(2, 7, [0, 1], "backward")]
    options = {"stage": stage, "precision": precision, "accumulate": 2}
    found = run(tmp_path, options | {"faults": faults})
    leaves_no_trace(found, uninterrupted(options), kills=3)


# -- what an epoch has set ---------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"freezes": True, "validates": 3}, id="frozen layers and modes of modules"),
        pytest.param({"draws": True}, id="a sampler's own generator"),
        pytest.param({"unfreezes": True}, id="a group that BaseFinetuning has added"),
        pytest.param({"averages": True}, id="StochasticWeightAveraging"),
        pytest.param({"schedule": {"0": 2, "1": 3}}, id="an accumulation schedule"),
    ],
)
def test_what_an_epoch_has_set_survives_kills(options, uninterrupted, tmp_path):
    kills = [fault(0, 3, [1], "forward"), fault(1, 5, [0], "forward")]
    if "schedule" not in options:
        kills += [fault(2, 8, [0, 1], "forward"), fault(3, 13, [1], "forward")]
    found = run(tmp_path, options | {"faults": kills})
    leaves_no_trace(found, uninterrupted(options), len(kills))


# -- several fits, and after the fit -----------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "kill"), one_at_a_time([3, 1, 2], [(3, "forward"), (0, "fit")]))
def test_a_kill_in_the_second_fit_of_a_script_does_not_repeat_the_first(stage, kill, uninterrupted, tmp_path):
    options, (step, moment) = {"stage": stage, "fits": 2, "epochs": 1}, kill
    found = run(tmp_path, options | {"faults": [fault(0, step, [1], moment, fit=1)]})
    assert found.continued == [6, step][: 1 + (step > 0)]  # the first fit's end, then the second fit if it was kept
    assert found.begun[-1] == list(range(step, 6))
    found.same_as(uninterrupted(options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_kill_in_each_of_three_fits_leaves_no_trace(stage, uninterrupted, tmp_path):
    options = {"stage": stage, "fits": 3, "epochs": 1}
    faults = [fault(number, 2 + number, [number % 2], "backward", fit=number) for number in range(3)]
    found = run(tmp_path, options | {"faults": faults})
    assert found.begun == [[0, 1, 2], [2, 3, 4, 5, 0, 1, 2, 3], [3, 4, 5, 0, 1, 2, 3, 4], [4, 5]]
    found.same_as(uninterrupted(options))


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("test", "kill"),
        ("last checkpoint", "kill"),
        ("end of the script", "exit with 3"),
        pytest.param("test", "fail", marks=pytest.mark.exhaustive),
        pytest.param("end of the script", "kill", marks=pytest.mark.exhaustive),
    ],
)
def test_a_fault_after_the_fit_repeats_no_training(where, what, uninterrupted, tmp_path):
    options = {"tests": True, "saves_at_the_end": True, "stops": True}
    found = run(tmp_path, options | {"faults": [fault(0, 12, [0], where, what)]})
    assert found.attempts == 2 and found.begun == [list(range(12))], found.output
    found.same_as(uninterrupted(options))
    assert not found.memory.exists()


# -- at random ---------------------------------------------------------------------------------------------------------

JOBS, KILLS = 10, 10  # 100 kills


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", range(JOBS))
def test_a_hundred_random_kills_leave_no_trace(job, uninterrupted, tmp_path):
    drawn = random.Random(job)
    stage, offload = list(itertools.product((1, 2, 3), OFFLOADS.values()))[job % 9]
    options = {"stage": stage, "strategy": offload, "saves": drawn.choice([0, 2])}
    faults = []
    for number, step in enumerate(sorted(drawn.sample(range(1, 15), KILLS))):
        moment, victims = drawn.choice(MOMENTS), drawn.choice([[0], [1], [0, 1]])
        # at the first such moment from this step on: a save may be late by a step, or was made by the attempt before
        faults.append(fault(number, step, victims_at(moment, victims), moment, until=99))
    found = run(tmp_path, options | {"faults": faults}, timeout=800)
    leaves_no_trace(found, uninterrupted(options), KILLS)


def last_begun(folder):
    """The last attempt in the output, and the last step begun in it."""
    seen = re.findall(r"attempt (\d+) rank \d+ begins step (\d+)", (folder / "output").read_text())
    return max(((int(attempt), int(step)) for attempt, step in seen), default=(-1, -1))


@pytest.mark.timeout(600)
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(7))
def test_kills_from_outside_at_random_times_leave_no_trace(seed, uninterrupted, tmp_path):
    drawn, kills = random.Random(seed), 6
    options = {"stage": 1 + seed % 3, "epochs": kills + 2, "pause": 0.05}
    process, furthest = started(tmp_path, options, restarts=kills), 0
    for number in range(kills):
        deadline = time.monotonic() + 90
        while (begun := last_begun(tmp_path)) < (number, furthest + 1) or begun[0] > number:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.01)
        time.sleep(drawn.uniform(0, 0.25))
        furthest = last_begun(tmp_path)[1]
        victims = [
            int(pid) for pid in re.findall(rf"attempt {number} is process (\d+)", (tmp_path / "output").read_text())
        ]
        os.kill(drawn.choice(sorted(victims)), signal.SIGKILL)
    leaves_no_trace(ended(tmp_path, process.wait(90)), uninterrupted(options), kills)
