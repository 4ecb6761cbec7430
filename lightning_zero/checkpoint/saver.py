"""Save checkpoints: a file or a folder, immediately or in the background while training continues."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.objects import ONE_RANK, Ranks, alone, snapshot
from lightning_zero.checkpoint.saving import (
    CopyBuffer,
    Entry,
    content_of,
    device_of,
    entry_of,
    on_every_rank,
    write_file,
    write_folder,
)
from lightning_zero.checkpoint.trees import is_view_of_parameter
from lightning_zero.engine import (
    LazyTensor,
    ShardedTensor,
    as_made_of_tensors,
    await_always,
    failures,
    process_group,
    sharded_tree,
)
from lightning_zero.io.labels import new_label

log = logging.getLogger(__name__)


class SaveMode(Enum):
    """How a checkpoint is saved."""

    GATHERED = "gathered"
    """One file, written by rank 0; tensors are gathered before."""
    ASSEMBLED = "assembled"
    """One file, written by rank 0 in the background, where the other ranks send their shards to rank 0."""
    SHARDED = "sharded"
    """A folder, to which each rank writes its shards."""


_Write = Callable[[Ranks, Callable[[], list[Entry]]], None]
"""Writes a rank's part of a checkpoint, given the ranks and a function that returns the rank's entries or copies."""


@dataclass(frozen=True)
class SaveJob:
    """A checkpoint to be saved.

    Attributes:
        path: the path of the file or folder; rank 0's value is used.
        contents: the checkpoint's entries: on every rank the same sharded tensors; other values are taken from rank 0.
        tree: with ``SaveMode.SHARDED``, the entries that are stored in DCP's format; see ``content_of``.
        written_by: with ``SaveMode.SHARDED``, versions, stage and world size, for the manifest.
        before: called in the background, after the values have been copied and before any are written.
    """

    mode: SaveMode
    path: Any
    contents: Mapping[str, Any]
    tree: Mapping[str, Any] = field(default_factory=dict)
    written_by: dict[str, Any] = field(default_factory=dict)
    folders: Sequence[int] = (0,)
    before: Callable[[], None] = lambda: None


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
        self._group: process_group.ProcessGroup | None = None  # of all ranks, for their background threads alone
        self._made = WeakIdKeyDictionary()
        self._expected: dict[str, bool] = {}  # by path: whether there is a checkpoint once all jobs are done

    def __reduce__(self) -> Any:
        # Users copy trainers and strategies. The copy gets a new saver, without the original's background work.
        return Saver, (self._in_background,)

    def save(self, job: SaveJob, ranks: Ranks = ONE_RANK) -> None:
        """Save a checkpoint. Collective.

        Raises:
            CheckpointNotSavedError: on every rank, if any rank fails to write; in the background, ``finish`` raises it.
        """

        def begin() -> tuple[str, str]:
            label = new_label()
            if ranks.rank == 0:  # every rank refuses a path before any rank writes to it
                destination = Destination(job.path, label)
                destination.check_replaceable()
                destination.make_folder()  # now, since Lightning may link to the checkpoint before it is written
            return str(job.path), label

        path, label = on_every_rank(begin, ranks, str(job.path))[0]
        destination = Destination(path, label)
        part = self._part_of_folder if job.mode is SaveMode.SHARDED else self._part_of_file
        entries, write = part(job, ranks, destination)
        if not self._in_background:
            write(ranks, lambda: entries)
            return
        self._expected[path] = True
        group = self._joined() if entries or job.mode is SaveMode.SHARDED else None
        gather = alone if group is None else partial(process_group.all_gather_objects, group=group)
        stay = []
        if job.mode is SaveMode.SHARDED:
            # Optimizer states on a disk, which may be too large for memory, are not copied, and must not change until
            # they are read.
            stay = [entry for entry in entries if entry.is_guarded and isinstance(entry.values, LazyTensor)]
        copied = self._copying(entries, stay)
        reading: Future[None] = Future()
        await_always(reading)  # training waits for it before it changes guarded values

        def end() -> None:
            if not reading.done():
                reading.set_result(None)

        def copies() -> list[Entry]:
            found = copied()
            if not stay:
                end()
            job.before()
            return found

        def written(value: Any) -> list[Any]:
            end()  # this rank's file has been written
            return gather(value)

        def save() -> None:
            try:
                with failures.explained(f"Saving the checkpoint {path} in the background"):
                    write(replace(ranks, gather=written, group=group), copies)
            finally:
                end()

        self._submit(save)

    def _joined(self) -> process_group.ProcessGroup | None:
        """Return the group of the ranks' background threads; None for a process alone. The first call is collective."""
        if not process_group.is_initialized():
            return None
        if self._group not in process_group.all_groups():
            self._group = process_group.new_patient_group()
        return self._group

    def _part_of_folder(self, job: SaveJob, ranks: Ranks, destination: Destination) -> tuple[list[Entry], _Write]:
        """Serialise rank 0's objects, and return the shards that this rank writes, and the function that writes."""
        content = content_of(job.tree, job.contents, ranks)

        def write(ranks: Ranks, entries: Callable[[], list[Entry]]) -> None:
            write_folder(content, destination, job.written_by, ranks, entries, job.folders)

        return content.entries, write

    def _part_of_file(self, job: SaveJob, ranks: Ranks, destination: Destination) -> tuple[list[Entry], _Write]:
        """Copy rank 0's objects, and return this rank's shards, and the function with which rank 0 writes the file."""
        if not self._in_background:
            return [], lambda ranks, _: ranks.on_first(lambda: write_file(job.contents, destination))
        aside: list[Any] = []

        def later(tensor: Any) -> Any:
            if is_view_of_parameter(tensor):
                return tensor.whole()
            aside.append(tensor)
            return _Later(len(aside) - 1)

        def is_constant(leaf: Any) -> bool:
            return isinstance(leaf, Tensor) and leaf in self._made

        contents = dict(job.contents)
        hollow = sharded_tree.walk(contents, later, lambda leaf: sharded_tree.is_in_parts(leaf) or is_constant(leaf))
        kept = ranks.on_first(lambda: snapshot(hollow))
        constant = {number: tensor for number, tensor in enumerate(aside) if is_constant(tensor)}
        sharded = {number: tensor for number, tensor in enumerate(aside) if number not in constant}
        numbers, ranges = list(sharded), [tensor.slot.ranges() for tensor in sharded.values()]

        def write(ranks: Ranks, entries: Callable[[], list[Entry]]) -> None:
            whole = dict(zip(numbers, put_together(entries, ranges, ranks, destination.path)))
            if ranks.rank == 0:
                complete = sharded_tree.walk(
                    kept, (constant | whole).__getitem__, lambda leaf: isinstance(leaf, _Later)
                )
                write_file(as_made_of_tensors(complete), destination)

        return [entry_of(tensor, ranks.rank) for tensor in sharded.values()], write

    def _copying(self, entries: list[Entry], stay: list[Entry]) -> Callable[[], list[Entry]]:
        """Copy unguarded values, which may change at any time, and return a function that copies the guarded values.

        That function returns the copies and, in their places, the entries that ``stay`` uncopied.
        """
        left = set(map(id, stay))
        guarded = [entry for entry in entries if entry.is_guarded and id(entry) not in left]
        unguarded = [entry for entry in entries if not entry.is_guarded]
        copies = dict(zip(map(id, unguarded), self._memory.copied(unguarded)))
        device = device_of(guarded)
        ready = torch.accelerator.current_stream(device).record_event() if device is not None else None

        def copied() -> list[Entry]:
            copies.update(zip(map(id, guarded), self._memory_later.copied(guarded, ready)))
            return [copies.get(id(entry), entry) for entry in entries]

        return copied

    def made(self, value: Tensor, of: Tensor) -> None:
        """Record that ``value``, the full value of a tensor, will not change: background saves need not copy it."""
        is_parameters = isinstance(of, ShardedTensor) and of.is_parameter
        self._made[value] = sharded_tree.identity(of) if is_parameters else None  # type: ignore[arg-type]

    def made_values(self) -> dict[Any, Tensor]:
        """Return full values of parameters, by the ``identity`` of the sharded tensor."""
        return {key: value for value, key in self._made.items() if key is not None}

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

        if before is None:
            atexit.register(self._log_failures)
        self._jobs.append(self._executor.submit(run))

    def _log_failures(self) -> None:
        """Log failures that ``finish`` has not reported: a Fabric script, for example, may end before calling it."""
        for job in self._jobs:
            if (error := job.exception()) is not None:
                log.error("%s", error)

    def expects(self, path: Any) -> bool | None:
        """Whether there will be a checkpoint at a path once all jobs are done; None if no job changes the path."""
        return self._expected.get(str(path))

    def expect_no(self, path: Any) -> None:
        """Note on every rank that one of the ranks removes a checkpoint, by ``then``."""
        if self._jobs:
            self._expected[str(path)] = False

    def then(self, act: Callable[[], None]) -> None:
        """Call ``act`` after earlier checkpoints have been written, unless writing one of them fails."""
        if self._jobs:
            self._submit(act)
        else:
            act()

    def finish(self) -> None:
        """Wait until all checkpoints have been written, and raise the first error."""
        jobs, self._jobs = self._jobs, []
        self._expected.clear()
        atexit.unregister(self._log_failures)
        wait(jobs)
        for job in jobs:
            job.result()

    def close(self) -> None:
        """End a run: call ``finish``, and end the background thread. After a failure, saves under way fail, too."""
        try:
            self.finish()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None
            if self._group is not None:
                with suppress(RuntimeError, ValueError):  # the group may have failed, or already be destroyed
                    process_group.destroy(self._group)
                self._group = None


class _Later(int):
    """Placeholder for a tensor that is constant, or will be assembled in the background: the tensor's index."""


def put_together(
    copied: Callable[[], list[Entry]], ranges: list[list[tuple[int, int]]], ranks: Ranks, path: str
) -> list[Tensor]:
    """Assemble full tensors on rank 0, given each tensor's range on each rank; other ranks return []. Collective.

    Args:
        copied: returns this rank's shards.

    Raises:
        CheckpointNotSavedError: on every rank, if a rank cannot copy its shards, or if rank 0 has too little memory.
        RuntimeError: if a rank is lost.
    """
    entries: list[Entry] = []
    whole: list[Tensor] = []

    def prepare() -> None:
        entries.extend(copied())
        if ranks.rank == 0:
            whole.extend(torch.empty(entry.shape.numel(), dtype=entry.dtype, device="cpu") for entry in entries)

    on_every_rank(prepare, ranks, path)  # so that no rank waits in vain for the values of one that has failed
    for number, (entry, owned) in enumerate(zip(entries, ranges)):
        if ranks.rank:
            if entry.values.numel():
                failures.send(entry.values, ranks.group, 0)
            continue
        flat = whole[number]
        flat[: entry.values.numel()] = entry.values
        for source, (start, stop) in enumerate(owned[1:], 1):
            if stop > start:
                process_group.receive(flat[start:stop], ranks.group, source)
        whole[number] = flat.view(entry.shape)
    return whole
