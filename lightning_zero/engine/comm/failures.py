"""What ranks tell each other in the process group's store, and errors that say why a wait for other ranks ended.

- A rank that fails writes its reason, and closes its connections, which ends the waits of others.
- A rank that is killed cannot write. But the system closes its connections, including the one to the previous rank,
  where a thread waits for a message that is never sent. A suspended process keeps its connections.
- A rank that has waited for a few seconds writes a note: what it waits for, and which collectives it has begun. Once
  every rank has a note, each rank in a deadlock waits for a collective that another such rank has not begun, and cannot
  begin before its own wait ends. A rank that is only slow has no note, so no deadlock is found.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing import util
from typing import Any, NamedTuple

import torch

from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.cross_memory.exchange import sever_all
from lightning_zero.engine.comm.process_group import DistError, uses_agent_store
from lightning_zero.engine.comm.transport import Chain

PATIENCE = 3.0
"""Seconds that a rank waits before it writes a note. Timers read the store several times in this period."""

SAME_UNITS = (
    "Every rank must run the same units in the same order, forward and backward, and the same number of training "
    "batches: do not run units, or lines that need every rank, inside an 'if' that depends on the rank or its data. "
    "Ranks may run different numbers of forward passes (without backward) inside "
    "'with lightning_zero.uneven_forwards(module):', which every rank must enter."
)

_BLAME = (
    "another rank ended, or did not take part in time, or is at another line. Every rank must run the same units in "
    "the same order, and the same number of training batches. NCCL's Flight Recorder dumps the last collectives of "
    "each rank to the files that TORCH_FR_DUMP_TEMP_FILE names; compare them with torchfrtrace."
)

_MOMENT = 0.5  # seconds within which a rank's last words arrive after its connections have closed
_LAST_WORDS = 2.0  # seconds in which the others can read the store at the end of the process that has it
_AT_ONCE = 0.5  # seconds within which failures count as simultaneous
_WAS_KILLED = "was killed, or its process has crashed. Its output may say why; the system's log shows if memory ran out"
_SIGNS_OF_GLOO = "gloo/", "pair closure"  # texts that identify Gloo's errors, which have no class of their own


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
        begun: counts the collectives that this rank has begun, by engine and name, until the engine is closed.
        wait: what this rank waits for now, or None.
    """

    def __init__(self) -> None:
        self.group = process_group.default_group()
        self.gone: set[int] = set()
        self.failure: str | None = None
        self.begun: dict[str, Counter[str]] = {}
        self.wait: Wait | None = None
        self.is_closed = False
        self._earlier = getattr(sys, "last_value", None)  # of an earlier cell, in a notebook
        self._noted: Wait | None = None
        self._rank, self._size, self._process = process_group.rank(), process_group.world_size(), os.getpid()
        self._failed_together = 0  # how often all ranks have failed at the same time
        store: Any = process_group.default_store()
        # another connection, since a wait of the main thread in the store would block the timer
        own: process_group.Store = store.clone() if hasattr(store, "clone") else store
        self._store = process_group.named_store("lightning_zero/notices", own)
        self._ring: Any = None
        self._wakes = threading.Event()
        self._threads = [self._start(self._run)]
        # processes of ``multiprocessing`` do not run ``atexit`` handlers
        self._at_exit = util.Finalize(None, self._end, exitpriority=100)

    def _start(self, act: Callable[[], None]) -> threading.Thread:
        # Not an executor's thread: the thread lives as long as the group, and must not delay the interpreter's exit.
        thread = threading.Thread(target=act, name="lightning_zero-notices", daemon=True)
        thread.start()
        return thread

    @property
    def is_over(self) -> bool:
        """Whether the run has failed, or this rank has left it."""
        return self.is_closed or self.failure is not None

    def make_ring(self) -> None:
        """Connect the ranks, so that each notices when the next one's process ends. Collective, once."""
        if self._ring is None:
            self._ring = process_group.gloo_backend("lightning_zero/ring", self.group)
            self._threads.append(self._start(self._watch_next))

    def _end(self) -> None:
        """At the program's end: tell the other ranks, and why, and give them time to read that."""
        has_left = self.is_closed
        error = getattr(sys, "last_value", None)  # set by the interpreter: the exception that ends the program
        if error not in (None, self._earlier) and not has_left and self.failure is None:
            self.fail(reason_of(error))
        self.close()
        if self._rank == 0 and not has_left and not uses_agent_store():  # this process has the store
            self.read_until(lambda: len(self.gone) == self._size, _LAST_WORDS)

    def close(self, *, leaves: bool = True) -> None:
        """End the threads. If this rank leaves the run, the other ranks learn that it was not killed."""
        if not self.is_closed:
            if leaves:
                self._leave(self._rank)
            self.is_closed = True
            self._wakes.set()
            if self._ring is not None:
                process_group.close_connections(self._ring)
        if threading.current_thread() not in self._threads:
            self._join(self._threads)

    def _join(self, threads: Iterable[threading.Thread]) -> None:
        """Wait for threads before the interpreter exits: an exit during their calls of C++ would be an abort."""
        for thread in threads:
            thread.join(timeout=2)

    # -- waits ------------------------------------------------------------------------------------------------------

    def waiting(
        self, engine: str, what: str, members: Sequence[int], *, everyone: bool = True
    ) -> AbstractContextManager[None]:
        """Count a collective that begins now, and return the context in which this rank waits for the others.

        Args:
            engine, what: names for the engine and the collective, the same on every rank.
            members: the ranks among which it takes place, as numbered in the default group.
            everyone: whether every member takes part.

        Raises:
            RuntimeError: at once in a forked process, whose connections to the other ranks belong to its parent. And in
                the context if the code inside raises a RuntimeError, unless that says that memory ran out. The new
                error gives the reason if it is known: which rank failed, or which ranks are in a deadlock.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{what} requires every rank, but this is a forked process, such as a DataLoader's worker, which "
                "cannot communicate with the other ranks. Set num_workers=0; or, before the worker starts, copy the "
                "values on every rank: with lightning_zero.full_parameters(module): copy = parameter.detach().clone()."
            )
        begun = self.begun.get(engine, Counter())  # no rank waits any more for the collectives of a closed engine
        begun[what] += everyone
        return self._waiting(engine, what, begun[what] if everyone else 0, members)

    @contextmanager
    def _waiting(self, engine: str, what: str, ordinal: int, members: Sequence[int]) -> Iterator[None]:
        outer, self.wait = self.wait, Wait(engine, what, ordinal, members, time.monotonic())
        try:
            with explained(what, _BLAME):
                yield
        finally:
            self.wait = outer
            if self._noted is not None:
                self._noted = None
                with suppress(RuntimeError):  # the process with the store may have ended
                    self._store.set(f"note/{self._rank}", "")

    # -- the store --------------------------------------------------------------------------------------------------

    def _leave(self, rank: int) -> None:
        """Tell that a rank's process has ended."""
        self.gone.add(rank)
        with suppress(RuntimeError):  # the process with the store may have ended
            self._store.append("gone", f"{rank} ")  # type: ignore[attr-defined]  # torch's stubs lack it

    def _read(self) -> None:
        """Take in what ranks have told. The run fails if the process with the store ends without leaving the run."""
        reason = None
        try:
            if self._store.check(["failure"]):
                reason = self._store.get("failure").decode()
            if self._store.check(["gone"]):  # after the reason, before which its writer names the rank that was killed
                self.gone.update(map(int, self._store.get("gone").split()))
        except RuntimeError:
            if 0 in self.gone:
                self.close(leaves=False)
            elif not self.is_closed:
                reason = f"{'the launcher' if uses_agent_store() else 'rank 0'} {_WAS_KILLED}"
        if reason is not None and self.failure is None:
            self.failure = reason
            _end_waits(reason)

    def read_until(self, is_known: Callable[[], bool], seconds: float) -> bool:
        """Read the store until something is known, and return True; False if it is not known after some seconds."""
        deadline = time.monotonic() + seconds
        while not is_known():
            if time.monotonic() > deadline:
                return False
            self._read()
            time.sleep(0.01)
        return True

    def fail(self, reason: str) -> None:
        """End every rank's waits. Only the first reason counts."""
        with suppress(RuntimeError):  # the process with the store may have ended
            reason = self._store.compare_set("failure", "", reason).decode()
        self.failure = self.failure or reason
        _end_waits(self.failure)

    def states_if_all_fail(self, state: str) -> list[bytes]:
        """The states of all ranks, if all fail at the same time; otherwise an empty list."""
        store = process_group.named_store("lightning_zero/failures")
        keys = [f"{self._failed_together}/{rank}" for rank in range(self._size)]
        with suppress(RuntimeError):  # not all fail in time, or the process with the store has ended
            store.set(keys[self._rank], state)
            store.wait(keys, timedelta(seconds=_AT_ONCE))
            self._failed_together += 1
            return store.multi_get(keys)
        return []

    # -- the threads ------------------------------------------------------------------------------------------------

    def _watch_next(self) -> None:
        """Watch the next rank; when it has left the run, the one after it, and so on."""
        for step in range(1, self._size):
            if not self.is_over:
                self._watch((self._rank + step) % self._size)

    def _watch(self, rank: int) -> None:
        """Wait until the process of a rank ends. If that rank has not left the run, it was killed."""
        never = torch.empty(1, dtype=torch.uint8, device="cpu")
        with suppress(RuntimeError):  # the connection was closed
            self._ring.recv([never], rank, 0).wait(process_group.FOREVER)
        if not self.read_until(lambda: self.is_over or rank in self.gone, _MOMENT):
            self._leave(rank)
            self.fail(f"rank {rank} {_WAS_KILLED}")

    def _run(self) -> None:
        while not self.is_closed:
            self._wakes.wait(PATIENCE / 3)
            self._wakes.clear()
            self._read()
            with suppress(RuntimeError):
                self._note()
            if self.group not in process_group.all_groups():
                self.close()
        self._join(self._threads[1:])  # not this thread itself
        self._at_exit.cancel()

    def _note(self) -> None:
        """Write a note if this rank has waited for long; if every rank has a note, look for a deadlock."""
        wait = self.wait
        if wait is None or wait is self._noted or time.monotonic() - wait.since < PATIENCE:
            return
        self._noted = wait
        self._store.set(f"note/{self._rank}", json.dumps([wait, self.begun]))
        if self.wait is not wait:  # it has ended, perhaps before the note was written
            self._store.set(f"note/{self._rank}", "")
            return
        keys = [f"note/{rank}" for rank in range(self._size)]
        if self._store.check(keys):
            notes = self._store.multi_get(keys)
            if all(notes) and notes == self._store.multi_get(keys):  # between the two reads, every rank was waiting
                self._look_for_deadlock([json.loads(note) for note in notes])

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
    process_group.end_waits(process_group.all_groups())


_notices: list[Notices] = []  # at most one: that of the default process group


def notices(*, collective: bool = True) -> Notices:
    """The notices of the default process group.

    Args:
        collective: whether all ranks call this now. After the first such call, ranks also notice the end of a process
            for which they do not wait.
    """
    if _notices and _notices[0].group is not process_group.default_group():
        _notices.pop().close()
    if not _notices:
        _notices.append(Notices())
    if collective:
        _notices[0].make_ring()
    return _notices[0]


def failure() -> str | None:
    """Why the run cannot continue: which rank has failed or was killed, or which ranks are in a deadlock; else None."""
    return _notices[0].failure if _notices and process_group.is_default(_notices[0].group) else None


def waits_for(works: Sequence[Any], *, are_of_gloo: bool) -> list[Callable[[], Any]]:
    """Functions that wait for collectives. With Gloo, waits also end when the run has failed."""
    return [partial(_wait_for, process_group.noted(work)) if are_of_gloo else work.wait for work in works]


def _wait_for(work: Any) -> None:
    while process_group.is_in_flight(work):
        if failure() is not None:
            raise RuntimeError(failure())
    work.wait()


def send(tensor: torch.Tensor, group: process_group.ProcessGroup | None, rank: int) -> None:
    """Send a contiguous 1-D tensor to a rank of a group, however long that rank takes, unless the run has failed."""
    work, thread = process_group.send(tensor, group, rank), Chain("send")
    ended = thread.submit(partial(work.wait, process_group.FOREVER))  # which may never end (see ``is_in_flight``)
    while not futures.wait([ended], timeout=0.1).done:
        if failure() is not None:
            raise RuntimeError(failure())
    ended.result()


def reason_soon() -> str | None:
    """Like ``failure``, but wait for a moment if necessary: connections may close before the reason has arrived."""
    if not _notices:
        return None
    (own,) = _notices
    own.read_until(lambda: own.is_over, PATIENCE)
    return own.failure


def reason_of(error: BaseException) -> str:
    """Say with which exception this rank has failed."""
    first, *_ = str(error).splitlines() or [""]
    return f"rank {process_group.rank()} failed with {type(error).__name__}: {first[:500]}"


def fail(reason: str, state: object = None) -> bool:
    """Report this rank's failure to every rank of the default process group, and end the ranks' waits.

    The process group is unusable afterwards. But if all ranks fail at the same time, no rank is left waiting: then
    nothing is reported, and the group stays usable.

    Args:
        state: what this rank has computed so far, as a value with a unique text.

    Returns:
        Whether all ranks have failed at the same time, and in equal states.
    """
    own = notices(collective=False)
    if own.failure is None and (states := own.states_if_all_fail(repr(state))):
        return len(set(states)) == 1
    own.fail(reason)
    return False


def renew(**options: Any) -> None:
    """Replace the default process group, whose run has failed, with a new group of the same processes. Collective.

    Raises:
        RuntimeError: if a rank's process has ended.
    """
    if _notices and (gone := sorted(_notices[0].gone)):
        raise RuntimeError(
            f"These processes cannot continue after the failure: the program has ended on rank(s) {gone}. Restart all "
            "ranks."
        )
    while _notices:
        _notices.pop().close(leaves=False)
    process_group.restart(**options)


@contextmanager
def explained(what: str, blame: str | None = None) -> Iterator[None]:
    """Context for communication: errors inside, unless they say that memory ran out, give the reason of a failure.

    Args:
        what: a name for the communication, with which the error message begins.
        blame: what the message says if no rank has reported a failure; None leaves such errors as they are.
    """
    try:
        yield
    except RuntimeError as error:
        if is_of_memory(error):  # memory for the result was lacking, for which other ranks are not to blame
            raise
        if (reason := reason_soon()) is not None:
            raise RuntimeError(f"{what} did not complete: {reason}") from None
        if blame is None:
            raise
        raise RuntimeError(f"{what} did not complete: {blame} ({error})") from error


def explain(error: BaseException) -> None:
    """If a rank has failed, put the reason into an error of a collective that user code has called."""
    is_of_gloo = type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS_OF_GLOO)
    is_of_transport = isinstance(error, DistError) or is_of_gloo
    if is_of_transport and (reason := reason_soon()) is not None:
        error.args = (f"A collective did not complete: {reason}",)


def is_of_memory(error: BaseException) -> bool:
    """Whether an error says that this rank has run out of memory."""
    said = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in said or "not enough memory" in said)
    )
