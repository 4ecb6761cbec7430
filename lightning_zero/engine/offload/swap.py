"""Files for states on a disk, in a folder per process, and a pipeline that reads, changes and writes them.

    folder = SwapFolder("/local/disk")
    file = folder.open("bucket0", 3 * 2**30)
    ring = Ring(2**28)
    stream([Piece(file, start, 2**28) for start in range(0, 3 * 2**30, 2**28)], act, ring)

While ``act`` changes one piece in the calling thread, threads write the ones before and read those after:

    buffer 0 | read 0 | act 0 | write 0       | read 3 | act 3 | ...
    buffer 1 | read 1         | act 1 | write 1        | read 4 | ...
    buffer 2 | read 2                 | act 2 | write 2         | ...
"""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from itertools import chain
from multiprocessing.util import Finalize
from threading import Lock
from typing import NamedTuple

from lightning_zero.io.disk import DirectFile, aligned, huge_memory, make_private_folder
from lightning_zero.io.labels import LABEL, is_left_over, new_label

BUFFERS = 3
"""Buffers of a ring: one is being read into, one changed, one written."""

SLICE = 2**20
"""Smallest part of a piece, in bytes, that is worth a thread of its own."""

_NAME = re.compile(rf"lightning_zero\.swap-{LABEL}")


class SwapFolder:
    """A folder for this process alone, removed when it is closed or deleted, and when Python ends.

    Folders of processes that could not remove theirs (killed, or a machine that lost power) are removed when the next
    folder with the same parent is made: those of this machine at once, those of others after a day without a write.

    Args:
        path: the parent folder, on a local disk; if it does not exist, it is created for this user alone, and stays.
            The attribute is that of the folder itself.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        parent = os.path.abspath(path)
        self.path = os.path.join(parent, f"lightning_zero.swap-{new_label()}")
        try:
            make_private_folder(parent)
            _remove_leftovers(parent)
            os.mkdir(self.path, 0o700)  # as private as the process's memory
        except OSError as error:
            raise type(error)(
                error.errno,
                f"no folder for offload can be created there ({error.strerror}): write the path of a folder on a local "
                "disk in which this user may create files",
                parent,
            ) from error
        self._files: list[DirectFile] = []
        # ``Finalize`` does not run in a forked process, and does run at the end of a process of multiprocessing.
        self._finalizer = Finalize(self, _remove, args=(self.path, self._files), exitpriority=0)

    def open(self, name: str, nbytes: int) -> SwapFile:
        """Create a file of zeros, with a fixed size for which disk space is reserved; after an error none is left."""
        path = os.path.join(self.path, name)
        assert not os.path.exists(path), f"{path} is open"
        file = DirectFile(path, readable=True)
        try:
            file.reserve(nbytes)
        except OSError as error:
            file.close()
            os.remove(path)
            error.filename = path  # missing in errors of calls on open files
            raise
        self._files.append(file)
        return SwapFile(self, file, nbytes)

    def close(self) -> None:
        """Remove the folder with its files."""
        self._finalizer()


def _remove_leftovers(parent: str) -> None:
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        with suppress(OSError):  # perhaps another user's, or another rank is removing it
            if (found := _NAME.fullmatch(name)) and is_left_over(found["label"], path):
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: str, files: list[DirectFile]) -> None:
    for file in files:
        file.close()
    shutil.rmtree(path, ignore_errors=True)


class SwapFile:
    """A file in a ``SwapFolder``. Several threads may use it at once, at different positions."""

    def __init__(self, folder: SwapFolder, file: DirectFile, nbytes: int) -> None:
        self.path, self.nbytes = file.path, nbytes
        self._folder = folder  # a reference, since the folder is removed when it is deleted
        self.direct = file

    def close(self) -> None:
        """Remove the file."""
        self.direct.close()
        os.remove(self.path)

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
            raise OSError(error.errno, message, self.path) from error


class Piece(NamedTuple):
    """``nbytes`` of a file from ``position`` on, processed at once; ideally a multiple of ``disk.ALIGNMENT``."""

    file: SwapFile
    position: int
    nbytes: int


class Ring:
    """Three buffers that pieces use in turn, and the threads that read and write them.

    Args:
        nbytes: of a buffer: the size of the largest piece.
        threads: parallel reads, and parallel writes; disks are faster with several requests at once.
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
