"""Files for states offloaded to a disk, and buffers in which threads change the contents of files.

    file, buffers = SwapFile("/local/disk", 2**30), Buffers()
    buffers.change(file, act, Turn())

While one thread changes a file's contents, others write the contents of an earlier file and read those of a later one:

    thread 0 | read a | change a | write a            | read d   | ...
    thread 1          | read b   | change b | write b            | ...
    thread 2                     | read c   | change c | write c | ...
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from shutil import disk_usage
from typing import Any

from lightning_zero.io.disk import huge_memory

BUFFERS = 3  # at any time, one is filled, one is changed and one is written
_DIRECT = getattr(os, "O_DIRECT", 0)  # some operating systems lack direct I/O


def _allow_open_files() -> None:
    """Raise this process's limit of open files to what the system allows, since each bucket has a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems allow fewer than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class SwapFile:
    """An unnamed file. The system removes it once this process and all processes forked from it have ended or crashed.

    The file initially contains ``nbytes`` zeros, for which disk space is reserved. Writes beyond its end enlarge it.
    Several threads may read and write different positions at once.

    Data bypasses the page cache (``O_DIRECT``) where the system and the disk allow it, which saves memory and the time
    of copying. Addresses, positions and sizes must then be multiples of ``ALIGNMENT``; after a call with others, the
    file goes through the cache.

    Args:
        folder: path of a folder on a local disk; errors name it. A missing folder is created for this user alone.

    Raises:
        OSError: if the disk lacks space or no file can be created in the folder; no space is then reserved.
    """

    def __init__(self, folder: str, nbytes: int = 0) -> None:
        self.path, self.nbytes = folder, 0
        try:
            os.makedirs(folder, 0o700, exist_ok=True)
            _allow_open_files()
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                self._file = os.dup(file.fileno())
        except OSError as error:
            raise type(error)(
                error.errno,
                f"no file for offload can be created in this folder ({error.strerror}): choose a folder on a local "
                "disk in which this user may create files",
                folder,
            ) from error
        self._closed = weakref.finalize(self, os.close, self._file)
        self.reserve(nbytes)

    def _bypass_cache(self, bypasses: bool) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~_DIRECT
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | _DIRECT if bypasses else flags)

    def reserve(self, nbytes: int) -> None:
        """Change the size of the file, and allocate its blocks, so that no later write fails on a full disk.

        A system that cannot allocate blocks in advance must at least have the space now.

        Raises:
            OSError: if the disk lacks space; the file is then as before.
        """
        more, free = nbytes - self.nbytes, disk_usage(self._file).free
        self._bypass_cache(False)  # glibc may have to write to the file through the cache
        try:
            if more > free:  # an attempt would briefly fill the disk for all users
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._file, nbytes)
            if more > 0 and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, self.nbytes, more)
        except OSError as error:
            os.ftruncate(self._file, self.nbytes)
            raise OSError(
                error.errno,
                f"{error.strerror}: {more} bytes are required, {free} are available: free some space, or choose a "
                "folder on a larger disk",
                self.path,
            ) from None
        finally:
            with suppress(OSError):  # in-memory file systems lack direct I/O
                self._bypass_cache(True)
        self.nbytes = nbytes

    def write(self, data: memoryview, position: int) -> None:
        """Write bytes at a position."""
        while data:
            written = self._move("written", os.pwrite, data, position)
            data, position = data[written:], position + written

    def read(self, into: memoryview, position: int) -> None:
        """Fill memory with the bytes at a position."""
        while into:
            count = self._move("read", lambda file, memory, at: os.preadv(file, [memory], at), into, position)
            if count == 0:
                raise OSError(errno.EIO, f"the file ends at byte {position}, {len(into)} bytes too early", self.path)
            into, position = into[count:], position + count

    def _move(self, done: str, call: Callable[[int, memoryview, int], int], memory: memoryview, position: int) -> int:
        """Make one system call, and return the number of bytes transferred."""
        try:
            try:
                return call(self._file, memory, position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._bypass_cache(False)  # direct I/O is refused for this memory or file system
                return call(self._file, memory, position)
        except OSError as error:
            message = f"{len(memory)} bytes cannot be {done} at byte {position} ({error.strerror})"
            raise OSError(error.errno, message, self.path) from error

    def close(self) -> None:
        """Free the disk space, even if forked processes have the file open."""
        with suppress(OSError):  # the file was closed before
            self.reserve(0)
        self._closed()
        self._file = -1  # the system may reuse the closed descriptor


class Turn:
    """A thread's place in a line of threads: to enter it, the thread waits until the one before has left its own.

    It may be entered again.
    """

    def __init__(self, before: Turn | None = None) -> None:
        self._before, self._is_over = before, threading.Event()

    def __enter__(self) -> None:
        if self._before is not None:
            self._before._is_over.wait()
            self._before = None  # otherwise all earlier turns would be kept

    def __exit__(self, *_: object) -> None:
        self._is_over.set()


class Buffers:
    """A buffer for each thread that changes files, enlarged as needed.

    Attributes:
        free: the buffers that no thread is using.
    """

    def __init__(self, allocate: Callable[[int], Any] = huge_memory) -> None:
        self._allocate, self.free = allocate, list[Any]()
        self._reading = threading.Lock()

    def change(self, file: SwapFile, act: Callable[[Any], object], turn: Turn) -> None:
        """Read a file, change its contents in memory, and write them back. For up to ``BUFFERS`` threads at once.

        Args:
            act: called in the thread's turn with the contents, which it changes in place.
            turn: left in any case, for the threads behind.

        Raises:
            Exception: what ``act`` raises; the file is then unchanged.
            OSError: if the file cannot be read, and is then unchanged, or cannot be written.
        """
        try:
            buffer = self.free.pop()
        except IndexError:
            buffer = self._allocate(0)
        try:
            if len(buffer) < file.nbytes:
                buffer = self._allocate(file.nbytes)
            contents = buffer[: file.nbytes]
            with self._reading:  # otherwise the first file would be read at a third of the disk's speed
                file.read(contents, 0)
            with turn:
                act(contents)
            file.write(contents, 0)
        finally:
            self.free.append(buffer)
            with turn:  # if the file could not be read
                pass
