"""Kills in jobs other than those of test_kills: one process, other precisions, several fits; and kills at random."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import time

import pytest

from tests.resilience.jobs import ended, fault, run
from tests.resilience.test_faults import started
from tests.resilience.test_kills import MOMENTS, OFFLOADS, killed_at
from tests.support.selection import exhaustive_but, one_at_a_time

STAGES = exhaustive_but([3], [1, 2, 3])


def leaves_no_trace(found, expected, kills, repeats=1):
    """A job continued after each kill, repeated at most `repeats` steps, and ended as if nothing had happened."""
    found.same_as(expected)
    assert len(found.continued) == kills, found.output
    found.repeats_at_most(repeats)
    assert not os.listdir(found.folder / "memory")


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "moments"), one_at_a_time([3, 1, 2], [["copy", "update"], MOMENTS]))
def test_a_job_of_one_process_continues_after_kills(stage, moments, uninterrupted, tmp_path):
    found = run(tmp_path, {"stage": stage, "faults": killed_at(moments, stage, ranks=1)}, ranks=1)
    leaves_no_trace(found, uninterrupted({"stage": stage}, ranks=1), len(moments))


# -- the second kill ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "moment", "victims"), one_at_a_time([3, 1, 2], ["load", "read", "fit", "start"], [[0], [1]])
)
def test_a_job_killed_again_while_it_recovers_continues(stage, moment, victims, uninterrupted, tmp_path):
    faults = [fault(0, 5, [1], "backward"), fault(1, 0, victims, moment, until=99)]
    found = run(tmp_path, {"stage": stage, "faults": faults})
    found.same_as(uninterrupted({"stage": stage}))
    found.repeats_at_most(1)
    assert found.begun[0] == [0, 1, 2, 3, 4, 5] and found.begun[-1][0] == 5


# -- how often the state is kept, and in which precision ---------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_with_every_n_steps_at_most_n_steps_are_repeated(stage, uninterrupted, tmp_path):
    faults = [fault(0, 9, [1], "end"), fault(1, 15, [0], "copy")]
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


# -- several fits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "kill"), one_at_a_time([3, 1, 2], [(3, "forward"), (0, "fit"), (0, "copy")]))
def test_a_kill_in_the_second_fit_of_a_script_does_not_repeat_the_first(stage, kill, uninterrupted, tmp_path):
    options, (step, moment) = {"stage": stage, "fits": 2, "epochs": 1}, kill
    found = run(tmp_path, options | {"faults": [fault(0, step, [1], moment, fit=1)]})
    assert found.continued == [6, step][: 1 + (step > 0)]  # the first fit's end, then the second fit if it was kept
    assert found.begun[-1] == list(range(step, 6))
    found.same_as(uninterrupted(options))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "moment"), one_at_a_time([3, 1, 2], ["backward", "end"]))
def test_a_kill_in_the_first_fit_leaves_no_trace_in_the_second(stage, moment, uninterrupted, tmp_path):
    options = {"stage": stage, "fits": 2, "epochs": 1}
    found = run(tmp_path, options | {"faults": [fault(0, 3, [0], moment)]})
    assert found.begun == [[0, 1, 2, 3], [3, 4, 5, *range(6)]]
    found.same_as(uninterrupted(options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_kill_in_each_of_three_fits_leaves_no_trace(stage, uninterrupted, tmp_path):
    options = {"stage": stage, "fits": 3, "epochs": 1}
    faults = [fault(number, 2 + number, [number % 2], "backward", fit=number) for number in range(3)]
    found = run(tmp_path, options | {"faults": faults})
    assert found.begun == [[0, 1, 2], [2, 3, 4, 5, 0, 1, 2, 3], [3, 4, 5, 0, 1, 2, 3, 4], [4, 5]]
    found.same_as(uninterrupted(options))


@pytest.mark.exhaustive
def test_kills_in_the_second_fit_do_not_count_as_deaths_in_the_first(uninterrupted, tmp_path):
    options = {"fits": 2, "epochs": 1}
    found = run(
        tmp_path, options | {"faults": [fault(number, 1 + number, [1], "forward", fit=1) for number in range(4)]}
    )
    assert found.code == 0 and "without keeping a newer state, so it stops" not in found.output, found.output
    found.same_as(uninterrupted(options))


# -- at random ---------------------------------------------------------------------------------------------------------

JOBS, KILLS = 10, 10  # 100 kills


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", range(JOBS))
def test_a_hundred_random_kills_leave_no_trace(job, uninterrupted, tmp_path):
    drawn = random.Random(job)
    stage, offload = list(itertools.product((1, 2, 3), OFFLOADS.values()))[job % 9]
    options = {"stage": stage, "strategy": offload, "saves": drawn.choice([0, 2])}
    steps = sorted(drawn.sample(range(1, 15), KILLS))
    faults = [
        # at the first such moment from this step on: a copy may be late by a step, or was made by the attempt before
        fault(number, step, drawn.choice([[0], [1], [0, 1]]), drawn.choice(MOMENTS), until=99)
        for number, step in enumerate(steps)
    ]
    often = {"resilience": {"deaths_at_one_step": KILLS}}
    found = run(tmp_path, options | often | {"faults": faults}, timeout=500)
    leaves_no_trace(found, uninterrupted(options), KILLS)


def last_begun(folder):
    """The last attempt in the output, and the last step begun in it."""
    seen = re.findall(r"attempt (\d+) rank \d+ begins step (\d+)", (folder / "output").read_text())
    return max(((int(attempt), int(step)) for attempt, step in seen), default=(-1, -1))


@pytest.mark.timeout(300)
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(7))
def test_kills_from_outside_at_random_times_leave_no_trace(seed, uninterrupted, tmp_path):
    drawn, kills = random.Random(seed), 6
    options = {"stage": 1 + seed % 3, "epochs": kills + 2, "pause": 0.05}
    process, furthest = started(tmp_path, options, restarts=kills), 0
    for number in range(kills):
        deadline = time.monotonic() + 60
        while (begun := last_begun(tmp_path)) < (number, furthest + 1) or begun[0] > number:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.01)
        time.sleep(drawn.uniform(0, 0.25))
        furthest = last_begun(tmp_path)[1]
        victim, _ = json.loads((tmp_path / "memory" / "job" / f"process-{drawn.randrange(2)}").read_text())
        os.kill(victim, signal.SIGKILL)
    leaves_no_trace(ended(tmp_path, process.wait(90)), uninterrupted(options), kills)
