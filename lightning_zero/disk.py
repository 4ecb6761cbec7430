"""Files that are written past the system's cache, so that neither memory nor a processor's time goes into copies."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from threading import Thread

ALIGNMENT = 4096
"""Bytes of which positions, sizes and addresses must be multiples, to go past the cache of any usual disk."""

BUFFER = 2**24
"""Bytes that are written at once: enough that a disk is not kept waiting for the next."""


def aligned_memory(nbytes: int) -> memoryview:
    """Memory that begins at a multiple of ``ALIGNMENT``; it costs nothing before it is used."""
    return memoryview(mmap.mmap(-1, nbytes))


class DirectFile:
    """A new file for writing, past the system's cache (``O_DIRECT``) where the system, disk and values allow.

    Args:
        path: replaced if it exists.
    """

    def __init__(self, path: str) -> None:
        self._cached = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._open = [self._cached]
        self._direct: int | None = None
        with suppress(OSError, AttributeError):  # file systems in memory refuse, and other systems do not know it
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
            self._open.append(self._direct)

    @property
    def is_direct(self) -> bool:
        """Whether what is aligned goes past the cache."""
        return self._direct is not None

    def write(self, data: memoryview, position: int) -> None:
        """Write bytes at a position. From several threads at once, for different positions.

        Args:
            data: in ``aligned_memory``, if it is to go past the cache.
            position: a multiple of ``ALIGNMENT``, likewise; what is behind the last whole one of ``data`` does not.
        """
        while data:
            whole = len(data) // ALIGNMENT * ALIGNMENT
            if self._direct is not None and whole and position % ALIGNMENT == 0:
                try:
                    written = os.pwrite(self._direct, data[:whole], position)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._direct = None
                    continue
            else:
                written = os.pwrite(self._cached, data, position)
                if written >= BUFFER and hasattr(os, "posix_fadvise"):  # begin to write it, not only when it is synced
                    os.posix_fadvise(self._cached, position, written, os.POSIX_FADV_DONTNEED)
            data, position = data[written:], position + written

    def sync(self) -> None:
        """Wait until all of it is on the disk."""
        os.fsync(self._cached)

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())


class Appender:
    """Writes a new file from its beginning to its end: while one buffer goes to the disk, the next is filled.

    Args:
        path: replaced if it exists.
    """

    def __init__(self, path: str) -> None:
        self._file = DirectFile(path)
        self._filling, self._other = aligned_memory(BUFFER), aligned_memory(BUFFER)
        self._filled = self._position = 0
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def write(self, data: memoryview) -> int:
        """Take bytes. What goes wrong with them is raised now, by a later call or by ``finish``."""
        taken = len(data)
        while data:
            count = min(len(data), BUFFER - self._filled)
            self._filling[self._filled : self._filled + count] = data[:count]
            data, self._filled = data[count:], self._filled + count
            if self._filled == BUFFER:
                self._wait()
                self._thread = Thread(target=self._write, args=(self._filling, self._position), daemon=True)
                self._thread.start()
                self._filling, self._other = self._other, self._filling
                self._filled, self._position = 0, self._position + BUFFER
        return taken

    def _write(self, data: memoryview, position: int) -> None:
        try:
            self._file.write(data, position)
        except BaseException as error:
            self._error = error

    def _wait(self) -> None:
        self._join()
        if self._error is not None:
            raise self._error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Write what is left, and sync all of it to the disk."""
        self._wait()
        self._file.write(self._filling[: self._filled], self._position)
        self._filled = 0
        self._file.sync()

    def close(self) -> None:
        """Close the file; what was not finished is not all there."""
        self._join()
        self._file.close()
