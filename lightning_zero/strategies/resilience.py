"""Keep the state of a fit in shared memory, and continue from it when the job's processes are started again.

Between two batches, where all ranks meet anyway, each rank begins to copy its shards to one of its two slots; the copy
runs beside the next forward and backward. A rank enters the next meeting only when its copy is whole. So when ranks
leave a meeting, the last copy is whole on all of them, and the slot before it may be overwritten.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_zero.checkpoint.checksums import DamagedCheckpointError, NoCheckpointError
from lightning_zero.checkpoint.form import CHECKPOINT_KEY
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.checkpoint.saving import CheckpointNotSavedError, Content, CopyBuffer
from lightning_zero.checkpoint.slots import About, Slot, SlotWriter, open_slots
from lightning_zero.io.labels import this_machine
from lightning_zero.strategies.global_batch import GLOBAL_BATCH, keep_global_batch
from lightning_zero.strategies.jobs import JobFolder
from lightning_zero.strategies.loops import Around
from lightning_zero.strategies.mirror import Mirror, send_file
from lightning_zero.strategies.resilience_config import ResilienceConfig

_MEMORY = "/dev/shm"
_DEATHS, _FAILURES = "deaths", "failures-"
_OF_TUNERS = ".lr_find_", ".scale_batch_size_"  # how checkpoints are named to which Lightning's tuners go back
_REPEATED = 2  # errors after one step, after which an older state is taken
_jobs: dict[str, JobFolder] = {}
_fits = itertools.count()


class _Source(NamedTuple):
    """A state that a fit can continue from."""

    step: int
    is_slots: bool
    attempt: int
    number: int
    path: str
    is_within: bool = False  # saved by a callback in the middle of what follows a step, for example before a validation

    @property
    def rank(self) -> tuple[int, bool, int, int]:
        """Greatest for the state that is taken first.

        A state in memory that is one step older than a callback's checkpoint comes before it: all that follows the step
        is repeated.
        """
        return self.step - self.is_within, self.is_slots, self.attempt, self.number


_Place = tuple[str, str]
"""A machine, and a folder there."""


class _Strategy(Protocol):
    """What is used of the strategy."""

    global_rank: int
    local_rank: int
    world_size: int
    num_processes: Any
    options: Any

    def all_gather_values(self, value: Any) -> list[Any]: ...
    def broadcast(self, obj: Any, src: int = 0) -> Any: ...
    def state_in_parts(self) -> tuple[Content, dict[str, Any]]: ...
    def save_in_parts(self, path: Any) -> None: ...


class NoRoomError(OSError):
    """The folder in memory has no room at all; raised on every rank."""


class Resilience:
    """Slots of one fit.

    Args:
        config: what is kept, and where.
        strategy: the fit's strategy, whose processes have started.
        trainer: the fit's trainer.
        job: the job's name, the same when it is started again.

    Raises:
        NoRoomError: if the folder in memory is full.
        ValueError: if the folder cannot be used.
    """

    def __init__(self, config: ResilienceConfig, strategy: _Strategy, trainer: Any, job: str) -> None:
        self._config, self._strategy = config, strategy
        self._trainer, self._rank, self._size = trainer, strategy.global_rank, strategy.world_size
        self._of_machine = max(strategy.num_processes, 1)
        self._fit = f"fit-{next(_fits)}"
        self._job = self._job_folder_at(job)
        self._folder = self._folder_in(self._job.path)
        on_disk = os.path.join(str(trainer.default_root_dir), ".lightning_zero", job)
        self._record = os.path.join(on_disk, f"{self._fit}.json")  # of checkpoints that the fit has saved
        self._at_end = os.path.join(on_disk, f"{self._fit}.ckpt")  # where it is saved when a signal ends it
        self._attempt = self._number = 0
        self._step = -config.every_n_steps  # that the last copy, or the state that the fit continued from, is of
        self._index = 0  # of the slot that is overwritten next
        self._writers: dict[int, SlotWriter] = {}
        self._staging = CopyBuffer()
        self._executor: ThreadPoolExecutor | None = None
        self._copy: Future[None] | None = None
        self._has_warned = False
        self._trial: str | None = None  # checkpoint that a tuner will go back to; nothing is kept until then
        self._place = this_machine(), self._folder
        self._places: dict[_Place, list[int]] = {}  # ranks that share a folder
        self._found: dict[str, dict[About, dict[_Place, str]]] = {}  # by a path that stands for the slots of all ranks
        several = self._size > self._of_machine
        self._mirror = Mirror(self._folder, self._of_machine, strategy.options.group_timeout) if several else None
        Around.put(trainer._checkpoint_connector, "resume_start", self._resume)

    def _folder_in(self, job: str) -> str:
        return os.path.join(job, self._fit)

    def _job_folder_at(self, job: str) -> JobFolder:
        """The job's folder, which the fits of this process share. Collective."""
        parent = self._config.path or os.path.join(_MEMORY, f"lightning_zero-{os.getuid()}")
        path, error = os.path.join(parent, job), None
        try:
            if path not in _jobs:
                _jobs[path] = JobFolder(parent, job, self._rank, self._of_machine)
            _jobs[path].begin()
            os.makedirs(self._folder_in(path), 0o700, exist_ok=True)
        except OSError as raised:
            error = f"on rank {self._rank}: {raised}", raised.errno == errno.ENOSPC
        if errors := [each for each in self._strategy.all_gather_values(error) if each is not None]:
            text, is_full = max(errors, key=lambda each: each[1])
            if is_full:
                raise NoRoomError(
                    f"resilience: {parent} is full ({text}), so this run keeps nothing there. Give the folder more "
                    "room (of a container: --shm-size), or choose another one: ResilienceConfig(path=...)."
                )
            raise ValueError(
                f"resilience: {parent} cannot be used ({text}). Write resilience=ResilienceConfig(path=...) with "
                "another folder in memory (tmpfs), or job=... with another name; or leave resilience out."
            )
        return _jobs[path]

    # -- continuing -------------------------------------------------------------------------------------------------

    def _resume(self, resume: Callable[..., None], path: Any = None, weights_only: bool | None = None) -> None:
        """In place of Lightning's ``resume_start``: continue from the newest state that is whole. Collective."""
        sources = self._sources()
        newest = sources[0].step if sources else 0
        older = [source for source in sources if source.step < newest]
        if older and self._failures_after(newest) >= _REPEATED:
            rank_zero_warn(
                f"The step after step {newest} has failed {_REPEATED} times with an error, so the job continues from "
                "an older state."
            )
            sources = older
        for source in sources:
            try:
                resume(source.path, weights_only=weights_only)
            except (DamagedCheckpointError, NoCheckpointError, FileNotFoundError) as error:
                rank_zero_warn(f"{error} The job continues from an older state instead.")
                continue
            self._continue_from(source, newest)
            before = self._trainer._checkpoint_connector._loaded_checkpoint.get(CHECKPOINT_KEY, {}).get(GLOBAL_BATCH)
            if before is not None:
                keep_global_batch(self._trainer, before)
            return
        if self._attempt:
            rank_zero_warn("No state that this job has kept or saved is whole, so it begins anew.")
        resume(path, weights_only=weights_only)

    def _sources(self) -> list[_Source]:
        """All states to continue from, newest first, the same on every rank. Collective."""
        local = [slot for entry in sorted(os.listdir(self._folder)) if (slot := _slot_at(self._folder, entry))]
        held = self._strategy.all_gather_values((self._place, [(slot.about, slot.path) for slot in local]))
        copies: dict[About, dict[_Place, str]] = {}
        self._places.clear()
        for rank, (place, slots) in enumerate(held):
            self._places.setdefault(place, []).append(rank)
            for about, path in slots:
                copies.setdefault(about, {})[place] = path
        self._attempt = 1 + max((about.attempt for about in copies), default=-1)
        sources = []
        for attempt, number, step, size in {about[:4] for about in copies}:
            abouts = [About(attempt, number, step, size, rank) for rank in range(size)]
            if all(about in copies for about in abouts):
                path = os.path.join(self._folder, f"{attempt}.{number}")
                sources.append(_Source(step, True, attempt, number, path))
                self._found[path] = {about: copies[about] for about in abouts}
        on_disk = self._on_disk() if self._rank == 0 else []
        sources += self._strategy.all_gather_values(on_disk)[0]
        return sorted(sources, key=lambda source: source.rank, reverse=True)

    def _on_disk(self) -> list[_Source]:
        """Checkpoints that this fit has saved."""
        paths = [self._at_end]
        with suppress(OSError, ValueError), open(self._record) as file:
            paths += json.load(file)
        sources = []
        for path in dict.fromkeys(paths):
            with suppress(Exception):  # which loading it will raise
                step = open_checkpoint(path).checkpoint["global_step"]
                sources.append(_Source(step, False, -1, -1, path, is_within=path != self._at_end))
        return sources

    def opened(self, path: Any) -> dict[str, Any] | None:
        """The checkpoint in slots, if the path is one of theirs. Collective.

        Raises:
            DamagedCheckpointError: on every rank, if a value in a slot has changed.
        """
        if self._trial == str(path):
            self._trial = None
        copies = self._found.get(str(path))
        if copies is None:
            return None
        slots = self._brought_here(copies)
        opened, own = open_slots(self._folder, slots)
        opened.trust()
        about = opened.checkpoint.setdefault(CHECKPOINT_KEY, {})
        about |= {name: [state[name] for state in own] for name in ("rng", "data") if all(own)}
        return opened.checkpoint

    def _brought_here(self, copies: dict[About, dict[_Place, str]]) -> list[Slot]:
        """Slots of all ranks in this machine's folder; those that it lacks are sent by others. Collective.

        Raises:
            DamagedCheckpointError: if one of them is whole nowhere, or there is no room for it.
        """
        neighbours = self._places[self._place]
        mine = [path for about, held in copies.items() if (path := held.get(self._place)) and self._verifies(about)]
        bad = {path for path in mine if (slot := Slot.at(path)) is None or not slot.verify()}
        bad_at = dict(self._strategy.all_gather_values((self._rank, bad)))
        error, slots = None, []
        for about, held in copies.items():
            whole = {
                place: path
                for place, path in held.items()
                if not any(path in bad_at[rank] for rank in self._places[place])
            }
            if not whole:
                raise DamagedCheckpointError(
                    f"The state in memory after step {about.step} is damaged (rank {about.rank})."
                )
            path = whole.get(self._place, os.path.join(self._folder, f"{about.rank}.m{next(iter(whole.values()))[-1]}"))
            if len(whole) < len(self._places):
                sender = min(self._places[place][0] for place in whole)
                receives = self._place not in whole and self._rank == neighbours[0]
                error = send_file(path, sender, receives, self._rank, self._strategy.broadcast) or error
            slots.append(path)
        if errors := [each for each in self._strategy.all_gather_values(error) if each is not None]:
            raise DamagedCheckpointError(f"The state in memory cannot be sent to all machines ({errors[0]}).")
        found = [Slot.at(path) for path in slots]
        return [slot for slot in found if slot is not None]

    def _verifies(self, about: About) -> bool:
        """Whether this rank reads this slot of its machine's folder to verify it."""
        neighbours = self._places[self._place]
        return neighbours[about.rank % len(neighbours)] == self._rank

    def _continue_from(self, source: _Source, newest: int) -> None:
        """Count how often the job has died after its newest step, and spare the slots that it continues from."""
        rank_zero_info(f"Continuing after step {source.step} (attempt {self._attempt + 1} of this job).")
        self._step = source.step
        spared: set[str] = set()
        if source.is_slots:  # all ranks write to the slots of one index at a time
            copies = self._found[source.path]
            held = next(iter(copies.values()))
            self._index = 1 - int(next(iter(held.values()))[-1])
            spared = {os.path.basename(path) for places in copies.values() for path in places.values()}
        self._found.clear()
        self._remove_all_but(spared)
        deaths = 0
        if self._leads:
            deaths = _lines_in(self._died).count(str(newest))
            _append(self._died, newest)
        deaths = 1 + max(self._strategy.all_gather_values(deaths))
        if deaths >= self._config.deaths_at_one_step:
            raise RuntimeError(
                f"This job has ended {deaths} times in the step after step {newest}, so it is not tried again. "
                f"The state before that step is kept in {self._folder}. Look for the reason in what the processes "
                "wrote before they ended. Raise ResilienceConfig(deaths_at_one_step=...) to try again. To start anew, "
                f"give another job name, or remove that folder and {os.path.dirname(self._record)}."
            )

    @property
    def _leads(self) -> bool:
        """Whether this is the first of the ranks that share the folder."""
        return self._rank == self._places[self._place][0]

    def _remove_all_but(self, spared: set[str]) -> None:
        """Remove slots in this machine's folder to which no rank writes in this attempt, as after one on other ranks.

        Args:
            spared: names of slots that are still needed.
        """
        if not self._leads:
            return
        written = {f"{rank}.{index}" for rank in self._places[self._place] for index in (0, 1)}
        if self._mirror is not None:
            behind = ((rank - self._of_machine) % self._size for rank in self._places[self._place])
            written |= {f"{rank}.m{index}" for rank in behind for index in (0, 1)}
        for name in os.listdir(self._folder):
            if _is_slot(name) and name not in written | spared:
                with suppress(FileNotFoundError):
                    os.remove(os.path.join(self._folder, name))

    @property
    def _died(self) -> str:
        """File with the newest step at each start after a death, until the fit has ended."""
        return os.path.join(self._folder, _DEATHS)

    @property
    def _failed(self) -> str:
        """File with the steps after which this rank has met an error, until the fit has ended."""
        return os.path.join(self._folder, f"{_FAILURES}{self._rank}")

    def _failures_after(self, step: int) -> int:
        """How often a rank has met an error after a step. Collective."""
        return max(self._strategy.all_gather_values(_lines_in(self._failed).count(str(step))))

    def note_failure(self) -> None:
        """An error ends this attempt: if it comes again after the same step, the state before may be to blame."""
        _append(self._failed, self._step)

    # -- keeping ----------------------------------------------------------------------------------------------------

    def has_failed(self, *, is_end: bool = False) -> bool:
        """Before a meeting of the ranks: wait until this rank's copy is whole, if the meeting begins the next one.

        Args:
            is_end: of training.

        Returns:
            True if the copy could not be made.
        """
        if not self._is_due(is_end):
            return False
        return self._wait()

    def _wait(self) -> bool:
        """Wait for the copy that is being made. True if it could not be made."""
        copy, self._copy = self._copy, None
        error = copy.exception() if copy is not None else None
        if error is not None and not isinstance(error, OSError):
            raise error
        return error is not None and self._warn(error)

    def _is_due(self, is_end: bool) -> bool:
        """Whether the state is to be kept now: it has changed, and was not kept for a while."""
        step = self._trainer.global_step - self._step
        return step < 0 or step >= (1 if is_end else self._config.every_n_steps)

    def keep(self, has_failed: bool, *, is_end: bool = False) -> None:
        """After a meeting of the ranks: begin to copy the state, if it has changed.

        Args:
            has_failed: whether some rank's last copy could not be made; its slot is overwritten then.
            is_end: of training.
        """
        if has_failed:
            self._index = 1 - self._index
        if self._copy is not None or not self._is_due(is_end) or self._trial is not None:
            return
        self._step, self._number = self._trainer.global_step, self._number + 1
        about = About(self._attempt, self._number, self._step, self._size, self._rank)
        content, own = self._strategy.state_in_parts()
        index, self._index = self._index, 1 - self._index
        if self._number == 2:  # the first copy of this attempt is whole
            self._remove_all_but(set())
        try:
            complete = self._begin(index, content, about, own)
        except OSError as error:
            complete = partial(_raise, error)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="lightning_zero-slots")
        self._copy = self._executor.submit(self._complete, complete, index)

    def _complete(self, complete: Callable[[], None], index: int) -> None:
        """Complete a copy, and its mirror on another machine: the other machine waits for it in any case."""
        error = None
        try:
            complete()
        except OSError as raised:
            error = raised
        if self._mirror is not None:
            self._mirror.exchange(self._writers[index].contents if error is None else None, index)
        if error is not None:
            raise error

    def _begin(self, index: int, content: Content, about: About, own: Any) -> Callable[[], None]:
        if index not in self._writers:
            path = os.path.join(self._folder, f"{self._rank}.{index}")
            self._writers[index] = SlotWriter(path, self._staging)
        while True:
            try:
                return self._writers[index].begin(content, about, own)
            except OSError:
                if not self._forget_a_fit():
                    raise

    def _forget_a_fit(self) -> bool:
        """Make room: remove this rank's slots of the oldest fit that has ended."""
        own = [f"{self._rank}.{index}" for index in (0, 1)]
        if self._mirror is not None:
            own += [f"{self._mirror.of_rank}.m{index}" for index in (0, 1)]
        for fit in sorted(os.listdir(self._job.path)):
            folder = os.path.join(self._job.path, fit)
            if fit.startswith("fit-") and folder != self._folder:
                slots = [path for name in own if os.path.exists(path := os.path.join(folder, name))]
                for slot in slots:
                    os.remove(slot)
                if slots:
                    return True
        return False

    def _warn(self, error: OSError) -> bool:
        if not self._has_warned:
            self._has_warned = True
            free = shutil.disk_usage(self._folder).free / 2**20
            print(
                f"Rank {self._rank} could not keep the state after step {self._step} in {self._folder}: {error}; "
                f"{free:.0f} MiB are free there. Training goes on, and each interval tries again; until then the "
                "job would continue from an earlier step. Give the folder more room (of a container: --shm-size), "
                "or choose another one: ResilienceConfig(path=...).",
                file=sys.stderr,
                flush=True,
            )
        return True

    # -- checkpoints on a disk, and the end -------------------------------------------------------------------------

    def note(self, path: Any) -> None:
        """Record a checkpoint that this fit has saved, so the job finds it if its slots are gone."""
        if os.path.basename(path).startswith(_OF_TUNERS):
            self._trial = str(path)
        if self._trial is not None or self._rank != 0:
            return
        paths: list[str] = []
        with suppress(OSError, ValueError), open(self._record) as file:
            paths = json.load(file)
        try:
            os.makedirs(os.path.dirname(self._record), exist_ok=True)
            with open(f"{self._record}.new", "w") as file:
                json.dump([*[each for each in paths if each != str(path)][-7:], os.path.abspath(str(path))], file)
            os.replace(f"{self._record}.new", self._record)
        except OSError as error:
            rank_zero_warn(f"The job would not find {path} if what it keeps in memory were lost: {error}.")

    def save_before_end(self) -> None:
        """Save a checkpoint to the disk, since a signal ends the job, and this machine may be lost. Collective."""
        self._wait()
        with suppress(FileNotFoundError):
            os.remove(self._died)  # this end is no death
        began = time.monotonic()
        try:
            self._strategy.save_in_parts(self._at_end)
        except CheckpointNotSavedError as error:
            rank_zero_warn(f"{error} A signal ends this job; its state is in {self._folder} alone.")
            return
        rank_zero_info(
            f"A signal ends this job. Its state after step {self._trainer.global_step} was saved to {self._at_end} in "
            f"{time.monotonic() - began:.1f} s; the same job continues from it when it is started again."
        )

    def close(self, *, has_ended: bool) -> None:
        """Stop keeping. What is kept stays until the job ends: a later part of its program may fail.

        Args:
            has_ended: the fit has ended as it should.
        """
        Around.take_off(self._trainer._checkpoint_connector, "resume_start")
        try:
            if has_ended:
                self._wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            for writer in self._writers.values():
                writer.close()
            if self._mirror is not None:
                self._mirror.close()
        if has_ended:
            for path in (self._died, self._failed):  # the job may die in a later fit, and pass through this one again
                with suppress(FileNotFoundError):
                    os.remove(path)
            self._job.end([self._record, self._at_end])


def keep_for_next_attempt() -> None:
    """A run of this process has failed, perhaps after the fit: what its jobs keep stays in memory at its end."""
    for job in _jobs.values():
        job.begin()


# -- slots -------------------------------------------------------------------------------------------------------------


def _is_slot(name: str) -> bool:
    return name.endswith((".0", ".1", ".m0", ".m1"))


def _slot_at(folder: str, name: str) -> Slot | None:
    return Slot.at(os.path.join(folder, name)) if _is_slot(name) else None


# -- counts of steps ---------------------------------------------------------------------------------------------------


def _lines_in(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def _append(path: str, step: int) -> None:
    with suppress(OSError), open(path, "a") as file:  # no room: it does not count
        file.write(f"{step}\n")


def _raise(error: BaseException) -> None:
    raise error
