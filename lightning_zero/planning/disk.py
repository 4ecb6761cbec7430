"""Measures a disk's speed, with the same reads and writes as in updates of optimizer states on a disk."""

from __future__ import annotations

import statistics
import time

from lightning_zero.io.disk import is_in_memory
from lightning_zero.io.swap import Extent, Ring, SwapFile, stream

_BYTES, _EXTENT, _REPEATS = 2**27, 2**24, 3


def disk_bandwidth(folder: str) -> float:
    """Bytes per second, read plus written, that the pipeline for offloaded states achieves in a folder.

    Raises:
        OSError: if the folder is on an in-memory file system, or a file of 128 MiB cannot be created in it.
    """
    if is_in_memory(folder):
        raise OSError(f"{folder} is on an in-memory file system")
    file = SwapFile(folder, _BYTES)
    extents, ring = [Extent(file, start, _EXTENT) for start in range(0, _BYTES, _EXTENT)], Ring(_EXTENT)
    seconds = []
    for _ in range(_REPEATS + 1):  # the first run, which initializes the file's blocks, is discarded
        started = time.perf_counter()
        stream(extents, lambda *_: None, ring)
        seconds.append(time.perf_counter() - started)
    file.close()
    return 2 * _BYTES / statistics.median(seconds[1:])
