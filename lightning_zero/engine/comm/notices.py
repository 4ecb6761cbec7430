"""What ranks tell each other in the process group's store: why one fails, that one ends, that all wait.

- A rank that fails writes its reason, and closes its connections, which ends the waits of others.
- A rank that is killed cannot write. But the system closes its connections, also those to its neighbours in a ring in
  which the ranks' timers exchange messages. A suspended process keeps its connections.
- A rank that has waited for a few seconds writes a note: what it waits for, and which collectives it has begun. Once
  every rank has a note, each rank in a deadlock waits for a collective that another such rank has not begun, and cannot
  begin before its own wait ends. A rank that is only slow has no note, so no deadlock is found.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import util
from typing import Any, NamedTuple

import torch

from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.attempts import uses_agent_store
from lightning_zero.engine.comm.cross_memory.exchange import sever_all

PATIENCE = 3.0
"""Seconds that a rank waits before it writes a note. Timers read the store several times in this period."""

SAME_UNITS = (
    "Every rank must run the same units in the same order, forward and backward, and the same number of training "
    "batches: do not run units, or lines that need every rank, inside an 'if' that depends on the rank or its data. "
    "Ranks may run different numbers of forward passes (without backward) inside "
    "'with lightning_zero.uneven_forwards(module):', which every rank must enter."
)

_MOMENT = 0.5  # seconds within which a rank's last words arrive after its connections have closed
_LAST_WORDS = 2.0  # seconds in which the others can read the store at the end of the process that has it
_WAS_KILLED = "was killed, or its process has crashed. Its output may say why; the system's log shows if memory ran out"


class Wait(NamedTuple):
    """A wait for other ranks.

    Attributes:
        engine, what: names of the engine and of the collective, the same on every rank.
        ordinal: 1 for the first collective with these names, and so on; 0 excludes the wait from deadlock detection.
        members: the ranks that take part, as numbered in the default group.
    """

    engine: str
    what: str
    ordinal: int
    members: Sequence[int]
    since: float


class Notices:
    """This rank's notices to the other ranks of the default process group, and theirs.

    Attributes:
        gone: ranks whose processes have ended.
        begun: counts the collectives that this rank has begun, by engine and name.
        connection: a connection to the group's store, for threads that do not wait in the store.
    """

    def __init__(self) -> None:
        self.group = process_group.default_group()
        self.gone: set[int] = set()
        self.failure: str | None = None
        self.begun: dict[str, Counter[str]] = {}
        self.wait: Wait | None = None
        self._noted: Wait | None = None
        self._rank, self._size = process_group.rank(), process_group.world_size()
        store: Any = process_group.default_store()
        # another connection, since a wait of the main thread in the store would block the timer
        self.connection: process_group.Store = store.clone() if hasattr(store, "clone") else store
        self._store = process_group.named_store("lightning_zero/notices", self.connection)
        self._lock = threading.RLock()  # guards ``_noted``
        self._ring: Any = None
        self._wakes, self._is_closed = threading.Event(), False
        # Not an executor's thread: the timer lives as long as the group, and must not delay the interpreter's exit.
        self._timer = threading.Thread(target=self._run, name="lightning_zero-notices", daemon=True)
        self._timer.start()
        # processes of ``multiprocessing`` do not run ``atexit`` handlers
        self._at_exit = util.Finalize(None, self._end, exitpriority=100)

    def make_ring(self) -> None:
        """Connect the timers, so that they notice when a process ends. Collective over the default group, once."""
        if self._ring is None:
            self._ring = process_group.gloo_backend("lightning_zero/ring", self.group)

    def _end(self) -> None:
        """At the program's end: tell the other ranks, and give them time to read that."""
        has_left = self._is_closed
        self.close()
        if self._rank == 0 and not has_left and not uses_agent_store():  # this process has the store
            self._read_until(lambda: len(self.gone) == self._size, _LAST_WORDS)

    def close(self, *, leaves: bool = True) -> None:
        """End the timer. If this rank leaves the run, the other ranks learn that it was not killed."""
        if not self._is_closed:
            if leaves:
                self._leave(self._rank)
            self._is_closed = True
            self._wakes.set()
            if self._ring is not None:
                process_group.close_connections(self._ring)
        if threading.current_thread() is not self._timer:
            self._timer.join(timeout=2)

    # -- the store --------------------------------------------------------------------------------------------------

    def _leave(self, rank: int) -> None:
        """Tell that a rank's process has ended."""
        with suppress(RuntimeError):  # the process with the store may have ended
            self._store.append("gone", f"{rank} ")  # type: ignore[attr-defined]  # torch's stubs lack it

    def _read(self, *, needs_store: bool = False) -> None:
        """Take in what ranks have told. If ``needs_store``, the run fails if the process with the store has ended."""
        reason = None
        try:
            if self._store.check(["failure"]):
                reason = self._store.get("failure").decode()
            if self._store.check(["gone"]):  # after the reason, before which its writer names the rank that was killed
                self.gone.update(map(int, self._store.get("gone").split()))
        except RuntimeError:
            if needs_store and 0 not in self.gone:
                reason = f"{'the launcher' if uses_agent_store() else 'rank 0'} {_WAS_KILLED}"
        if reason is not None and self.failure is None:
            self.failure = reason
            _end_waits(reason)

    def _read_until(self, is_known: Callable[[], bool], seconds: float, *, needs_store: bool = False) -> bool:
        """Read the store until something is known, and return True; False if it is not known after some seconds."""
        deadline = time.monotonic() + seconds
        while not is_known():
            if time.monotonic() > deadline:
                return False
            self._read(needs_store=needs_store)
            time.sleep(0.01)
        return True

    def fail(self, reason: str) -> None:
        """End every rank's waits. Only the first reason counts."""
        with suppress(RuntimeError):  # the process with the store may have ended
            reason = self._store.compare_set("failure", "", reason).decode()
        self.failure = self.failure or reason
        _end_waits(self.failure)

    def reason_soon(self) -> str | None:
        """Wait for the reason why this rank's communication has failed; None if it is not known soon."""
        self._wakes.set()
        self._read_until(lambda: self._is_closed or self.failure is not None, PATIENCE, needs_store=True)
        return self.failure

    # -- the timer --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            self._wakes.wait(PATIENCE / 3)
            self._wakes.clear()
            self._read(needs_store=self.wait is not None)
            with suppress(RuntimeError):
                self._note()
            if self._ring is not None and self.failure is None:
                self._meet_neighbours()
            if self.group not in process_group.all_groups():
                self.close()
        # Only now: at exit, the main thread must join this thread, since an exit during its calls of C++ is an abort.
        self._at_exit.cancel()

    def _meet_neighbours(self) -> None:
        """Exchange messages with the neighbours in the ring, which fails if a neighbour's process has ended."""
        message, works = torch.zeros(1, dtype=torch.uint8, device="cpu"), []
        for step, begin in ((1, self._ring.send), (-1, self._ring.recv)):
            neighbour = (self._rank + step) % self._size
            if neighbour not in self.gone:
                with self._reporting_end_of(neighbour):
                    works.append((neighbour, begin([message], neighbour, 0)))
        for neighbour, work in works:
            with self._reporting_end_of(neighbour):
                work.wait(process_group.FOREVER)

    @contextmanager
    def _reporting_end_of(self, rank: int) -> Iterator[None]:
        """Context for communication with a rank. If it fails, and the rank does not say why, the rank was killed."""
        try:
            yield
        except RuntimeError:

            def is_known() -> bool:
                return self._is_closed or self.failure is not None or rank in self.gone

            if not self._read_until(is_known, _MOMENT, needs_store=self.wait is not None):
                self._leave(rank)
                self.fail(f"rank {rank} {_WAS_KILLED}")
                self._read()

    def _note(self) -> None:
        """Write a note if this rank has waited for long; if every rank has a note, look for a deadlock."""
        wait = self.wait
        if wait is None or wait is self._noted or time.monotonic() - wait.since < PATIENCE:
            return
        note = json.dumps([wait, self.begun])
        with self._lock:
            self._noted = wait
            if self.wait is not wait:  # it has ended, perhaps before ``_noted`` was set
                self._noted = None
                return
            self._store.set(f"note/{self._rank}", note)
        keys = [f"note/{rank}" for rank in range(self._size)]
        if self._store.check(keys):
            notes = self._store.multi_get(keys)
            if all(notes) and notes == self._store.multi_get(keys):  # between the two reads, every rank was waiting
                self._look_for_deadlock([json.loads(note) for note in notes])

    def end_wait(self, outer: Wait | None) -> None:
        """End this rank's wait, and continue with the outer one."""
        self.wait = outer
        if self._noted is not None:
            with self._lock, suppress(RuntimeError):
                self._noted = None
                self._store.set(f"note/{self._rank}", "")

    def _look_for_deadlock(self, notes: list[tuple[Any, dict[str, dict[str, int]]]]) -> None:
        """Fail if ranks cannot go on, given each rank's wait and the numbers of collectives that it has begun."""

        def holds_up(other: int, rank: int) -> bool:
            wait, (_, begun) = Wait(*notes[rank][0]), notes[other]
            in_engine = begun.get(wait.engine)  # None if that rank has closed the engine, after all its collectives
            return other in wait.members and in_engine is not None and in_engine.get(wait.what, 0) < wait.ordinal

        stuck = set(range(self._size))
        while free := {rank for rank in stuck if not any(holds_up(other, rank) for other in stuck)}:
            stuck -= free
        if stuck:
            where = ", ".join(f"rank {rank} waits for {Wait(*notes[rank][0]).what}" for rank in sorted(stuck))
            self.fail(f"the ranks wait for each other for ever: {where}. {SAME_UNITS}")


def _end_waits(reason: str) -> None:
    sever_all(reason)
    for group in process_group.all_groups():
        process_group.end_waits(group)
