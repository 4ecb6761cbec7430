"""Where ranks wait: those that wait for each other for ever, or for one that failed, are told in seconds what happened.

A rank that has waited for a while says in the process group's store what for, and what it has begun before. From
these notices a deadlock can be proven: r waits for a collective that s has not begun, and s, which can begin nothing
before its own wait is over, waits for one that r has not begun (or for a rank that waits for r, and so on). A rank that
is slow waits for nothing, and so is never taken for one that diverged.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_zero.engine.lifelines import LOST, Lifelines
from lightning_zero.engine.same_machine import sever_all

PATIENCE = 3.0
"""Seconds that a rank waits before it says so, and that another lets such a notice stand."""

_FAILED = "lightning_zero/failed"  # in the store, and as a message between the ranks
_AT_ONCE = timedelta(milliseconds=500)
_MOMENT = 1.0  # seconds after which it is known everywhere why a rank has closed its connections

_UNUSED_TAG = 7699


class _Wait(NamedTuple):
    engine: str
    what: str
    ordinal: int  # the how manieth of this name; 0 where not every rank takes part, so that nothing can be concluded
    since: float

    @property
    def key(self) -> str:
        return _key(self.engine, self.what)


def _key(engine: str, what: str) -> str:
    return f"{engine}: {what}"


class Watch:
    """What one engine tells of its rank's waits to the lookout that all engines over a group share.

    Args:
        group: the process group.
        name: of what the ranks do together, the same on all of them and new each time.
        sees_waits: whether ranks wait for each other where they say so. Otherwise they wait for a device as a rule, in
            whatever asks it for a value.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, *, sees_waits: bool = True) -> None:
        self._name = name
        known = next((each for each in _lookouts if each.group is group), None)
        self._lookout = known or _Lookout(group, sees_waits)
        self._lookout.users.append(self)
        self._lifelines = lifelines_over(group)

    def begin(self, what: str) -> int:
        """Count a collective of this name that this rank begins, in the order that all ranks have; its ordinal."""
        return self._lookout.begin(_key(self._name, what))

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
        with self._lookout.waiting(_Wait(self._name, what, ordinal, time.monotonic())):
            yield

    def notice_of(self, rank: int) -> str:
        """What a rank has said about its wait, which is different for each wait; empty if it waits for nothing."""
        return self._lookout.notice_of(rank)

    @property
    def ended(self) -> set[int]:
        """Ranks of the group whose processes have ended, in whatever way."""
        return self._lifelines.ended

    def close(self) -> None:
        if self in self._lookout.users:
            self._lookout.users.remove(self)
            if not self._lookout.users:
                self._lookout.close()


class _Lookout:
    """Over the waits of one rank of a group, in whichever engine: ranks may wait for each other in two of them."""

    def __init__(self, group: dist.ProcessGroup, sees_waits: bool) -> None:
        self.group = group
        self.users: list[Watch] = []
        _lookouts.append(self)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._sees_waits = sees_waits
        self._rank, self._others = rank, [other for other in range(size) if other != rank]
        self._begun: Counter[str] = Counter()
        self._wait: _Wait | None = None
        self._announced: _Wait | None = None
        self._lock = threading.Lock()  # of what is announced
        self._closed = threading.Event()
        # a connection of its own: the main thread may hold the other for as long as it waits
        store = dist.distributed_c10d._get_default_store()
        self._store = store.clone() if hasattr(store, "clone") else store
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        self._notices = dist.PrefixStore(f"lightning_zero/watch/{ranks}", self._store)
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
            reason = _reason_soon()
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
        return _read(self._notices, f"{rank}") or ""

    def close(self) -> None:
        if self in _lookouts:
            _lookouts.remove(self)
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
                    _wake(reason, self._store)
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
                _wake(reason, self._store)

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


_lookouts: list[_Lookout] = []


def name_in(notice: str) -> str:
    """What a notice's rank waits for."""
    _, what, *_ = json.loads(notice)
    return what


@contextmanager
def explained(what: str, kind: type[RuntimeError] = RuntimeError) -> Iterator[None]:
    """Around a wait that no watch is over: if it fails since another rank did, the error says so.

    Args:
        what: what is waited for.
        kind: of the errors by which it may fail.
    """
    try:
        yield
    except kind:
        reason = _reason_soon()
        if reason is None:
            raise
        raise RuntimeError(f"{what} did not complete: {reason}") from None


def explain(error: BaseException) -> None:
    """Let an error by which the transport has ended a wait of the project's own say why, where another rank failed."""
    is_of_transport = isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/" in str(error))
    if is_of_transport and (reason := _reason_soon()) is not None:
        error.args = (f"A collective did not complete: {reason}",)


def _reason_soon() -> str | None:
    """Why the run cannot go on; connections may close a moment before it is known for what reason."""
    deadline = time.monotonic() + _MOMENT
    while (reason := failure()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return reason


_lifelines: dict[dist.ProcessGroup, Lifelines] = {}
listeners: dict[str, Callable[[], None]] = {}
"""What to do when another rank says something else over them (``Lifelines.say``); called in their thread."""
_told: list[str] = []  # why the run cannot go on, as it came over these; the first counts


def lifelines_over(group: dist.ProcessGroup | None = None) -> Lifelines:
    """Those of a process group, which stay as long as it does. The first time every rank of it calls this."""
    group = group or dist.distributed_c10d._get_default_group()
    for gone in set(_lifelines).difference(dist.distributed_c10d._world.pg_map):
        _close_lifelines(gone)
    if group not in _lifelines:
        _lifelines[group] = Lifelines(group, partial(_hear, group, dist.get_process_group_ranks(group)))
    return _lifelines[group]


def _close_lifelines(group: dist.ProcessGroup) -> None:
    _lifelines.pop(group).close()
    _told.clear()


def _hear(group: dist.ProcessGroup, ranks: list[int], kind: str, rank: int, text: str) -> None:
    """What comes over the lifelines of a group, in their thread."""
    if group not in _lifelines:
        return
    if kind in listeners:
        listeners[kind]()
    if kind not in (LOST, _FAILED):
        return
    if kind == LOST:
        text = f"rank {ranks[rank]} was killed, or its process has crashed. What it has written may say why; the "
        text += "system's log does if memory has run out"
    _told.append(text)
    _end_waits(_told[0])


def fail(reason: str) -> None:
    """Tell every rank of the default process group that this one has failed, and wake those that wait.

    The process group is of no use then; see ``renew``. But where all ranks fail at once, and alike, none waits, and the
    group is left as it is for whoever has use of it.
    """
    global _failures_alike
    store = dist.distributed_c10d._get_default_store()
    notes = [f"{_FAILED}/{_failures_alike}/{rank}" for rank in range(dist.get_world_size())]
    _write(store, notes[dist.get_rank()], "")
    if _told or not _have_all_come(store, notes):
        _wake(reason, store)
    else:
        _failures_alike += 1


_failures_alike = 0
"""How often all ranks have failed at once over this process group, whose store keeps their notes."""


def _have_all_come(store: Any, notes: list[str]) -> bool:
    """Whether every rank has written its note, or does at once."""
    try:
        store.wait(notes, _AT_ONCE)
    except RuntimeError:
        return False
    return True


def _wake(reason: str, store: Any) -> None:
    """End every wait over the default process group and its kin, here and elsewhere. The first reason counts."""
    if _told:  # by it, everywhere
        reason = _told[0]
    else:
        with suppress(RuntimeError):  # the store's host may be gone, and with it this rank's peers or their connections
            reason = store.compare_set(_FAILED, "", reason).decode()
        for lifelines in _lifelines.values():
            lifelines.say(_FAILED, reason)
    _end_waits(reason)


def _end_waits(reason: str) -> None:
    sever_all(reason)
    for group in list(dist.distributed_c10d._world.pg_map):
        _sever(group)


def failure(store: Any = None) -> str | None:
    """Why the run over the default process group cannot go on, if some rank has failed, or was killed."""
    return _told[0] if _told else _read(store or dist.distributed_c10d._get_default_store(), _FAILED)


def have_all_come(state: Any, patience: float) -> bool:
    """Whether every rank of the default process group says the same within some seconds, after a failure.

    Args:
        state: what this rank has come with, for JSON.
        patience: seconds that rank 0, which decides, waits for the others, and they for it.
    """
    if any(lifelines.ended for lifelines in _lifelines.values()):
        return False
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("lightning_zero/come", dist.distributed_c10d._get_default_store())
    said = json.dumps(state)
    try:
        store.set(str(rank), said)
        if rank == 0:
            store.wait([str(other) for other in range(size)], timedelta(seconds=patience))
            store.set("verdict", "yes" if all(store.get(str(r)).decode() == said for r in range(size)) else "no")
        store.wait(["0"], timedelta(seconds=patience))
        store.wait(["verdict"], timedelta(seconds=2 * patience))
        return store.get("verdict").decode() == "yes"
    except RuntimeError:  # one has not come, or has taken the store with it
        if rank == 0:
            _write(store, "verdict", "no")
        return False


def renew(**options: Any) -> None:
    """Put a new default process group in the place of one whose run failed. Collective.

    It meets in the same store, where it has keys of its own, so that no message of the old one reaches it.

    Args:
        options: of ``dist.init_process_group`` beside backend, store, rank and world size.

    Raises:
        RuntimeError: if the process of a rank has ended.
    """
    if ended := sorted({rank for lifelines in _lifelines.values() for rank in lifelines.ended}):
        raise RuntimeError(
            f"The ranks cannot run again after the failure: the process of rank(s) {ended} has ended. Start all "
            "of them anew."
        )
    global _failures_alike
    _failures_alike = 0
    rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    store = dist.PrefixStore("lightning_zero/renewed", dist.distributed_c10d._get_default_store())
    for lookout in list(_lookouts):
        lookout.close()  # what they would find in the old store is not about the new group
    for group in list(_lifelines):
        _close_lifelines(group)
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)


def _read(store: Any, key: str) -> str | None:
    """What a key holds; None where there is none, or no store any more since the rank that hosted it is gone."""
    try:
        return store.get(key).decode() if store.check([key]) else None
    except RuntimeError:
        return None


def _write(store: Any, key: str, value: str) -> None:
    with suppress(RuntimeError):
        store.set(key, value)


def _sever(group: dist.ProcessGroup) -> None:
    """End what is under way in a group, here and, over Gloo, on the ranks that wait for this one."""
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if backend.name().lower() != "gloo":
            backend.abort()
            continue
        # Gloo closes all connections when one receive is not served in time. (Its abort() wakes nobody.) From a rank
        # that is gone it fails at once, and closes none: so there is one from each, and after the first that is late
        # they cost nothing.
        for peer in range(group.size()):
            if peer != group.rank():
                with suppress(RuntimeError):
                    backend.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
