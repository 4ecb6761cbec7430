"""Errors that say why a wait for other ranks ended: which rank has failed or was killed, or which ranks are stuck."""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.notices import Notices, Wait
from lightning_zero.engine.comm.process_group import DistError, ProcessGroup

_AT_ONCE = 0.5  # seconds within which failures count as simultaneous
_SIGNS_OF_GLOO = "gloo/", "pair closure"  # texts that identify Gloo's errors, which have no class of their own

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


class Watch:
    """Registers one engine's waits for other ranks, so that failures and deadlocks end them.

    Args:
        name: the engine's name, the same on every rank and new for each engine.
    """

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self._group, self._name, self._ranks = group, name, process_group.ranks_of(group)
        self._members: Sequence[int] = self._ranks
        self._notices = notices(collective=len(self._ranks) == process_group.world_size())
        self._begun = self._notices.begun.setdefault(name, Counter())
        self._process = os.getpid()

    def among(self, members: Sequence[int]) -> Watch:
        """Make a watch for waits in which only these ranks take part, as numbered in the default group."""
        watch = copy.copy(self)
        watch._members = members
        return watch

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
        self._begun[what] += 1
        return self._begun[what]

    @contextmanager
    def waiting(self, what: str, ordinal: int | None = None) -> Iterator[None]:
        """Context in which this rank waits for others.

        Args:
            what: a name for the wait, the same on every rank.
            ordinal: the result of ``begin``, which is called here by default; 0 if only some ranks take part.

        Raises:
            RuntimeError: if the code inside raises a RuntimeError, unless that says that memory ran out. The new error
                gives the reason if it is known: which rank failed, or which ranks are in a deadlock. Also in a forked
                process; see ``check_process``.
        """
        self.check_process(what)
        ordinal = self.begin(what) if ordinal is None else ordinal
        outer = self._notices.wait
        self._notices.wait = Wait(self._name, what, ordinal, self._members, time.monotonic())
        try:
            yield
        except RuntimeError as error:
            if is_of_memory(error):  # memory for the result was lacking, for which other ranks are not to blame
                raise
            if (reason := self._notices.reason_soon()) is None:
                raise RuntimeError(f"{what} did not complete: {self._blame()} ({error})") from error
            raise RuntimeError(f"{what} did not complete: {reason}") from None
        finally:
            self._notices.end_wait(outer)

    def _blame(self) -> str:
        """Explain why a wait failed, if no rank has reported a failure."""
        if gone := self.gone:
            return (
                f"the program has ended on rank(s) {gone}. Every rank must run the whole program, with the same number "
                "of training batches."
            )
        said = (
            "another rank ended, or did not take part in time, or is at another line. Every rank must run the same "
            "units in the same order, and the same number of training batches."
        )
        if any(backend.name().lower() == "nccl" for backend in process_group.backends_of(self._group)):
            said += (
                " NCCL's Flight Recorder dumps the last collectives of each rank to the files that "
                "TORCH_FR_DUMP_TEMP_FILE names; compare them with torchfrtrace."
            )
        return said

    @property
    def gone(self) -> list[int]:
        """The ranks of the group whose processes have ended."""
        return [number for number, rank in enumerate(self._ranks) if rank in self._notices.gone]

    def close(self) -> None:
        """Forget the engine's collectives, for which no other rank waits any more."""
        self._notices.begun.pop(self._name, None)


def failure() -> str | None:
    """Why the run cannot continue: which rank has failed or was killed, or which ranks are in a deadlock; else None."""
    return _notices[0].failure if _notices and process_group.is_default(_notices[0].group) else None


def reason_soon() -> str | None:
    """Like ``failure``, but wait for a moment if necessary: connections may close before the reason has arrived."""
    return _notices[0].reason_soon() if _notices else None


def fail(reason: str, state: object = None) -> bool:
    """Report this rank's failure to every rank of the default process group, and end the ranks' waits.

    The process group is unusable afterwards. But if all ranks fail at the same time, no rank is left waiting: then
    nothing is reported, and the group stays usable.

    Args:
        state: what this rank has computed so far, as a value with a unique text.

    Returns:
        Whether all ranks have failed at the same time, and in equal states.
    """
    with suppress(RuntimeError):  # the process with the store may have ended
        if failure() is None and (states := _states_if_all_fail(repr(state))):
            return len(set(states)) == 1
    notices(collective=False).fail(reason)
    return False


def _states_if_all_fail(state: str) -> list[bytes]:
    """The states of all ranks, if all fail at the same time; otherwise an empty list."""
    store, size = process_group.named_store("lightning_zero/failures"), process_group.world_size()
    store.set(f"state/{process_group.rank()}", state)
    number, deadline = store.add("number", 1), time.monotonic() + _AT_ONCE
    while store.add("number", 0) < number + -number % size:  # the next multiple of size: earlier failures also count
        if time.monotonic() > deadline:
            return []
        time.sleep(0.01)
    return store.multi_get([f"state/{rank}" for rank in range(size)])


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
def explained(what: str) -> Iterator[None]:
    """Context for communication outside of ``Watch.waiting``: if a rank has failed, errors inside give the reason.

    Args:
        what: a name for the communication, with which the error message begins.
    """
    try:
        yield
    except RuntimeError:
        reason = reason_soon()
        if reason is None:
            raise
        raise RuntimeError(f"{what} did not complete: {reason}") from None


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
