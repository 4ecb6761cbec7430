"""Measures a disk as updates of states on it use it."""

from __future__ import annotations

import statistics
import time

from lightning_zero.io.disk import is_in_memory
from lightning_zero.io.swap import Extent, Ring, SwapFile, stream

_BYTES, _EXTENT, _REPEATS = 2**27, 2**24, 3


def disk_bandwidth(folder: str) -> float:
    """Bytes a second that the pipeline of offloaded states reads and writes in a folder, together.

    Raises:
        OSError: if the folder is on a file system in memory, or a file of 128 MiB cannot be made there.
    """
    if is_in_memory(folder):
        raise OSError(f"{folder} is on a file system in memory")
    file = SwapFile(folder, _BYTES)
    extents, ring = [Extent(file, start, _EXTENT) for start in range(0, _BYTES, _EXTENT)], Ring(_EXTENT)
    seconds = []
    for _ in range(_REPEATS + 1):  # first into blocks that were never written
        started = time.perf_counter()
        stream(extents, lambda *_: None, ring)
        seconds.append(time.perf_counter() - started)
    file.close()
    return 2 * _BYTES / statistics.median(seconds[1:])
