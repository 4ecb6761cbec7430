"""Saves a strategy's checkpoints, full or sharded, at once or in the background."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.checkpoint.background import Background, StoreExchange, own_connection, put_together
from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.saving import (
    CheckpointNotSavedError,
    Entry,
    Gather,
    HostMemory,
    content_of,
    device_of,
    entry_of,
    is_view_of_parameter,
    not_saved,
    refusal_of,
    save_in_parts,
    save_whole,
)
from lightning_zero.engine.comm.background_work import BackgroundWork
from lightning_zero.engine.comm.failures import failure
from lightning_zero.engine.comm.process_group import is_initialized
from lightning_zero.engine.compat import tree_leaves
from lightning_zero.engine.tensor.lazy_tensor import StoredTensor
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.sharded_tree import is_in_parts, walk
from lightning_zero.io.labels import new_label


class Saver:
    """Saves one checkpoint after another. Call ``finish`` on all ranks before each, to learn the last one's result.

    Args:
        in_background: copy the values, and return before they are written.
    """

    def __init__(self, in_background: bool) -> None:
        self._in_background = in_background
        self._background, self._memory, self._memory_later = Background(), HostMemory(), HostMemory()
        self._abandoned = Event()
        self._made = WeakIdKeyDictionary()

    def __reduce__(self) -> Any:
        # Users copy trainers and strategies; background work belongs to the original alone.
        return Saver, (self._in_background,)

    def save_in_parts(
        self,
        tree: Mapping[str, Any],
        rest: Mapping[str, Any],
        path: Any,
        written_by: dict[str, Any],
        rank: int,
        gather: Gather,
    ) -> None:
        """Write a sharded checkpoint: a folder in which each rank writes one file. Collective.

        Args:
            tree, rest: see ``content_of``.
            path: rank 0's is used.
            written_by: for the manifest.
            rank: of this process.
            gather: all-gathers a value.

        Raises:
            CheckpointNotSavedError: on every rank, if writing failed; in the background ``finish`` raises it.
        """
        # Connect before any collective: if the store's host is lost, connecting takes as long as the group's timeout.
        store = own_connection() if self._in_background and is_initialized() else None
        label = new_label()
        # Checked here as well: a refused path is refused on every rank before any rank has written.
        everyone = gather((label, str(path), refusal_of(path, label) if rank == 0 else None))
        label, path, refusal = everyone[0]
        if refusal is not None:
            raise not_saved(path, 0, refusal)
        content, destination = content_of(tree, rest, rank), Destination(path, label)
        if not self._in_background:
            save_in_parts(content, destination, written_by, rank, gather)
            return
        self._background.finish()
        copied = self._copying([entry for entry in content.entries if not _stays_on_disk(entry)])
        # Values on a disk are read while they are written to the checkpoint; nothing may change them until then.
        reading = BackgroundWork(is_awaited=any(map(_stays_on_disk, content.entries)))
        telling: AbstractContextManager[Gather] = nullcontext(lambda value: [value])
        if store is not None and len(everyone) > 1:
            telling = StoreExchange(store, label, self._abandoned)

        def save() -> None:
            with reading, telling as exchange:
                memory = iter(copied())
                entries = [entry if _stays_on_disk(entry) else next(memory) for entry in content.entries]

                def tell(value: Any) -> list[Any]:
                    reading.end()  # this rank's file is written
                    return exchange(value)

                save_in_parts(replace(content, entries=entries), destination, written_by, rank, tell)

        self._background.submit(save)

    def _copying(self, entries: list[Entry]) -> Callable[[], list[Entry]]:
        """Copy unguarded values, which may change at any time; returns a function that copies the guarded ones.

        The returned function must be called, in another thread: training waits for it before it changes guarded values.
        """
        guarded = [entry for entry in entries if entry.is_guarded]
        self._memory_later.reserve(guarded)
        now = self._memory.copied([entry for entry in entries if not entry.is_guarded])
        device = device_of(guarded)
        ready = torch.accelerator.current_stream(device).record_event() if device is not None else None
        work = BackgroundWork()

        def copied() -> list[Entry]:
            with work:
                found = {True: iter(self._memory_later.copied(guarded, ready)), False: iter(now)}
            return [next(found[entry.is_guarded]) for entry in entries]

        return copied

    def made(self, value: Tensor) -> None:
        """Note of a tensor that nobody will change it: it need not be copied to be saved."""
        if self._in_background:
            self._made[value] = None

    def save_whole(self, checkpoint: Mapping[str, Any], path: Any) -> None:
        """Write a full checkpoint, by one rank.

        Raises:
            CheckpointNotSavedError: if writing failed; in the background ``finish`` raises it.
        """
        destination = Destination(path, new_label())
        if not self._in_background:
            save_whole(checkpoint, destination)
            return
        self._background.finish()
        self._background.submit(partial(save_whole, self._copied(checkpoint), destination))

    def _copied(self, checkpoint: Any) -> Any:
        memo: dict[int, Any] = {}
        for leaf in tree_leaves(checkpoint):
            if isinstance(leaf, Tensor):  # deepcopy refuses non-leaf tensors of autograd
                memo[id(leaf)] = leaf if leaf in self._made else copy.deepcopy(leaf.detach(), memo)
        return copy.deepcopy(checkpoint, memo)

    def save_whole_later(self, checkpoint: Mapping[str, Any], path: Any, rank: int, group: Any) -> None:
        """Copy this rank's shards; in the background, rank 0 gathers all shards and writes a full checkpoint.

        Args:
            checkpoint: with the same sharded tensors on every rank; of everything else rank 0's is written.
            group: a process group for these background threads only; None with one rank.
        """
        self._background.finish()
        sharded: list[ShardedTensor] = []

        def later(tensor: Any) -> Any:
            if is_view_of_parameter(tensor):
                return tensor.whole()
            sharded.append(tensor)
            return _Later(len(sharded) - 1)

        hollow = walk(dict(checkpoint), later, is_in_parts)
        entries = [entry_of(tensor, rank) for tensor in sharded]
        ranges = [tensor.slot.ranges() for tensor in sharded]
        kept = self._copied(hollow) if rank == 0 else None
        destination = Destination(path, new_label())
        copied = self._copying(entries)

        def save() -> None:
            try:
                whole = put_together(copied(), ranges, rank, group)
            except RuntimeError as error:
                raise CheckpointNotSavedError(
                    f"The checkpoint {path} was not saved: its parts did not come together: {failure() or error}. What "
                    "was there before is as it was."
                ) from error
            if rank == 0:
                found = walk(kept, lambda leaf: whole[leaf.number], _is_later)
                save_whole(found, destination)

        self._background.submit(save)

    def then(self, act: Callable[[], None]) -> None:
        """Call ``act`` after earlier checkpoints have been written; not at all if writing them fails."""
        if self._background.is_empty:
            act()
        else:
            self._background.submit(act)

    @property
    def is_done(self) -> bool:
        """Whether all saves have finished, successfully or not."""
        return self._background.is_done

    def finish(self) -> None:
        """Wait until all checkpoints have been written.

        Raises:
            CheckpointNotSavedError: if one could not be written.
        """
        self._background.finish()

    def close(self, *, abandon: bool = False) -> None:
        """Call ``finish`` at the end of a run.

        Args:
            abandon: other ranks are gone: a save that waits for them for more than a few seconds is given up and
            removed.
        """
        if abandon:
            self._abandoned.set()
        try:
            self._background.close()
        finally:
            self._abandoned.clear()


@dataclass(frozen=True)
class _Later:
    """In the place of a tensor whose parts are put together in the background: its number among these."""

    number: int


def _is_later(leaf: Any) -> bool:
    return isinstance(leaf, _Later)


def _stays_on_disk(entry: Entry) -> bool:
    """Whether it is optimizer state on a disk, which is too large to be copied to memory."""
    return entry.is_guarded and isinstance(entry.values, StoredTensor)
