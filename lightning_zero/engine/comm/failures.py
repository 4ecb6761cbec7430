"""How the failure of one rank reaches the others, with its reason, and ends their waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.cma_exchange import sever_all
from lightning_zero.engine.comm.lifelines import LOST, Lifelines
from lightning_zero.engine.comm.process_group import DistError, ProcessGroup, default_store

_FAILED = "lightning_zero/failed"  # in the store, and as a message between the ranks
_AT_ONCE = timedelta(milliseconds=500)
_MOMENT = 1.0  # seconds after which it is known everywhere why a rank has closed its connections

_UNUSED_TAG = 7699
_SIGNS_OF_GLOO = "gloo/", "pair closure"  # in its messages, which have no class of their own


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
        reason = reason_soon()
        if reason is None:
            raise
        raise RuntimeError(f"{what} did not complete: {reason}") from None


def explain(error: BaseException) -> None:
    """Let an error by which the transport has ended a wait of the project's own say why, where another rank failed."""
    is_of_gloo = type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS_OF_GLOO)
    is_of_transport = isinstance(error, DistError) or is_of_gloo
    if is_of_transport and (reason := reason_soon()) is not None:
        error.args = (f"A collective did not complete: {reason}",)


def reason_soon() -> str | None:
    """Why the run cannot go on; connections may close a moment before it is known for what reason."""
    deadline = time.monotonic() + _MOMENT
    while (reason := failure()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return reason


_lifelines: dict[ProcessGroup, Lifelines] = {}
listeners: dict[str, Callable[[], None]] = {}
"""What to do when another rank says something else over them (``Lifelines.say``); called in their thread."""
_told: dict[ProcessGroup, str] = {}  # why the run cannot go on, as it came over the lifelines of a group


def lifelines_over(group: ProcessGroup | None = None) -> Lifelines:
    """Those of a process group, which stay as long as it does. The first time every rank of it calls this."""
    group = group or process_group.default_group()
    for gone in set(_lifelines).difference(process_group.all_groups()):
        _close_lifelines(gone)
    if group not in _lifelines:
        _lifelines[group] = Lifelines(group, partial(_hear, group, process_group.ranks_of(group)))
    return _lifelines[group]


def _close_lifelines(group: ProcessGroup) -> None:
    _lifelines.pop(group).close()
    _told.pop(group, None)


def _hear(group: ProcessGroup, ranks: list[int], kind: str, rank: int, text: str) -> None:
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
    _told.setdefault(group, text)
    _end_waits(_first_told() or text)


def fail(reason: str) -> None:
    """Tell every rank of the default process group that this one has failed, and wake those that wait.

    The process group is of no use then; see ``renewal.renew``. But where all ranks fail at once, and alike, none waits,
    and the group is left as it is.
    """
    global _failures_alike
    store = default_store()
    notes = [f"{_FAILED}/{_failures_alike}/{rank}" for rank in range(process_group.world_size())]
    write(store, notes[process_group.rank()], "")
    if _told or not _have_all_come(store, notes):
        end_all_waits(reason, store)
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


def end_all_waits(reason: str, store: Any) -> None:
    """End every wait over the default process group and its kin, here and elsewhere. The first reason counts."""
    if told := _first_told():  # by it, everywhere
        reason = told
    else:
        with suppress(RuntimeError):  # the store's host may be gone, and with it this rank's peers or their connections
            reason = store.compare_set(_FAILED, "", reason).decode()
        for lifelines in _lifelines.values():
            lifelines.say(_FAILED, reason)
    _end_waits(reason)


def _end_waits(reason: str) -> None:
    sever_all(reason)
    for group in process_group.all_groups():
        _sever(group)


def failure(store: Any = None) -> str | None:
    """Why the run over the default process group cannot go on, if some rank has failed, or was killed."""
    return _first_told() or read(store or default_store(), _FAILED)


def _first_told() -> str | None:
    return next(iter(list(_told.values())), None)


def ended_ranks() -> set[int]:
    """Ranks, each as numbered in its group, whose processes have ended."""
    return {rank for lifelines in _lifelines.values() for rank in lifelines.ended}


def forget() -> None:
    """Close the lifelines of all groups, and forget what came over them: the default group is about to be replaced."""
    global _failures_alike
    _failures_alike = 0
    for group in list(_lifelines):
        _close_lifelines(group)


def read(store: Any, key: str) -> str | None:
    """What a key holds; None where there is none, or no store any more since the rank that hosted it is gone."""
    try:
        return store.get(key).decode() if store.check([key]) else None
    except RuntimeError:
        return None


def write(store: Any, key: str, value: str) -> None:
    with suppress(RuntimeError):
        store.set(key, value)


def _sever(group: ProcessGroup) -> None:
    """End what is under way in a group, here and, over Gloo, on the ranks that wait for this one."""
    for backend in process_group.backends_of(group):
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
