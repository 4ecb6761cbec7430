"""Jobs that SLURM's srun starts, again under the same job id after a task was killed or the job was preempted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.resilience.jobs import SCRIPT, ended, environment, fault, options_of, run
from tests.support.ports import reserved_port
from tests.support.warm import warm_python


@pytest.fixture
def port():
    with reserved_port() as reserved:
        yield reserved


def memory_of_slurm():
    return list(Path(f"/dev/shm/lightning_zero-{os.geteuid()}").glob("slurm-77-*"))


def start_tasks(folder, options, attempt, port):
    """Start the processes of a job step."""
    folder.mkdir(exist_ok=True)
    of_step = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_JOB_NODELIST": "127.0.0.1", "SLURM_NODEID": "0"}
    of_step |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "MASTER_PORT": str(port)}
    of_script = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
    output = (folder / "output").open("a")
    return [
        subprocess.Popen(
            [
                warm_python(),
                str(SCRIPT),
                options_of(folder, options | {"resilience": {"job": None, "every_n_steps": 1}}),
            ],
            cwd=folder,
            env=environment() | of_step | of_script | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]


@pytest.mark.exhaustive
def test_a_job_step_continues_after_a_task_was_killed(port, tmp_path):
    folder, options = tmp_path / "job", {"faults": [fault(0, 5, [1], "backward")]}
    codes = [process.wait(90) for process in start_tasks(folder, options, 0, port)]
    assert 0 not in codes
    assert [process.wait(90) for process in start_tasks(folder, options, 1, port)] == [0, 0]
    found = ended(folder, 0)
    found.same_as(run(tmp_path / "whole", {}))
    assert [steps[0] for steps in found.begun] == [0, 5] and memory_of_slurm() == []


@pytest.mark.exhaustive
def test_a_preempted_job_saves_its_state_and_continues_on_another_machine(port, tmp_path):
    folder, options = tmp_path / "job", {"pause": 0.1}
    tasks = start_tasks(folder, options, 0, port)
    while "rank 1 begins step 4" not in (folder / "output").read_text():
        assert all(task.poll() is None for task in tasks), (folder / "output").read_text()
        time.sleep(0.02)
    for task in tasks:
        task.send_signal(signal.SIGTERM)
    assert [task.wait(60) for task in tasks] == [0, 0]
    (memory,) = memory_of_slurm()
    shutil.rmtree(memory)  # on another machine
    assert [process.wait(90) for process in start_tasks(folder, options, 1, port)] == [0, 0]
    found = ended(folder, 0)
    found.same_as(run(tmp_path / "whole", {}))
    found.repeats_at_most(0)
