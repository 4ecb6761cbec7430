"""Keep the state of a fit in memory that outlives its processes, and continue from it when they are started again.

Every ``every_n_steps`` optimizer steps, all ranks begin a sharded save in the background, the same as with
``ZeroStrategy(checkpoint="sharded", async_save=True)``. It goes to a folder on tmpfs, a *generation*:

    /dev/shm/lightning_zero-UID/JOB/fit-N/step-K              one folder per user, job, fit of the script, and step
    /dev/shm/lightning_zero-UID/JOB/attempt-ID/RANK           exists once the process has ended with exit code 0
    DEFAULT_ROOT_DIR/.lightning_zero-JOB/fit-N.ckpt, .json    saved when a signal ends the job; the fit's checkpoints

The two newest generations are kept. On several machines, each machine holds the files of its own ranks. Processes are
restarted by torchrun, SLURM or Ray Train.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_zero.checkpoint.checksums import DamagedCheckpointError, NoCheckpointError
from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.saver import Saver
from lightning_zero.checkpoint.saving import CheckpointNotSavedError
from lightning_zero.io.annotations import check_fields, shown
from lightning_zero.io.disk import make_own_folder

_MEMORY = "/dev/shm"
_FORGOTTEN = 24 * 3600  # seconds after the last change of a job's folder, when the user's next job removes it
_MESSAGE = 2**26  # maximum size of a message between machines, in bytes
_DAMAGED = DamagedCheckpointError, NoCheckpointError, FileNotFoundError  # the last: an empty folder
_OF_TUNERS = ".lr_find_", ".scale_batch_size_"  # name prefixes of the checkpoints that Lightning's tuners restore


@dataclass(frozen=True)
class ResilienceConfig:
    """How a job keeps its state in shared memory, to continue when its processes are restarted.

    Args:
        every_n_steps: number of optimizer steps between two kept states.
        job: the job's name (ASCII letters, digits, ``_`` and ``-``), which must be the same when the job is restarted,
            and different for each job; None derives a name from the command line and from SLURM's job id or torchrun's
            run id.

    Raises:
        ValueError: if a value is not allowed.

    Example:
        >>> resilience = lightning_zero.ResilienceConfig(every_n_steps=5)
        >>> strategy = lightning_zero.ZeroStrategy(stage=3, resilience=resilience)
    """

    every_n_steps: int = field(default=20, metadata={"least": 1})
    job: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "resilience: ")
        if self.job is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", self.job):  # it becomes a folder's name
            raise ValueError(f"resilience: job={shown(self.job)} must consist of ASCII letters, digits, '_' and '-'.")


def name_of_job() -> str | None:
    """Return the name under which restarted processes find the job's files; None if the launcher gives the job no name.

    The name includes a checksum of folder and command line, since several programs may run within one SLURM job.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if "SLURM_JOB_ID" in os.environ:
        name = f"slurm-{os.environ['SLURM_JOB_ID']}"
    elif run is None or run == "lightning-zero":  # ``lightning-zero train`` does not restart processes
        return None
    elif run == "none":  # torchrun's default: its process id and, since ids are reused, start time (proc(5), field 22)
        status = Path(f"/proc/{os.getppid()}/stat").read_text()
        name = f"torchrun-{os.getppid()}-{status.rpartition(')')[2].split()[19]}"
    else:
        name = run
    program = zlib.crc32("\0".join([os.getcwd(), *sys.argv]).encode())
    return re.sub(r"[^A-Za-z0-9-]", "_", name)[:80] + f"-{program:08x}"


class _Job:
    """A job's folder on this machine, removed when all of the job's processes there have ended with exit code 0."""

    def __init__(self, path: str, attempt: str, rank: int, neighbours: list[int]) -> None:
        self._path, self._attempt = path, os.path.join(path, f"attempt-{attempt}")
        self._rank, self._neighbours = rank, neighbours
        self.keeps = True  # whether the folder must stay when this process ends: a fit is running or has failed
        self.on_disk = set[str]()  # the folders on disk of the job's fits, which are removed, too
        if rank == neighbours[0]:
            for name in os.listdir(path):
                if name.startswith("attempt-"):
                    shutil.rmtree(os.path.join(path, name), ignore_errors=True)
            os.mkdir(self._attempt, 0o700)
        if not _jobs:
            vars(sys)["exit"] = partial(_exit, sys.exit)
        Finalize(None, self._end_process, exitpriority=10)  # unlike atexit, also runs in multiprocessing processes

    def _end_process(self) -> None:
        if self.keeps or getattr(sys, "last_value", None) is not None:
            return
        try:
            open(os.path.join(self._attempt, str(self._rank)), "x").close()
            if len(os.listdir(self._attempt)) < len(self._neighbours):
                return
        except OSError:  # another attempt has begun
            return
        shutil.rmtree(self._path, ignore_errors=True)
        for folder in self.on_disk if self._neighbours[0] == 0 else ():
            with suppress(Exception):  # libraries for object stores raise errors of their own
                fs, place = url_to_fs(folder)
                fs.rm(place, recursive=True)


_jobs: dict[str, _Job] = {}
_fits = itertools.count()


def _exit(leave: Callable[[Any], None], code: Any = None) -> None:
    """In place of ``sys.exit``: note codes other than 0, since functions that run at exit cannot see the code."""
    if code not in (None, 0):
        keep_for_next_attempt()
    leave(code)


def keep_for_next_attempt() -> None:
    """Leave kept states in memory when this process ends, since a run has failed, perhaps after the fit."""
    for job in _jobs.values():
        job.keeps = True


def _check_own(folder: str) -> None:
    """Raise a PermissionError unless this is this user's own folder, to which no one else has access."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is a link, or another user's, or open to others, so it is not read")


def _remove_forgotten(private: str, own: str) -> None:
    for name in os.listdir(private):
        job = os.path.join(private, name)
        with suppress(OSError):
            folders = [job, *(os.path.join(job, each) for each in os.listdir(job))]
            if name != own and time.time() - max(os.lstat(each).st_mtime for each in folders) > _FORGOTTEN:
                shutil.rmtree(job, ignore_errors=True)


def _append(path: str, part: bytes) -> None:
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    with open(path, "ab") as file:
        file.write(part)


class KeptState(NamedTuple):
    """A state to continue from. The greatest is tried first."""

    step: int
    is_in_memory: bool
    path: str


class Restarts:
    """Keeps the states of one fit, and continues the fit from them. All public methods are collective but ``note``."""

    def __init__(self, config: ResilienceConfig, strategy: Any, trainer: Any, job: str) -> None:
        self._every, self._strategy, self._trainer = config.every_n_steps, strategy, trainer
        self._rank = strategy.global_rank
        private, fit = os.path.join(_MEMORY, f"lightning_zero-{os.geteuid()}"), f"fit-{next(_fits)}"
        path = os.path.join(private, job)
        self._folder = os.path.join(path, fit)
        fs, root = url_to_fs(str(trainer.default_root_dir))
        root = root if isinstance(fs, LocalFileSystem) else str(trainer.default_root_dir)
        self._on_disk = os.path.join(root, f".lightning_zero-{job}")
        self._record = os.path.join(self._on_disk, f"{fit}.json")  # the last checkpoints that the fit has saved
        self._at_end = os.path.join(self._on_disk, f"{fit}.ckpt")
        places, attempt = self._agree_on_places(path)
        neighbours = [rank for rank, place in enumerate(places) if place == places[self._rank]]
        self._leaders = [places.index(place) for place in dict.fromkeys(places)]  # the first rank of each machine
        self._leads = self._rank == neighbours[0]
        if self._leads:
            _remove_forgotten(private, job)
        if path not in _jobs:
            _jobs[path] = _Job(path, attempt, self._rank, neighbours)
        self._job = _jobs[path]
        self._job.keeps = True
        self._job.on_disk.add(self._on_disk)
        self._saver = Saver(in_background=True)
        self._has_begun = self._has_failed = False
        self._last: int | None = None  # step of the last save, or from which the fit has continued
        self._saving: int | None = None  # step of the save in progress
        self._whole: list[int] = []  # step of the newest whole generation; empty if there is none
        self._held: list[dict[int, list[str]]] = []  # by rank, the generations on its machine
        self._trial: str | None = None  # path of a checkpoint that a tuner will restore; until then no state is kept

    def _make_folders(self) -> None:
        job = os.path.dirname(self._folder)
        for folder in (os.path.dirname(job), job, self._folder):
            make_own_folder(folder)

    def _agree_on_places(self, path: str) -> tuple[list[Any], str]:
        """Create the folders, and return what identifies each rank's, and a name for this attempt of the job."""
        ranks = self._strategy.ranks
        try:
            ranks.alike(self._make_folders)
        except OSError as error:
            raise ValueError(
                f"resilience: {path} cannot be used ({error}). Remove it, or write "
                "resilience=ResilienceConfig(job=...) with another name; or leave resilience out."
            ) from None
        found, boot = os.stat(self._folder), Path("/proc/sys/kernel/random/boot_id").read_text()
        everyone = ranks.all_gather_values(((boot, found.st_dev, found.st_ino), secrets.token_hex(8)))
        return [each for each, _ in everyone], everyone[0][1]

    def resume(self, resume: Callable[..., None], path: Any = None, weights_only: bool | None = None) -> None:
        """In place of Lightning's ``resume_start``: continue from the newest undamaged state, or else from ``path``."""
        damage: Exception | None = None
        for state in self._states():
            if damage is not None:
                rank_zero_warn(f"{damage} Resuming instead from {state.path}.")
            try:
                self._continue_from(state, partial(resume, weights_only=weights_only))
                return
            except _DAMAGED as error:
                damage = error
        if damage is not None:
            rank_zero_warn(f"{damage} Resuming instead from {path or 'the beginning'}.")
        resume(path, weights_only=weights_only)

    def _states(self) -> list[KeptState]:
        """Return the states that earlier attempts have left, in the order to try them."""
        if self._has_begun:  # a tuner in the fit restores its own checkpoint
            return []
        self._has_begun = True
        self._held = self._strategy.ranks.all_gather_values(self._generations() if self._leads else {})
        steps = {step for found in self._held for step in found}
        states = [KeptState(step, True, self._path_of(step)) for step in steps]
        on_disk = self._recorded() if self._rank == 0 else []
        return sorted([*states, *self._strategy.ranks.all_gather_values(on_disk)[0]], reverse=True)

    def _continue_from(self, state: KeptState, resume: Callable[[str], None]) -> None:
        """Call ``resume`` with the path of a state, and go on from there."""
        if state.is_in_memory:
            self._bring(state)
        resume(state.path)
        self._last = last = state.step
        self._whole = [last] if state.is_in_memory else []
        if self._leads:
            self._keep_only([step for step in self._steps() if step <= last])  # newer ones are damaged
        rank_zero_info(f"Restart: continuing after step {last}, from {state.path}.")

    def _path_of(self, step: int) -> str:
        return os.path.join(self._folder, f"step-{step}")

    def _generations(self) -> dict[int, list[str]]:
        """Return, by step, the names of a generation's files on this machine."""
        return {step: os.listdir(self._path_of(step)) for step in self._steps()}

    def _steps(self) -> list[int]:
        """The steps of the generations on this machine, whole or not."""
        names: list[str] = []
        with suppress(FileNotFoundError):  # the system has cleaned up, for example when the user's last session ended
            names = os.listdir(self._folder)
        return [int(step[1]) for name in names if (step := re.fullmatch(r"step-(\d+)", name)) is not None]

    def _bring(self, state: KeptState) -> None:
        """Receive the files of a generation that are on other machines only. Errors are raised on every rank."""
        files = {rank: self._held[rank].get(state.step, []) for rank in self._leaders}
        try:
            for name in sorted(set().union(*files.values())):
                holders = [rank for rank, names in files.items() if name in names]
                if len(holders) < len(files):
                    receives = self._leads and self._rank not in holders
                    self._send(os.path.join(state.path, name), holders[0], receives)
        except OSError as error:
            raise DamagedCheckpointError(f"{state.path} cannot be sent to all machines ({error}).") from None

    def _send(self, path: str, sender: int, receives: bool) -> None:
        """Send a file from one rank to those that receive it. If one cannot write it, every rank raises an OSError."""
        with open(path, "rb") if self._rank == sender else nullcontext() as source:
            part = None
            while part != b"":
                part = self._strategy.broadcast(source.read(_MESSAGE) if source is not None else None, sender)
                self._strategy.ranks.alike(partial(_append, path, part) if receives else lambda: None)

    def loaded(self, path: Any) -> bool:
        """Note that a checkpoint is loaded, and return whether it was written without the Trainer's CheckpointIO."""
        if self._trial == str(path):
            self._trial = self._last = None
        is_kept = os.path.dirname(path) == self._folder
        return is_kept or (str(path) == self._at_end and self._strategy.num_nodes == 1)

    def between_batches(self, *, is_end: bool = False) -> None:
        """Begin a save if one is due. At the end of training, it is due if the state has changed."""
        step = self._trainer.global_step
        if self._trial is not None:
            return
        if self._last is None:
            self._last = step
        since = step - self._last
        if self._saving is not None and since > 0:
            self._finish()  # so that no more than ``every_n_steps`` steps are at risk
        if since >= (1 if is_end else self._every):
            self._last, before = step, partial(self._prepare, self._whole)
            try:
                self._strategy.checkpoints.save_generation(self._saver, self._path_of(step), self._leaders, before)
                self._saving = step
            except CheckpointNotSavedError as error:
                self._warn(step, error)

    def _prepare(self, keep: list[int]) -> None:
        """Make room and a folder for a generation. Called in the background, on the first rank of each machine."""
        self._keep_only(keep)
        self._make_folders()

    def _keep_only(self, steps: list[int]) -> None:
        for step in set(self._steps()) - set(steps):
            Destination(self._path_of(step)).remove()

    def _finish(self) -> None:
        """Wait for the save in progress."""
        step, self._saving = self._saving, None
        try:
            self._saver.finish()
        except CheckpointNotSavedError as error:
            self._warn(step, error)
        else:
            self._whole = self._whole if step is None else [step]

    def _warn(self, step: int | None, error: CheckpointNotSavedError) -> None:
        if not self._has_failed:
            rank_zero_warn(
                f"The state after step {step} could not be kept in memory. Training continues, and later states are "
                f"tried; give {_MEMORY} more room (in a container: --shm-size). {error}"
            )
        self._has_failed = True

    def note(self, path: Any, then: Callable[[Callable[[], None]], None]) -> None:
        """Record a checkpoint for a restarted job, by ``then``, which calls a function once it has been written."""
        if os.path.basename(path).startswith(_OF_TUNERS):
            self._trial = str(path)
        if self._trial is None and self._rank == 0:
            place = str(path) if "://" in str(path) else os.path.abspath(path)
            then(partial(self._add_to_record, self._trainer.global_step, place))

    def _add_to_record(self, step: int, path: str) -> None:
        states = [*[each for each in self._recorded() if each.path != path][-7:], KeptState(step, False, path)]
        try:
            self._make_folder_on_disk()
            with Destination(self._record).replacing() as file:
                file.write(json.dumps(states).encode())
        except Exception as error:  # libraries for object stores raise errors of their own
            rank_zero_warn(
                f"The path of the checkpoint {path} could not be recorded ({error}). If the states in memory are lost, "
                "a restarted job will not find this checkpoint."
            )

    def _make_folder_on_disk(self) -> None:
        if "://" not in self._on_disk:
            os.makedirs(self._on_disk, 0o700, exist_ok=True)
            _check_own(self._on_disk)

    def _recorded(self) -> list[KeptState]:
        """Return the checkpoints that this fit has saved; none if their record belongs to another user."""
        with suppress(Exception):  # libraries for object stores raise errors of their own
            if "://" not in self._on_disk:
                _check_own(self._on_disk)
            with fsspec.open(self._record, "r") as file:
                return [KeptState(int(step), False, str(path)) for step, _, path in json.load(file)]
        return []

    def save_before_end(self) -> None:
        """Save a checkpoint to disk when a signal ends the job: the states in memory may be lost."""
        self._finish()
        try:
            self._strategy.ranks.alike(lambda: self._make_folder_on_disk() if self._rank == 0 else None)
            self._strategy.checkpoints.save_last(self._at_end)
        except Exception as error:  # for example, if another rank has been killed meanwhile
            rank_zero_warn(f"{error} A signal is ending this job, and its state is kept only in {self._folder}.")
            return
        rank_zero_info(
            f"A signal is ending this job. Its state after step {self._trainer.global_step} was saved to "
            f"{self._at_end}. When restarted, the job continues from it."
        )

    def close(self, *, has_ended: bool) -> None:
        """Stop keeping states. Kept states stay until the job ends. Collective if the fit has ended in order."""
        try:
            if has_ended:
                self._finish()
                self._job.keeps = False
        finally:
            with suppress(Exception):  # raised if another rank, which has failed, has not finished a save
                self._saver.close()
        if has_ended and self._leads and self._whole:
            with suppress(OSError):
                self._keep_only(self._whole)
