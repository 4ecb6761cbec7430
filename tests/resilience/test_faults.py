"""Faults other than kills: signals, damaged, missing or foreign states, a full tmpfs, lost memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.checkpoint.faults import on_a_small_disk
from tests.resilience.jobs import command, ended, environment, fault, memory_of, run
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


def generations_in(folder):
    found = (memory_of(folder) / "fit-0").glob("step-*")
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def on_disk(folder):
    return folder / f".lightning_zero-{memory_of(folder).name}"


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "job"
    shutil.rmtree(memory_of(tmp_path / "job"), ignore_errors=True)


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "what_is_left"), one_at_a_time([3, 1, 2], ["memory", "disk"]))
def test_sigterm_to_one_rank_saves_on_all_and_the_same_job_continues(stage, what_is_left, uninterrupted, folder):
    options = {"stage": stage, "faults": [fault(0, 5, [1], "backward", "term")]}
    code = started(folder, options).wait(90)
    before = ended(folder, code)
    assert code == 0 and before.weights is None and "Its state after step 6 was saved to" in before.output
    assert generations_in(folder)
    if what_is_left == "disk":
        shutil.rmtree(memory_of(folder))  # as on another machine
    found = ended(folder, started(folder, options).wait(90))
    assert found.continued == [6]
    found.same_as(uninterrupted({"stage": stage}))
    assert not memory_of(folder).exists() and not on_disk(folder).exists()


def test_the_state_at_sigterm_is_not_written_to_a_folder_of_another_user(folder):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    folder.mkdir()
    on_disk(folder).mkdir(0o777)
    os.chown(on_disk(folder), 12345, 12345)
    options = {"epochs": 1, "strategy": {"async_save": True}, "faults": [fault(0, 2, [1], "backward", "term")]}
    assert started(folder, options).wait(90) == 0
    assert (
        "so it is not read A signal is ending this job, and its state is kept only in"
        in (folder / "output").read_text()
    )
    assert not list(on_disk(folder).iterdir())


@pytest.mark.exhaustive
def test_with_a_plugin_for_checkpoints_a_job_continues_after_a_kill_and_after_sigterm(uninterrupted, folder):
    faults = [fault(0, 3, [1], "backward"), fault(1, 5, [1], "backward", "term")]
    options = {"has_plugin": True, "faults": faults}
    assert started(folder, options).wait(120) == 0
    shutil.rmtree(memory_of(folder))
    found = ended(folder, started(folder, options | {"faults": []}).wait(90))
    assert found.continued == [3, 6], found.output
    found.same_as(uninterrupted({}))


@pytest.mark.exhaustive
def test_after_sigterm_to_the_launcher_the_state_is_saved_within_a_step_and_two_seconds(folder):
    process = started(folder, {"pause": 0.2})
    wait_for(folder, "rank 1 begins step 4")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    wait_for(folder, "was saved to")
    assert time.monotonic() - began < 0.2 + 2 + 0.5  # half a second for the step's own work and this check
    process.wait(60)


# -- states that cannot be used ----------------------------------------------------------------------------------------


def stopped_after_kills(folder, options, step):
    """A job that has run out of restarts in a step: the states after this step and the one before are in memory."""
    options = options | {"faults": [fault(0, step, [0, 1], "forward")]}
    assert started(folder, options, restarts=0).wait(90) != 0
    assert [path.name for path in generations_in(folder)] == [f"step-{step - 1}", f"step-{step}"]
    return options


def flip(path):
    """Change one bit in a value of rank 1."""
    with open(next(path.glob("__1_*.distcp")), "r+b") as file:
        content = file.read()
        directory = content.rindex(b"data/0")  # of the last piece, which is the largest
        position = content.rindex(b"data/0", 0, directory) + 200
        file.seek(position)
        file.write(bytes([content[position] ^ 1]))


def truncate(path):
    os.truncate(next(path.glob("__1_*.distcp")), 1000)


def lose_metadata(path):
    os.remove(path / ".metadata")


DAMAGES = {each.__name__: each for each in (flip, truncate, lose_metadata)}


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    ("damage", "which"),
    [
        ("flip", "the newest"),
        ("truncate", "all"),
        *(
            pytest.param(name, which, marks=pytest.mark.exhaustive)
            for name, which in [
                ("truncate", "the newest"),
                ("lose_metadata", "the newest"),
                ("flip", "all"),
            ]
        ),
    ],
)
def test_another_state_takes_the_place_of_a_damaged_one(damage, which, uninterrupted, folder):
    options = stopped_after_kills(folder, {}, 7)
    try:
        for path in generations_in(folder)[-1 if which == "the newest" else 0 :]:
            DAMAGES[damage](path)
        found = ended(folder, started(folder, options | {"faults": []}).wait(90))
    finally:
        shutil.rmtree(memory_of(folder).parent / "victim", ignore_errors=True)
    assert found.continued == ([6] if which == "the newest" else []), found.output
    assert ("Resuming instead from the beginning" in found.output) == (which == "all")
    found.same_as(uninterrupted({}))


@pytest.mark.exhaustive
@pytest.mark.parametrize("left", ["damaged", pytest.param("nothing", marks=pytest.mark.exhaustive)])
def test_without_a_whole_state_in_memory_the_job_continues_from_its_last_checkpoint(left, uninterrupted, folder):
    options = stopped_after_kills(folder, {"saves": 3}, 8)
    for path in generations_in(folder):
        truncate(path) if left == "damaged" else shutil.rmtree(path)
    found = ended(folder, started(folder, options | {"faults": []}).wait(90))
    assert found.continued == [6], found.output
    found.same_as(uninterrupted({}))
    assert not memory_of(folder).exists() and not on_disk(folder).exists()


@pytest.mark.exhaustive
def test_the_folder_of_checkpoints_may_be_a_url(uninterrupted, folder):
    options = {"root": f"file://{folder}/root", "saves": 3}
    stopped_after_kills(folder, options, 8)
    shutil.rmtree(memory_of(folder))  # as on another machine
    found = run(folder, options)
    assert found.continued == [6], found.output
    found.same_as(uninterrupted({}))
    assert not (folder / "file:").exists() and not list((folder / "root").glob(".lightning_zero-*"))


# -- no room -----------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("nbytes", [2**18, pytest.param(2**14, marks=pytest.mark.exhaustive)])
def test_training_continues_with_one_warning_where_memory_has_no_room(nbytes, tmp_path):
    def act():
        found = run(tmp_path, {"epochs": 1}, python=sys.executable)  # the warm interpreter is outside this file system
        assert found.code == 0 and "ended after step 6" in found.output, found.output
        assert found.output.count("could not be kept in memory") == 1, found.output

    assert on_a_small_disk("/dev/shm", nbytes, act, seconds=120) == 0


# -- other ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_job_continues_on_another_number_of_ranks(ranks, folder):
    options = stopped_after_kills(folder, {"precision": "64-true", "is_plain": True}, 6)
    found = run(folder, options | {"faults": []}, ranks)
    assert found.code == 0 and found.continued == [6], found.output
    assert found.begun[-1][-1] == 17


@pytest.mark.exhaustive
def test_frozen_parameters_that_change_are_kept_though_checkpoints_leave_them_out(tmp_path):
    options = {"teaches": True, "strategy": {"exclude_frozen_parameters": True}}
    found = run(tmp_path / "killed", {**options, "faults": [fault(0, 7, [1], "backward")]})
    found.same_as(run(tmp_path / "whole", options))
