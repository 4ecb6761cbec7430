"""Keep the state of a fit in shared memory, and continue from it when the job's processes are started again.

All ranks run a collective between two batches anyway. Then each rank begins to copy its shards to one of its two slots;
the copy runs during the next forward and backward pass. Before the next copy, a rank enters the collective only when
its last copy is complete. So when ranks leave the collective, the last copy is complete on all ranks, and the other
slot may be overwritten.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_zero.checkpoint.checksums import DamagedCheckpointError, NoCheckpointError
from lightning_zero.checkpoint.form import CHECKPOINT_KEY
from lightning_zero.checkpoint.saving import CheckpointNotSavedError, CopyBuffer
from lightning_zero.checkpoint.slots import About, KeptState, SlotWriter
from lightning_zero.io.disk import make_own_folder
from lightning_zero.strategies.global_batch import GLOBAL_BATCH, keep_global_batch
from lightning_zero.strategies.jobs import JobFolder
from lightning_zero.strategies.kept_states import KeptStates, Strategy, recorded, write_record
from lightning_zero.strategies.loops import Around
from lightning_zero.strategies.mirror import Mirror
from lightning_zero.strategies.resilience_config import ResilienceConfig

_MEMORY = "/dev/shm"
_OF_TUNERS = ".lr_find_", ".scale_batch_size_"  # name prefixes of the checkpoints that Lightning's tuners restore
_REPEATED = 2  # after this many errors with the same newest state, the job continues from an older state
_jobs: dict[str, JobFolder] = {}
_fits = itertools.count()


class NoRoomError(OSError):
    """Raised on every rank if the folder in memory is full."""


class Resilience:
    """Keeps the states of one fit in slots, and resumes from them.

    Args:
        config: how often states are kept, and where.
        strategy: the fit's strategy, whose processes have started.
        trainer: the fit's trainer.
        job: the job's name, which stays the same when the job is started again.

    Attributes:
        factor: the number of this rank's batches that correspond to one batch of a rank before the restart; None if the
            fit does not continue from a state of this job.

    Raises:
        NoRoomError: if the folder in memory is full.
        ValueError: if the folder cannot be used.
    """

    def __init__(self, config: ResilienceConfig, strategy: Strategy, trainer: Any, job: str) -> None:
        self._config, self._strategy = config, strategy
        self._trainer, self._rank, self._size = trainer, strategy.global_rank, strategy.world_size
        self._of_machine = max(strategy.num_processes, 1)
        self._fit = f"fit-{next(_fits)}"
        self._job = self._job_folder_at(job)
        self._folder = self._folder_in(self._job.path)
        on_disk = os.path.join(str(trainer.default_root_dir), ".lightning_zero", job)
        self._record = os.path.join(on_disk, f"{self._fit}.json")  # a list of the checkpoints that the fit has saved
        self._at_end = os.path.join(on_disk, f"{self._fit}.ckpt")  # the checkpoint saved when a signal ends the fit
        self._states = KeptStates(strategy, self._folder, self._record, self._at_end)
        self._number = 0
        self._has_removed_older = False
        self._step = -config.every_n_steps  # step of the last copy, or of the state from which the fit continued
        self._index = 0  # index of the slot that is overwritten next
        self._writers: dict[int, SlotWriter] = {}
        self._staging = CopyBuffer()
        self._executor: ThreadPoolExecutor | None = None
        self._copy: Future[None] | None = None
        self._has_warned = False
        self.factor: Fraction | None = None
        self._accumulate: int | None = None  # ``accumulate_grad_batches`` of the state from which the fit continues
        self._trial: str | None = None  # path of a checkpoint that a tuner will restore; until then no state is kept
        several = self._size > self._of_machine
        self._mirror = Mirror(self._folder, self._of_machine, strategy.options.group_timeout) if several else None
        Around.put(trainer._checkpoint_connector, "resume_start", self._resume)

    def _folder_in(self, job: str) -> str:
        return os.path.join(job, self._fit)

    def _job_folder_at(self, job: str) -> JobFolder:
        """Return the job's folder, which all fits of this process share. Collective."""
        parent = str(self._config.path or os.path.join(_MEMORY, f"lightning_zero-{os.getuid()}"))
        path, error = os.path.join(parent, job), None
        try:
            if path not in _jobs:
                _jobs[path] = JobFolder(parent, job, self._rank, self._of_machine)
            _jobs[path].begin()
            make_own_folder(self._folder_in(path))
        except OSError as raised:
            error = f"on rank {self._rank}: {raised}", raised.errno == errno.ENOSPC
        if errors := [each for each in self._strategy.all_gather_values(error) if each is not None]:
            text, is_full = max(errors, key=lambda each: each[1])
            if is_full:
                raise NoRoomError(
                    f"resilience has no effect in this run: {parent} is full ({text}). Give the folder more room (in a "
                    "container: --shm-size), or choose another folder: ResilienceConfig(path=...)."
                )
            raise ValueError(
                f"resilience: {parent} cannot be used ({text}). Write resilience=ResilienceConfig(path=...) with "
                "another folder in memory (tmpfs), or job=... with another name; or leave resilience out."
            )
        return _jobs[path]

    # -- continuing -------------------------------------------------------------------------------------------------

    def _resume(self, resume: Callable[..., None], path: Any = None, weights_only: bool | None = None) -> None:
        """Replace Lightning's ``resume_start``: continue from the newest intact state. Collective."""
        # True when a tuner in the fit restores its starting point. This attempt has then been counted already.
        is_again = self._trial is not None and str(path) == self._trial
        self.factor = self._accumulate = None
        sources = self._states.sources(weights_only)
        newest = sources[0].step if sources else 0
        self._step, failures = newest, self._states.failures_after(newest)
        older = [source for source in sources if source.step < newest]
        if older and failures >= _REPEATED:
            rank_zero_warn(
                f"This job has failed after step {newest} at least {_REPEATED} times with an error, so it continues "
                "from an older state."
            )
            sources = older
        for source in sources:
            try:
                resume(source.path, weights_only=weights_only)
            except (DamagedCheckpointError, NoCheckpointError, FileNotFoundError) as error:
                rank_zero_warn(f"{error} Another state is tried, if there is one.")
                continue
            self._step = source.step
            limit = None if is_again else self._config.deaths_at_one_step
            index = self._states.continue_from(source, newest, limit)
            self._trial = None
            if index is not None:
                self._index = 1 - index
            before = self._trainer._checkpoint_connector._loaded_checkpoint.get(CHECKPOINT_KEY, {}).get(GLOBAL_BATCH)
            self.factor = keep_global_batch(self._trainer, before) if before is not None else Fraction(1)
            self._accumulate = int(before["accumulate"] * self.factor) if before is not None else None
            return
        self._step = -self._config.every_n_steps
        if self._states.attempt:
            rank_zero_warn("No state or checkpoint of this job is intact, so the job starts over.")
        resume(path, weights_only=weights_only)

    def on_train_start(self) -> None:
        """Continue with the accumulation of an unfinished epoch: schedules only set it when an epoch begins."""
        if self._accumulate is not None:
            self._trainer.accumulate_grad_batches = self._accumulate
            self._accumulate = None

    def opened(self, path: Any) -> dict[str, Any] | None:
        """Return the checkpoint in the slots if ``path`` is a ``Source.path`` of slots, otherwise None. Collective.

        Raises:
            DamagedCheckpointError: on every rank, if a slot is damaged, or cannot be sent to a machine that lacks it.
        """
        if self._trial == str(path):
            self._trial = None
        return self._states.opened(path)

    def note_failure(self) -> None:
        """Record that an error ends this attempt."""
        self._states.note_failure(self._step)

    # -- keeping ----------------------------------------------------------------------------------------------------

    def has_failed(self, *, is_end: bool = False) -> bool:
        """Wait for this rank's last copy if the next one is due. Call this before the collective between batches.

        Args:
            is_end: whether training ends.

        Returns:
            True if the last copy has failed.
        """
        if not self._is_due(is_end):
            return False
        return self._wait()

    def _wait(self) -> bool:
        """Wait for the copy in progress. Return True if it has failed with an OSError."""
        copy, self._copy = self._copy, None
        error = copy.exception() if copy is not None else None
        if error is not None and not isinstance(error, OSError):
            raise error
        return error is not None and self._warn(error)

    def _is_due(self, is_end: bool) -> bool:
        """Whether to copy the state now: the interval has passed, or training ends and the state has changed."""
        step = self._trainer.global_step - self._step
        return step < 0 or step >= (1 if is_end else self._config.every_n_steps)

    def keep(self, has_failed: bool, *, is_end: bool = False) -> None:
        """Begin to copy the state, if a copy is due. Call this after the collective between batches.

        Args:
            has_failed: whether the last copy has failed on any rank. If so, every rank overwrites that copy's slot.
            is_end: whether training ends.
        """
        if has_failed:
            self._index = 1 - self._index
        if self._copy is not None or not self._is_due(is_end) or self._trial is not None:
            return
        is_complete = self._number > 0 and not has_failed  # whether there is a complete copy of this attempt
        self._step, self._number = self._trainer.global_step, self._number + 1
        about = About(self._states.attempt, self._number, self._step, self._size, self._rank)
        state, own = self._strategy.state_in_parts()
        index, self._index = self._index, 1 - self._index
        if is_complete and not self._has_removed_older:
            self._states.remove_all_but(set())
            self._has_removed_older = True
        try:
            complete = self._begin(index, state, about, own)
        except OSError as error:
            complete = partial(_raise, error)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="lightning_zero-slots")
        self._copy = self._executor.submit(self._complete, complete, index)

    def _complete(self, complete: Callable[[], None], index: int) -> None:
        """Complete a copy and mirror it. After an error, send empty contents, as another machine waits for a copy."""
        error = None
        try:
            complete()
        except OSError as raised:
            error = raised
            self._forget_a_fit()  # there was room for the values, but not for what follows them; the next copy has more
        if self._mirror is not None:
            self._mirror.exchange(self._writers[index].contents if error is None else None, index)
        if error is not None:
            raise error

    def _begin(self, index: int, state: KeptState, about: About, own: Any) -> Callable[[], None]:
        if index not in self._writers:
            path = os.path.join(self._folder, f"{self._rank}.{index}")
            self._writers[index] = SlotWriter(path, self._staging)
        while True:
            try:
                return self._writers[index].begin(state, about, own)
            except OSError:
                if not self._forget_a_fit():
                    raise

    def _forget_a_fit(self) -> bool:
        """Remove this rank's slots of the oldest other fit, to make room. Return whether any were removed."""
        own = [f"{self._rank}.{index}" for index in (0, 1)]
        if self._mirror is not None:
            own += [f"{self._mirror.of_rank}.m{index}" for index in (0, 1)]
        for fit in sorted(os.listdir(self._job.path), key=lambda name: (len(name), name)):  # fit-10 is newer than fit-9
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
                f"free space there: {free:.0f} MiB. Training continues, and a copy is attempted at each interval; "
                "until one succeeds, a restarted job continues from an earlier step. Give the folder more room (in a "
                "container: --shm-size), or choose another folder: ResilienceConfig(path=...).",
                file=sys.stderr,
                flush=True,
            )
        return True

    # -- checkpoints on a disk, and the end -------------------------------------------------------------------------

    def note(self, path: Any) -> None:
        """Record a checkpoint that this fit has saved, so that a restarted job finds it if the slots are lost."""
        if os.path.basename(path).startswith(_OF_TUNERS):
            self._trial = str(path)
        if self._trial is not None or self._rank != 0:
            return
        place = str(path) if "://" in str(path) else os.path.abspath(path)
        try:
            others = [each for each in recorded(self._record) if each != place]
            write_record(self._record, [*others[-7:], place])
        except Exception as error:
            rank_zero_warn(
                f"The path of the checkpoint {path} could not be recorded ({error}). If the states in memory are lost, "
                "a restarted job will not find this checkpoint."
            )

    def save_before_end(self) -> None:
        """Save a checkpoint to disk when a signal ends the job: the states in memory may be lost. Collective."""
        self._wait()
        self._states.forget_deaths()
        began = time.monotonic()
        try:
            self._strategy.save_in_parts(self._at_end)
        except CheckpointNotSavedError as error:
            rank_zero_warn(f"{error} A signal is ending this job, and its state is kept only in {self._folder}.")
            return
        rank_zero_info(
            f"A signal is ending this job. Its state after step {self._trainer.global_step} was saved to "
            f"{self._at_end} in {time.monotonic() - began:.1f} s. When restarted, the job continues from it."
        )

    def close(self, *, has_ended: bool) -> None:
        """Stop keeping states. States already kept stay until the process ends, since a later fit may fail.

        Args:
            has_ended: whether the fit has ended normally.
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
            self._states.forget_deaths()  # a job that dies in a later fit repeats this fit; old deaths must not count
            self._job.end([self._record, self._at_end])


def keep_for_next_attempt() -> None:
    """Leave kept states in memory when this process ends, since a run has failed, perhaps after the fit."""
    for job in _jobs.values():
        job.begin()


def _raise(error: BaseException) -> None:
    raise error
