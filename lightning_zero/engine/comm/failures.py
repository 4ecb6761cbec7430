"""End waits for other ranks with an error if a rank fails or is killed, or if ranks are in a deadlock.

The first such failure is reported to all ranks over the lifelines (``lifelines.py``), and ends all their waits within
seconds.

A rank that has waited for a few seconds sends a notice to the first rank: what it waits for, and which collectives it
has begun. Two notices can prove a deadlock: rank r waits for a collective that rank s has not begun, and s waits for a
collective that r has not begun. Neither rank can begin another collective before its own wait ends. Longer cycles of
ranks are detected in the same way. A rank that is only slow sends no notice, so it is never taken for part of a
deadlock.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from threading import Lock
from typing import NamedTuple

import torch

from lightning_zero.engine.comm import lifelines, process_group
from lightning_zero.engine.comm.attempts import leave_soon, will_be_repeated
from lightning_zero.engine.comm.cross_memory.exchange import sever_all
from lightning_zero.engine.comm.lifelines import LEFT, LOST, TICK, WAITS, Lifelines
from lightning_zero.engine.comm.process_group import DistError, ProcessGroup, default_store

_FAILED, _REFUSED = "failed", "refused"  # kinds of message: the whole run has failed, or only some waits
_AT_ONCE = 0.5  # seconds within which failures count as simultaneous
_MOMENT = 1.0  # seconds within which a failing rank's reason arrives after its connections have closed

_UNUSED_TAG = 7699
_SIGNS_OF_GLOO = "gloo/", "pair closure"  # texts that identify Gloo's errors, which have no class of their own

listeners: dict[str, Callable[[], None]] = {}
"""Functions by kind of message (see ``Lifelines.say``), for kinds that are not handled here. The lifelines' thread
calls the function when such a message arrives."""


class _Wait(NamedTuple):
    key: str  # the engine's name and ``what``
    what: str
    ordinal: int  # 1 for the first collective with this key, and so on; 0 excludes the wait from deadlock detection
    since: float
    may_be_refused: bool  # whether the run can continue after this wait has failed
    members: Sequence[int] = ()  # ranks that take part; empty for all


class _Watchdog(Lifelines):
    """The lifelines of a group, and this rank's waits in all engines, since a deadlock may involve several engines.

    Attributes:
        ended: ranks of the group whose processes have ended.
        failure: why the run cannot continue; None while it can.
        refusal: the deadlock that ends this rank's current wait, but not the run; "" if there is none.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.ended: set[int] = set()
        self.failure: str | None = None
        self.refusal = ""
        self._ranks = process_group.ranks_of(group)
        self._begun: Counter[str] = Counter()
        self._closed_engines: list[str] = []
        self._wait: _Wait | None = None
        self._announced: _Wait | None = None
        self._announcing = Lock()
        # On the first rank: each waiting rank's wait, its counts of collectives begun, and its closed engines.
        self._notices: dict[int, tuple[_Wait, Counter[str], list[str]]] = {}
        super().__init__(group)

    def hear(self, kind: str, rank: int, text: str) -> None:
        if kind in (LOST, LEFT):
            self.ended.add(rank)
        if kind == LOST:
            text = f"rank {self._ranks[rank]} was killed, or its process has crashed. Its output may say why; "
            text += "the system's log shows whether memory ran out"
        if kind in (LOST, _FAILED):
            self.failure = self.failure or text
            if kind == LOST and will_be_repeated():
                leave_soon(text)
            _end_waits(failure() or text)
        elif kind == WAITS:
            self._take_notice(rank, text)
        elif kind == _REFUSED:
            refused, where = json.loads(text)
            if self._rank in refused:
                self.refusal = where
        elif kind == TICK:
            self._announce()
        elif kind in listeners:
            listeners[kind]()

    def begin(self, key: str) -> int:
        self._begun[key] += 1
        return self._begun[key]

    def close_engine(self, name: str) -> None:
        """Forget the collectives of an engine, so that waits for them no longer count as part of a deadlock."""
        self._closed_engines.append(name)
        for key in [key for key in list(self._begun) if _engine_in(key) == name]:
            del self._begun[key]

    @contextmanager
    def waiting(self, wait: _Wait) -> Iterator[None]:
        outer, self._wait, self.refusal = self._wait, wait, ""
        try:
            yield
        except RuntimeError as error:
            if is_of_memory(error):  # memory for the result was lacking, for which other ranks are not to blame
                raise
            reason = reason_soon()
            cause = error if reason is None else None  # a known reason makes the connection's error superfluous
            raise RuntimeError(f"{wait.what} did not complete: {reason or self._blame(error)}") from cause
        finally:
            self._wait = outer
            if self._announced is not None:
                with self._announcing:
                    self._announced = None
                    self.say(WAITS)

    def _blame(self, error: RuntimeError) -> str:
        """Explain why a wait failed, if no rank has reported a failure."""
        if self.ended:
            return (
                f"the program has ended on rank(s) {sorted(self.ended)}. Every rank must run the whole program, with "
                f"the same number of training batches. ({error})"
            )
        return (
            "another rank ended, or did not take part in time, or is at another line. Every rank must run the same "
            f"units in the same order, and the same number of training batches. ({error})"
        )

    def _announce(self) -> None:
        """Notify the first rank of a wait that is longer than ``PATIENCE``, once for each wait."""
        wait = self._wait
        if wait is not None and time.monotonic() - wait.since > lifelines.PATIENCE:
            with self._announcing:
                if self._wait is wait and self._announced is not wait:
                    self._announced = wait
                    text = json.dumps([*wait, self._begun.copy(), self._closed_engines])
                    if self._rank == 0:  # sending a long message would block, since this thread also receives it
                        self._take(WAITS, 0, text)
                    else:
                        self.say(WAITS, text)

    def _take_notice(self, rank: int, text: str) -> None:
        """On the first rank, record a rank's wait, or its end if ``text`` is empty; end the waits of any deadlock."""
        self._notices.pop(rank, None)
        if text:
            *wait, begun, closed = json.loads(text)
            self._notices[rank] = _Wait(*wait), Counter(begun), closed
            if (cycle := self._cycle([rank], set())) is None:
                return
            waits = {each: self._notices[each][0] for each in sorted(cycle)}
            where = ", ".join(f"rank {each} waits for {wait.what}" for each, wait in waits.items())
            if refused := [each for each, wait in waits.items() if wait.may_be_refused]:
                self._take(_REFUSED, 0, json.dumps([refused, where]))
                return
            end_all_waits(
                f"the ranks wait for each other for ever: {where}. Every rank must run the same units in the same "
                "order, forward and backward, and the same number of training batches: do not run units inside an 'if' "
                "that depends on the rank or its data. "
                "Ranks may run different numbers of forward passes (without backward) inside 'with "
                "lightning_zero.uneven_forwards(module):', which every rank must enter."
            )

    def _cycle(self, path: list[int], seen: set[int]) -> list[int] | None:
        """Extend a path, in which each rank waits for the next, into a cycle; None if there is none.

        Args:
            seen: ranks from which no path leads back. They are tried only once, since there may be very many paths.
        """
        wait = self._notices[path[-1]][0]
        for other, (_, begun, closed) in self._notices.items():
            takes_part = not wait.members or other in wait.members
            if takes_part and begun[wait.key] < wait.ordinal and _engine_in(wait.key) not in closed:
                if other == path[0]:
                    return path
                if other not in path and other not in seen and (found := self._cycle([*path, other], seen)) is not None:
                    return found
        seen.add(path[-1])
        return None


def _engine_in(key: str) -> str:
    """The engine's name in a wait's key."""
    return key.partition(": ")[0]


class Watch:
    """Registers one engine's waits for other ranks with the watchdog of the process group.

    Args:
        group: the process group.
        name: the engine's name, the same on every rank and new for each engine.
        members: the ranks of the group that wait for each other; by default all.
    """

    def __init__(self, group: ProcessGroup, name: str, members: Sequence[int] = ()) -> None:
        self._group, self._name, self._members, self._watchdog = group, name, members, lifelines_over(group)
        self._process = os.getpid()

    def among(self, members: Sequence[int]) -> Watch:
        """Make a watch for waits in which only these ranks of the group take part."""
        return Watch(self._group, self._name, list(members))

    def check_process(self, what: str) -> None:
        """Raise a RuntimeError in a forked process, whose connections to the other ranks belong to its parent."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{what} requires every rank, but this is a forked process, such as a DataLoader's worker, which "
                "cannot communicate with the other ranks. Set num_workers=0; or, before the worker starts, copy the "
                "values on every rank: with lightning_zero.full_parameters(module): copy = parameter.detach().clone()."
            )

    def begin(self, what: str) -> int:
        """Count a collective, and return its number (from 1) among the collectives with this name."""
        return self._watchdog.begin(f"{self._name}: {what}")

    def waiting(
        self, what: str, ordinal: int | None = None, may_be_refused: bool = False
    ) -> AbstractContextManager[None]:
        """Context in which this rank waits for others.

        Args:
            what: a name for the wait, the same on every rank.
            ordinal: the result of ``begin``, which is called here by default; 0 if only some ranks take part.
            may_be_refused: whether the code inside checks ``refusal``. A deadlock then ends only such waits, and not
                the run.

        Raises:
            RuntimeError: if the code inside raises a RuntimeError, unless that says that memory ran out. The new error
                gives the reason if it is known: which rank failed, or which ranks are in a deadlock. Also in a forked
                process; see ``check_process``.
        """
        self.check_process(what)
        ordinal = self.begin(what) if ordinal is None else ordinal
        key = f"{self._name}: {what}"
        return self._watchdog.waiting(_Wait(key, what, ordinal, time.monotonic(), may_be_refused, self._members))

    def close(self) -> None:
        """Forget the engine's collectives."""
        self._watchdog.close_engine(self._name)

    @property
    def ended(self) -> set[int]:
        """Ranks of the group whose processes have ended."""
        return self._watchdog.ended

    @property
    def refusal(self) -> str:
        """The deadlock that ends this rank's current wait, but not the run; "" if there is none."""
        return self._watchdog.refusal


_watchdogs: dict[ProcessGroup, _Watchdog] = {}


def lifelines_over(group: ProcessGroup | None = None) -> _Watchdog:
    """The lifelines of ``group``, by default the default group. The first call for a group is collective."""
    group = group or process_group.default_group()
    for gone in set(_watchdogs).difference(process_group.all_groups()):
        _watchdogs.pop(gone).close()
    if group not in _watchdogs:
        _watchdogs[group] = _Watchdog(group)
    return _watchdogs[group]


@contextmanager
def explained(what: str, kind: type[RuntimeError] = RuntimeError) -> Iterator[None]:
    """Context for communication outside of ``Watch.waiting``: if a rank has failed, errors inside give the reason.

    Args:
        what: a name for the communication, with which the error message begins.
        kind: the class of errors that may be replaced in this way.
    """
    try:
        yield
    except kind:
        reason = reason_soon()
        if reason is None:
            raise
        raise RuntimeError(f"{what} did not complete: {reason}") from None


def is_of_memory(error: BaseException) -> bool:
    """Whether an error says that this rank has run out of memory."""
    said = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in said or "not enough memory" in said)
    )


def explain(error: BaseException) -> None:
    """If a rank has failed, put the reason into an error of a collective that user code has called."""
    is_of_gloo = type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS_OF_GLOO)
    is_of_transport = isinstance(error, DistError) or is_of_gloo
    if is_of_transport and (reason := reason_soon()) is not None:
        error.args = (f"A collective did not complete: {reason}",)


def failure() -> str | None:
    """Why the run cannot continue: which rank has failed or was killed, or which ranks are in a deadlock; else None."""
    return next((watchdog.failure for watchdog in list(_watchdogs.values()) if watchdog.failure is not None), None)


def reason_soon() -> str | None:
    """Like ``failure``, but wait for a moment if necessary: connections may close before the reason has arrived."""
    deadline = time.monotonic() + _MOMENT
    while (reason := failure()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return reason


def fail(reason: str) -> None:
    """Report this rank's failure to every rank of the default process group, and end the ranks' waits.

    The process group is unusable afterwards. But if all ranks fail at the same time, no rank is left waiting: then
    nothing is reported, and the group stays usable.
    """
    if failure() is not None or not _all_fail():
        end_all_waits(reason)


def _all_fail() -> bool:
    store, key, size = default_store(), "lightning_zero/failures", process_group.world_size()
    with suppress(RuntimeError):  # the store's host may be gone
        number, deadline = store.add(key, 1), time.monotonic() + _AT_ONCE
        while time.monotonic() < deadline:
            if store.add(key, 0) >= number + -number % size:  # the next multiple of size: earlier failures also count
                return True
            time.sleep(0.01)
    return False


def end_all_waits(reason: str) -> None:
    """End every wait in this process's groups, here and on the other ranks. Only the first reason is reported."""
    if failure() is None:
        for watchdog in _watchdogs.values():
            watchdog.failure = reason
            watchdog.say(_FAILED, reason)
    _end_waits(failure() or reason)


def _end_waits(reason: str) -> None:
    sever_all(reason)
    for group in process_group.all_groups():
        _sever(group)


def _sever(group: ProcessGroup) -> None:
    """End all communication in a group: on this rank and, over Gloo, on the ranks that wait for this rank."""
    for backend in process_group.backends_of(group):
        if backend.name().lower() != "gloo":
            backend.abort()
            continue
        # Gloo's abort() does not end waits, but a receive that times out closes all connections. A receive from an
        # ended rank fails at once and closes none, so the loop tries every rank. After the first timeout, the remaining
        # receives fail at once.
        for peer in range(group.size()):
            if peer != group.rank():
                with suppress(RuntimeError):
                    backend.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def ended_ranks() -> set[int]:
    """The ranks whose processes have ended, each as numbered in its group."""
    return {rank for watchdog in _watchdogs.values() for rank in watchdog.ended}


def forget() -> None:
    """Close the lifelines of all groups and forget all failures, before the default group is replaced."""
    for group in list(_watchdogs):
        _watchdogs.pop(group).close()
