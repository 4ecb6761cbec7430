"""Files for states on a disk, and a pipeline that reads, changes and writes them.

    file = SwapFile("/local/disk", 3 * 2**30)
    stream([Piece(file, start, 2**28) for start in range(0, 3 * 2**30, 2**28)], act, Ring(2**28))

While ``act`` changes one piece in the calling thread, threads write the ones before and read those after:

    buffer 0 | read 0 | act 0 | write 0       | read 3 | act 3 | ...
    buffer 1 | read 1         | act 1 | write 1        | read 4 | ...
    buffer 2 | read 2                 | act 2 | write 2         | ...
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from itertools import chain
from threading import Lock
from typing import NamedTuple

from lightning_zero.io.disk import DirectFile, aligned, huge_memory, make_private_folder
from lightning_zero.io.labels import new_label

BUFFERS = 3
"""Buffers of a ring: one is being read into, one changed, one written."""

SLICE = 2**20
"""Smallest part of a piece, in bytes, that is worth a thread of its own."""


def unnamed_file(folder: str) -> DirectFile:
    """Create a file without a name, so that it vanishes however the process ends, and processes that it forked.

    The folder is on a local disk; if it does not exist, it is created for this user alone.
    """
    make_private_folder(folder)
    file = DirectFile(os.path.join(folder, f".lightning_zero-{new_label()}"), readable=True)
    os.unlink(file.path)
    return file


class SwapFile:
    """An unnamed file of zeros with reserved disk space. Several threads may use it at once, at different positions.

    Raises:
        OSError: if the disk lacks space or no file can be created in the folder; no space is taken then.
    """

    def __init__(self, folder: str, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        try:
            self.direct = unnamed_file(folder)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"no file for offload can be created there ({error.strerror}): write the path of a folder on a local "
                "disk in which this user may create files",
                folder,
            ) from error
        weakref.finalize(self, self.direct.close)
        try:
            self.direct.reserve(nbytes)
        except OSError as error:
            self.direct.close()
            error.filename = folder  # that of the file is gone, or missing in errors of calls on open files
            raise

    def close(self) -> None:
        """Free the disk space, also where forked processes have the file open."""
        with suppress(OSError):  # closed before
            self.direct.reserve(0)
        self.direct.close()

    def read(self, into: memoryview, position: int) -> None:
        """Fill memory with the bytes at a position; an OSError names the file and the position."""
        self._move(self.direct.read, "read", into, position)

    def write(self, data: memoryview, position: int) -> None:
        """Write bytes at a position; an OSError names the file and the position."""
        self._move(self.direct.write, "written", data, position)

    def _move(self, call: Callable[[memoryview, int], None], done: str, memory: memoryview, position: int) -> None:
        assert 0 <= position and position + len(memory) <= self.nbytes
        try:
            call(memory, position)
        except OSError as error:
            message = f"{len(memory)} bytes cannot be {done} at byte {position} ({error.strerror})"
            raise OSError(error.errno, message, self.folder) from error


class Piece(NamedTuple):
    """A range of a file that is processed at once; its bytes ideally are a multiple of ``disk.ALIGNMENT``."""

    file: SwapFile
    position: int
    nbytes: int


class Ring:
    """Three buffers for the largest piece, which pieces use in turn, and the threads that read and write them.

    Several threads read a piece, and several write it: disks are faster with several requests at once.
    """

    def __init__(self, nbytes: int, threads: int = 4) -> None:
        self.nbytes, self.threads = nbytes, threads
        self._buffers = [huge_memory(max(nbytes, 1)) for _ in range(BUFFERS)]
        # Two executors, so that reads and writes do not queue behind each other. Threads start when they are needed and
        # end with the ring.
        self._readers = ThreadPoolExecutor(threads, "lightning_zero-read")
        self._writers = ThreadPoolExecutor(threads, "lightning_zero-write")

    def buffer(self, index: int, nbytes: int) -> memoryview:
        """The buffer of the piece with this number."""
        return self._buffers[index % BUFFERS][:nbytes]

    def read(self, index: int, piece: Piece, after: Sequence[Future[None]] = ()) -> list[Future[None]]:
        """Start to read a piece into its buffer, after the given writes."""

        def read(memory: memoryview, position: int) -> None:
            wait(after)
            piece.file.read(memory, position)

        return self._in_slices(self._readers, read, index, piece)

    def write(self, index: int, piece: Piece) -> list[Future[None]]:
        """Start to write a piece from its buffer."""
        return self._in_slices(self._writers, piece.file.write, index, piece)

    def _in_slices(
        self, executor: ThreadPoolExecutor, call: Callable[[memoryview, int], None], index: int, piece: Piece
    ) -> list[Future[None]]:
        memory = self.buffer(index, piece.nbytes)
        size = aligned(max(SLICE, -(-piece.nbytes // self.threads)))
        return [
            executor.submit(call, memory[start : start + size], piece.position + start)
            for start in range(0, piece.nbytes, size)
        ]


def stream(
    pieces: Sequence[Piece],
    act: Callable[[int, memoryview], object],
    ring: Ring,
    on_written: Callable[[int], object] = lambda index: None,
) -> None:
    """Read pieces, change each in place, and write them back, with all three overlapping.

    After an error of ``act`` or of the disk, running reads and writes finish and no new ones start.

    Args:
        pieces: must not overlap; none may be larger than a buffer of the ring.
        act: called in this thread with a piece's number and its bytes, which it may use until it returns.
        ring: not in use by another ``stream``.
        on_written: called with a piece's number after it was written: in other threads, one call at a time, for the
            last piece perhaps shortly after this function has returned.
    """
    notifying = Lock()
    reads: deque[list[Future[None]]] = deque()  # of the next piece, and of those after it
    writes: deque[list[Future[None]]] = deque(maxlen=BUFFERS)  # of the last pieces; all earlier ones have succeeded
    try:
        for index, piece in enumerate(pieces[:BUFFERS]):
            reads.append(ring.read(index, piece))
        for index, piece in enumerate(pieces):
            _wait(reads[0])
            reads.popleft()
            # Raise errors of finished writes. The last write from this buffer is finished, as the read has waited for
            # it.
            _wait(write for write in chain.from_iterable(writes) if write.done())
            act(index, ring.buffer(index, piece.nbytes))
            writes.append(ring.write(index, piece))
            _when_done(writes[-1], partial(on_written, index), notifying)
            if index + BUFFERS < len(pieces):
                reads.append(ring.read(index + BUFFERS, pieces[index + BUFFERS], after=writes[-1]))
        _wait(chain.from_iterable(writes))
    finally:  # no thread uses the ring afterwards
        for future in chain.from_iterable(reads):
            future.cancel()
        wait([*chain.from_iterable(reads), *chain.from_iterable(writes)])
        reads.clear()  # break the cycle of a raised exception, this frame and the futures
        writes.clear()


def _wait(futures: Iterable[Future[None]]) -> None:
    """Wait for all futures; raise the error of the first that has failed."""
    waiting = deque(futures)
    del futures  # no reference from this frame to an exception that refers to it
    while waiting:
        waiting.popleft().result()


def _when_done(futures: Sequence[Future[None]], notify: Callable[[], object], notifying: Lock) -> None:
    """Call ``notify`` once after all futures have succeeded, with the lock held; not at all if one fails."""
    left = len(futures)

    def done(future: Future[None]) -> None:
        nonlocal left
        with notifying:
            left -= future.exception() is None
            if left == 0:
                notify()

    for future in futures:
        future.add_done_callback(done)
