"""The job's folder in memory and the checkpoints on a disk: which state is taken, what is removed, and what is left."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_zero import ResilienceConfig
from lightning_zero.io.labels import label_of
from lightning_zero.strategies.jobs import JobFolder, name_of_job
from tests.checkpoint.faults import on_a_small_disk
from tests.resilience.jobs import SCRIPT, ended, environment, fault, options_of, run
from tests.resilience.test_faults import flip, slots_in, started, stopped_after_kills
from tests.support.selection import exhaustive_but
from tests.support.warm import warm_python

HOURS_AGO = time.time() - 3 * 3600


def age(folder: Path) -> None:
    """Set the times of a folder and of all its contents to hours ago."""
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (HOURS_AGO, HOURS_AGO))


# -- what is removed ---------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_job_started_again_after_hours_continues_from_memory(uninterrupted, tmp_path):
    options = stopped_after_kills(tmp_path, {}, 7)
    age(tmp_path / "memory")
    found = ended(tmp_path, started(tmp_path, options | {"faults": []}).wait(60))
    assert found.continued == [7], found.output
    found.same_as(uninterrupted({}))


def test_only_forgotten_jobs_are_removed_from_the_folder(tmp_path):
    memory = tmp_path / "memory"
    dead = subprocess.run([sys.executable, "-c", DEAD], capture_output=True, text=True, env=environment()).stdout
    for name in ("forgotten", "continued lately", "of the user"):
        (memory / name / "fit-0").mkdir(parents=True)
        (memory / name).chmod(0o700)
        (memory / name / "fit-0" / "0.0").write_text("values")
        if name != "of the user":
            (memory / name / "process-0").write_text(json.dumps([1, dead]))
        age(memory / name)
    os.utime(memory / "continued lately" / "fit-0" / "0.0")  # as a slot that is overwritten in place
    (memory / "a file").touch()
    assert run(tmp_path, {"epochs": 1}).code == 0
    assert sorted(os.listdir(memory)) == ["a file", "continued lately", "of the user"]


@pytest.mark.exhaustive
def test_a_rank_takes_its_place_though_another_rank_checks_the_place_at_that_moment(tmp_path):
    (tmp_path / "job").mkdir(0o700)
    with open(tmp_path / "job" / "process-0", "w+") as place:
        json.dump([1, label_of(os.getpid())], place)
        place.flush()
        fcntl.lockf(place, fcntl.LOCK_EX)  # as a rank that checks whether the place is taken
        script = f"from lightning_zero.strategies.jobs import JobFolder; JobFolder({str(tmp_path)!r}, 'job', 0, 2)"
        process = subprocess.Popen([sys.executable, "-c", script], env=environment())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(6)
    assert process.wait(10) == 0


RANK = """
import fcntl, json, os, sys, time
from lightning_zero.io.labels import this_machine
from lightning_zero.strategies.jobs import JobFolder

def pause():
    print("paused", flush=True)
    sys.stdin.readline()

def lock(file, kind, *of_range):
    lockf(file, kind, *of_range)
    if kind & fcntl.LOCK_EX:
        fcntl.lockf = lockf
        pause()

def wait(seconds):
    time.sleep = sleep
    pause()

lockf, sleep = fcntl.lockf, time.sleep

folder, rank, noted, machine = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if rank == 0:
    fcntl.lockf = lock
    for each in range(2):
        note = json.dumps([noted or os.getpid(), f"{this_machine()}{machine}-{2**22 + 1}-1"])
        with open(f"{folder}/job/process-{each}", "w") as file:
            file.write(note.ljust(256))
else:
    time.sleep = wait  # called before this rank looks again
JobFolder(folder, "job", rank, 2)
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("machine", ["", "-restarted"], ids=["same machine", "restarted container"])
@pytest.mark.parametrize("reused_by", exhaustive_but(["rank 0"], ["another process", "rank 0"]))
def test_notes_of_a_dead_attempt_are_not_taken_for_those_of_ranks_that_start(reused_by, machine, tmp_path):
    """Rank 1 looks at the files while rank 0 has locked one that still contains a note of the previous attempt, whose
    launcher has ended (no process has an id above 2**22), and whose process id is in use again."""
    (tmp_path / "job").mkdir(0o700)
    other = subprocess.Popen(["sleep", "600"])
    ranks = []
    try:
        for rank in range(2):
            noted = other.pid if reused_by == "another process" else 0
            command = [warm_python(), "-c", RANK, str(tmp_path), str(rank), str(noted), machine]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            ranks.append(subprocess.Popen(command, env=environment(), **pipes))
            assert ranks[-1].stdout.readline() == "paused\n"
        assert other.poll() is None and ranks[0].poll() is None
        for each in ranks:
            each.stdin.write("\n")
            each.stdin.flush()
            assert each.stdout.readline() == "done\n"
        assert other.poll() is None
    finally:
        for each in [other, *ranks]:
            each.kill()
            each.communicate()


DEAD = "import os; from lightning_zero.io.labels import label_of; print(label_of(os.getpid()), end='')"


@pytest.mark.exhaustive
def test_slots_of_a_job_on_another_number_of_ranks_are_removed(tmp_path):
    options = {"is_plain": True, "batch": 4, "precision": "64-true"}
    run(tmp_path, options | {"faults": [fault(0, 4, range(4), "backward")]}, 4, restarts=0)
    assert len(slots_in(tmp_path)) == 8
    found = run(tmp_path, options | {"faults": [fault(0, 9, [0, 1], "backward")]}, 2, restarts=0)
    assert "was 4 before the restart and is 2 now" in found.output
    assert [path.name for path in slots_in(tmp_path)] == ["0.0", "0.1", "1.0", "1.1"]


# -- folders of others -------------------------------------------------------------------------------------------------


def another_users(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(path, 12345, 12345)


PREPARED = {
    "a job folder of another user": (lambda job: another_users(job), "belongs to user 12345"),
    "a job folder that others may write to": (lambda job: job.chmod(0o777), "mode 0777 instead of 0700"),
    "a job folder that others may read": (lambda job: job.chmod(0o755), "mode 0755 instead of 0700"),
    "a link": (lambda job: (job.rmdir(), job.symlink_to(job.parent / "victim")), "the path is a link or a file"),
    "a file": (lambda job: (job.rmdir(), job.touch()), "the path is a link or a file"),
    "a link to a process's file": (
        lambda job: (job / "process-0").symlink_to(job.parent / "victim/note"),
        "symbolic links",
    ),
    "a parent of another user": (lambda job: another_users(job.parent), "the parent folder belongs to user 12345"),
    "a parent that all may change": (lambda job: job.parent.chmod(0o777), "every user may replace the folder"),
}


@pytest.mark.parametrize("prepared", PREPARED)
def test_a_folder_that_another_user_may_have_prepared_is_not_used(prepared, tmp_path):
    memory = tmp_path / "memory"
    (memory / "victim").mkdir(parents=True)
    (memory / "victim" / "note").write_text("[1, 2]")
    (memory / "job").mkdir(0o700)
    prepare, reason = PREPARED[prepared]
    prepare(memory / "job")
    with pytest.raises(OSError, match=reason):
        JobFolder(str(memory), "job", 0, 1)
    assert os.listdir(memory / "victim") == ["note"] and (memory / "victim" / "note").read_text() == "[1, 2]"


def test_a_fits_folder_that_is_a_link_ends_the_run_with_its_name(tmp_path):
    (tmp_path / "memory" / "job").mkdir(0o700, parents=True)
    (tmp_path / "victim").mkdir()
    (tmp_path / "memory" / "job" / "fit-0").symlink_to(tmp_path / "victim")
    found = run(tmp_path, {"epochs": 1}, restarts=0)
    assert found.code != 0 and "resilience: " in found.output and "the path is a link or a file" in found.output
    assert not os.listdir(tmp_path / "victim")


def test_folders_of_others_in_a_shared_parent_are_left_alone(tmp_path):
    """Reading a pipe would hang, and a folder to which others may write would be removed with its files."""
    memory = tmp_path / "memory"
    dead = subprocess.run([sys.executable, "-c", DEAD], capture_output=True, text=True, env=environment()).stdout
    for name in ("open", "pipe"):
        (memory / name).mkdir(parents=True)
    (memory / "open" / "process-0").write_text(json.dumps([1, dead]))
    os.mkfifo(memory / "pipe" / "process-0")
    age(memory)
    script = f"from lightning_zero.strategies.jobs import JobFolder; JobFolder({str(memory)!r}, 'job', 0, 1)"
    subprocess.run([warm_python(), "-c", script], env=environment(), check=True, timeout=60)
    assert sorted(os.listdir(memory)) == ["job", "open", "pipe"]


@pytest.mark.parametrize("job", ["..", ".", "", "a/b", "a.b", "/etc", "a b", "\u00e9", "a\n", 5])
def test_a_jobs_name_cannot_lead_out_of_the_folder(job):
    with pytest.raises(ValueError, match=r"^resilience: job=.* must (be a string or None|consist of ASCII letters)"):
        ResilienceConfig(job=job)


@pytest.mark.parametrize("given", ["..", ".", "../../x", "a.b/\u00e9 c"])
def test_a_jobs_name_from_the_launcher_is_a_name_of_one_folder(given, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", given)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert ResilienceConfig(job=name_of_job()).job


# -- what is left ------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_an_error_after_the_fit_does_not_lose_the_final_state_of_the_fit(uninterrupted, tmp_path):
    found = run(tmp_path, {"tests": True, "faults": [fault(0, 18, [0, 1], "test", "fail")]})
    assert found.output.count("a mistake of the project") == 2
    assert found.continued == [18] and len(found.begun) == 1, found.output
    found.same_as(uninterrupted({}))
    assert not os.listdir(tmp_path / "memory")


def start_by_lightning(folder: Path, options: dict, attempt: int) -> int:
    """Let Lightning's own launcher start the second process."""
    of_script = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
    with (folder / "output").open("a") as output:
        return subprocess.run(
            [warm_python(), str(SCRIPT), options_of(folder, options)],
            cwd=folder,
            env=environment() | of_script,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=90,
        ).returncode


def test_a_named_job_that_lightning_itself_starts_continues(uninterrupted, tmp_path):
    options = {"faults": [fault(0, 5, [0, 1], "backward")]}
    assert start_by_lightning(tmp_path, options, 0) != 0
    found = ended(tmp_path, start_by_lightning(tmp_path, options, 1))
    assert found.continued == [5], found.output
    found.same_as(uninterrupted({}))


@pytest.mark.exhaustive
def test_a_folder_that_is_full_from_the_start_is_reported_and_training_continues(tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()

    def act() -> None:
        (memory / "filler").write_bytes(bytes(2**14 - 4096 * 1))
        with pytest.raises(OSError):
            (memory / "more").write_bytes(bytes(2**14))
        found = run(tmp_path, {"epochs": 1}, python=sys.executable)  # the warm interpreter is outside this file system
        assert found.code == 0 and "resilience has no effect in this run" in found.output, found.output
        assert "ended after step 6" in found.output

    assert on_a_small_disk(memory, 2**14, act, seconds=120) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("free", "killed_at"),
    [pytest.param(2**15, 5, id="room for no values"), pytest.param(2**16, 0, id="room for the first values alone")],
)
def test_where_there_is_no_room_states_of_the_oldest_fit_are_removed_first(free, killed_at, tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()

    def act() -> None:
        for fit in ("fit-9", "fit-10"):
            (memory / "job" / fit).mkdir(parents=True)
            (memory / "job" / fit / "0.0").write_bytes(bytes(2**19))
            (memory / "job").chmod(0o700)
        (memory / "filler").write_bytes(bytes(shutil.disk_usage(memory).free - free))
        options = {"faults": [fault(0, killed_at, [0], "backward")]}
        run(tmp_path, options, 1, restarts=0, python=sys.executable)
        assert [len(os.listdir(memory / "job" / fit)) for fit in ("fit-9", "fit-10")] == [0, 1]

    assert on_a_small_disk(memory, 3 * 2**19, act, seconds=120) == 0


# -- which state is taken ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", exhaustive_but([3], [1, 2, 3]))
def test_where_memory_is_damaged_the_job_continues_from_the_last_checkpoint(stage, uninterrupted, tmp_path):
    options = stopped_after_kills(tmp_path, {"stage": stage, "saves": 3}, 8)
    for path in slots_in(tmp_path):
        flip(path)
    found = ended(tmp_path, started(tmp_path, options | {"faults": []}).wait(60))
    assert found.continued == [6], found.output
    found.same_as(uninterrupted({"stage": stage}))


@pytest.mark.exhaustive
def test_a_validation_after_the_last_checkpoint_is_not_lost(uninterrupted, tmp_path):
    """The checkpoint of step 4 is newer than the state in memory, but continuing from it would skip the validation."""
    options = {"saves": 2, "validates": 2}
    found = run(tmp_path, options | {"faults": [fault(0, 4, [1], "validation")]})
    assert found.continued == [3], found.output
    assert found.output.count("validates after step 4\n") == 2
    found.same_as(uninterrupted({"validates": 2}))


@pytest.mark.exhaustive
def test_without_memory_the_job_still_finds_its_checkpoints(uninterrupted, tmp_path):
    options = stopped_after_kills(tmp_path, {"saves": 3}, 8)
    shutil.rmtree(tmp_path / "memory")
    found = ended(tmp_path, started(tmp_path, options | {"faults": []}).wait(60))
    assert found.continued == [6], found.output
    found.same_as(uninterrupted({}))


@pytest.mark.exhaustive
def test_without_memory_the_job_finds_a_checkpoint_that_was_saved_to_a_url(uninterrupted, tmp_path):
    options = {"faults": [fault(0, 5, [0, 1], "start", "save to a URL"), fault(0, 8, [0, 1], "forward")]}
    run(tmp_path, options, restarts=0)
    shutil.rmtree(tmp_path / "memory")
    found = run(tmp_path, {})
    assert found.continued == [5], found.output
    found.same_as(uninterrupted({}))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ends", ["by a signal", "by a kill"])
def test_the_folder_of_checkpoints_may_be_a_url(ends, uninterrupted, tmp_path):
    end = fault(0, 5, [1], "backward", "term") if ends == "by a signal" else fault(0, 8, [1], "forward")
    options = {"root": f"file://{tmp_path}/root", "saves": 3}
    run(tmp_path, options | {"faults": [end]}, restarts=0)
    shutil.rmtree(tmp_path / "memory")  # as on another machine
    found = run(tmp_path, options)
    assert found.continued == [6], found.output
    found.same_as(uninterrupted({}))
    assert not os.listdir(tmp_path / "root" / ".lightning_zero" / "job")
    assert not (tmp_path / "file:").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"saves": 3, "saves_weights": 1},
        {"saves": 3, "saves_weights": 1, "strategy": {"checkpoint": "sharded"}},
        {"saves": 3, "has_class": True},
    ],
    ids=str,
)
def test_without_memory_the_job_continues_from_the_last_complete_checkpoint(options, uninterrupted, tmp_path):
    stopped_after_kills(tmp_path, options, 8)
    shutil.rmtree(tmp_path / "memory")
    found = run(tmp_path, options)
    assert found.continued == [6], found.output
    found.same_as(uninterrupted({}))
