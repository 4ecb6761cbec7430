"""Offloaded states on a disk: a file holds the master weights and optimizer states of a rank's shard of one bucket.

    | sub-group 0                          | sub-group 1                          | ...
    | masters | exp_avg | exp_avg_sq | ... | masters | exp_avg | exp_avg_sq | ... |

Since a sub-group holds all states of its elements, one read and one write suffice to update them (Rajbhandari et al.,
"ZeRO-Infinity", SC 2021, section 5.2.2). Sub-groups are unrelated to the optimizer's parameter groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from lightning_zero.engine.comm.simulation import SimulatedFile, Simulation
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.io.disk import ALIGNMENT, aligned, aligned_memory
from lightning_zero.io.swap import FileRange, Ring, SameThread, SwapFile

MASTERS, PARAMETERS = "the masters", "the parameters"
"""Names of fields that are not optimizer states: the master weights (first), and their copy in the compute dtype."""


class Swap:
    """The files of an engine's buckets, in one folder, and buffers for updates of ``sub_group`` elements at a time.

    With a simulation, no files are created.
    """

    def __init__(self, folder: str, sub_group: int, simulation: Simulation | None = None) -> None:
        self._folder, self._files, self._simulation = folder, weakref.WeakSet[SwapFile](), simulation
        self.sub_group = aligned(sub_group)  # rounded up, so that fields of any dtype are aligned
        executor: Callable[[int, str], Executor] = ThreadPoolExecutor if simulation is None else SameThread
        self._ring_of = partial(Ring, executor=executor)
        self._ring = self._ring_of(0)
        # Separate from the ring's threads: a task of this reader may wait for an update, which waits for the ring.
        self.reader = executor(2, "lightning_zero-fetch")

    def open(self, nbytes: int) -> SwapFile:
        """Create a file of this size. Raises an OSError if the disk lacks space."""
        if self._simulation is not None:
            return SimulatedFile(nbytes, self._simulation.moves)  # type: ignore[return-value]
        file = SwapFile(self._folder, nbytes)
        self._files.add(file)
        return file

    def close(self) -> None:
        """End the threads, and close all files."""
        self.reader.shutdown()
        self._ring.close()
        for file in list(self._files):
            file.close()

    def ring(self, nbytes: int) -> Ring:
        """The ring of buffers, enlarged if needed to hold extents of ``nbytes`` bytes."""
        if nbytes > self._ring.nbytes:
            self._ring = self._ring_of(0)  # free the old buffers first
            self._ring = self._ring_of(nbytes)
        return self._ring


class DiskStates:
    """Tensors of equal length, called fields, stored in a file, one sub-group after another.

    Args:
        dtype: the dtype of the master weights, which are the first field.
        fields: dtypes of the other fields, by name. The attribute ``fields`` also contains the first field.

    Raises:
        OSError: if the disk lacks space.
    """

    def __init__(
        self, swap: Swap, name: str, numel: int, dtype: torch.dtype, fields: Mapping[str, torch.dtype]
    ) -> None:
        self.swap, self.name, self.numel, self.dtype = swap, name, numel, dtype
        self.fields: Mapping[str, torch.dtype] = {MASTERS: dtype, **fields}
        self.count = -(-numel // swap.sub_group)  # number of sub-groups
        self._file = swap.open(sum(map(self._nbytes, range(self.count))))

    def add_fields(self, fields: Mapping[str, torch.dtype]) -> None:
        """Add missing fields, filled with zeros. Raises an OSError, and changes nothing, if the disk lacks space."""
        if all(field in self.fields for field in fields):
            return
        new = DiskStates(self.swap, self.name, self.numel, self.dtype, {**self.fields, **fields})
        try:
            for start, stop in map(self.range_of, range(self.count)):
                for field in self.fields:
                    new.write(field, start, self.read(field, start, stop))
        except BaseException:
            new.close()
            raise
        former, self._file, self.fields = self._file, new._file, new.fields
        former.close()

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    @property
    def nbytes(self) -> int:
        """The file's size."""
        return self._file.nbytes

    # -- by sub-group -----------------------------------------------------------------------------------------------

    def extents(self) -> list[FileRange]:
        """The extents of all sub-groups, in order."""
        return [FileRange(self._file, index * self._nbytes(0), self._nbytes(index)) for index in range(self.count)]

    def range_of(self, index: int) -> tuple[int, int]:
        """The elements ``[start, stop)`` of a sub-group."""
        return index * self.swap.sub_group, min((index + 1) * self.swap.sub_group, self.numel)

    def _nbytes(self, index: int) -> int:
        """Bytes of a sub-group. All sub-groups except the last have the same size."""
        start, stop = self.range_of(index)
        return sum(aligned((stop - start) * dtype.itemsize) for dtype in self.fields.values())

    def _offsets(self, index: int) -> dict[str, int]:
        """Each field's offset in bytes within a sub-group."""
        start, stop = self.range_of(index)
        ends = accumulate((aligned((stop - start) * dtype.itemsize) for dtype in self.fields.values()), initial=0)
        return dict(zip(self.fields, ends))

    def views(self, index: int, memory: memoryview) -> dict[str, Tensor]:
        """The fields of a sub-group, as 1-D tensors over the memory that contains the sub-group."""
        start, stop = self.range_of(index)
        offsets = self._offsets(index)
        return {
            field: torch.frombuffer(memory, dtype=dtype, count=stop - start, offset=offsets[field])
            for field, dtype in self.fields.items()
        }

    # -- by range ---------------------------------------------------------------------------------------------------

    def read(self, field: str, start: int, stop: int) -> Tensor:
        """Read the elements ``[start, stop)`` of a field into new memory."""
        out = torch.empty(stop - start, dtype=self.fields[field], device="cpu")
        for part, position, memory, elements in self._parts(field, start, stop):
            self._file.read(memory, position)
            out[part] = elements
        return out

    def write(self, field: str, start: int, values: Tensor) -> None:
        """Write values to the elements of a field from ``start`` on."""
        for part, position, memory, elements in self._parts(field, start, start + values.numel()):
            if elements.nbytes < len(memory):
                self._file.read(memory, position)  # preserves the bytes around the elements
            elements.copy_(values[part])
            self._file.write(memory, position)

    def _parts(self, field: str, start: int, stop: int) -> Iterator[tuple[slice, int, memoryview, Tensor]]:
        """Split ``[start, stop)`` by sub-group: yield (part, aligned file position, memory, the part in memory)."""
        dtype, sub_group = self.fields[field], self.swap.sub_group
        for index in range(start // sub_group, -(-stop // sub_group)):
            first, last = self.range_of(index)
            low, high = max(start, first), min(stop, last)
            begin = (low - first) * dtype.itemsize // ALIGNMENT * ALIGNMENT
            memory = aligned_memory(aligned((high - first) * dtype.itemsize) - begin)
            offset = (low - first) * dtype.itemsize - begin
            elements = torch.frombuffer(memory, dtype=dtype, count=high - low, offset=offset)
            position = index * self._nbytes(0) + self._offsets(index)[field] + begin
            yield slice(low - start, high - start), position, memory, elements

    def tensor(self, field: str, start: int, stop: int) -> LazyTensor:
        """A range of a field as a lazy tensor: each use reads values from the disk, and each write goes to the disk."""

        def read(low: int, high: int) -> Tensor:
            return self.read(field, start + low, start + high)

        write = partial(self.write, field, start)
        return LazyTensor(f"{field} of {self.name}", (stop - start,), self.fields[field], read, write=write)
