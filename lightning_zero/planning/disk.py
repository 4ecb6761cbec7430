"""Measures a disk under the load of optimizer updates whose states are stored there."""

from __future__ import annotations

import statistics
import time

from lightning_zero.io.disk import is_in_memory
from lightning_zero.io.swap import Extent, Ring, SwapFile, stream

_BYTES, _EXTENT, _REPEATS = 2**27, 2**24, 3


def disk_bandwidth(folder: str) -> float:
    """Bytes per second that the pipeline for offloaded states reads and writes in a folder, in total.

    Raises:
        OSError: if the folder is on a file system in memory, or a file of 128 MiB cannot be made there.
    """
    if is_in_memory(folder):
        raise OSError(f"{folder} is on a file system in memory")
    file = SwapFile(folder, _BYTES)
    extents, ring = [Extent(file, start, _EXTENT) for start in range(0, _BYTES, _EXTENT)], Ring(_EXTENT)
    seconds = []
    for _ in range(_REPEATS + 1):  # the first run, into blocks that were never written, is discarded
        started = time.perf_counter()
        stream(extents, lambda *_: None, ring)
        seconds.append(time.perf_counter() - started)
    file.close()
    return 2 * _BYTES / statistics.median(seconds[1:])
