"""Files that are mapped into memory, from which each rank can read its own part of a tensor."""

from __future__ import annotations

import os
from bisect import bisect_right
from contextlib import suppress
from mmap import PAGESIZE
from typing import Any

import torch
from torch import Tensor


class MappedFiles:
    """The files that are mapped into this process's memory, by ``torch.load(mmap=True)`` or safetensors, for example.

    The list is read from Linux's ``/proc``, since torch keeps none. On other systems, no mapped files are found.
    """

    def __init__(self) -> None:
        self._mappings: list[tuple[int, int, int, str]] = []
        with suppress(OSError), open("/proc/self/maps") as file:
            for line in (line.split(maxsplit=5) for line in file):
                path = line[5].strip() if len(line) > 5 else ""
                if path.startswith("/") and not path.startswith(("/dev/", "/memfd:", "/SYSV")):
                    start, stop = (int(address, 16) for address in line[0].split("-"))
                    self._mappings.append((start, stop, int(line[2], 16), path))

    def range_of(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """Return a key of the file range that a tensor maps, for ranks to compare; None if unmapped or written to."""
        if tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
            return None
        address = tensor.data_ptr()
        found = bisect_right(self._mappings, (address, float("inf"))) - 1
        if found < 0 or address >= self._mappings[found][1]:
            return None
        start, _, offset, path = self._mappings[found]
        if _is_written(address, address + tensor.numel() * tensor.element_size()):
            return None
        try:
            size = os.path.getsize(path)
        except OSError:
            size = -1  # the file was deleted; its mapping stays valid
        name = os.path.basename(path.removesuffix(" (deleted)"))
        # On another machine, a file of this name and size may hold other values, so ranks also compare some values.
        first = tuple(tensor.detach().view(-1)[:4].double().tolist()) if not tensor.is_complex() else ()
        return name, size, offset + address - start, str(tensor.dtype), first


def _is_written(start: int, stop: int) -> bool:
    """Whether a range of mapped memory has private pages, which a write creates; True if unknown."""
    first, last = start // PAGESIZE, -(-stop // PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(8 * first)
            entries = bytearray(file.read(8 * (last - first)))
            flags = torch.frombuffer(entries, dtype=torch.int64) >> 61  # bits: 1 file-backed, 2 swapped out, 4 present
            return bool(((flags & 6 != 0) & (flags & 1 == 0)).any())
    except (OSError, ValueError):
        return True
