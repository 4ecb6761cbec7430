"""Writing a checkpoint: in parts, by all ranks in parallel, or whole, by one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.checkpoint import archive
from lightning_zero.checkpoint.commit import Destination, Stream
from lightning_zero.checkpoint.form import CHECKPOINT_KEY, CONTAINERS, DCP_METADATA, MANIFEST, REST, SAVE_ID, Manifest
from lightning_zero.engine.pieces import Box, boxes
from lightning_zero.engine.sharded_tensor import Handle, ShardedTensor
from lightning_zero.engine.sources import listed
from lightning_zero.engine.stored import StoredTensor
from lightning_zero.engine.streams import own_stream

Gather = Callable[[Any], list[Any]]
"""Every rank's value, in the order of ranks; each rank calls it."""

_PIECE_BYTES = 2**26
"""Bytes of the largest piece, as far as rows allow: as much as a piece costs in memory when it is read back."""


class CheckpointNotSavedError(OSError):
    """A checkpoint could not be written; what was there before is as it was."""


@dataclass(frozen=True)
class Entry:
    """A tensor, as far as one rank writes it.

    Attributes:
        names: of the parameter, and of those that are tied to it, which share its pieces.
        shape, dtype: of the whole.
        values: this rank's range, 1-D, in any dtype; a ``StoredTensor`` is read piece by piece.
        start, stop: the range in the flattened tensor.
        is_guarded: whether nobody writes to the values while they are read in the background, see ``engine.settling``.
    """

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    values: Tensor
    start: int
    stop: int
    is_guarded: bool = False

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize

    @cached_property
    def boxes(self) -> list[Box]:
        """The rectangles that tile the range; of a tensor without elements one that has none either."""
        if not self.shape.numel():
            return [Box((0,) * len(self.shape), tuple(self.shape), 0)]
        return boxes(self.shape, self.start, self.stop, max(_PIECE_BYTES // self.dtype.itemsize, 1))

    def piece(self, box: Box) -> Tensor:
        """One rectangle, on the CPU, in memory of its own size."""
        start, stop = box.start - self.start, box.stop - self.start
        if isinstance(self.values, StoredTensor):
            part = self.values.range(start, stop)
        else:
            part = self.values.detach().reshape(-1)[start:stop]
        return _alone(part.to("cpu", self.dtype).contiguous()).view(box.sizes)


@dataclass(frozen=True)
class Content:
    """What one rank writes of a checkpoint in parts.

    Attributes:
        entries: its parts of tensors.
        objects: other leaves of what DCP keeps, serialised; rank 0 alone has some, as of the next two.
        rest: all else, serialised.
        paths: by DCP's dotted name, where a leaf is in the tree.
    """

    entries: list[Entry]
    objects: dict[str, bytes]
    rest: bytes
    paths: dict[str, tuple[Any, ...]]


def content_of(tree: Mapping[str, Any], rest: Mapping[str, Any], rank: int = 0) -> Content:
    """Split a checkpoint into what each rank writes. Every rank has the same sharded tensors in it.

    Args:
        tree: nested dicts and lists of tensors and other values, all of which DCP is to know.
        rest: Lightning's other entries; a tensor in parts among them is kept as those of the tree are.
    """
    hollow, handles = _split(rest)
    tree, containers = _told(tree)
    if containers:
        hollow[CHECKPOINT_KEY] = {**hollow.get(CHECKPOINT_KEY, {}), CONTAINERS: containers}
    leaves, paths = flatten_state_dict({**tree, **handles})
    shared: dict[Any, list[str]] = {}
    tensors: dict[Any, Tensor] = {}
    objects: dict[str, bytes] = {}
    for name, leaf in leaves.items():
        if is_view_of_parameter(leaf):
            leaf = leaf.whole()
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_quantized:
            key = identity(leaf)
            shared.setdefault(key, []).append(name)
            tensors[key] = leaf
        elif rank == 0:
            objects[name] = _serialised(leaf)
    entries = [entry_of(tensor, rank, tuple(shared[key])) for key, tensor in tensors.items()]
    return Content(
        [entry for entry in entries if entry.stop > entry.start or (rank == 0 and not entry.shape.numel())],
        objects,
        _serialised(hollow) if rank == 0 else b"",
        paths if rank == 0 else {},
    )


def is_view_of_parameter(value: Any) -> bool:
    """Whether it is one, that user code has put into a checkpoint: it has no parts of its own."""
    return isinstance(value, Handle) and not isinstance(value, (ShardedTensor, StoredTensor))


def by_name(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """An optimizer's state dict with names of parameters in the place of numbers, as DCP's users keep it.

    Args:
        state: in torch's ordinary form.
        names: of the parameters, in the order of the groups; one that is missing keeps its number.
    """

    def name_of(number: int) -> str:
        return names[number] if number < len(names) else str(number)

    return {
        **state,
        "state": {name_of(number): values for number, values in state["state"].items()},
        "param_groups": [{**group, "params": list(map(name_of, group["params"]))} for group in state["param_groups"]],
    }


def names_in(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """The names of an optimizer's parameters in the order of its groups, as ``by_name`` takes them.

    Args:
        names: by ``id`` of the parameter; what is not there is called by its number.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(id(parameter), str(number)) for number, parameter in enumerate(parameters)]


def _split(rest: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is no tensor in parts, and the tensors in parts, each in nested dicts and lists."""

    def walk(value: Any) -> tuple[Any, Any]:
        if isinstance(value, Handle):
            return None, value
        if isinstance(value, (dict, list, tuple)):
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
            parts = {key: walk(item) for key, item in items}
            handles = {key: handle for key, (_, handle) in parts.items() if handle is not None}
            if handles:
                hollow = {key: left for key, (left, _) in parts.items()}
                return (hollow if isinstance(value, dict) else list(hollow.values())), handles
        return value, None

    hollow, handles = walk(dict(rest))
    return hollow, handles or {}


def _told(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tree as DCP can flatten it, and the containers in it that DCP would not make again, with None for leaves.

    Those lie where modules keep more than tensors (``get_extra_state``), and in optimizers' groups.
    """

    def walk(value: Any) -> tuple[Any, Any, bool]:
        if not isinstance(value, (dict, list, tuple)):
            return value, None, False
        parts = [walk(item) for item in (value.values() if isinstance(value, dict) else value)]
        is_odd = not parts or any(odd for *_, odd in parts)
        items, hollow = [item for item, *_ in parts], [item for _, item, _ in parts]
        if isinstance(value, dict):
            is_odd = is_odd or not all(isinstance(key, str) for key in value)
            return dict(zip(value, items)), dict(zip(value, hollow)), is_odd
        in_parts = any(isinstance(leaf, Handle) for leaf in tree_leaves(items))  # DCP keeps a tuple as one object
        return items if in_parts else value, hollow, is_odd

    walked = {key: {name: walk(value) for name, value in of_one.items()} for key, of_one in tree.items()}
    containers = {key: {name: found[1] for name, found in of.items() if found[2]} for key, of in walked.items()}
    plain = {key: {name: found[0] for name, found in of.items()} for key, of in walked.items()}
    return plain, {key: found for key, found in containers.items() if found}


def without_parts(value: Any, *, keep: bool = True) -> Any:
    """The same, with whole tensors on the CPU where hooks have put values of sharded parameters. Collective.

    Args:
        keep: False for ranks that take part but do not write: None in their place.
    """
    if isinstance(value, Handle) and not isinstance(value, StoredTensor):
        whole = value.detach().whole()  # type: ignore[attr-defined]
        return whole.to("cpu", copy=True) if keep else None
    if not isinstance(value, (dict, list, tuple)):
        return value
    items = list(value.values() if isinstance(value, dict) else value)
    parts = [without_parts(item, keep=keep) for item in items]
    if all(part is item for part, item in zip(parts, items)):
        return value
    if isinstance(value, dict):
        changed = copy.copy(value)  # of its class, and with what is noted at a state dict
        changed.update(zip(value, parts))
        return changed
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def identity(tensor: Tensor) -> Any:
    """Equal for tied tensors, which are the same memory, and for no others."""
    if isinstance(tensor, ShardedTensor):
        return (id(tensor.slot), tensor.dtype) if tensor.is_parameter else id(tensor)  # alike on all ranks
    if isinstance(tensor, StoredTensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def entry_of(tensor: Tensor, rank: int, names: tuple[str, ...] = ()) -> Entry:
    """What one rank has to write of a tensor."""
    if isinstance(tensor, ShardedTensor) and tensor.numel():
        start, stop = tensor.slot.offset, tensor.slot.offset + tensor.slot.local_numel
        is_guarded = not (tensor.is_parameter and tensor.slot.is_written_by_modules)
        return Entry(names, tensor.shape, tensor.dtype, tensor.at_rest().detach(), start, stop, is_guarded)
    # Other tensors are the same on every rank, or meant for rank 0 to write.
    values = tensor if tensor.numel() else torch.empty(0, dtype=tensor.dtype, device="cpu")
    return Entry(names, tensor.shape, tensor.dtype, values, 0, tensor.numel() if rank == 0 else 0)


def _serialised(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _alone(part: Tensor) -> Tensor:
    """A tensor over the same memory whose storage is no larger than itself: torch.save writes whole storages."""
    if part.untyped_storage().nbytes() == part.nbytes or not part.numel():
        return part
    return torch.frombuffer(part.view(torch.uint8).numpy(), dtype=torch.uint8).view(part.dtype)


class HostMemory:
    """Memory on the CPU into which checkpoint after checkpoint is copied; pinned where there is a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, entries: list[Entry]) -> None:
        """Make sure that there is room."""
        needed = sum(_aligned(entry.nbytes) for entry in entries)
        if len(self._memory) < needed:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # so that the two are not there at once
            is_pinned = device_of(entries) is not None
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=is_pinned, device="cpu")

    def copied(self, entries: list[Entry], after: torch.Event | None = None) -> list[Entry]:
        """The same entries, which training does not change.

        Args:
            after: of their device, where it has the values; None for all that it was told to do so far.
        """
        self.reserve(entries)
        copied, targets, sources, position = [], [], [], 0
        for entry in entries:
            target = self._memory[position : position + entry.nbytes].view(entry.dtype)
            position += _aligned(entry.nbytes)
            copied.append(replace(entry, values=target))
            if isinstance(entry.values, StoredTensor):
                target.copy_(entry.values.shown(0, target.numel()))  # one after another: all of them may be too large
                continue
            targets.append(target)
            sources.append(entry.values.detach().reshape(-1)[: target.numel()])
        device = device_of(entries)
        if device is None:
            if targets:
                torch._foreach_copy_(targets, sources)
        else:
            stream = own_stream(device)
            stream.wait_event(after or torch.accelerator.current_stream(device).record_event())
            with stream:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            stream.synchronize()
        return copied


def device_of(entries: list[Entry]) -> torch.device | None:
    """The device that the values are on, None for the CPU's memory."""
    return next((entry.values.device for entry in entries if entry.values.device.type != "cpu"), None)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


@dataclass(frozen=True)
class _Written:
    """What one rank has written: a file's name and size, and its pieces."""

    file: str
    nbytes: int
    tensors: list[tuple[tuple[str, ...], torch.Size, torch.dtype, list[tuple[Box, list[int]]]]]
    objects: dict[str, list[int]]
    rest: dict[str, int | None] | None

    def pieces(self) -> list[list[int]]:
        return [place for *_, placed in self.tensors for _, place in placed] + list(self.objects.values())


def save_in_parts(
    content: Content,
    destination: Destination,
    written_by: dict[str, Any],
    rank: int = 0,
    gather: Gather = lambda value: [value],
) -> None:
    """Write a checkpoint as a folder, of which each rank writes a file. Collective.

    Args:
        content: this rank's.
        destination: the same on every rank.
        written_by: for the manifest.

    Raises:
        CheckpointNotSavedError: on every rank, if one could not write. Nothing of it is left then.
    """
    try:
        try:
            told: Any = _write(content, destination, rank)
        except Exception as error:
            told = _reason(error)
        everyone = gather(told)
        failed = {number: told for number, told in enumerate(everyone) if isinstance(told, str)}
        outcome = None
        if rank == 0 and not failed:
            try:
                _complete(content, destination, written_by, everyone)
            except Exception as error:
                outcome = _reason(error)
        if not failed:
            outcome = gather(outcome)[0]
            failed = {0: outcome} if outcome is not None else {}
    except BaseException:  # another rank is gone, or Ctrl-C
        if rank == 0:
            destination.discard()
        raise
    if failed:
        if rank == 0:
            destination.discard()
        raise not_saved(destination.path, *next(iter(failed.items())))


def not_saved(path: str, rank: int, reason: str) -> CheckpointNotSavedError:
    """The error, for every rank, of one that could not write."""
    return CheckpointNotSavedError(
        f"The checkpoint {path} was not saved: rank {rank} could not write it: {reason}. Nothing of it is left, and "
        "what was there before is as it was."
    )


def refusal_of(path: str, label: str) -> str | None:
    """Why a checkpoint must not be written at a path; None if it may. See ``Destination``."""
    try:
        Destination(path, label).check_replaceable()
    except Exception as error:
        return _reason(error)
    return None


def save_whole(checkpoint: Mapping[str, Any], destination: Destination) -> None:
    """Write a checkpoint as one ordinary file of ``torch.save``, by one rank.

    Raises:
        CheckpointNotSavedError: if that fails. Nothing of it is left then.
    """
    try:
        destination.check_replaceable()
        destination.clear_leftovers()
        with destination.writing() as stream:
            torch.save(checkpoint, stream)  # type: ignore[arg-type]
        destination.put_in_place()
    except BaseException as error:
        destination.discard()
        if not isinstance(error, (OSError, RuntimeError)):
            raise  # what cannot be pickled is the project's own
        raise CheckpointNotSavedError(
            f"The checkpoint {destination.path} was not saved: {_reason(error)}. Nothing of it is left, and what was "
            "there before is as it was."
        ) from error


def _reason(error: BaseException) -> str:
    # where writing fails, torch.save ends with an error of its own about positions in the file
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return f"{type(cause or error).__name__}: {cause or error}"


def _write(content: Content, destination: Destination, rank: int) -> _Written:
    if rank == 0:
        destination.check_replaceable()
        destination.clear_leftovers()
    name = f"__{rank}_0.distcp"
    tensors, objects = [], {}
    # Small ones side by side: whoever opens a checkpoint reads some of them, and of a disk many of what lies around.
    entries = sorted(content.entries, key=lambda entry: entry.nbytes > archive.LARGEST)
    with destination.writing(name) as stream:
        for entry in entries:
            placed = [(box, _piece(stream, partial(_save_piece, entry, box, stream))) for box in entry.boxes]
            tensors.append((entry.names, entry.shape, entry.dtype, placed))
        for key, data in content.objects.items():
            objects[key] = _piece(stream, partial(stream.write, data))
    rest: dict[str, int | None] | None = None
    if rank == 0:
        with destination.writing(REST) as file:
            rest = {"bytes": file.write(content.rest), "crc32": file.crc32}
    return _Written(name, stream.position, tensors, objects, rest)


def _save_piece(entry: Entry, box: Box, stream: Stream) -> None:
    piece = entry.piece(box)
    if 0 < piece.nbytes <= archive.LARGEST:
        stream.write(archive.archived(piece))
    else:
        torch.save(piece, stream)  # type: ignore[arg-type]


def _piece(stream: Stream, write: Callable[[], Any]) -> list[int]:
    """Offset, length and checksum of what is written to the stream now."""
    offset = stream.begin()
    write()
    return [offset, stream.position - offset, stream.crc32]


def _complete(content: Content, destination: Destination, written_by: dict[str, Any], everyone: list[_Written]) -> None:
    """On rank 0: what makes a checkpoint of the files of all ranks."""
    elsewhere = [rank for rank, written in enumerate(everyone) if destination.size_of(written.file) != written.nbytes]
    if elsewhere:
        raise OSError(
            f"what rank(s) {elsewhere} wrote is not there: a checkpoint in parts needs a folder that all machines "
            "share. Choose another, or ZeroStrategy(checkpoint='full')"
        )
    metadata = _metadata(content, everyone)
    data = pickle.dumps(metadata)
    manifest = Manifest(written_by)
    with destination.writing(DCP_METADATA) as file:
        manifest.files[DCP_METADATA] = {"bytes": file.write(data), "crc32": file.crc32}
    for written in everyone:
        manifest.files[written.file] = {"bytes": written.nbytes, "crc32": None}
        manifest.pieces[written.file] = written.pieces()
        if written.rest is not None:
            manifest.files[REST] = written.rest
    with destination.writing(MANIFEST) as file:
        file.write(manifest.to_bytes())
    destination.put_in_place()


def _metadata(content: Content, everyone: list[_Written]) -> Metadata:
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for written in everyone:
        for names, shape, dtype, placed in written.tensors:
            for name in names:
                known = tensors.setdefault(name, TensorStorageMetadata(TensorProperties(dtype=dtype), shape, []))
                for box, (offset, length, _) in placed:
                    offsets = torch.Size(box.offsets)
                    known.chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
                    storage[MetadataIndex(name, offsets)] = _StorageInfo(written.file, offset, length)
        for name, (offset, length, _) in written.objects.items():
            storage[MetadataIndex(name)] = _StorageInfo(written.file, offset, length)
    objects = {name: BytesStorageMetadata() for written in everyone for name in written.objects}
    lacking = [name for name in content.paths if name not in objects and not _is_whole(tensors.get(name))]
    if lacking:
        raise ValueError(
            f"{listed(lacking)} of the checkpoint {'is' if len(lacking) == 1 else 'are'} in parts, and not every rank "
            "has put its own there: what a hook saves of sharded parameters it must save on every rank, with no 'if "
            "rank == 0:' around it"
        )
    found: dict[str, Any] = {name: objects[name] if name in objects else tensors[name] for name in content.paths}
    return Metadata(found, content.paths, storage, StorageMeta(save_id=SAVE_ID), CURRENT_DCP_VERSION)


def _is_whole(tensor: TensorStorageMetadata | None) -> bool:
    return tensor is not None and sum(prod(chunk.sizes) for chunk in tensor.chunks) == tensor.size.numel()
