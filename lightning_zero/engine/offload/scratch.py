"""Places for bytes that this process alone needs again: the host's memory, or a file without a name on a disk."""

from __future__ import annotations

import os
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.disk import DirectFile, aligned, aligned_memory, make_private_folder
from lightning_zero.labels import new_label

WRITES = 2
"""Writes that may be under way at once; their memory is all that the host needs beside the disk."""


class HostMemory:
    """The host's memory.

    Args:
        is_pinned: so that a GPU copies to and from it beside the computation.
    """

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned

    def memory(self, nbytes: int) -> Tensor:
        """Bytes to be filled, and handed over by ``put``."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_pinned, device="cpu")

    def put(self, memory: Tensor, filled: torch.Event | None) -> Tensor:
        """Take the bytes over, which are there once an event has come. What is returned says where they are."""
        return memory

    def get(self, where: Tensor, deliver: Callable[[Tensor], Any]) -> Future[Any]:
        """Hand the bytes to a function; what that returns."""
        delivered: Future[Any] = Future()
        delivered.set_result(deliver(where))
        return delivered

    def free(self, where: Tensor) -> None:
        """The bytes are not needed any more."""


class Disk:
    """A file that has no name from its beginning on, so that nothing is left of it, however the process ends.

    One thread writes and reads, in the order in which it was asked to: what is read has been written, and what is
    written where something else was comes after the reads of that.

    Args:
        folder: on a local disk; made, for this user alone, if it does not exist.
        is_pinned: as for ``HostMemory``, of what is written and read.

    Raises:
        OSError: if no file can be made there.
    """

    def __init__(self, folder: str, is_pinned: bool) -> None:
        make_private_folder(folder)
        self.folder, self._is_pinned = folder, is_pinned
        self._file = DirectFile(os.path.join(folder, f".lightning_zero-{new_label()}"), readable=True)
        os.unlink(self._file.path)
        weakref.finalize(self, self._file.close)
        self._thread = ThreadPoolExecutor(1, "lightning_zero-disk")
        self._writes: deque[Future[Any]] = deque()
        self._ranges = _Ranges()

    def memory(self, nbytes: int) -> Tensor:
        """Bytes to be filled, and handed over by ``put``. Waits for the disk if it is too far behind."""
        while len(self._writes) >= WRITES:
            wait([self._writes.popleft()])  # what went wrong is told to whoever needs the bytes
        return self._aligned(nbytes)

    def put(self, memory: Tensor, filled: torch.Event | None) -> _Stored:
        """Take the bytes over, which are there once an event has come. What is returned says where they are."""
        start = self._ranges.claim(len(memory))
        written = self._thread.submit(self._write, memory, start, filled)
        self._writes.append(written)
        return _Stored(start, len(memory), written)

    def get(self, where: _Stored, deliver: Callable[[Tensor], Any]) -> Future[Any]:
        """Read the bytes and hand them to a function, in the thread; what that returns, or what went wrong.

        Raises in the future:
            OSError: naming the folder, and what was wrong with it.
        """
        return self._thread.submit(self._read, where, deliver)

    def free(self, where: _Stored) -> None:
        """The bytes are not needed any more: others may take their place."""
        self._ranges.give_back(where.start, where.nbytes)

    def _aligned(self, nbytes: int) -> Tensor:
        nbytes = aligned(nbytes)
        if self._is_pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")  # is at the begin of a page
        return torch.frombuffer(aligned_memory(nbytes), dtype=torch.uint8)

    def _write(self, memory: Tensor, start: int, filled: torch.Event | None) -> tuple[int | None, str | None] | None:
        if filled is not None:
            filled.synchronize()
        try:
            self._file.write(memory.numpy().data, start)
        except OSError as error:
            return error.errno, error.strerror  # not itself: it holds the frame, which holds the memory
        return None

    def _read(self, where: _Stored, deliver: Callable[[Tensor], Any]) -> Any:
        failed = where.written.result()
        if failed is not None:
            raise self._error("written to", where, *failed)
        memory = self._aligned(where.nbytes)
        try:
            self._file.read(memory.numpy().data, where.start)
        except OSError as error:
            raise self._error("read from", where, error.errno, error.strerror) from error
        return deliver(memory)

    def _error(self, what: str, where: _Stored, number: int | None, reason: str | None) -> OSError:
        return OSError(
            number,
            f"{where.nbytes:,} bytes could not be {what} the disk for offload ({reason}): make room there, choose a "
            "folder on another disk, or offload to the CPU's memory",
            self.folder,
        )


class _Stored(NamedTuple):
    start: int
    nbytes: int
    written: Future[tuple[int | None, str | None] | None]


class _Ranges:
    """Which ranges of a file are free; the file grows where none is large enough."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # of start and stop, in order, not touching each other
        self._end = 0
        # Bytes are given back whenever their graph goes, in any thread, in the midst of the other method, too.
        self._given_back: deque[tuple[int, int]] = deque()

    def claim(self, nbytes: int) -> int:
        """Where so many bytes have their place now: in the first gap that has room."""
        while self._given_back:
            self._join(*self._given_back.popleft())
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                self._free[index : index + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        self._end += nbytes
        return self._end - nbytes

    def give_back(self, start: int, nbytes: int) -> None:
        self._given_back.append((start, start + nbytes))

    def _join(self, start: int, stop: int) -> None:
        insort(self._free, (start, stop))
        joined = [self._free[0]]
        for start, stop in self._free[1:]:
            if start == joined[-1][1]:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        if joined[-1][1] == self._end:
            self._end = joined.pop()[0]
        self._free = joined
