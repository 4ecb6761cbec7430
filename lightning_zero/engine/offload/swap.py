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

from lightning_zero.io.disk import DirectFile, aligned, aligned_memory, free_bytes, huge_memory, make_private_folder
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
        label: of this folder, see ``labels.new_label``.

    Attributes:
        path: of the folder itself.

    Raises:
        OSError: if no folder can be created there; the same subclass as the system's error, with an explanation.
    """

    def __init__(self, path: str | os.PathLike[str], label: str | None = None) -> None:
        parent = os.path.abspath(path)
        self.path = os.path.join(parent, f"lightning_zero.swap-{label or new_label()}")
        try:
            make_private_folder(parent)
            _remove_leftovers(parent)
            os.mkdir(self.path, 0o700)  # as private as the process's memory
        except OSError as error:
            raise type(error)(
                error.errno,
                f"no folder for offloading can be made there ({error.strerror}): write the path of a folder on a local "
                "disk, in which this user may make files",
                parent,
            ) from error
        self._files: list[DirectFile] = []
        # ``Finalize`` does not run in a forked process, and does run at the end of a process of multiprocessing.
        self._finalizer = Finalize(self, _remove, args=(self.path, self._files), exitpriority=0)

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be reserved."""
        return free_bytes(self.path)

    def open(self, name: str, nbytes: int) -> SwapFile:
        """Create a file of zeros, with a fixed size for which disk space is reserved.

        Raises:
            OSError: if the disk lacks space or the file cannot be created; no file is left then.
        """
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
    """A file in a ``SwapFolder``. Several threads may use it at once, at different positions.

    Bytes that could not be written are kept in memory until the disk accepts them, so reads are always up to date.

    Attributes:
        path: of the file, for messages.
        nbytes: the file's size.
    """

    def __init__(self, folder: SwapFolder, file: DirectFile, nbytes: int) -> None:
        self.path, self.nbytes = file.path, nbytes
        self._folder = folder  # a reference, since the folder is removed when it is deleted
        self._file = file
        self._kept: dict[tuple[int, int], memoryview] = {}  # by (start, stop); overlapping ones agree
        self._lock = Lock()  # of ``_kept``, held while its bytes are written

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
        os.remove(self.path)

    @property
    def is_direct(self) -> bool:
        """Whether all aligned reads and writes have bypassed the system's cache so far."""
        return self._file.is_direct

    def read(self, into: memoryview, position: int) -> None:
        """Fill memory with the bytes at a position.

        Raises:
            OSError: with the file and the position; the content of the memory is undefined then.
        """
        stop = position + len(into)
        assert 0 <= position and stop <= self.nbytes
        at = position
        for (start, end), kept in self._retry():
            first, last = max(start, at), min(end, stop)
            if first < last:
                self._read(into[at - position : first - position], at)
                into[first - position : last - position] = kept[first - start : last - start]
                at = last
        self._read(into[at - position :], at)

    def _read(self, into: memoryview, position: int) -> None:
        try:
            self._file.read(into, position)
        except OSError as error:
            raise OSError(
                error.errno, f"{len(into)} bytes cannot be read at byte {position} ({error.strerror})", self.path
            ) from error

    def write(self, data: memoryview, position: int) -> None:
        """Write bytes at a position.

        Raises:
            OSError: with the file and the position. The bytes are then kept: later reads return them, and each later
                read or write first tries again to write them.
        """
        stop = position + len(data)
        assert 0 <= position and stop <= self.nbytes
        if self._kept:
            self._retry()
            with self._lock:  # so that no older bytes are written there after this
                for (start, end), kept in list(self._kept.items()):
                    first, last = max(start, position), min(end, stop)
                    if first < last:
                        kept[first - start : last - start] = data[first - position : last - position]
        try:
            self._file.write(data, position)
        except OSError as error:
            kept = aligned_memory(len(data))
            kept[:] = data
            with self._lock:
                self._kept[position, stop] = kept
            raise OSError(
                error.errno,
                f"{len(data)} bytes cannot be written at byte {position} ({error.strerror}); they are kept in memory, "
                "and written as soon as the disk takes them",
                self.path,
            ) from error

    def _retry(self) -> list[tuple[tuple[int, int], memoryview]]:
        """Try to write the kept bytes; returns those that the disk still refuses, in order of position."""
        if not self._kept:
            return []
        with self._lock:
            for (start, end), kept in list(self._kept.items()):
                with suppress(OSError):
                    self._file.write(kept, start)
                    del self._kept[start, end]
            return sorted(self._kept.items(), key=lambda item: item[0])


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
        self.in_use = Lock()

    def buffer(self, index: int, nbytes: int) -> memoryview:
        """The buffer of the piece with this number."""
        return self._buffers[index % BUFFERS][:nbytes]

    def read(self, index: int, piece: Piece, after: Sequence[Future[None]] = ()) -> list[Future[None]]:
        """Start to read a piece into its buffer, after the given writes; skipped if one of them fails."""

        def read(memory: memoryview, position: int) -> None:
            wait(after)
            if all(write.exception() is None for write in after):
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
    *,
    write_back: bool = True,
    on_written: Callable[[int], object] | None = None,
) -> None:
    """Read pieces, change each in place, and write them back, with all three overlapping.

    After an error, running reads and writes finish and no new ones start. Each piece is then as ``act`` left it if
    ``act`` has returned, and otherwise unchanged; bytes that the disk did not accept are kept by the ``SwapFile``.

    Args:
        pieces: must not overlap; none may be larger than a buffer of the ring.
        act: called in this thread with a piece's number and its bytes, which it may use until it returns.
        ring: not in use by another ``stream``.
        write_back: ``False`` only reads the pieces; changes are dropped.
        on_written: called with a piece's number after it was written: in other threads, one call at a time, for the
            last piece perhaps shortly after this function has returned.

    Raises:
        OSError: if a read or a write fails, with the file and the position.
        Exception: any error of ``act``.
    """
    assert all(piece.nbytes <= ring.nbytes for piece in pieces), "a piece is larger than the ring's buffers"
    assert not (write_back and _overlap(pieces)), "a piece would be read before another has changed it"
    is_free = ring.in_use.acquire(blocking=False)
    assert is_free, "the ring is in use"
    telling = Lock()
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
            writes.append(ring.write(index, piece) if write_back else [])
            if on_written is not None:
                _when_done(writes[-1], partial(on_written, index), telling)
            if index + BUFFERS < len(pieces):
                reads.append(ring.read(index + BUFFERS, pieces[index + BUFFERS], after=writes[-1]))
        _wait(chain.from_iterable(writes))
    finally:
        _end(reads, writes)
        reads.clear()  # break the cycle of a raised exception, this frame and the futures
        writes.clear()
        ring.in_use.release()


def _wait(futures: Iterable[Future[None]]) -> None:
    """Wait for all futures; raise the error of the first that has failed."""
    waiting = deque(futures)
    del futures  # no reference from this frame to an exception that refers to it
    while waiting:
        waiting.popleft().result()


def _when_done(futures: Sequence[Future[None]], tell: Callable[[], object], telling: Lock) -> None:
    """Call ``tell`` once after all futures have succeeded, with the lock held; not at all if one fails."""
    left = len(futures)

    def done(future: Future[None]) -> None:
        nonlocal left
        with telling:
            left -= future.exception() is None
            if left == 0:
                tell()

    for future in futures:
        future.add_done_callback(done)


def _end(reads: Iterable[list[Future[None]]], writes: Iterable[list[Future[None]]]) -> None:
    """Wait until no thread uses the ring. Reads that have not started are cancelled; all writes finish."""
    for future in chain.from_iterable(reads):
        future.cancel()
    wait([*chain.from_iterable(reads), *chain.from_iterable(writes)])


def _overlap(pieces: Sequence[Piece]) -> bool:
    ordered = sorted((id(piece.file), piece.position, piece.position + piece.nbytes) for piece in pieces)
    return any(one[0] == next[0] and one[2] > next[1] for one, next in zip(ordered, ordered[1:]))
