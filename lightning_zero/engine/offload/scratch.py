"""Scratch storage of one process: memory of the host or of a device, or an unnamed file on a disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.io.disk import aligned, aligned_memory
from lightning_zero.io.swap import SwapFile

WRITES = 2
"""Writes that may be pending at once. Disk storage needs host memory only for their buffers."""


class Memory:
    """Scratch storage in memory; host memory may be pinned, so that a GPU copies to and from it in the background."""

    def __init__(self, device: torch.device, is_pinned: bool = False) -> None:
        self.device, self._is_pinned = device, is_pinned

    def memory(self, nbytes: int) -> Tensor:
        """A buffer of bytes to fill and pass to ``put``."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_pinned, device=self.device)

    def put(self, memory: Tensor, filled: torch.Event | None) -> Tensor:
        """Store the bytes of a buffer, which is filled once the event has occurred, and return a key for ``get``."""
        return memory

    def get(self, where: Tensor, deliver: Callable[[Tensor], Any]) -> Future[Any]:
        """Pass the bytes to a function, and return a future with its result."""
        delivered: Future[Any] = Future()
        delivered.set_result(deliver(where))
        return delivered

    def free(self, where: Tensor) -> None:
        """Free the bytes."""


class Disk:
    """Scratch storage in an unnamed file.

    One thread does all writes and reads in the order of the calls, so a read comes after the write of its bytes, and a
    write to reused space comes after the reads of the old bytes.
    """

    def __init__(self, folder: str, is_pinned: bool) -> None:
        self._is_pinned, self._file = is_pinned, SwapFile(folder)
        self._thread = ThreadPoolExecutor(1, "lightning_zero-disk")
        self._writes: deque[Future[Any]] = deque()
        # Starts of freed ranges, by size. A range is freed with its autograd graph, which may happen in any thread.
        self._free: dict[int, deque[int]] = {}
        self._end = 0

    def memory(self, nbytes: int) -> Tensor:
        """A buffer of bytes to fill and pass to ``put``, once few enough writes are pending."""
        while len(self._writes) >= WRITES:
            wait([self._writes.popleft()])  # ``get`` raises the error of a failed write
        return self._aligned(nbytes)

    def put(self, memory: Tensor, filled: torch.Event | None) -> _Stored:
        """Store the bytes of a buffer, which is filled once the event has occurred, and return a key for ``get``."""
        start = self._claim(len(memory))
        written = self._thread.submit(self._write, memory, start, filled)
        self._writes.append(written)
        return _Stored(start, len(memory), written)

    def get(self, where: _Stored, deliver: Callable[[Tensor], Any]) -> Future[Any]:
        """Read the bytes and pass them to a function, in the background; return a future with its result."""
        return self._thread.submit(self._read, where, deliver)

    def free(self, where: _Stored) -> None:
        """Free the bytes: later writes may reuse their space."""
        self._free[where.nbytes].append(where.start)

    def _claim(self, nbytes: int) -> int:
        """Reserve a free range of the same size, or a new one at the end of the file, and return its start."""
        free = self._free.setdefault(nbytes, deque())
        if free:
            return free.pop()
        if sum(size * len(starts) for size, starts in self._free.items()) == self._end:  # nothing is stored
            self._free, self._end = {nbytes: free}, 0
        self._end += nbytes
        return self._end - nbytes

    def _aligned(self, nbytes: int) -> Tensor:
        nbytes = aligned(nbytes)
        if self._is_pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")  # starts at a page boundary
        return torch.frombuffer(aligned_memory(nbytes), dtype=torch.uint8)

    def _write(self, memory: Tensor, start: int, filled: torch.Event | None) -> tuple[int | None, str | None] | None:
        if filled is not None:
            filled.synchronize()
        try:
            self._file.write(memory.numpy().data, start)
        except OSError as error:
            return error.errno, error.strerror  # not the error: its traceback holds the frame, which holds the memory
        return None

    def _read(self, where: _Stored, deliver: Callable[[Tensor], Any]) -> Any:
        failed = where.written.result()
        if failed is not None:
            raise self._error(*failed)
        memory = self._aligned(where.nbytes)
        try:
            self._file.read(memory.numpy().data, where.start)
        except OSError as error:
            raise self._error(error.errno, error.strerror) from error
        return deliver(memory)

    def _error(self, number: int | None, reason: str | None) -> OSError:
        advice = "free space there, write the path of a folder on another disk, or offload activations to the CPU"
        return OSError(number, f"{reason}: {advice}", self._file.path)


class _Stored(NamedTuple):
    start: int
    nbytes: int
    written: Future[tuple[int | None, str | None] | None]
