"""What a strategy saves by: in the form that was asked for, now or in the background."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
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
    identity,
    is_view_of_parameter,
    not_saved,
    refusal_of,
    save_in_parts,
    save_whole,
)
from lightning_zero.engine.settling import Work
from lightning_zero.engine.sharded_tensor import ShardedTensor
from lightning_zero.engine.stored import StoredTensor
from lightning_zero.engine.watch import failure
from lightning_zero.labels import new_label


class Saver:
    """Saves one checkpoint after another. Call ``finish`` before each, on all ranks, to learn what became of the last.

    Args:
        in_background: copy what is to be saved, and let the caller go on while it is written.
    """

    def __init__(self, in_background: bool) -> None:
        self._in_background = in_background
        self._background, self._memory, self._memory_later = Background(), HostMemory(), HostMemory()
        self._abandoned = Event()
        self._made = WeakIdKeyDictionary()

    def __reduce__(self) -> Any:
        # users copy trainers and strategies: what is under way belongs to one
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
        """Write a folder, of which each rank writes a file. Collective.

        Args:
            tree, rest: see ``content_of``.
            path: rank 0's counts.
            written_by: for the manifest.
            rank: this one.
            gather: collects a value of every rank.

        Raises:
            CheckpointNotSavedError: on every rank, if it was not written; in the background ``finish`` raises it.
        """
        # Before anything that ranks do together: who is not connected yet when the host of the store is lost would try
        # for as long as the group's timeout.
        store = own_connection() if self._in_background and dist.is_initialized() else None
        label = new_label()
        # likewise: what is refused is refused on every rank before any has written something
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
        # what stays there is read as it is written, and nobody writes to it until then
        reading = Work(tells=False, settles=any(map(_stays_on_disk, content.entries)))
        telling: AbstractContextManager[Gather] = nullcontext(lambda value: [value])
        if store is not None and len(everyone) > 1:
            telling = StoreExchange(store, label, self._abandoned)

        def save() -> None:
            with reading, telling as exchange:
                memory = iter(copied())
                entries = [entry if _stays_on_disk(entry) else next(memory) for entry in content.entries]

                def tell(value: Any) -> list[Any]:
                    reading.end()  # this rank has written its part
                    return exchange(value)

                save_in_parts(replace(content, entries=entries), destination, written_by, rank, tell)

        self._background.submit(save)

    def _copying(self, entries: list[Entry]) -> Callable[[], list[Entry]]:
        """Copy what may be written to at any time, and return what copies the rest, which training waits for to do so.

        It must be called, in another thread.
        """
        guarded = [entry for entry in entries if entry.is_guarded]
        self._memory_later.reserve(guarded)
        now = self._memory.copied([entry for entry in entries if not entry.is_guarded])
        device = device_of(guarded)
        ready = torch.accelerator.current_stream(device).record_event() if device is not None else None
        work = Work(tells=False)

        def copied() -> list[Entry]:
            with work:
                found = {True: iter(self._memory_later.copied(guarded, ready)), False: iter(now)}
            return [next(found[entry.is_guarded]) for entry in entries]

        return copied

    def made(self, values: Iterable[Any]) -> None:
        """Note of tensors that nobody will change them: they need not be copied to be saved."""
        if self._in_background:
            self._made.update((value, None) for value in values if isinstance(value, Tensor))

    def save_whole(self, checkpoint: Mapping[str, Any], path: Any) -> None:
        """Write one file, by one rank.

        Raises:
            CheckpointNotSavedError: if it was not written; in the background ``finish`` raises it.
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
            if isinstance(leaf, Tensor):  # one that autograd has made has no deep copy
                memo[id(leaf)] = leaf if leaf in self._made else copy.deepcopy(leaf.detach(), memo)
        return copy.deepcopy(checkpoint, memo)

    def save_whole_later(self, checkpoint: Mapping[str, Any], path: Any, rank: int, group: Any) -> None:
        """Copy this rank's parts, and let rank 0 put all parts together and write one file in the background.

        Args:
            checkpoint: with sharded tensors, the same on every rank; of all else rank 0's counts.
            group: for the threads of all ranks alone; None where there is one rank.
        """
        self._background.finish()
        leaves, spec = tree_flatten(dict(checkpoint))
        leaves = [leaf.whole() if is_view_of_parameter(leaf) else leaf for leaf in leaves]
        sharded = {identity(leaf): leaf for leaf in leaves if isinstance(leaf, ShardedTensor)}
        keys = [identity(leaf) if isinstance(leaf, ShardedTensor) else None for leaf in leaves]
        entries = [entry_of(tensor, rank) for tensor in sharded.values()]
        ranges = [tensor.slot.ranges() for tensor in sharded.values()]
        kept = self._copied([leaf if key is None and rank == 0 else None for key, leaf in zip(keys, leaves)])
        destination = Destination(path, new_label())
        copied = self._copying(entries)

        def save() -> None:
            try:
                whole = dict(zip(sharded, put_together(copied(), ranges, rank, group)))
            except RuntimeError as error:
                raise CheckpointNotSavedError(
                    f"The checkpoint {path} was not saved: its parts did not come together: {failure() or error}. What "
                    "was there before is as it was."
                ) from error
            if rank == 0:
                found = [leaf if key is None else whole[key] for key, leaf in zip(keys, kept)]
                save_whole(tree_unflatten(found, spec), destination)

        self._background.submit(save)

    def then(self, act: Callable[[], None]) -> None:
        """Do something when what was saved before is written; not at all if that fails."""
        if self._background.is_empty:
            act()
        else:
            self._background.submit(act)

    @property
    def is_done(self) -> bool:
        """Whether all that was saved is written, or has failed."""
        return self._background.is_done

    def finish(self) -> None:
        """Wait until all that was saved is written.

        Raises:
            CheckpointNotSavedError: if something was not.
        """
        self._background.finish()

    def close(self, *, abandon: bool = False) -> None:
        """As ``finish``, at the end of a run.

        Args:
            abandon: other ranks are gone: what waits for them for more than some seconds is given up, and removed.
        """
        if abandon:
            self._abandoned.set()
        try:
            self._background.close()
        finally:
            self._abandoned.clear()


def _stays_on_disk(entry: Entry) -> bool:
    """Whether it is states of an optimizer on a disk, of which there are too many for the memory."""
    return entry.is_guarded and isinstance(entry.values, StoredTensor)
