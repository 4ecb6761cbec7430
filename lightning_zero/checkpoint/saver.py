"""Save a strategy's checkpoints, full or sharded, immediately or in the background while training continues."""

from __future__ import annotations

import atexit
import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from threading import Event
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.on_rank_0 import Gather
from lightning_zero.checkpoint.saving import (
    CheckpointNotSavedError,
    CopyBuffer,
    Entry,
    OnRank0,
    content_of,
    device_of,
    entry_of,
    is_view_of_parameter,
    not_saved,
    reason_of,
    refusal_of,
    save_in_parts,
    save_whole,
)
from lightning_zero.checkpoint.snapshot import snapshot
from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.background_work import BackgroundWork
from lightning_zero.engine.comm.failures import explained, failure, notices
from lightning_zero.engine.comm.process_group import DistError, ProcessGroup, Store
from lightning_zero.engine.optim.kinds import as_made_of_tensors
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.sharded_tree import identity, is_in_parts, walk
from lightning_zero.io.labels import new_label

log = logging.getLogger(__name__)

_PATIENCE = 10.0
"""Seconds to wait for other ranks to finish writing, once a rank has failed or the run is being abandoned."""


class Saver:
    """Saves checkpoints. Before each save, call ``finish`` on all ranks to raise errors from earlier saves.

    Args:
        in_background: whether a background thread writes the checkpoints, while training continues.
    """

    def __init__(self, in_background: bool) -> None:
        self._in_background = in_background
        self._memory, self._memory_later = CopyBuffer(), CopyBuffer()
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._abandoned = Event()
        self._made = WeakIdKeyDictionary()

    def __reduce__(self) -> Any:
        # Users copy trainers and strategies. The copy gets a new saver, without the original's background work.
        return Saver, (self._in_background,)

    def save_in_parts(
        self,
        tree: Mapping[str, Any],
        rest: Mapping[str, Any],
        path: Any,
        written_by: dict[str, Any],
        rank: int,
        gather: Gather,
        serialising: OnRank0 | None = None,
        folders: Sequence[int] = (0,),
        before: Callable[[Destination], None] | None = None,
    ) -> None:
        """Write a sharded checkpoint: a folder in which each rank writes one file. Collective.

        Args:
            tree, rest, serialising: see ``content_of``.
            path: the folder's path; rank 0's value is used.
            written_by: versions, stage and world size, for the manifest.
            gather: all-gathers a value.
            folders: see ``saving.save_in_parts``.
            before: called in the background, after the values have been copied and before any are written.

        Raises:
            CheckpointNotSavedError: on every rank, if any rank fails to write; in the background, ``finish`` raises it.
        """
        store = self._connected()
        label = new_label()
        # The path is also checked here, so that every rank refuses it before any rank writes to it.
        everyone = gather((label, str(path), refusal_of(path, label) if rank == 0 else None))
        label, path, refusal = everyone[0]
        if refusal is not None:
            raise not_saved(path, 0, refusal)
        content, destination = content_of(tree, rest, rank, serialising), Destination(path, label)
        if not self._in_background:
            save_in_parts(content, destination, written_by, rank, gather, folders=folders)
            return
        self.finish()
        copied = self._copying([entry for entry in content.entries if not _stays_on_disk(entry)])
        # Values on a disk are read only when the checkpoint is written, and must not change until then.
        reading = BackgroundWork(is_awaited=any(map(_stays_on_disk, content.entries)))
        exchanging: AbstractContextManager[Gather] = nullcontext(lambda value: [value])
        if store is not None and len(everyone) > 1:
            exchanging = StoreExchange(store, label, self._abandoned)

        def entries() -> list[Entry]:
            memory = iter(copied())
            if before is not None:
                before(destination)
            return [entry if _stays_on_disk(entry) else next(memory) for entry in content.entries]

        def save() -> None:
            with reading, exchanging as exchange:

                def written(value: Any) -> list[Any]:
                    reading.end()  # this rank's file has been written
                    return exchange(value)

                save_in_parts(content, destination, written_by, rank, written, entries, folders)

        self._submit(save)

    def _connected(self) -> Store | None:
        """Return the store for exchanges in the background; None if there is no background or no other rank.

        Called before any collective. If the store's host is lost, connecting takes as long as the group's timeout; and
        a rank that is lost before the ranks notice such losses would be waited for without end.
        """
        if not self._in_background or not process_group.is_initialized():
            return None
        notices()
        return own_connection()

    def _copying(self, entries: list[Entry]) -> Callable[[], list[Entry]]:
        """Copy unguarded values, which may change at any time, and return a function that copies the guarded values.

        Another thread must call the returned function, since training waits for it before changing guarded values.
        """
        guarded = [entry for entry in entries if entry.is_guarded]
        now = self._memory.copied([entry for entry in entries if not entry.is_guarded])
        device = device_of(guarded)
        ready = torch.accelerator.current_stream(device).record_event() if device is not None else None
        work = BackgroundWork()

        def copied() -> list[Entry]:
            with work:
                found = {True: iter(self._memory_later.copied(guarded, ready)), False: iter(now)}
            return [next(found[entry.is_guarded]) for entry in entries]

        return copied

    def made(self, value: Tensor, of: Tensor) -> None:
        """Record that ``value``, the full value of a tensor, will not change: background saves need not copy it."""
        is_parameters = isinstance(of, ShardedTensor) and of.is_parameter
        self._made[value] = identity(of) if is_parameters else None  # type: ignore[arg-type]

    def made_values(self) -> dict[Any, Tensor]:
        """Return full values of parameters, by the ``identity`` of the sharded tensor."""
        return {key: value for value, key in self._made.items() if key is not None}

    def save_whole(self, checkpoint: Mapping[str, Any], path: Any) -> None:
        """Write a full checkpoint. Only one rank calls this."""
        if self._in_background:
            self.save_whole_later(checkpoint, path, 0, None)
        else:
            save_whole(checkpoint, Destination(path, new_label()))

    def save_whole_later(
        self, checkpoint: Mapping[str, Any], path: Any, rank: int, group: Any, copying: OnRank0 | None = None
    ) -> None:
        """Copy this rank's shards; in the background, rank 0 gathers all shards and writes a full checkpoint.

        Args:
            checkpoint: a dictionary with the same sharded tensors on every rank; other values are taken from rank 0.
            group: a process group that is used only by the ranks' background threads; None if there is one rank.
            copying: calls a function on rank 0, which copies other values; these may refer to sharded tensors.
        """
        self.finish()
        sharded: list[ShardedTensor] = []

        def later(tensor: Any) -> Any:
            if is_view_of_parameter(tensor):
                return tensor.whole()
            sharded.append(tensor)
            return _Later(len(sharded) - 1)

        hollow = walk(dict(checkpoint), later, is_in_parts)
        entries = [entry_of(tensor, rank) for tensor in sharded]
        ranges = [tensor.slot.ranges() for tensor in sharded]
        if copying is None:
            kept = snapshot(hollow, self._made) if rank == 0 else None
        else:
            kept = copying(lambda: snapshot(hollow, self._made))
        destination = Destination(path, new_label())
        copied = self._copying(entries)

        def save() -> None:
            try:
                whole = put_together(copied, ranges, rank, group)
            except RuntimeError as error:
                raise CheckpointNotSavedError(
                    f"The checkpoint {path} was not saved: its shards could not be assembled on rank 0: "
                    f"{failure() or error}. Any earlier checkpoint at this path is unchanged."
                ) from error
            if rank == 0:
                complete = walk(kept, whole.__getitem__, lambda leaf: isinstance(leaf, _Later))
                save_whole(as_made_of_tensors(complete), destination)

        self._submit(save)

    def _submit(self, job: Callable[[], None]) -> None:
        """Run a job in a thread after all earlier jobs, unless one of them has failed."""
        if self._executor is None:
            # The interpreter waits for this thread at exit.
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="lightning_zero-checkpoint")
        before = self._jobs[-1] if self._jobs else None

        def run() -> None:
            if before is not None:
                before.result()  # raises if the earlier job has failed
            job()

        self._jobs.append(self._executor.submit(run))
        _unfinished.add(self)

    def then(self, act: Callable[[], None]) -> None:
        """Call ``act`` after earlier checkpoints have been written, unless writing one of them fails."""
        if self._jobs:
            self._submit(act)
        else:
            act()

    def finish(self) -> None:
        """Wait until all checkpoints have been written, and raise the first error."""
        jobs, self._jobs = self._jobs, []
        _unfinished.discard(self)
        wait(jobs)
        for job in jobs:
            job.result()

    def close(self, *, abandon: bool = False) -> None:
        """End a run: call ``finish``, and end the background thread.

        Args:
            abandon: whether other ranks may be gone; a save that waits for such a rank is discarded after some seconds.
        """
        if abandon:
            self._abandoned.set()
        try:
            self.finish()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None
            self._abandoned.clear()


class _Later(int):
    """Placeholder for a sharded tensor that is assembled in the background; its value is the tensor's index."""


def _stays_on_disk(entry: Entry) -> bool:
    """Whether an entry is optimizer state on a disk, which may be too large to be copied to memory."""
    return entry.is_guarded and isinstance(entry.values, LazyTensor)


_unfinished: set[Saver] = set()


@atexit.register
def _log_failures() -> None:
    """Log failures that ``finish`` has not reported, for example because a Fabric script ended before calling it."""
    for saver in _unfinished:
        for job in saver._jobs:
            if (error := job.exception()) is not None:
                log.error("%s", error)


def put_together(
    copied: Callable[[], list[Entry]], ranges: list[list[tuple[int, int]]], rank: int, group: ProcessGroup | None
) -> list[Tensor]:
    """Assemble full tensors on rank 0, given each tensor's range on each rank; other ranks return []. Collective.

    Args:
        copied: returns this rank's shards.

    Raises:
        RuntimeError: on every rank, if a rank cannot copy its shards or is lost, or if rank 0 has too little memory.
    """
    entries, whole = [], []
    error: Exception | None = None
    try:
        entries = copied()
        if rank == 0:
            whole = [torch.empty(entry.shape.numel(), dtype=entry.dtype, device="cpu") for entry in entries]
    except Exception as raised:
        error = raised
    # Exchange errors before any values: otherwise, other ranks would wait in vain for this rank.
    reason = reason_of(error) if error is not None else None
    reasons = process_group.all_gather_objects(reason, group) if group is not None else [reason]
    for number, reason in enumerate(reasons):
        if reason is not None:
            raise RuntimeError(f"rank {number} failed with {reason}") from error
    for number, (entry, owned) in enumerate(zip(entries, ranges)):
        if rank:
            if entry.values.numel():
                process_group.send(entry.values, group, 0)
            continue
        flat = whole[number]
        flat[: entry.values.numel()] = entry.values
        for source, (start, stop) in enumerate(owned[1:], 1):
            if stop > start:
                process_group.receive(flat[start:stop], group, source)
        whole[number] = flat.view(entry.shape)
    return whole


def own_connection() -> Store:
    """Return a second connection to the process group's store, since the main thread may block the first one.

    Later saves reuse the connection, since connecting to a store whose host is gone takes as long as the group's
    timeout.
    """
    return _connection(process_group.default_store())


@lru_cache(maxsize=1)
def _connection(store: Store) -> Store:
    return process_group.new_connection(store)


class StoreExchange:
    """All-gather of small values through the process group's store, usable from a thread while collectives run.

    Args:
        store: see ``own_connection``.
        name: identifies this exchange on every rank; must be different for each exchange.
        abandoned: once set, the exchange waits for other ranks for only a few more seconds.
    """

    def __init__(self, store: Store, name: str, abandoned: Event) -> None:
        self._store = process_group.named_store(f"lightning_zero/checkpoint/{name}", store)
        self._rank, self._size, self._abandoned = process_group.rank(), process_group.world_size(), abandoned
        self._notices = notices(collective=False)
        self._round = 0

    def __call__(self, value: Any) -> list[Any]:
        """All-gather a small picklable value, and return the values in the order of ranks."""
        number, self._round = self._round, self._round + 1
        with explained("The exchange of checkpoint metadata", DistError):  # fails if the store's host process ends
            self._store.set(f"{number}/{self._rank}", pickle.dumps(value))  # type: ignore[arg-type]
            missing = self._wait(f"{number}")
        if missing:
            raise RuntimeError(
                f"rank(s) {missing} did not finish a checkpoint: "
                f"{failure() or 'their processes have ended, or the run has ended'}"
            )
        return [
            value if rank == self._rank else pickle.loads(self._store.get(f"{number}/{rank}"))
            for rank in range(self._size)
        ]

    def __enter__(self) -> StoreExchange:
        return self

    def __exit__(self, *_: object) -> None:
        """Announce that this rank is done.

        Rank 0, whose process may host the store, waits for the other ranks, and then deletes the keys of all ranks.
        """
        with suppress(RuntimeError):  # raised if the store is gone: then no rank can wait for this key
            if self._rank != 0:
                self._store.set(f"left/{self._rank}", "")
            elif not self._wait("left"):
                for what in (*range(self._round), "left"):
                    for rank in range(self._size):
                        self._store.delete_key(f"{what}/{rank}")

    def _wait(self, what: str) -> list[int]:
        """Wait until all other ranks have set a key, or a rank has ended or failed; return the ranks without a key."""
        missing = [rank for rank in range(self._size) if rank != self._rank]
        pause, lost_since = 1e-3, None
        while True:
            ended = set(self._notices.gone)  # read before the keys, since a rank may write its key and then end
            missing = [rank for rank in missing if not self._store.check([f"{what}/{rank}"])]
            if not missing or ended.intersection(missing):
                return missing
            if self._abandoned.is_set() or failure() is not None:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > _PATIENCE:
                    return missing
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
