"""Kept states of a fit: which of them are complete, which one to continue from, and how often the job has died."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_zero.checkpoint.checksums import DamagedCheckpointError
from lightning_zero.checkpoint.form import CHECKPOINT_KEY
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.checkpoint.slots import About, KeptState, Slot, open_slots
from lightning_zero.io.labels import this_machine
from lightning_zero.strategies.mirror import send_file

_DEATHS, _FAILURES = "deaths", "failures-"


class Strategy(Protocol):
    """The attributes and methods of a strategy that ``Resilience`` and ``KeptStates`` use."""

    global_rank: int
    local_rank: int
    world_size: int
    num_processes: Any
    options: Any

    def all_gather_values(self, value: Any) -> list[Any]: ...
    def broadcast(self, obj: Any, src: int = 0) -> Any: ...
    def state_in_parts(self) -> tuple[KeptState, dict[str, Any]]: ...
    def save_in_parts(self, path: Any) -> None: ...


class Source(NamedTuple):
    """A state that a fit can continue from."""

    step: int
    is_slots: bool
    attempt: int
    number: int
    path: str
    is_within: bool = False  # saved by a callback while work after the step (such as validation) is still due

    @property
    def rank(self) -> tuple[int, bool, int, int]:
        """Sort key. The state with the greatest key is tried first.

        A state in memory is tried before a callback's checkpoint that is one step newer. From the state in memory, the
        fit repeats the newer step and all work that was still due after it.
        """
        return self.step - self.is_within, self.is_slots, self.attempt, self.number


Place = tuple[str, str]
"""The name of a machine, and the path of a folder on that machine."""


class KeptStates:
    """States of one fit that earlier attempts of the job have left in memory and on disk.

    Args:
        strategy: the fit's strategy.
        folder: the slots' folder on this machine.
        record: path of the file that lists the checkpoints saved by the fit.
        at_end: path of the checkpoint that is saved when a signal ends the job.

    Attributes:
        attempt: number of the job's current attempt, counted from 0. It is set by ``sources``.
    """

    def __init__(self, strategy: Strategy, folder: str, record: str, at_end: str) -> None:
        self._strategy, self._rank, self._size = strategy, strategy.global_rank, strategy.world_size
        self._of_machine = max(strategy.num_processes, 1)
        self._folder, self._record, self._at_end = folder, record, at_end
        self.attempt = 0
        self._place = this_machine(), folder
        self._places: dict[Place, list[int]] = {}  # for each folder, the ranks that share it
        self._found: dict[str, dict[About, dict[Place, str]]] = {}  # copies of slots, by ``Source.path``

    def sources(self, weights_only: bool | None = None) -> list[Source]:
        """Return the states to continue from, in the order to try them, the same on every rank. Collective.

        Args:
            weights_only: as for ``Trainer.fit``, for checkpoints on a disk.
        """
        local = [slot for entry in sorted(os.listdir(self._folder)) if (slot := _slot_at(self._folder, entry))]
        held = self._strategy.all_gather_values((self._place, [(slot.about, slot.path) for slot in local]))
        copies: dict[About, dict[Place, str]] = {}
        self._places.clear()
        for rank, (place, slots) in enumerate(held):
            self._places.setdefault(place, []).append(rank)
            for about, path in slots:
                copies.setdefault(about, {})[place] = path
        self.attempt = 1 + max((about.attempt for about in copies), default=-1)
        sources = []
        for attempt, number, step, size in {about[:4] for about in copies}:
            abouts = [About(attempt, number, step, size, rank) for rank in range(size)]
            if all(about in copies for about in abouts):
                path = os.path.join(self._folder, f"{attempt}.{number}")
                sources.append(Source(step, True, attempt, number, path))
                self._found[path] = {about: copies[about] for about in abouts}
        on_disk, unread = self._on_disk(weights_only) if self._rank == 0 else ([], [])
        for reason in unread:
            rank_zero_warn(f"A checkpoint of this job is not continued from, since it cannot be read: {reason}")
        sources += self._strategy.all_gather_values(on_disk)[0]
        return sorted(sources, key=lambda source: source.rank, reverse=True)

    def _on_disk(self, weights_only: bool | None) -> tuple[list[Source], list[str]]:
        """Return the checkpoints that this fit has saved, and the reasons why others cannot be read."""
        sources, unread = [], []
        for path in dict.fromkeys([self._at_end, *recorded(self._record)]):
            try:
                checkpoint = open_checkpoint(path, weights_only=weights_only).checkpoint
            except FileNotFoundError:
                continue  # removed, as ``save_top_k`` does, or none was saved at the end
            except Exception as error:
                unread.append(str(error))
                continue
            step = checkpoint.get("global_step")
            if step is not None and "optimizer_states" in checkpoint:
                sources.append(Source(step, False, -1, -1, path, is_within=path != self._at_end))
        return sources, unread

    def opened(self, path: Any) -> dict[str, Any] | None:
        """Return the checkpoint in the slots if ``path`` is a ``Source.path`` of slots, otherwise None. Collective.

        Raises:
            DamagedCheckpointError: on every rank, if a slot is damaged, or cannot be sent to a machine that lacks it.
        """
        copies = self._found.get(str(path))
        if copies is None:
            return None
        slots = self._brought_here(copies)
        opened, own = open_slots(self._folder, slots)
        opened.trust()
        about = opened.checkpoint.setdefault(CHECKPOINT_KEY, {})
        about |= {name: [state[name] for state in own] for name in own[0] if all(own)}
        return opened.checkpoint

    def _brought_here(self, copies: dict[About, dict[Place, str]]) -> list[Slot]:
        """Receive the slots that are missing on this machine, and return the slots of all ranks. Collective.

        Raises:
            DamagedCheckpointError: if no machine has an intact copy of a slot, or a machine has no room for a slot.
        """
        mine = [path for about, held in copies.items() if (path := held.get(self._place)) and self._verifies(about)]
        bad = {path for path in mine if (slot := Slot.at(path)) is None or not slot.verify()}
        bad_at = dict(self._strategy.all_gather_values((self._rank, bad)))
        error, paths = None, []
        for about, held in copies.items():
            whole = {
                place: path
                for place, path in held.items()
                if not any(path in bad_at[rank] for rank in self._places[place])
            }
            if not whole:
                raise DamagedCheckpointError(
                    f"Every copy in memory of rank {about.rank}'s state after step {about.step} is damaged."
                )
            holder, held_at = next(iter(whole.items()))
            path = whole.get(self._place, os.path.join(self._folder, f"{about.rank}.m{held_at[-1]}"))
            if len(whole) < len(self._places):
                receives = self._place not in whole and self._leads
                sender = min(self._places[holder])
                error = send_file(path, sender, receives, self._rank, self._strategy.broadcast) or error
            paths.append(path)
        if errors := [each for each in self._strategy.all_gather_values(error) if each is not None]:
            raise DamagedCheckpointError(f"The state kept in memory cannot be sent to all machines ({errors[0]}).")
        return [slot for path in paths if (slot := Slot.at(path)) is not None]

    def _verifies(self, about: About) -> bool:
        """Whether this rank verifies the slot: the ranks that share a folder divide its slots among themselves."""
        neighbours = self._places[self._place]
        return neighbours[about.rank % len(neighbours)] == self._rank

    def continue_from(self, source: Source, newest: int, limit: int | None) -> int | None:
        """Count how often the job has died after its newest kept state, and remove slots no longer needed. Collective.

        Args:
            source: the state that the fit has just loaded.
            newest: the newest step whose state is kept.
            limit: number of deaths after ``newest`` at which the job stops; None if this attempt is already counted.

        Returns:
            The index of the slots that contain the state, the same on all ranks; None for a checkpoint on disk.

        Raises:
            RuntimeError: if the limit is reached.
        """
        if limit is not None:
            rank_zero_info(f"Continuing after step {source.step} (attempt {self.attempt + 1} of this job).")
        copies, index = self._found.get(source.path, {}), None
        if source.is_slots:
            index = int(next(iter(next(iter(copies.values())).values()))[-1])
        self._found.clear()
        self.remove_all_but({os.path.basename(path) for held in copies.values() for path in held.values()})
        if limit is None:
            return index
        deaths = 0
        if self._leads:
            deaths = _lines_in(self._died).count(str(newest))
            _append(self._died, newest)
        deaths = 1 + max(self._strategy.all_gather_values(deaths))
        if deaths >= limit:
            raise RuntimeError(
                f"This job has died {deaths} times after step {newest} without keeping a newer state, so it stops. "
                "Look for the cause in the last output of the processes. To try again, increase "
                "ResilienceConfig(deaths_at_one_step=...). To start over, give the job another name, or remove its "
                f"folders {self._folder} and {os.path.dirname(self._record)}."
            )
        return index

    @property
    def _leads(self) -> bool:
        """Whether this rank is the first of the ranks that share the folder."""
        return self._rank == self._places[self._place][0]

    def remove_all_but(self, spared: set[str]) -> None:
        """Remove slots of earlier attempts from this machine's folder, unless ranks write to them in this attempt.

        Args:
            spared: names of slots that are still needed.
        """
        if not self._leads:
            return
        written = {f"{rank}.{index}" for rank in self._places[self._place] for index in (0, 1)}
        if self._size > self._of_machine:
            behind = ((rank - self._of_machine) % self._size for rank in self._places[self._place])
            written |= {f"{rank}.m{index}" for rank in behind for index in (0, 1)}
        for name in os.listdir(self._folder):
            if _is_slot(name) and name not in written | spared:
                with suppress(FileNotFoundError):
                    os.remove(os.path.join(self._folder, name))

    @property
    def _died(self) -> str:
        """Path of a file with one line per restart: the newest kept step. Removed when the fit has ended."""
        return os.path.join(self._folder, _DEATHS)

    @property
    def _failed(self) -> str:
        """Path of a file with one line per error on this rank: the last kept step. Removed when the fit has ended."""
        return os.path.join(self._folder, f"{_FAILURES}{self._rank}")

    def failures_after(self, step: int) -> int:
        """Return the number of failures after a step, on the rank that has failed most often. Collective."""
        return max(self._strategy.all_gather_values(_lines_in(self._failed).count(str(step))))

    def note_failure(self, step: int) -> None:
        """Record that an error after ``step`` ends this attempt. If errors recur, the kept state may be the cause."""
        _append(self._failed, step)

    def forget_deaths(self) -> None:
        """Forget deaths and failures, after the fit has ended normally or when a signal ends the job."""
        for path in (self._died, self._failed):
            with suppress(FileNotFoundError):
                os.remove(path)


# -- slots -------------------------------------------------------------------------------------------------------------


def _is_slot(name: str) -> bool:
    return name.endswith((".0", ".1", ".m0", ".m1"))


def _slot_at(folder: str, name: str) -> Slot | None:
    return Slot.at(os.path.join(folder, name)) if _is_slot(name) else None


# -- checkpoints -------------------------------------------------------------------------------------------------------


def recorded(record: str) -> list[str]:
    """Return the paths in the list ``record``, a local path or a URL; none if it cannot be read."""
    with suppress(Exception), fsspec.open(record, "r") as file:  # libraries for object stores raise errors of their own
        return list(json.load(file))
    return []


def write_record(record: str, paths: list[str]) -> None:
    """Replace the list ``record`` at once, so that a process killed meanwhile leaves the old or the new list.

    Raises:
        Exception: if it cannot be written; which one depends on the file system.
    """
    fs, place = url_to_fs(record)
    fs.makedirs(os.path.dirname(place), exist_ok=True)
    if not isinstance(fs, LocalFileSystem):
        fs.pipe_file(place, json.dumps(paths).encode())
        return
    with open(f"{place}.new", "w") as file:
        json.dump(paths, file)
    os.replace(f"{place}.new", place)


# -- counts of deaths and failures -------------------------------------------------------------------------------------


def _lines_in(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def _append(path: str, step: int) -> None:
    with suppress(OSError), open(path, "a") as file:  # if there is no room, the step is not recorded
        file.write(f"{step}\n")
