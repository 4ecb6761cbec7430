"""Files for states offloaded to a disk, and a pipeline that reads, changes and writes them.

    file = SwapFile("/local/disk", 3 * 2**30)
    stream([FileRange(file, start, 2**28) for start in range(0, 3 * 2**30, 2**28)], act, Ring())

While ``act`` changes one extent in the calling thread, other threads write earlier extents and read later ones:

    buffer 0 | read 0 | act 0 | write 0       | read 3 | act 3 | ...
    buffer 1 | read 1         | act 1 | write 1        | read 4 | ...
    buffer 2 | read 2                 | act 2 | write 2         | ...
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

from lightning_zero.io.disk import aligned, free_bytes, huge_memory, make_private_folder
from lightning_zero.io.labels import new_label

BUFFERS = 3  # at any time, one is filled, one is changed and one is written
SLICE = 2**20  # smallest part of an extent, in bytes, that is worth a separate thread
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
        path = os.path.join(folder, f".lightning_zero-{new_label()}")
        try:
            make_private_folder(folder)
            _allow_open_files()
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.unlink(path)
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
        more, free = nbytes - self.nbytes, free_bytes(self._file)
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


class FileRange(NamedTuple):
    """A range of a file that is processed as a unit; ideally ``nbytes`` is a multiple of ``disk.ALIGNMENT``."""

    file: SwapFile
    position: int
    nbytes: int


class SameThread(Executor):
    """An executor without threads: ``submit`` runs the function at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(act(*args, **kwargs))
        return done


class Ring:
    """Three buffers, used in turn and enlarged as needed, and the threads that read and write extents.

    Several threads read an extent, and several write it: disks are faster with several requests at once.
    """

    def __init__(
        self,
        threads: int = 4,
        executor: Callable[[int, str], Executor] = ThreadPoolExecutor,
        allocate: Callable[[int], Any] = huge_memory,
    ) -> None:
        self.threads, self._allocate, self.buffers = threads, allocate, [allocate(0)] * BUFFERS
        # Three executors, so that reads and writes do not queue behind each other. Threads start when they are needed.
        self._readers = executor(threads, "lightning_zero-read")
        self._writers = executor(threads, "lightning_zero-write")
        self._ends = executor(1, "lightning_zero-written")

    def close(self) -> None:
        """Stop the threads, and wait until they have ended; free the buffers. So does garbage collection."""
        for executor in (self._readers, self._writers, self._ends):
            executor.shutdown()
        self.buffers = [self._allocate(0)] * BUFFERS

    def buffer(self, index: int, nbytes: int) -> memoryview:
        """Return the first ``nbytes`` of the buffer for the extent with number ``index``."""
        if len(self.buffers[index % BUFFERS]) < nbytes:
            self.buffers[index % BUFFERS] = self._allocate(nbytes)
        return self.buffers[index % BUFFERS][:nbytes]

    def read(self, index: int, extent: FileRange, after: Sequence[Future[None]] = ()) -> list[Future[None]]:
        """Start to read an extent into its buffer. The read waits until the writes in ``after`` have ended."""

        def read(memory: memoryview, position: int) -> None:
            wait(after)
            extent.file.read(memory, position)

        return self._in_slices(self._readers, read, index, extent)

    def write(self, index: int, extent: FileRange, then: Callable[[int], object]) -> Future[None]:
        """Start to write an extent from its buffer. After that, ``then`` is called with the extent's number."""
        slices = self._in_slices(self._writers, extent.file.write, index, extent)

        def end() -> None:
            wait(slices)
            _wait(slices)
            then(index)

        return self._ends.submit(end)

    def _in_slices(
        self, executor: Executor, call: Callable[[memoryview, int], None], index: int, extent: FileRange
    ) -> list[Future[None]]:
        memory = self.buffer(index, extent.nbytes)
        size = aligned(max(SLICE, -(-extent.nbytes // self.threads)))
        return [
            executor.submit(call, memory[start : start + size], extent.position + start)
            for start in range(0, extent.nbytes, size)
        ]


def stream(
    extents: Sequence[FileRange],
    act: Callable[[int, memoryview], object],
    ring: Ring,
    on_written: Callable[[int], object] = lambda index: None,
) -> None:
    """Read extents, change each in place, and write them back; after an error, no new reads and writes start.

    Args:
        extents: ranges that do not overlap.
        act: called in this thread with an extent's number and bytes; ``act`` may use these bytes until it returns.
        ring: a ring that no other ``stream`` is using.
        on_written: called in another thread with an extent's number after the extent was written, in order.
    """
    reads: deque[list[Future[None]]] = deque()  # reads of the next extents
    writes: deque[Future[None]] = deque()  # the latest writes; all earlier ones succeeded
    try:
        for index, extent in enumerate(extents[:BUFFERS]):
            reads.append(ring.read(index, extent))
        for index, extent in enumerate(extents):
            _wait(reads[0])
            reads.popleft()
            while writes and writes[0].done():
                writes.popleft().result()
            act(index, ring.buffer(index, extent.nbytes))
            writes.append(ring.write(index, extent, on_written))
            if index + BUFFERS < len(extents):
                reads.append(ring.read(index + BUFFERS, extents[index + BUFFERS], after=[writes[-1]]))
        _wait(writes)
    finally:  # wait until no thread uses the ring
        for future in chain.from_iterable(reads):
            future.cancel()
        wait([*chain.from_iterable(reads), *writes])


def _wait(futures: Iterable[Future[None]]) -> None:
    """Wait for the futures in order; raise the error of the first failed future."""
    for future in futures:
        future.result()
