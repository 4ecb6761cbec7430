"""Offloaded states on a disk: the master weights and optimizer states of a rank's shard of one bucket, in a file.

    | piece 0                              | piece 1                              | ...
    | masters | exp_avg | exp_avg_sq | ... | masters | exp_avg | exp_avg_sq | ... |

A piece holds all fields for an update of some elements, so that one read and one write suffice (Rajbhandari et al.,
"ZeRO-Infinity", SC 2021, section 5.2.2). Pieces divide the shard regardless of the optimizer's parameter groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.offload.swap import Piece, Ring, SwapFile, SwapFolder
from lightning_zero.engine.tensor.lazy_tensor import StoredTensor
from lightning_zero.io.disk import ALIGNMENT, aligned, aligned_memory

MASTERS, PARAMETERS = "the masters", "the parameters"
"""Fields that are not optimizer states: the master weights, which are first, and their copy in the compute dtype."""

_NONE: Mapping[str, torch.dtype] = MappingProxyType({})


class Swap:
    """The folder of all files of an engine's buckets, and the buffers for their updates.

    Args:
        folder: on the disk.
        sub_group: elements of a piece.
    """

    def __init__(self, folder: SwapFolder, sub_group: int) -> None:
        self.folder = folder
        self.sub_group = aligned(sub_group)  # so that a field of any dtype is aligned
        self._ring = Ring(0)
        self.reader = ThreadPoolExecutor(2, "lightning_zero-fetch")

    def ring(self, nbytes: int) -> Ring:
        """The ring of buffers, for pieces of up to so many bytes."""
        if nbytes > self._ring.nbytes:
            self._ring = Ring(0)  # first free the old one
            self._ring = Ring(nbytes)
        return self._ring


class _Extent(NamedTuple):
    """The elements ``[start, stop)`` of a field within one piece, and the aligned bytes that contain them."""

    start: int
    stop: int
    position: int
    nbytes: int
    offset: int


@dataclass(frozen=True)
class _Layout:
    """Positions of pieces and fields in a file.

    Attributes:
        numel: elements of each field.
        sub_group: elements of a piece.
        fields: dtypes by name.
    """

    numel: int
    sub_group: int
    fields: Mapping[str, torch.dtype]

    @property
    def count(self) -> int:
        return -(-self.numel // self.sub_group)

    def range_of(self, index: int) -> tuple[int, int]:
        """The elements ``[start, stop)`` of a piece."""
        return index * self.sub_group, min((index + 1) * self.sub_group, self.numel)

    def position(self, index: int) -> int:
        """Where a piece begins in the file; with ``index`` equal to ``count``, the end of the file."""
        whole = index * self._nbytes(self.sub_group)
        return whole if index < self.count else self.position(index - 1) + self.nbytes(index - 1) if index else 0

    def nbytes(self, index: int) -> int:
        """Bytes of a piece."""
        start, stop = self.range_of(index)
        return self._nbytes(stop - start)

    def _nbytes(self, numel: int) -> int:
        return sum(aligned(numel * dtype.itemsize) for dtype in self.fields.values())

    def offsets(self, index: int) -> dict[str, int]:
        """Where each field begins in a piece."""
        start, stop = self.range_of(index)
        found, offset = {}, 0
        for field, dtype in self.fields.items():
            found[field] = offset
            offset += aligned((stop - start) * dtype.itemsize)
        return found

    def extents(self, field: str, start: int, stop: int) -> Iterator[_Extent]:
        """The parts of a range of a field, piece by piece."""
        size = self.fields[field].itemsize
        for index in range(start // self.sub_group, -(-stop // self.sub_group)):
            first, last = self.range_of(index)
            low, high = max(start, first), min(stop, last)
            begin = (low - first) * size // ALIGNMENT * ALIGNMENT
            end = aligned((high - first) * size)
            position = self.position(index) + self.offsets(index)[field] + begin
            yield _Extent(low, high, position, end - begin, (low - first) * size - begin)


class DiskStates:
    """Tensors of one length, called fields, in a file that is divided into pieces.

    Args:
        swap: the folder for the file.
        name: of the bucket, for the file's name and for errors.
        numel: elements of each field.
        dtype: of the master weights, which are the first field.
        fields: dtypes of the other fields by name.

    Raises:
        OSError: if the disk lacks space for all of them.
    """

    def __init__(
        self, swap: Swap, name: str, numel: int, dtype: torch.dtype, fields: Mapping[str, torch.dtype] = _NONE
    ) -> None:
        self.swap, self._name, self._versions = swap, name, count()
        self.numel, self.dtype = numel, dtype
        self._layout = _Layout(numel, swap.sub_group, {MASTERS: dtype, **fields})
        self._file = self._new_file(self._layout)

    def _new_file(self, layout: _Layout) -> SwapFile:
        name = self._name.replace("/", "_") or "root"
        return self.swap.folder.open(f"{name}.{next(self._versions)}", layout.position(layout.count))

    @property
    def fields(self) -> Mapping[str, torch.dtype]:
        return self._layout.fields

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._file.nbytes

    def add_fields(self, fields: Mapping[str, torch.dtype]) -> None:
        """Add fields that are missing, filled with zeros.

        Raises:
            OSError: if the disk lacks space; nothing has been changed then.
        """
        if not all(field in self.fields for field in fields):
            self._lay_out({**self.fields, **fields})

    def _lay_out(self, fields: Mapping[str, torch.dtype]) -> None:
        """Move to a new file with the given fields; new fields are zeros."""
        before, file = self._layout, self._file
        layout = _Layout(self.numel, self.swap.sub_group, fields)
        new = self._new_file(layout)
        try:
            for index in range(layout.count):
                for field in before.fields.keys() & fields.keys():
                    values = _read(before, file, field, *before.range_of(index))
                    _write(layout, new, field, layout.range_of(index)[0], values)
        except BaseException:
            new.close()
            raise
        self._layout, self._file = layout, new
        file.close()

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    # -- piece by piece ---------------------------------------------------------------------------------------------

    def pieces(self) -> list[Piece]:
        """All pieces, in order."""
        layout = self._layout
        return [Piece(self._file, layout.position(index), layout.nbytes(index)) for index in range(layout.count)]

    def range_of(self, index: int) -> tuple[int, int]:
        """The elements ``[start, stop)`` of a piece."""
        return self._layout.range_of(index)

    def views(self, index: int, memory: memoryview) -> dict[str, Tensor]:
        """The fields of a piece as 1-D tensors over the memory that the piece was read into."""
        start, stop = self.range_of(index)
        offsets = self._layout.offsets(index)
        return {
            field: torch.frombuffer(memory, dtype=dtype, count=stop - start, offset=offsets[field])
            for field, dtype in self.fields.items()
        }

    # -- by range ---------------------------------------------------------------------------------------------------

    def read(self, field: str, start: int, stop: int) -> Tensor:
        """Read the elements ``[start, stop)`` of a field into new memory."""
        return _read(self._layout, self._file, field, start, stop)

    def write(self, field: str, start: int, values: Tensor) -> None:
        """Write the elements of a field from ``start`` on."""
        _write(self._layout, self._file, field, start, values)

    def tensor(self, field: str, start: int, stop: int) -> StoredTensor:
        """A range of a field as a lazy tensor: read at each use of its values, written at once."""

        def read(low: int, high: int) -> Tensor:
            return self.read(field, start + low, start + high)

        write = partial(self.write, field, start)
        return StoredTensor(f"{field} of {self._name}", (stop - start,), self.fields[field], read, write=write)


def _read(layout: _Layout, file: SwapFile, field: str, start: int, stop: int) -> Tensor:
    out = torch.empty(stop - start, dtype=layout.fields[field], device="cpu")
    for extent in layout.extents(field, start, stop):
        memory = aligned_memory(extent.nbytes)
        file.read(memory, extent.position)
        out[extent.start - start : extent.stop - start] = _elements(extent, memory, out.dtype)
    return out


def _write(layout: _Layout, file: SwapFile, field: str, start: int, values: Tensor) -> None:
    dtype = layout.fields[field]
    for extent in layout.extents(field, start, start + values.numel()):
        memory = aligned_memory(extent.nbytes)
        if (extent.stop - extent.start) * dtype.itemsize < extent.nbytes:
            file.read(memory, extent.position)  # bytes around the elements
        _elements(extent, memory, dtype).copy_(values[extent.start - start : extent.stop - start])
        file.write(memory, extent.position)


def _elements(extent: _Extent, memory: memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=extent.stop - extent.start, offset=extent.offset)
