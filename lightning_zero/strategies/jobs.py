"""A job's folder in shared memory: its name, the processes that use it, and its removal when the job has ended."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import sys
import time
import zlib
from contextlib import suppress
from multiprocessing.util import Finalize

from fsspec.core import url_to_fs

from lightning_zero.io.disk import check_own_folder, make_own_folder, make_private_folder
from lightning_zero.io.labels import is_of_the_dead, label_of

_FORGOTTEN = 3600.0
"""Once a job's launcher has ended, other jobs remove the job's folder this many seconds after its last change."""

_PROCESS, _ENDED = "process-", "ended-"
_PATIENCE = 10.0  # seconds to wait for a lock, or for a killed process to end
_NOTE_BYTES = 256
_OWNED, _NOTED = 0, 1
"""Bytes of a process's file that the process locks: the first before it writes its note, the second afterwards. While
only the first is locked, the note is an earlier process's, whose id may have been reused, even by the new process."""


def name_of_job() -> str | None:
    """Return the name under which restarted processes find the job's files; None if the launcher gives the job no name.

    The name includes a checksum of folder and command line, since several programs may run within one SLURM job.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if "SLURM_JOB_ID" in os.environ:
        name = f"slurm-{os.environ['SLURM_JOB_ID']}"
    elif run is None:
        return None
    else:  # the default id "none" is the same for all jobs, so torchrun's process id is used
        name = run if run != "none" else f"torchrun-{label_of(os.getppid()).rpartition('-')[0]}"
    program = zlib.crc32("\0".join([os.getcwd(), *sys.argv]).encode())
    return re.sub(r"[^A-Za-z0-9-]", "_", name)[:80] + f"-{program:08x}"


class JobFolder:
    """A job's folder on one machine. It is removed after all the job's processes there have ended without errors.

    Args:
        parent: the folder in memory that contains job folders; only this user may access it.
        name: the job's name.
        rank: this process's rank.
        of_machine: the number of the job's ranks on this machine.

    Raises:
        OSError: if the folder cannot be used, another user has prepared it, or processes of another launcher use it.
    """

    def __init__(self, parent: str, name: str, rank: int, of_machine: int) -> None:
        make_private_folder(parent)
        self.path = os.path.join(parent, name)
        make_own_folder(self.path)
        _clear_leftovers(parent, name)
        self._rank, self._of_machine, self._is_running = rank, of_machine, True
        self._others: list[str] = []
        launcher = label_of(os.getppid())
        for entry in os.listdir(self.path):
            if entry.startswith(_PROCESS) and entry != f"{_PROCESS}{rank}":
                _end_orphan(os.path.join(self.path, entry), launcher)
        own = os.path.join(self.path, f"{_PROCESS}{rank}")
        if os.path.exists(own):
            _end_orphan(own, launcher)
        self._file = os.open(own, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _lock(self._file, _OWNED)  # held until this process ends; forked processes do not inherit the lock
        about = json.dumps([os.getpid(), launcher]).encode()
        try:
            # not truncated before: a full tmpfs has no room for a new page, but an old note's page can be overwritten
            os.pwrite(self._file, about.ljust(_NOTE_BYTES), 0)
            _lock(self._file, _NOTED)
        except OSError:
            os.close(self._file)  # releases the lock: other ranks would wait for the contents of a locked file
            raise
        Finalize(None, self._end_process, exitpriority=10)  # unlike atexit, also runs in multiprocessing processes

    def begin(self) -> None:
        """Keep the folder when this process exits, because a fit begins or a run has failed."""
        self._is_running = True
        with suppress(OSError):
            os.remove(os.path.join(self.path, f"{_ENDED}{self._rank}"))

    def end(self, others: list[str]) -> None:
        """Record that a fit has ended without an error.

        Args:
            others: the fit's files outside of the folder, which rank 0 removes when it exits.
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
            with suppress(Exception):  # libraries for object stores raise errors of their own
                fs, place = url_to_fs(path)
                fs.rm(place, recursive=True)


def _lock(file: int, byte: int) -> None:
    """Lock a byte of a file. Retry, since other ranks briefly lock it to test whether its owner is still running.

    Raises:
        BlockingIOError: if the byte stays locked.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.001)


def _is_owners(file: int, byte: int) -> bool:
    """Whether a byte of a file is locked by the file's owner.

    The test itself takes a shared lock: all ranks test the same files at the same time, and would take each other's
    exclusive locks for the owner's.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, byte)
    except BlockingIOError:
        return True
    fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)
    return False


def _end_orphan(path: str, launcher: str) -> None:
    """Kill the process that has locked a file if its launcher has ended, as when only torchrun was killed.

    Raises:
        OSError: if the process does not end, or belongs to another launcher that is still running.
    """
    deadline, process = time.monotonic() + _PATIENCE, 0
    with suppress(FileNotFoundError), os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
        file = opened.fileno()
        while time.monotonic() < deadline:
            if _is_owners(file, _NOTED):
                with suppress(ValueError):  # the owner has just ended, and the next one is writing its note
                    process, its_launcher = json.loads(os.pread(file, _NOTE_BYTES, 0))
                    if its_launcher.rpartition("-")[0] == launcher.rpartition("-")[0]:
                        return
                    if _process_in(launcher) == process or _process_in(its_launcher) == os.getpid():
                        return  # one process has launched the other, as Lightning's first process does
                    if not is_of_the_dead(its_launcher):
                        break
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            elif not _is_owners(file, _OWNED):
                return
            time.sleep(0.01)
        raise FileExistsError(f"another run of this job uses {os.path.dirname(path)} (process id {process})")


def _process_in(label: str) -> int:
    return int(label.split("-")[-2])


def _clear_leftovers(parent: str, own: str) -> None:
    """Remove the folders of other jobs whose launchers have ended and whose files have not changed for a while."""
    for job in os.scandir(parent):
        if job.name == own:
            continue
        with suppress(OSError, ValueError):
            check_own_folder(job.path)
            launchers = []
            for entry in os.scandir(job.path):
                if entry.name.startswith(_PROCESS):
                    with open(entry.path) as file:
                        launchers.append(json.load(file)[1])
            # A folder's own modification time does not change when files in it are overwritten.
            files = (os.path.join(folder, name) for folder, _, names in os.walk(job.path) for name in names)
            newest = max(os.stat(path).st_mtime for path in files)
            if launchers and all(map(is_of_the_dead, launchers)) and time.time() - newest > _FORGOTTEN:
                shutil.rmtree(job.path, ignore_errors=True)
