"""Slots: files in shared memory (tmpfs), which outlive processes; each rank copies its part of a run's state to them.

    header    the trailer's position and checksum; zeros while the slot is being written
    values    the values of this rank's tensors, each aligned to 64 bytes
    trailer   descriptions of the values, sums that reveal damage, and all other parts of the state, pickled

Each rank writes alternately to two slots, so one slot is complete at any time. The design follows Gemini (SOSP 2023,
section 4), but slots are on the rank's own machine, since tmpfs outlives a killed process.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.checksums import DamagedCheckpointError
from lightning_zero.checkpoint.files import Files
from lightning_zero.checkpoint.folder import Folder
from lightning_zero.checkpoint.reading import OpenedCheckpoint, opened_folder
from lightning_zero.checkpoint.saving import (
    CopyBuffer,
    Entry,
    Written,
    aligned,
    device_of,
    entry_of,
    identity,
    is_strided,
    is_view_of_parameter,
    metadata_of,
    serialised,
)
from lightning_zero.engine.comm.background_work import BackgroundWork
from lightning_zero.engine.compat import foreach_copy
from lightning_zero.engine.plan.chunks import Box
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor

_HEADER = struct.Struct("<8sQQI")  # magic; the trailer's position, length and CRC-32
_MAGIC = b"lzslot02"
_PIECE = 2**22
"""Values are copied and summed in pieces of about this many bytes."""


class About(NamedTuple):
    """Identifies the state in a slot.

    Attributes:
        attempt: number of the job's attempt; each restart of the job's processes begins the next attempt.
        number: number of this copy of the state, counted within the attempt.
        step: number of optimizer steps so far.
        world_size: number of ranks, which is also the number of slots that make up one copy.
    """

    attempt: int
    number: int
    step: int
    world_size: int
    rank: int


class KeptState(NamedTuple):
    """One rank's part of a state, as it is written to a slot.

    Attributes:
        entries: this rank's parts of tensors.
        sharded: the number of sharded tensors, the same on every rank.
        rest: all other values, pickled, with the names of entries in place of tensors; empty except on rank 0.
    """

    entries: list[Entry]
    sharded: int
    rest: bytes


def kept_state_of(tree: Mapping[str, Any], rest: Mapping[str, Any], rank: int = 0) -> KeptState:
    """Return the part of a state that a rank keeps. Every rank must pass the same sharded tensors in the same order.

    Args:
        tree: picklable values, whose tensors will be read back piece by piece, as ``LazyTensor``.
        rest: likewise, but tensors that are not sharded will be read back as ordinary tensors.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, rank)
    pickler.dump(tree)
    pickler.is_lazy = False
    pickler.dump(rest)
    return KeptState(pickler.entries, pickler.sharded, stream.getvalue() if rank == 0 else b"")


class _Pickler(pickle.Pickler):
    """Pickles the name of an entry in place of a tensor, and a number in place of a zero-dimensional tensor.

    Pickling a tensor's values would take many times as long, and would copy them once more.

    Attributes:
        is_lazy: whether tensors that are not sharded become entries, too.
    """

    def __init__(self, stream: io.BytesIO, rank: int = 0) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.entries: list[Entry] = []
        self.sharded, self.is_lazy, self._rank = 0, True, rank
        self._names: dict[Any, str] = {}
        self._alive: list[Tensor] = []  # so that no identity in ``_names`` is used again

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            return _stored, (self._name_of(value),)
        if not isinstance(value, Tensor):
            return NotImplemented
        if _is_number(value):
            return _tensor_of, (value.item(), value.dtype)
        if is_view_of_parameter(value):
            value = value.whole()  # type: ignore[attr-defined]
        if self._rank != 0:
            return _tensor_of, (0, value.dtype)  # only rank 0 keeps values that are not sharded
        if isinstance(value, LazyTensor) or (self.is_lazy and is_strided(value)):
            return _stored, (self._name_of(value),)
        if value.is_nested:  # torch cannot put it together from parts that are still in the slot
            return _loaded, (serialised(value),)
        return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    def _name_of(self, tensor: Tensor) -> str:
        key = identity(tensor)
        if key not in self._names:
            if isinstance(tensor, ShardedTensor):
                name = f"{self.sharded}: {tensor.slot.name}"
                self.sharded += 1
            else:
                name = f"unsharded {len(self._names)}"
            self._names[key] = name
            self._alive.append(tensor)
            entry = entry_of(tensor, self._rank, (name,))
            if entry.is_written_by(self._rank):
                self.entries.append(entry)
        return self._names[key]


def _is_number(value: Tensor) -> bool:
    """Whether a value is an ordinary zero-dimensional tensor in CPU memory, such as an optimizer's ``step``."""
    return (
        type(value) is Tensor
        and not value.dim()
        and value.device.type == "cpu"
        and is_strided(value)
        and not value.requires_grad
    )


def _tensor_of(number: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor(number, dtype=dtype, device="cpu")


def _loaded(data: bytes) -> Tensor:
    """Undo ``serialised``."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _stored(name: str) -> Tensor:
    """Return the tensor of this name. ``_Unpickler`` puts the function that does so in place of this one."""
    raise NotImplementedError


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._tensors.__getitem__ if found is _stored else found


class SlotWriter:
    """Writer of a slot's file. Each copy of the state overwrites the file.

    Args:
        path: the file's path.
        staging: CPU memory to which values on an accelerator are copied first. Writers that never write at the same
            time may share this memory.
    """

    VALUES = 4096
    """Position of the first value in the file, on a page boundary. The header, at position 0, is written last."""

    def __init__(self, path: str, staging: CopyBuffer | None = None) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._size = os.fstat(self._file).st_size
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._staging = CopyBuffer() if staging is None else staging
        self._length = 0  # length of the contents in bytes
        # What follows is kept from copy to copy, until the layout changes.
        self._layout: Any = None
        self._positions: list[int] = []  # of each entry, followed by the end of the last entry
        self._targets: dict[int, Tensor] = {}  # the memory of an entry's values, by the entry's number
        self._tensors = b""

    def begin(self, state: KeptState, about: About, own: Any) -> Callable[[], None]:
        """Begin to replace the contents: copy unguarded values, which may change at any time.

        Args:
            state: what to write; guarded values are copied later.
            own: this rank's own state, such as its position in the data.

        Returns:
            A function that copies the guarded values and completes the slot. Another thread must call this function:
            before training changes guarded values, it waits until they have been copied.

        Raises:
            OSError: if the file system has too little space.
        """
        os.pwrite(self._file, bytes(_HEADER.size), 0)
        entries = sorted(state.entries, key=lambda entry: entry.is_guarded)
        self._arrange(entries)
        end = self._positions[-1]
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.is_lazy = False
        pickler.dump(own)
        others = (*state[1:], stream.getvalue())
        self._reserve(end)
        free = sum(not entry.is_guarded for entry in entries)
        sums = self._copied(_on_cpu(entries[:free], CopyBuffer()), 0)
        guarded = entries[free:]
        device = device_of(guarded)
        ready = torch.accelerator.current_stream(device).record_event() if device is not None else None
        work = BackgroundWork()

        def complete() -> None:
            with work:
                sums.extend(self._copied(_on_cpu(guarded, self._staging, ready), free))
            trailer = pickle.dumps((about, self._described(entries), sums, others), pickle.HIGHEST_PROTOCOL)
            self._reserve(end + len(trailer))
            os.pwrite(self._file, trailer, end)
            header = _HEADER.pack(_MAGIC, end, len(trailer), zlib.crc32(trailer))
            os.pwrite(self._file, header, 0)
            self._length = end + len(trailer)

        return complete

    @property
    def contents(self) -> Tensor:
        """All bytes of a complete slot."""
        return self._mapped()[: self._length]

    def overwritten(self, length: int) -> Tensor:
        """Return the file's memory for new contents. The bytes before ``VALUES`` must be written last.

        Raises:
            OSError: if the file system has too little space.
        """
        os.pwrite(self._file, bytes(_HEADER.size), 0)
        self._reserve(length)
        return self._mapped()[:length]

    def _reserve(self, size: int) -> None:
        """Allocate the file's memory now: if tmpfs had no memory left at a later write, the process would be killed."""
        if size > self._size:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._targets = {}
            os.posix_fallocate(self._file, 0, size)
            self._size = size

    def _mapped(self) -> Tensor:
        if not len(self._memory):
            self._memory = torch.frombuffer(mmap.mmap(self._file, self._size), dtype=torch.uint8)
        return self._memory

    def _arrange(self, entries: list[Entry]) -> None:
        """Set the positions of the entries, unless the layout is that of the last copy."""
        layout = [(entry.names, entry.share, entry.dtype, entry.start, entry.stop) for entry in entries]
        if layout != self._layout:
            self._layout, self._targets, self._tensors = layout, {}, b""
            self._positions = [self.VALUES]
            for entry in entries:
                length = max(entry.nbytes, 1)  # readers tell pieces apart by their positions
                self._positions.append(aligned(self._positions[-1] + length))

    @torch.no_grad()
    def _copied(self, entries: list[Entry], first: int) -> list[tuple[int, int, int]]:
        """Copy values to their positions, and return (begin, end, sum) of each copied piece.

        Each piece is summed while it is in the processor's cache, which takes half as long as reading it again.

        Args:
            first: the number of the first entry in the layout.
        """
        memory, sums = self._mapped(), []
        begin = self._positions[first]
        targets: list[Tensor] = []
        sources: list[Tensor] = []

        def copy_until(end: int) -> None:
            nonlocal begin, targets, sources
            if targets:
                foreach_copy(targets, sources)
            sums.append((begin, end, _sum(memory[begin:end])))
            begin, targets, sources = end, [], []

        for number, entry in enumerate(entries, first):
            position = self._positions[number]
            if number not in self._targets:
                self._targets[number] = memory[position : position + entry.nbytes].view(entry.dtype)
            target = self._targets[number]
            if isinstance(entry.values, LazyTensor):
                target.copy_(entry.values.shown(0, target.numel()))  # one at a time: together, they may exceed memory
                continue
            source = entry.values
            if source.shape != target.shape:
                source = source.reshape(-1)[: target.numel()]
            step = _PIECE // entry.dtype.itemsize
            starts = range(position, position + entry.nbytes, _PIECE)
            for start, to, values in zip(starts, _cut(target, step), _cut(source, step)):
                if start - begin >= _PIECE:
                    copy_until(start)
                targets.append(to)
                sources.append(values)
        copy_until(self._positions[first + len(entries)])
        return sums

    def _described(self, entries: list[Entry]) -> bytes:
        """Return the pickled description of the values, as in ``Written.tensors``."""
        if not self._tensors:
            tensors = [
                (
                    entry.names,
                    entry.shape,
                    entry.dtype,
                    [(box, _place(entry, box, position)) for box in entry.boxes],
                )
                for entry, position in zip(entries, self._positions)
            ]
            self._tensors = pickle.dumps(tensors, pickle.HIGHEST_PROTOCOL)
        return self._tensors

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._memory, self._targets = -1, torch.empty(0, dtype=torch.uint8, device="cpu"), {}


def _cut(values: Tensor, step: int) -> Sequence[Tensor]:
    """Cut 1-D values into pieces of ``step`` elements. Most values are one piece, and ``split`` costs time for each."""
    return values.split(step) if len(values) > step else (values,)


def _place(entry: Entry, box: Box, position: int) -> list[int]:
    size = entry.dtype.itemsize
    return [position + (box.start - entry.start) * size, (box.stop - box.start) * size, 0]


def _on_cpu(entries: list[Entry], staging: CopyBuffer, after: torch.Event | None = None) -> list[Entry]:
    """Return the entries if their values are on the CPU, otherwise copies of the entries in ``staging``."""
    return entries if device_of(entries) is None else staging.copied(entries, after)


def _sum(memory: Tensor) -> int:
    """Return a sum that differs if any single 8-byte word has changed; the length must be a multiple of 8 bytes."""
    return int(memory.view(torch.int64).sum())


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass
class Slot:
    """A slot that was complete when its trailer was read; ``verify`` checks the values."""

    path: str
    about: About
    _trailer: Any

    @classmethod
    def at(cls, path: str) -> Slot | None:
        """Read the trailer of the slot in a file; return None if the slot is incomplete."""
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size:
                return None
            magic, position, length, crc32 = _HEADER.unpack(head)
            if magic != _MAGIC:
                return None
            file.seek(position)
            trailer = file.read(length)
        if len(trailer) != length or zlib.crc32(trailer) != crc32:
            return None
        about, *rest = pickle.loads(trailer)
        return cls(path, about, rest)

    def verify(self) -> bool:
        """Whether all values match their sums."""
        _, sums, _ = self._trailer
        with open(self.path, "rb") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE), dtype=torch.uint8)
        return all(end <= len(memory) and _sum(memory[begin:end]) == expected for begin, end, expected in sums)

    @property
    def written(self) -> Written:
        tensors, _, _ = self._trailer
        return Written(os.path.basename(self.path), os.path.getsize(self.path), pickle.loads(tensors), {}, None)

    @property
    def state(self) -> tuple[int, bytes, bytes]:
        """``sharded`` and ``rest`` as in ``KeptState``, and the pickled ``own`` of ``SlotWriter.begin``."""
        _, _, state = self._trailer
        return state


class _SlotFolder(Folder):
    """Reads one slot per rank, together a copy of the state, as a sharded checkpoint."""

    def __init__(self, folder: str, slots: Sequence[Slot]) -> None:
        self.files, self.written_by = Files(folder), {}
        counts, (self._pickled, *_), own = zip(*(slot.state for slot in slots))
        if len(set(counts)) > 1:
            raise ValueError(
                f"the ranks have kept different numbers of sharded tensors, {counts}: a hook that saves values of "
                "sharded parameters must do so on every rank, not inside 'if rank == 0:'"
            )
        self.own = [pickle.loads(each) for each in own]
        written = [slot.written for slot in slots]
        names = {name for each in written for names, *_ in each.tensors for name in names}
        sizes = {each.file: each.nbytes for each in written}
        self._take(metadata_of({name: (name,) for name in names}, written), None, sizes, tuple(slots[0].about))

    def tree(self) -> dict[str, Any]:
        metadata, self._metadata = self._metadata, None
        assert metadata is not None
        unpickler = _Unpickler(self._pickled, dict(self._values(metadata)))
        return unpickler.load() | unpickler.load()

    def _decoded(self, data: memoryview, chunk: Any, dtype: torch.dtype) -> Tensor:
        flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype, device="cpu")
        return flat.view(chunk.sizes)


def open_slots(folder: str, slots: Sequence[Slot]) -> tuple[OpenedCheckpoint, list[Any]]:
    """Open slots as a sharded checkpoint whose tensors are read when they are needed.

    Args:
        folder: the folder that contains all slots.
        slots: the slots that make up one copy of the state, in the order of ranks.

    Returns:
        The checkpoint, and each rank's own state.

    Raises:
        DamagedCheckpointError: if the slots are incomplete.
    """
    try:
        read = _SlotFolder(folder, slots)
    except ValueError as error:
        raise DamagedCheckpointError(f"The slots in {folder} cannot be read: {error}") from error
    return opened_folder(read), read.own
