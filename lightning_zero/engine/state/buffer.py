"""The gathered buffer of a bucket: its memory, the streams that use it, and whether user code has views of it."""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.comm.asynchronous import current_stream, wait_for
from lightning_zero.engine.comm.counters import Ledger
from lightning_zero.engine.compat import storage_use_count
from lightning_zero.engine.plan.layout import BucketLayout


def without_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a 1-D tensor whose storage has zero bytes."""
    tensor = torch.empty(numel, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


class GatheredBuffer:
    """The full parameters of a bucket, one after another.

    Device memory is allocated and freed on one stream. Before memory is freed, this stream waits for all streams that
    used it. ``masters`` are the master weight tensors that are views of the buffer.
    """

    def __init__(self, tensor: Tensor, layout: BucketLayout, ledger: Ledger, stays: bool) -> None:
        self.tensor, self._layout, self._ledger = tensor, layout, ledger
        self._nbytes = tensor.numel() * tensor.element_size()
        self.segments: list[Tensor] = []  # created at the first allocation, since views of an empty storage fail
        self.masters: weakref.WeakSet[Any] = weakref.WeakSet()
        self._allocated_on: torch.Stream | None = None  # None on the CPU
        self._arrived: torch.Event | None = None  # recorded after the first stream's wait for the gather
        self._used_on: list[torch.Stream] = []
        if stays:
            ledger.add("parameters", self._nbytes)
            self._find_segments()

    def allocate(self) -> None:
        """Allocate the memory, unless it is already allocated."""
        if self.tensor.untyped_storage().nbytes():
            return
        self.tensor.untyped_storage().resize_(self._nbytes)
        self._allocated_on = current_stream(self.tensor.device)
        self._ledger.add("gathered", self._nbytes)
        if not self.segments:
            self._find_segments()

    def free(self) -> None:
        wait_for(self._used_on, self._allocated_on)
        self.tensor.untyped_storage().resize_(0)
        self._ledger.add("gathered", -self._nbytes)

    def _find_segments(self) -> None:
        ranges = self.tensor.split_with_sizes(self._layout.sizes())[::2]
        # detached, since a fake tensor that is a view of a view keeps the intermediate view alive
        self.segments = [part.view(segment.shape).detach() for part, segment in zip(ranges, self._layout.segments)]

    # -- streams ----------------------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """Record that the current stream has waited for a gather."""
        if (stream := current_stream(self.tensor.device)) is not None:
            self._arrived, self._used_on = stream.record_event(), [stream]

    def use(self) -> None:
        """Make the current stream wait for the last gather: a module may compute on streams of its own."""
        if self._arrived is not None:
            stream = current_stream(self.tensor.device)
            if stream is not None and stream not in self._used_on:
                stream.wait_event(self._arrived)
                self._used_on.append(stream)

    def is_kept(self, others: int) -> bool:
        """Whether user code has a tensor over the buffer.

        Args:
            others: how many tensors over the buffer the engine has besides ``tensor``, ``segments`` and ``masters``.
        """
        of_this_call = 1
        return storage_use_count(self.tensor) > 1 + len(self.segments) + len(self.masters) + others + of_this_call


def let_freed_memory_stay() -> None:
    """Keep freed memory in the process, so that new buffers reuse it and the system need not zero new memory.

    By default, glibc returns a freed block to the system at once if the block is larger than a limit: the size of the
    largest block freed before, up to 32 MiB. Free memory at the end of the heap is returned beyond twice that limit:
    see ``mallopt(3)``, M_MMAP_THRESHOLD. Freeing one large block, which is never written to, raises both limits. A call
    of ``mallopt`` would override what the user has set in the environment.
    """
    if sys.platform == "linux":
        system = ctypes.CDLL(None)
        system.malloc.argtypes, system.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        system.free.argtypes = [ctypes.c_void_p]
        system.free(system.malloc(2**25 - 2**16))
