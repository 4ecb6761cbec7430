"""Faults other than kills: signals, damaged or missing slots, a full tmpfs, hangs, repeated mistakes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.checkpoint.faults import on_a_small_disk
from tests.resilience.jobs import command, ended, environment, fault, run
from tests.support.selection import one_at_a_time

NAMED = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=the-job"]


def started(folder, options, restarts=3):
    """A job that can be started again under its name."""
    folder.mkdir(exist_ok=True)
    with open(folder / "output", "a") as output:
        return subprocess.Popen(
            command(folder, options, 2, restarts, NAMED),
            cwd=folder,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait_for(folder, text, seconds=120):
    deadline = time.monotonic() + seconds
    while text not in (output := (folder / "output").read_text()):
        assert time.monotonic() < deadline, f"no {text!r} in:\n{output}"
        time.sleep(0.02)


def slots_in(folder):
    return sorted((folder / "memory").glob("*/fit-0/*.[01]"))


@pytest.mark.parametrize(("stage", "what_is_left"), one_at_a_time([3, 1, 2], ["memory", "disk"]))
def test_sigterm_to_one_rank_saves_on_all_and_the_same_job_continues(stage, what_is_left, tmp_path):
    expected = run(tmp_path / "whole", {"stage": stage})
    folder, options = tmp_path / "ended", {"stage": stage, "faults": [fault(0, 5, [1], "backward", "term")]}
    code = started(folder, options).wait(60)
    before = ended(folder, code)
    assert code == 0 and before.weights is None and "Its state after step 6 was saved to" in before.output
    assert len(slots_in(folder)) == 4
    if what_is_left == "disk":
        shutil.rmtree(folder / "memory")  # as on another machine
    found = ended(folder, started(folder, options).wait(60))
    assert "Continuing after step 6" in found.output
    found.same_as(expected)
    assert not os.listdir(folder / "memory") and not os.listdir(folder / ".lightning_zero" / "job")


def test_after_sigterm_to_the_launcher_the_state_is_saved_within_a_step_and_two_seconds(tmp_path):
    process = started(tmp_path, {"pause": 0.2})
    wait_for(tmp_path, "rank 1 begins step 4")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    wait_for(tmp_path, "was saved to")
    assert time.monotonic() - began < 0.2 + 2 + 0.5  # half a second for the step's own work and this check
    process.wait(60)


def stopped_after_kills(folder, options, step):
    """A job that has run out of restarts in a step: its slots hold two steps."""
    options = options | {"faults": [fault(0, step, [0, 1], "forward")]}
    assert started(folder, options, restarts=0).wait(60) != 0
    assert len(slots_in(folder)) == 4
    return options


def flip(path):
    with open(path, "r+b") as file:
        file.seek(4096 + 1000)
        (byte,) = file.read(1)
        file.seek(4096 + 1000)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(("damage", "which"), one_at_a_time(["flipped", "truncated", "missing"], ["the newest", "all"]))
def test_a_damaged_slot_is_noticed_and_an_older_state_taken(damage, which, tmp_path):
    expected = run(tmp_path / "whole", {})
    folder = tmp_path / "damaged"
    options = stopped_after_kills(folder, {}, 7)
    of_rank_1 = [path for path in slots_in(folder) if path.name.startswith("1.")]
    newest = max(of_rank_1, key=lambda path: path.stat().st_mtime_ns)
    for path in [newest] if which == "the newest" else of_rank_1:
        {"flipped": flip, "truncated": lambda path: os.truncate(path, 5000), "missing": os.remove}[damage](path)
    found = ended(folder, started(folder, options | {"faults": []}).wait(60))
    begins_anew = which == "all"
    assert ("the job starts over" in found.output) == begins_anew
    assert ("Continuing after step 6" in found.output) == (not begins_anew)
    found.same_as(expected)


@pytest.mark.exhaustive
def test_a_job_whose_agent_was_killed_continues_when_started_again(tmp_path):
    expected = run(tmp_path / "whole", {"pause": 0.05})
    folder = tmp_path / "killed"
    process = started(folder, {"pause": 0.05})
    wait_for(folder, "rank 1 begins step 5")
    process.kill()  # its processes outlive it for a while
    process.wait()
    found = ended(folder, started(folder, {"pause": 0.05}).wait(60))
    assert "Continuing after step" in found.output
    found.same_as(expected)


def test_a_third_death_in_one_step_stops_the_job_and_names_the_step(tmp_path):
    faults = [fault(number, 4, [0], "forward", "fail") for number in range(9)]
    process = started(tmp_path, {"faults": faults}, restarts=3)
    found = ended(tmp_path, process.wait(90))
    assert found.code != 0
    assert "a mistake of the project" in found.output
    assert "has died 3 times after step 4 without keeping a newer state, so it stops" in found.output
    assert found.begun == [[0, 1, 2, 3, 4], [4], [3, 4]]


@pytest.mark.exhaustive
def test_training_continues_with_a_warning_where_memory_has_no_room(tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()

    def act():
        found = run(tmp_path, {"epochs": 1}, python=sys.executable)  # the warm interpreter is outside this file system
        assert found.code == 0 and found.output.count("could not keep the state after step 0") == 2, found.output
        assert "ended after step 6" in found.output

    assert on_a_small_disk(memory, 2**14, act, seconds=120) == 0


@pytest.mark.exhaustive
def test_frozen_parameters_that_change_are_kept_though_checkpoints_leave_them_out(tmp_path):
    options = {"teaches": True, "strategy": {"exclude_frozen_parameters": True}}
    found = run(tmp_path / "killed", {**options, "faults": [fault(0, 7, [1], "backward")]})
    found.same_as(run(tmp_path / "whole", options))
