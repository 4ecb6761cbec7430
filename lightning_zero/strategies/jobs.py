"""The folder of a job in shared memory: its name, the processes that use it, and its removal when the job has ended."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import time
import zlib
from contextlib import suppress
from multiprocessing.util import Finalize

from lightning_zero.io.disk import make_private_folder
from lightning_zero.io.labels import is_of_the_dead, label_of

_FORGOTTEN = 3600.0
"""Seconds without a change after which the next job removes the folder of a job whose launcher is gone."""

_PROCESS, _ENDED = "process-", "ended-"
_PATIENCE = 10.0  # seconds for a killed process to end


def name_of_job() -> str | None:
    """The name by which processes that are started again find what those before have left; None if nothing gives one.

    It contains the command line, since several programs may run within one job of SLURM.
    """
    run, address = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("MASTER_ADDR")
    if "SLURM_JOB_ID" in os.environ:
        name = f"slurm-{os.environ['SLURM_JOB_ID']}"
    elif run is None:
        return None
    else:  # torchrun's default name
        name = run if run != "none" else f"{address}-{os.environ.get('MASTER_PORT')}"
    program = zlib.crc32("\0".join([os.getcwd(), *sys.argv]).encode())
    return "".join(each if each.isalnum() or each in "-." else "_" for each in name)[:80] + f"-{program:08x}"


class JobFolder:
    """A job's folder, as one of its processes uses it; removed when all processes of the machine end without an error.

    Args:
        parent: a folder in memory, of this user alone.
        name: of the job.
        rank: of this process.
        of_machine: ranks of the job on this machine.

    Raises:
        OSError: if the folder cannot be used, or another launcher's processes use it.
    """

    def __init__(self, parent: str, name: str, rank: int, of_machine: int) -> None:
        make_private_folder(parent)
        _clear_leftovers(parent)
        self.path = os.path.join(parent, name)
        os.makedirs(self.path, 0o700, exist_ok=True)
        self._rank, self._of_machine, self._is_running = rank, of_machine, True
        self._others: list[str] = []
        launcher = label_of(os.getppid())
        for entry in os.listdir(self.path):
            if entry.startswith(_PROCESS) and entry != f"{_PROCESS}{rank}":
                _end_orphan(os.path.join(self.path, entry), launcher)
        own = os.path.join(self.path, f"{_PROCESS}{rank}")
        if os.path.exists(own):
            _end_orphan(own, launcher)
        self._file = os.open(own, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends; forked ones do not have it
        os.truncate(self._file, 0)
        os.pwrite(self._file, json.dumps([os.getpid(), launcher]).encode(), 0)
        Finalize(None, self._end_process, exitpriority=10)  # called at exit in processes of multiprocessing as well

    def begin(self) -> None:
        """A fit begins."""
        self._is_running = True

    def end(self, others: list[str]) -> None:
        """A fit has ended without an error.

        Args:
            others: files of the fit that are removed with the folder.
        """
        self._is_running, self._others = False, [*self._others, *others]

    def _end_process(self) -> None:
        if self._is_running or getattr(sys, "last_value", None) is not None:
            return
        with suppress(OSError):
            open(os.path.join(self.path, f"{_ENDED}{self._rank}"), "w").close()
            ended = [name for name in os.listdir(self.path) if name.startswith(_ENDED)]
            if len(ended) >= self._of_machine:
                shutil.rmtree(self.path, ignore_errors=True)
        for path in self._others if self._rank == 0 else ():
            with suppress(OSError):
                os.remove(path) if os.path.isfile(path) else shutil.rmtree(path)


def _end_orphan(path: str, launcher: str) -> None:
    """Kill a process that uses the folder although its launcher is gone, as after a kill of torchrun alone.

    Raises:
        OSError: if it belongs to another launcher that lives.
    """
    deadline, process = time.monotonic() + _PATIENCE, 0
    with suppress(FileNotFoundError), open(path, "r+") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                file.seek(0)
            with suppress(ValueError):  # it is being written
                process, its_launcher = json.loads(file.read())
                if its_launcher.rpartition("-")[0] == launcher.rpartition("-")[0]:
                    return
                if not is_of_the_dead(its_launcher):
                    break
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        raise FileExistsError(f"process {process} of another run of this job uses {os.path.dirname(path)}")


def _clear_leftovers(parent: str) -> None:
    """Remove folders of jobs whose launchers are gone, and that have not been continued for a while."""
    for job in os.scandir(parent):
        with suppress(OSError, ValueError):
            launchers = []
            for entry in os.scandir(job.path):
                if entry.name.startswith(_PROCESS):
                    with open(entry.path) as file:
                        launchers.append(json.load(file)[1])
            newest = max(os.stat(path).st_mtime for path, *_ in os.walk(job.path))
            if all(map(is_of_the_dead, launchers)) and time.time() - newest > _FORGOTTEN:
                shutil.rmtree(job.path, ignore_errors=True)
