"""Writing checkpoints in the background, one after another, while training goes on."""

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
import torch.distributed as dist
from torch import Tensor

from lightning_zero.checkpoint.saving import Entry
from lightning_zero.engine.watch import explained, failure, lifelines_over

log = logging.getLogger(__name__)

_PATIENCE = 10.0
"""Seconds that a rank waits for the others to have written once one is known to have failed."""


class Background:
    """One thread that does what is submitted, in that order. What follows something that failed is not done."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Do something when all before it is done."""
        if self._executor is None:
            # its thread is waited for when the interpreter ends
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
        """Whether nothing was submitted since ``finish`` was called last."""
        return not self._jobs

    @property
    def is_done(self) -> bool:
        return all(job.done() for job in self._jobs)

    def finish(self) -> None:
        """Wait until all is done.

        Raises:
            Exception: the first that was raised by something submitted since the last call.
        """
        jobs, self._jobs = self._jobs, []
        _unfinished.discard(self)
        for job in jobs:
            job.exception()
        for job in jobs:
            job.result()

    def close(self) -> None:
        """As ``finish``, and end the thread."""
        try:
            self.finish()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None


_unfinished: set[Background] = set()


@atexit.register
def _tell_at_the_end() -> None:
    """Of what failed where nobody asks any more: a script of Fabric's has ended."""
    for background in _unfinished:
        for job in background._jobs:
            if (error := job.exception()) is not None:
                log.error("%s", error)


def put_together(
    entries: list[Entry], ranges: list[list[tuple[int, int]]], rank: int, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Whole tensors on rank 0, of what each rank has of them; nothing on other ranks. Collective.

    Args:
        entries: this rank's parts, the same tensors in the same order on every rank.
        ranges: of each tensor, which part of it flattened each rank has.
        group: for this alone; None where there is one rank.
    """
    whole = []
    for entry, owned in zip(entries, ranges):
        if rank:
            if entry.values.numel():
                dist.send(entry.values, group=group, group_dst=0)
            continue
        flat = torch.empty(entry.shape.numel(), dtype=entry.dtype, device="cpu")
        flat[: entry.values.numel()] = entry.values
        for source, (start, stop) in enumerate(owned[1:], 1):
            if stop > start:
                dist.recv(flat[start:stop], group=group, group_src=source)
        whole.append(flat.view(entry.shape))
    return whole


def own_connection() -> dist.Store:
    """One to the process group's store, since the main thread may hold the other for as long as it waits.

    Not for every save a new one: if the host of the store is gone, it is tried for as long as the group's timeout.
    """
    store = dist.distributed_c10d._get_default_store()
    if not _connections or _connections[0] is not store:
        _connections[:] = [store, store.clone() if hasattr(store, "clone") else store]
    return _connections[1]


_connections: list[dist.Store] = []


class StoreExchange:
    """Ranks tell each other values through the process group's store: from a thread, beside any collectives.

    Args:
        store: see ``own_connection``.
        name: the same on every rank, and new each time.
        abandoned: is set when the others need not be waited for any longer than some seconds.
    """

    def __init__(self, store: dist.Store, name: str, abandoned: Event) -> None:
        self._store = dist.PrefixStore(f"lightning_zero/checkpoint/{name}", store)
        self._rank, self._size, self._abandoned = dist.get_rank(), dist.get_world_size(), abandoned
        self._lifelines = lifelines_over()
        self._round = 0

    def __call__(self, value: Any) -> list[Any]:
        """Every rank's small picklable value, in the order of ranks.

        Raises:
            RuntimeError: if some do not come: a rank has failed.
        """
        number, self._round = self._round, self._round + 1
        with explained("The exchange about a checkpoint", dist.DistError):  # the store goes with the rank that hosts it
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
        """Let the others know that this rank needs to hear no more. Rank 0, whose process may host the store, waits."""
        with suppress(RuntimeError):  # the store is gone, and with it whoever would wait
            self._store.set(f"left/{self._rank}", "")
            if self._rank == 0:
                self._wait("left")

    def _wait(self, what: str) -> list[int]:
        """Wait for all ranks to have said something; those that never will."""
        missing = [rank for rank in range(self._size) if rank != self._rank]
        pause, lost_since = 1e-3, None
        while True:
            ended = self._lifelines.ended  # before it is seen whether they have come
            missing = [rank for rank in missing if not self._store.check([f"{what}/{rank}"])]
            if not missing or ended.intersection(missing):
                return missing
            if self._abandoned.is_set() or failure() is not None:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > _PATIENCE:
                    return missing
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
