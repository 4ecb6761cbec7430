"""Watchdog over the waits of ranks: a deadlock ends in seconds, with an error that says which rank waits for what.

A rank that has waited for a while writes to the process group's store what it waits for, and what it has begun before.
These notices can prove a deadlock: rank r waits for a collective that rank s has not begun, and s, which can begin
nothing before its own wait is over, waits for one that r has not begun (or for a rank that waits for r, and so on). A
rank that is merely slow waits for nothing, and so is never taken for one that diverged.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.failures import end_all_waits, failure, lifelines_over, read, reason_soon
from lightning_zero.engine.comm.process_group import ProcessGroup, default_store

PATIENCE = 3.0
"""Seconds that a rank waits before it says so, and that another lets such a notice stand."""


class _Wait(NamedTuple):
    engine: str
    what: str
    ordinal: int  # counts the waits of this name; 0 where not every rank takes part, so that nothing can be concluded
    since: float

    @property
    def key(self) -> str:
        return _key(self.engine, self.what)


def _key(engine: str, what: str) -> str:
    return f"{engine}: {what}"


class Watch:
    """What one engine tells of its rank's waits to the watchdog that all engines over a group share.

    Args:
        group: the process group.
        name: of what the ranks do together, the same on all of them and new each time.
        sees_waits: whether ranks wait for each other in ``waiting``, as over Gloo. Over NCCL they usually wait for the
            device instead, wherever its values are read.
    """

    def __init__(self, group: ProcessGroup, name: str, *, sees_waits: bool = True) -> None:
        self._name = name
        known = next((each for each in _watchdogs if each.group is group), None)
        self._watchdog = known or _Watchdog(group, sees_waits)
        self._watchdog.users.append(self)
        self._lifelines = lifelines_over(group)

    def begin(self, what: str) -> int:
        """Count a collective of this name that this rank begins, in the order that all ranks have; its ordinal."""
        return self._watchdog.begin(_key(self._name, what))

    @contextmanager
    def waiting(self, what: str, ordinal: int | None = None) -> Iterator[None]:
        """Around anything in which this rank waits for others.

        Args:
            what: a name, the same on every rank.
            ordinal: what ``begin`` gave for it, by default that of one that begins here; 0 if only some take part.

        Raises:
            RuntimeError: for one that is raised inside, saying why if that is known: which rank failed, which ranks
                wait for each other, or where each is.
        """
        ordinal = self.begin(what) if ordinal is None else ordinal
        with self._watchdog.waiting(_Wait(self._name, what, ordinal, time.monotonic())):
            yield

    def notice_of(self, rank: int) -> str:
        """What a rank has said about its wait, which is different for each wait; empty if it waits for nothing."""
        return self._watchdog.notice_of(rank)

    @property
    def ended(self) -> set[int]:
        """Ranks of the group whose processes have ended, in whatever way."""
        return self._lifelines.ended

    def close(self) -> None:
        if self in self._watchdog.users:
            self._watchdog.users.remove(self)
            if not self._watchdog.users:
                self._watchdog.close()


class _Watchdog:
    """Watches the waits of this rank in a group, in all engines: ranks may wait for each other in two of them."""

    def __init__(self, group: ProcessGroup, sees_waits: bool) -> None:
        self.group = group
        self.users: list[Watch] = []
        _watchdogs.append(self)
        rank, size = process_group.rank(group), process_group.world_size(group)
        self._sees_waits = sees_waits
        self._rank, self._others = rank, [other for other in range(size) if other != rank]
        self._begun: Counter[str] = Counter()
        self._wait: _Wait | None = None
        self._announced: _Wait | None = None
        self._lock = threading.Lock()  # of what is announced
        self._closed = threading.Event()
        # a connection of its own: the main thread may hold the other for as long as it waits
        self._store = process_group.new_connection(default_store())
        ranks = ",".join(map(str, process_group.ranks_of(group)))
        self._notices = process_group.named_store(f"lightning_zero/watch/{ranks}", self._store)
        self._thread = threading.Thread(target=self._run, name="lightning_zero-watch", daemon=True)
        self._thread.start()

    def begin(self, key: str) -> int:
        self._begun[key] += 1
        return self._begun[key]

    @contextmanager
    def waiting(self, wait: _Wait) -> Iterator[None]:
        outer, self._wait = self._wait, wait
        try:
            yield
        except RuntimeError as error:
            reason = reason_soon()
            cause = error if reason is None else None  # what it tells of closed connections explains nothing then
            raise RuntimeError(f"{wait.what} did not complete: {reason or self._blame(error)}") from cause
        finally:
            self._wait = outer
            if self._announced is not None:
                with self._lock:
                    self._announced = None
                    # emptied, not deleted: another may be about to read it, and would wait for it to come back
                    self._set("")

    def notice_of(self, rank: int) -> str:
        return read(self._notices, f"{rank}") or ""

    def close(self) -> None:
        if self in _watchdogs:
            _watchdogs.remove(self)
        self._closed.set()
        if threading.current_thread() is not self._thread:
            # A thread that comes back from the store to an interpreter that has ended would abort the process.
            self._thread.join(timeout=2)

    def _blame(self, error: RuntimeError) -> str:
        """Why a wait failed though no rank has reported a failure: one is gone, or did not come in time."""
        if ended := lifelines_over(self.group).ended:
            return f"the process of rank(s) {sorted(ended)} has ended. Every rank must run to the end. ({error})"
        notices = {rank: self.notice_of(rank) for rank in self._others}
        elsewhere = [f", rank {rank} waits for {name_in(notice)}" for rank, notice in notices.items() if notice]
        return (
            f"another rank ended, or did not take part in it{''.join(elsewhere)}. "
            f"Every rank must run the same units in the same order. ({error})"
        )

    def _set(self, notice: str) -> None:
        try:
            self._notices.set(f"{self._rank}", notice)
        except RuntimeError:  # the store went away with the rank that hosted it: nobody is left to tell
            self.close()

    def _run(self) -> None:
        while not self._closed.wait(PATIENCE / 3):
            wait = self._wait
            if wait is None or time.monotonic() - wait.since < PATIENCE:
                if not self._sees_waits and (reason := failure(self._store)) is not None:
                    end_all_waits(reason, self._store)
                    return
                continue
            reason = failure(self._store)
            with self._lock:
                is_new = self._wait is wait and self._announced is not wait
                if is_new:
                    self._set(json.dumps([*wait, self._begun]))
                    self._announced = wait
            if reason is None and is_new:  # once: of the ranks in a deadlock, the last to say so sees all
                reason = self._deadlock(wait)
            if reason is not None and self._wait is wait:
                end_all_waits(reason, self._store)

    def _deadlock(self, wait: _Wait) -> str | None:
        """The ranks, this one among them, of which each waits for the next for ever."""
        waits, begun = {self._rank: wait}, {self._rank: self._begun}
        for rank in self._others:
            notice = self.notice_of(rank)
            if notice:
                *fields, counts = json.loads(notice)
                waits[rank], begun[rank] = _Wait(*fields), Counter(counts)

        def way_back(rank: int, path: list[int]) -> list[int] | None:
            for other in waits:
                if begun[other][waits[rank].key] < waits[rank].ordinal:
                    if other == self._rank:
                        return path
                    found = way_back(other, [*path, other]) if other not in path else None
                    if found:
                        return found
            return None

        cycle = way_back(self._rank, [self._rank])
        if cycle is None or self._wait is not wait:
            return None
        where = ", ".join(f"rank {rank} waits for {waits[rank].what}" for rank in sorted(cycle))
        return (
            f"the ranks wait for each other for ever: {where}. Every rank must run the same units in the same order, "
            "forward and backward: no 'if' on the rank or on its data around them. Forwards without a backward may "
            "differ in number inside of 'with lightning_zero.uneven_forwards(module):', which every rank enters."
        )


_watchdogs: list[_Watchdog] = []


def name_in(notice: str) -> str:
    """What a notice's rank waits for."""
    _, what, *_ = json.loads(notice)
    return what


def close_watchdogs() -> None:
    """End all of them: what they would find in a store from here on is not about the groups they were made for."""
    for watchdog in list(_watchdogs):
        watchdog.close()
