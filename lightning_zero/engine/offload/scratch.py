"""Scratch storage for one process: host memory, device memory, or an unnamed file on a disk."""

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
"""Maximum number of pending writes to a disk; the buffer of each takes host memory."""


class Memory:
    """Scratch storage in memory. Host memory may be pinned, so that copies to and from a GPU run in the background."""

    def __init__(self, device: torch.device, is_pinned: bool = False) -> None:
        self.device, self._is_pinned = device, is_pinned

    def memory(self, nbytes: int) -> Tensor:
        """A buffer of bytes to fill and pass to ``put``."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_pinned, device=self.device)

    def put(self, memory: Tensor, filled: torch.Event | None) -> Tensor:
        """Store a buffer that is full once the event ``filled`` occurs (None: now); return a key for ``get``."""
        return memory

    def get(self, where: Tensor, deliver: Callable[[Tensor], Any]) -> Future[Any]:
        """Pass stored bytes to a function, and return a future with the function's result."""
        delivered: Future[Any] = Future()
        delivered.set_result(deliver(where))
        return delivered

    def free(self, where: Tensor) -> None:
        """Free stored bytes."""


class Disk:
    """Scratch storage in an unnamed file.

    One thread runs all writes and reads in the order of the calls, so that bytes are written before they are read, and
    read before their space is reused.
    """

    def __init__(self, folder: str, is_pinned: bool) -> None:
        self._is_pinned, self._file = is_pinned, SwapFile(folder)
        self._thread = ThreadPoolExecutor(1, "lightning_zero-disk")
        self._writes: deque[Future[Any]] = deque()
        # Start positions of freed ranges, by size. Autograd graphs own the stored bytes, and any thread may free a
        # graph, so these are deques, whose ``append`` and ``pop`` are thread-safe.
        self._free: dict[int, deque[int]] = {}
        self._end = 0

    def memory(self, nbytes: int) -> Tensor:
        """A buffer of bytes to fill and pass to ``put``. Waits while too many writes are pending."""
        while len(self._writes) >= WRITES:
            wait([self._writes.popleft()])  # if this write has failed, ``get`` raises its error
        return self._aligned(nbytes)

    def put(self, memory: Tensor, filled: torch.Event | None) -> _Stored:
        """Store a buffer that is full once the event ``filled`` occurs (None: now); return a key for ``get``."""
        start = self._claim(len(memory))
        written = self._thread.submit(self._write, memory, start, filled)
        self._writes.append(written)
        return _Stored(start, len(memory), written)

    def get(self, where: _Stored, deliver: Callable[[Tensor], Any]) -> Future[Any]:
        """Read stored bytes and pass them to a function, in the background. Return a future with the result."""
        return self._thread.submit(self._read, where, deliver)

    def free(self, where: _Stored) -> None:
        """Free stored bytes: later writes may reuse their space."""
        self._free[where.nbytes].append(where.start)

    def _claim(self, nbytes: int) -> int:
        """Reserve a freed range of exactly this size, or a new range at the end of the file; return its start."""
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
            return error.errno, error.strerror  # the error itself would keep this frame, and so the buffer, alive
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
        advice = "free space on this disk, set path= to a folder on another disk, or write activations='cpu'"
        return OSError(number, f"{reason}: {advice}", self._file.path)


class _Stored(NamedTuple):
    start: int
    nbytes: int
    written: Future[tuple[int | None, str | None] | None]
