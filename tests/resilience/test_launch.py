"""`lightning-zero launch` starts a script's processes, and restarts them after one has died or hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from lightning_zero.io import beats
from tests.resilience.jobs import LAUNCH, environment, fault, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A job without faults."""
    return run(tmp_path_factory.mktemp("whole"), {})


def launch(*arguments, folder, timeout=60):
    """Run a script of the folder to its end."""
    command = [sys.executable, *LAUNCH, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("victims", [pytest.param([1], marks=pytest.mark.exhaustive), [0, 1]])
def test_processes_that_were_killed_start_again_and_continue(victims, whole, tmp_path):
    faults = [fault(0, 4, victims, "backward"), fault(1, 6, victims, "commit")]
    found = run(tmp_path, {"faults": faults}, launcher=LAUNCH)
    found.same_as(whole)
    found.repeats_at_most(1)
    assert len(found.begun) == 3 and not os.listdir(tmp_path / "memory")


@pytest.mark.parametrize("what", ["stop", pytest.param("loop", marks=pytest.mark.exhaustive)])
def test_a_hanging_process_is_named_and_killed_and_the_job_continues(what, whole, tmp_path):
    options = {"faults": [fault(0, 4, [1], "forward", what)]}
    found = run(tmp_path, options, launcher=[*LAUNCH, "--hang-timeout", "4"])
    assert re.search(
        r"no process has begun a step for 4 s\. Rank 1 \(process \d+\) is hanging, and rank\(s\) 0 are waiting for it",
        found.output,
    )
    assert ("job.py" in found.output.partition("Fatal Python error: Aborted")[2]) == (what == "loop")  # its stack
    found.same_as(whole)
    found.repeats_at_most(1)


@pytest.mark.exhaustive
def test_a_slow_step_is_not_a_hang(whole, tmp_path):
    found = run(tmp_path, {"pause": 0.3}, launcher=[*LAUNCH, "--hang-timeout", "2"])
    assert "is hanging" not in found.output and len(found.begun) == 1
    found.same_as(whole)


def test_where_heartbeats_cannot_be_written_training_continues_and_a_killed_process_is_noticed(whole, tmp_path):
    missing = {beats.FOLDER: str(tmp_path / "removed by a launcher that has ended")}
    found = run(tmp_path, {"faults": [fault(0, 4, [1], "backward")]}, restarts=1, more=missing)
    found.same_as(whole)
    assert len(found.begun) == 2


def has_ended(process):
    """Whether the process has ended, even if the system still keeps its exit code for a parent."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.exhaustive
def test_when_the_launcher_is_killed_its_processes_end(tmp_path):
    (tmp_path / "script.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, *LAUNCH, "--nproc-per-node", "2", "script.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 2  # less than a server with torch takes to shut down under load
    while (left := [each for each in family if not has_ended(each)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)])
def test_a_signal_to_the_launcher_ends_all_processes(number, tmp_path):
    (tmp_path / "script.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, *LAUNCH, "--nproc-per-node", "2", "script.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None and [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
    family = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0 and time.monotonic() - began < 20
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left


SHOW = """
import os, sys
print(os.environ["RANK"], os.environ["WORLD_SIZE"], __name__, sys.argv[1:], flush=True)
"""


@pytest.mark.exhaustive
def test_a_script_or_module_gets_its_arguments(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    for how in (["show.py"], ["-m", "show"]):
        code, output, errors = launch("--nproc-per-node", "2", *how, "--help", "-m", "x y", folder=tmp_path)
        assert code == 0, errors
        assert sorted(output.splitlines()) == [f"{rank} 2 __main__ ['--help', '-m', 'x y']" for rank in range(2)]


@pytest.mark.exhaustive
def test_a_scripts_exit_code_and_exception_are_reported(tmp_path):
    for script, code, said in (
        ("import sys; sys.exit(0)", 0, ""),
        ("import sys; sys.exit(3)", 1, "exitcode"),
        ("raise ValueError('a mistake of the project')", 1, "ValueError: a mistake of the project"),
    ):
        (tmp_path / "script.py").write_text(script)
        found, _, errors = launch("--nproc-per-node", "1", "--max-restarts", "0", "script.py", folder=tmp_path)
        assert found == code and said in errors, errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc-per-node", "2", "none.py"], "there is no file none.py"),
        (["--nnodes", "1:2", "script.py"], "--nnodes 1:2 requires --rdzv-endpoint HOST:PORT and --rdzv-id NAME on all"),
        (["--nproc-per-node", "many", "script.py"], "--nproc-per-node many must be a number of at least 1, or gpu"),
        (["script.py"], "--nproc-per-node gpu: torch finds no GPU here; write a number"),
        (["--nproc-per-node", "0", "script.py"], "--nproc-per-node 0 must be a number"),
        (["--nproc-per-node", "2", "--max-restart", "x", "script.py"], "invalid int value: 'x'"),
    ],
)
def test_a_wrong_option_is_an_error_of_one_line(arguments, said, tmp_path):
    (tmp_path / "script.py").write_text("")
    code, output, errors = launch(*arguments, folder=tmp_path)
    assert code == 2 and not output
    assert errors.startswith("lightning-zero launch: ") and said in errors and errors.count("\n") == 1, errors
