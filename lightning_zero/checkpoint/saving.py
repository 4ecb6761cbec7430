"""Write a checkpoint: a sharded one by all ranks in parallel, or a full one by one rank.

A sharded checkpoint has the format of ``torch.distributed.checkpoint`` (DCP). DCP's own ``save`` takes 2.8 times as
long, and training waits six times as long for its ``async_save`` (``benchmarks/results/checkpoint.md``).
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.optim import Optimizer

from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.form import CHECKPOINT_KEY, DCP_METADATA, FORMAT, MANIFEST, REST, SAVE_ID, VERSIONS
from lightning_zero.checkpoint.objects import ONE_RANK, Ranks, serialised
from lightning_zero.checkpoint.trees import (
    by_dotted_name,
    identity,
    is_strided,
    is_view_of_parameter,
    leaves_of,
    split,
    versions_in,
)
from lightning_zero.engine import LazyTensor, ShardedTensor, compat, flat_range, own_stream
from lightning_zero.engine import share as tiling
from lightning_zero.io.text import listed

_StorageInfo, _DCP_VERSION = compat.dcp_internals()
_Result = TypeVar("_Result")
_PIECE_BYTES = 2**26
"""Maximum size of a piece in bytes, unless one row is larger: reading a piece takes this much memory."""


class CheckpointNotSavedError(OSError):
    """A checkpoint could not be written; any earlier checkpoint at its path is unchanged."""


@dataclass
class Entry:
    """The part of a tensor that one rank writes.

    Attributes:
        names: all names of the tensor: several if parameters are tied.
        share: how tensor parallelism divides the full tensor.
        values: this rank's values, of any shape and dtype; a ``LazyTensor`` is read piece by piece.
        start, stop: this rank's range in the flattened tensor or, under tensor parallelism, in this rank's flat share.
        is_guarded: whether writes to the values wait for background reads; see ``await_always``.
    """

    names: tuple[str, ...]
    share: tiling.Share
    dtype: torch.dtype
    values: Tensor
    start: int
    stop: int
    is_guarded: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.share.shape

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize

    def is_written_by(self, rank: int) -> bool:
        """Whether this rank writes anything: rank 0 also writes empty tensors."""
        return self.stop > self.start or (rank == 0 and not self.shape.numel())

    @cached_property
    def boxes(self) -> list[tiling.Box]:
        """The rectangles that tile the range; for an empty tensor, a single empty rectangle."""
        if not self.shape.numel():
            return [tiling.Box((0,) * len(self.shape), tuple(self.shape), 0)]
        return tiling.boxes_of(self.share, self.start, self.stop, max(_PIECE_BYTES // self.dtype.itemsize, 1))

    def piece(self, box: tiling.Box) -> Tensor:
        """Return the values in one rectangle, on the CPU, in a storage of exactly their size."""
        part = flat_range(self.values.detach(), box.start - self.start, box.stop - self.start)
        part = part.to("cpu", self.dtype).resolve_conj().resolve_neg()
        return _alone(part.contiguous()).view(box.sizes)


@dataclass(frozen=True)
class Content:
    """The part of a sharded checkpoint that one rank writes. Only rank 0 writes more than ``entries``.

    Attributes:
        entries: this rank's parts of tensors.
        objects: all other leaves of DCP's tree, serialised, by DCP's dotted name.
        rest: the entries outside of DCP's tree, serialised.
        paths: each leaf's path in the tree, by DCP's dotted name.
    """

    entries: list[Entry]
    objects: dict[str, bytes]
    rest: bytes
    paths: dict[str, tuple[Any, ...]]


def content_of(tree: Mapping[str, Any], rest: Mapping[str, Any], ranks: Ranks = ONE_RANK) -> Content:
    """Return the part of a checkpoint that a rank writes. Every rank must pass the same sharded tensors.

    Args:
        tree: nested dicts and lists of tensors and other values, to be stored in DCP's format; it may be a state dict.
        rest: Lightning's other entries; sharded tensors among them are stored in DCP's format, too.
    """
    hollow, sharded = split(dict(rest))
    versions = versions_in(rest) | versions_in(tree)
    if versions:
        hollow[CHECKPOINT_KEY] = {**hollow.get(CHECKPOINT_KEY, {}), VERSIONS: versions}
    leaves, paths = by_dotted_name([*leaves_of(tree), *sharded])
    shared: dict[Any, list[str]] = {}
    tensors: dict[Any, Tensor] = {}
    others: dict[str, Any] = {}
    for name, leaf in leaves.items():
        if is_view_of_parameter(leaf):
            leaf = leaf.whole()
        if isinstance(leaf, Tensor) and is_strided(leaf):
            key = identity(leaf)
            shared.setdefault(key, []).append(name)
            tensors[key] = leaf
        else:
            others[name] = leaf

    def serialise() -> tuple[dict[str, bytes], bytes]:
        return {name: serialised(value) for name, value in others.items()}, serialised(hollow)

    objects, data = ranks.on_first(serialise) or ({}, b"")
    entries = [entry_of(tensor, ranks.rank, tuple(shared[key])) for key, tensor in tensors.items()]
    own = [entry for entry in entries if entry.is_written_by(ranks.rank)]
    return Content(own, objects, data, paths if ranks.rank == 0 else {})


def by_name(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Replace parameter numbers in an optimizer's state dict with names, as in DCP checkpoints.

    Args:
        names: the parameters' names, in the order of the groups; a parameter without a name keeps its number.
    """

    def name_of(number: Any) -> str:
        has_name = isinstance(number, int) and number < len(names)
        return names[number] if has_name else str(number)

    return {
        **state,
        "state": {name_of(number): values for number, values in state["state"].items()},
        "param_groups": [{**group, "params": list(map(name_of, group["params"]))} for group in state["param_groups"]],
    }


def names_in(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return an optimizer's parameter names in group order: ``names[id(parameter)]``, or a number if there is none."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(id(parameter), str(number)) for number, parameter in enumerate(parameters)]


def entry_of(tensor: Tensor, rank: int, names: tuple[str, ...] = ()) -> Entry:
    """Return the part of a tensor that one rank writes."""
    if isinstance(tensor, ShardedTensor) and tensor.numel():
        share, start = tensor.slot.share, tensor.slot.offset
        stop = start + tensor.slot.local_numel if share.is_counted_here else start
        is_guarded = not (tensor.is_parameter and tensor.slot.is_written_by_modules)
        return Entry(names, share, tensor.dtype, tensor.at_rest(), start, stop, is_guarded)
    # Only rank 0 writes a tensor that is not sharded, even if its values differ between ranks.
    values = tensor if tensor.numel() else torch.empty(0, dtype=tensor.dtype, device="cpu")
    return Entry(names, tiling.Share(tensor.shape), tensor.dtype, values, 0, tensor.numel() if rank == 0 else 0)


def _alone(part: Tensor) -> Tensor:
    """Return the tensor with a storage of its own size, since torch.save writes entire storages."""
    if part.numel() == 1:  # its stride may be any number, but must be 1 for access to its bytes
        return part.clone(memory_format=torch.contiguous_format)
    if part.untyped_storage().nbytes() == part.nbytes or not part.numel():
        return part
    return torch.frombuffer(part.view(torch.uint8).numpy(), dtype=torch.uint8).view(part.dtype)


class CopyBuffer:
    """Reusable CPU memory to which checkpoints are copied; pinned if values are on an accelerator."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copied(self, entries: list[Entry], after: torch.Event | None = None) -> list[Entry]:
        """Copy the entries' values, so that training may change the originals.

        Args:
            after: event on the entries' device after which values are final; None waits for all work queued so far.
        """
        device, needed = device_of(entries), sum(_aligned(entry.nbytes) for entry in entries)
        if len(self._memory) < needed:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees the old memory first
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=device is not None, device="cpu")
        copied, targets, sources, position = [], [], [], 0
        for entry in entries:
            target = self._memory[position : position + entry.nbytes].view(entry.dtype)
            position += _aligned(entry.nbytes)
            copied.append(replace(entry, values=target))
            if isinstance(entry.values, LazyTensor):
                target.copy_(entry.values.shown(0, target.numel()))  # one at a time: together, they may exceed memory
                continue
            targets.append(target)
            sources.append(entry.values.detach().reshape(-1)[: target.numel()])
        if device is None:
            if targets:
                compat.foreach_copy(targets, sources)
        else:
            stream = own_stream(device)
            stream.wait_event(after or torch.accelerator.current_stream(device).record_event())
            with stream:
                compat.foreach_copy(targets, sources, non_blocking=True)
            stream.synchronize()
        return copied


def device_of(entries: list[Entry]) -> torch.device | None:
    """Return the device of the values that are not on the CPU; None if all values are on the CPU."""
    return next((entry.values.device for entry in entries if entry.values.device.type != "cpu"), None)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


@dataclass(frozen=True)
class Written:
    """What one rank has written: its file's name and size, and the offset and length of each piece."""

    file: str
    nbytes: int
    tensors: list[tuple[tuple[str, ...], torch.Size, torch.dtype, list[tuple[tiling.Box, tuple[int, int]]]]]
    objects: dict[str, tuple[int, int]]


def write_folder(
    content: Content,
    destination: Destination,
    written_by: dict[str, Any],
    ranks: Ranks = ONE_RANK,
    entries: Callable[[], list[Entry]] | None = None,
    folders: Sequence[int] = (0,),
) -> None:
    """Write a sharded checkpoint: a folder in which each rank writes one file. Collective.

    Args:
        destination: where to write; its path and label must be the same on every rank.
        written_by: versions, stage and world size, for the manifest.
        entries: returns copies of the content's entries, which are written instead.
        folders: the first rank of each group of ranks that share a folder, beginning with rank 0. By default, all ranks
            do. Otherwise each folder contains the files of its own ranks, and only that of rank 0 has the metadata.

    Raises:
        CheckpointNotSavedError: on every rank, if any rank could not write; this save's files are then removed.
    """
    leads = ranks.rank in folders

    def write() -> Written:
        if leads:
            destination.clear_leftovers()
        own = content if entries is None else replace(content, entries=entries())
        return _write(own, destination, ranks.rank)

    def complete() -> None:
        if ranks.rank == 0:
            _complete(content, destination, written_by, everyone, are_visible=len(folders) == 1)
        if leads:
            destination.put_in_place()

    try:
        everyone = on_every_rank(write, ranks, destination.path)
        on_every_rank(complete, ranks, destination.path)
    except BaseException:  # also if another rank is gone, or the user pressed Ctrl-C
        if leads:
            destination.discard()
        raise


def on_every_rank(act: Callable[[], _Result], ranks: Ranks, path: str, what: str = "checkpoint") -> list[_Result]:
    """Call a function on every rank, and return all results. Collective.

    Args:
        what: what the function writes at the path, for errors.

    Raises:
        CheckpointNotSavedError: on every rank, if the function fails on any rank.
    """
    result = reason = None
    try:
        result = act()
    except Exception as error:
        reason = _reason_of(error)
    everyone = ranks.gather((result, reason))
    for rank, (_, why) in enumerate(everyone):
        if why is not None:
            raise _not_saved(path, rank, why, what)
    return [each for each, _ in everyone]


def write_file(checkpoint: Mapping[str, Any], destination: Destination) -> None:
    """Write a full checkpoint: one ordinary ``torch.save`` file, by rank 0.

    Raises:
        CheckpointNotSavedError: if the file could not be written. Errors of pickling are raised unchanged.
    """
    try:
        destination.clear_leftovers()
        with destination.replacing() as stream:
            torch.save(checkpoint, stream)  # type: ignore[arg-type]
    except (OSError, RuntimeError) as error:
        raise _not_saved(destination.path, 0, _reason_of(error)) from error


def _not_saved(path: str, rank: int, reason: str, what: str = "checkpoint") -> CheckpointNotSavedError:
    return CheckpointNotSavedError(
        f"The {what} {path} was not saved: rank {rank} could not write it: {reason}. Its partial files were "
        f"removed; any earlier {what} at this path is unchanged."
    )


def _reason_of(error: BaseException) -> str:
    # If a write fails, torch.save raises an error about file positions; its ``__context__`` is the real error.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return f"{type(cause or error).__name__}: {cause or error}"


def _write(content: Content, destination: Destination, rank: int) -> Written:
    name = f"__{rank}_{destination.number}.distcp"
    tensors, objects = [], {}
    # Small tensors are stored together: opening a checkpoint reads some of them, and read-ahead fetches the others.
    entries = sorted(content.entries, key=lambda entry: entry.nbytes)
    with destination.writing(name) as stream:
        for entry in entries:
            placed = []
            for box in entry.boxes:
                stream.begin()
                torch.save(entry.piece(box), stream)  # type: ignore[arg-type]
                placed.append((box, stream.piece))
            tensors.append((entry.names, entry.shape, entry.dtype, placed))
        for key, data in content.objects.items():
            stream.begin()
            stream.write(data)
            objects[key] = stream.piece
    return Written(name, stream.position, tensors, objects)


def _complete(
    content: Content, destination: Destination, written_by: dict[str, Any], everyone: list[Written], are_visible: bool
) -> None:
    """On rank 0, write the files of the whole checkpoint; ``are_visible``: whether all files must be in this folder."""
    invisible = [rank for rank, written in enumerate(everyone) if destination.size_of(written.file) != written.nbytes]
    if invisible and are_visible:
        raise OSError(
            f"the files of rank(s) {invisible} are not visible to rank 0: a sharded checkpoint requires a folder that "
            "all machines share. Choose such a folder, or ZeroStrategy(checkpoint='full')"
        )
    contents = {REST: content.rest, DCP_METADATA: pickle.dumps(metadata_of(content.paths, everyone))}
    checksums = {name: {"crc32": zlib.crc32(data)} for name, data in contents.items()}
    manifest = {"format": FORMAT, "written_by": written_by, "files": checksums}
    for name, data in {**contents, MANIFEST: json.dumps(manifest).encode()}.items():
        with destination.writing(name) as file:
            file.write(data)


def metadata_of(paths: dict[str, tuple[Any, ...]], everyone: Sequence[Written]) -> dcp.Metadata:
    """Return DCP's metadata for all ranks' files. A tensor that lacks the shards of some ranks is an error."""
    tensors: dict[str, dcp.TensorStorageMetadata] = {}
    storage: dict[dcp.MetadataIndex, Any] = {}
    for written in everyone:
        for names, shape, dtype, placed in written.tensors:
            for name in names:
                known = tensors.setdefault(
                    name, dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), shape, [])
                )
                for box, (offset, length) in placed:
                    offsets = torch.Size(box.offsets)
                    known.chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
                    storage[dcp.MetadataIndex(name, offsets)] = _StorageInfo(written.file, offset, length)
        for name, (offset, length) in written.objects.items():
            storage[dcp.MetadataIndex(name)] = _StorageInfo(written.file, offset, length)
    objects = {name: dcp.BytesStorageMetadata() for written in everyone for name in written.objects}
    lacking = [name for name in paths if name not in objects and not _is_whole(tensors.get(name))]
    if lacking:
        raise ValueError(
            f"the checkpoint lacks some ranks' shards of {listed(lacking)}: a hook that saves values of sharded "
            "parameters must do so on every rank, not inside 'if rank == 0:'"
        )
    found: dict[str, Any] = {name: objects[name] if name in objects else tensors[name] for name in paths}
    return dcp.Metadata(found, paths, storage, dcp.StorageMeta(save_id=SAVE_ID), _DCP_VERSION)


def _is_whole(tensor: dcp.TensorStorageMetadata | None) -> bool:
    return tensor is not None and sum(prod(chunk.sizes) for chunk in tensor.chunks) == tensor.size.numel()
