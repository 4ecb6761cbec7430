"""Write checkpoints in the background, one after another, while training continues."""

from __future__ import annotations

import atexit
import logging
import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.saving import Entry
from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.failures import explained, failure, lifelines_over
from lightning_zero.engine.comm.process_group import DistError, ProcessGroup, Store

log = logging.getLogger(__name__)

_PATIENCE = 10.0
"""Seconds to wait for the other ranks' files once a rank is known to have failed."""


class Background:
    """A thread that runs submitted jobs in order. After a job has failed, the following ones are skipped."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after all earlier ones have finished."""
        if self._executor is None:
            # The interpreter waits for this thread at exit.
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="lightning_zero-checkpoint")
        before = self._jobs[-1] if self._jobs else None

        def run() -> None:
            if before is None or before.exception() is None:
                job()
            else:
                raise before.exception()  # type: ignore[misc]

        self._jobs.append(self._executor.submit(run))
        _unfinished.add(self)

    @property
    def is_empty(self) -> bool:
        """Whether no job was submitted since the last call of ``finish``."""
        return not self._jobs

    @property
    def is_done(self) -> bool:
        return all(job.done() for job in self._jobs)

    def finish(self) -> None:
        """Wait until all jobs have finished.

        Raises:
            Exception: the first exception of a job that was submitted since the last call.
        """
        jobs, self._jobs = self._jobs, []
        _unfinished.discard(self)
        for job in jobs:
            job.exception()
        for job in jobs:
            job.result()

    def close(self) -> None:
        """Call ``finish``, and end the thread."""
        try:
            self.finish()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None


_unfinished: set[Background] = set()


@atexit.register
def _tell_at_the_end() -> None:
    """Log failures that no call of ``finish`` reported, since a Fabric script has ended."""
    for background in _unfinished:
        for job in background._jobs:
            if (error := job.exception()) is not None:
                log.error("%s", error)


def put_together(
    entries: list[Entry], ranges: list[list[tuple[int, int]]], rank: int, group: ProcessGroup | None
) -> list[Tensor]:
    """Gather sharded tensors on rank 0; returns full tensors there, an empty list on other ranks. Collective.

    Args:
        entries: this rank's shards, of the same tensors in the same order on every rank.
        ranges: for each tensor, the range of the flattened tensor that each rank owns.
        group: a process group used for nothing else; None with one rank.
    """
    whole = []
    for entry, owned in zip(entries, ranges):
        if rank:
            if entry.values.numel():
                process_group.send(entry.values, group, 0)
            continue
        flat = torch.empty(entry.shape.numel(), dtype=entry.dtype, device="cpu")
        flat[: entry.values.numel()] = entry.values
        for source, (start, stop) in enumerate(owned[1:], 1):
            if stop > start:
                process_group.receive(flat[start:stop], group, source)
        whole.append(flat.view(entry.shape))
    return whole


def own_connection() -> Store:
    """Return a second connection to the process group's store, since the main thread may block the first one.

    The connection is reused by later saves: connecting to a store whose host is gone takes as long as the group's
    timeout.
    """
    store = process_group.default_store()
    if not _connections or _connections[0] is not store:
        _connections[:] = [store, process_group.new_connection(store)]
    return _connections[1]


_connections: list[Store] = []


class StoreExchange:
    """All-gather of small values through the process group's store, usable from a thread while collectives run.

    Args:
        store: see ``own_connection``.
        name: the same on every rank, and different for each exchange.
        abandoned: once set, other ranks are awaited for only a few seconds more.
    """

    def __init__(self, store: Store, name: str, abandoned: Event) -> None:
        self._store = process_group.named_store(f"lightning_zero/checkpoint/{name}", store)
        self._rank, self._size, self._abandoned = process_group.rank(), process_group.world_size(), abandoned
        self._lifelines = lifelines_over()
        self._round = 0

    def __call__(self, value: Any) -> list[Any]:
        """All-gather a small picklable value; returns the values in the order of ranks.

        Raises:
            RuntimeError: if a rank does not take part, because it has failed.
        """
        number, self._round = self._round, self._round + 1
        with explained("The exchange about a checkpoint", DistError):  # fails if its host rank ends
            self._store.set(f"{number}/{self._rank}", pickle.dumps(value))  # type: ignore[arg-type]
            missing = self._wait(f"{number}")
        if missing:
            raise RuntimeError(
                f"rank(s) {missing} did not write their parts: {failure() or 'the run, or their process, has ended'}"
            )
        return [
            value if rank == self._rank else pickle.loads(self._store.get(f"{number}/{rank}"))
            for rank in range(self._size)
        ]

    def __enter__(self) -> StoreExchange:
        return self

    def __exit__(self, *_: object) -> None:
        """Announce that this rank is done. Rank 0, whose process may host the store, waits for all others."""
        with suppress(RuntimeError):  # the store is gone, so no other rank can wait for it
            self._store.set(f"left/{self._rank}", "")
            if self._rank == 0:
                self._wait("left")

    def _wait(self, what: str) -> list[int]:
        """Wait until all ranks have written their key; returns the ranks that never will."""
        missing = [rank for rank in range(self._size) if rank != self._rank]
        pause, lost_since = 1e-3, None
        while True:
            ended = self._lifelines.ended  # read before the keys: a rank may write its key and then end
            missing = [rank for rank in missing if not self._store.check([f"{what}/{rank}"])]
            if not missing or ended.intersection(missing):
                return missing
            if self._abandoned.is_set() or failure() is not None:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > _PATIENCE:
                    return missing
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
