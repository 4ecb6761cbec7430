"""States that lie on a disk: a process's folder of files there, and the pipeline that reads, changes and writes them.

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

from lightning_zero.disk import DirectFile, aligned, aligned_memory, free_bytes, huge_memory, make_private_folder
from lightning_zero.labels import LABEL, is_left_over, new_label

BUFFERS = 3
"""Of a ring: one is read into, one is changed, one is written."""

SLICE = 2**20
"""Bytes below which it does not pay to divide a piece among threads."""

_NAME = re.compile(rf"lightning_zero\.swap-{LABEL}")


class SwapFolder:
    """A folder of this process alone, removed when it is closed or nobody has it any more, and when Python ends.

    What processes left that had no time for it (killed, or a machine that lost its power) is removed by the next
    folder that is made beside: theirs of this machine at once, of another one after a day without a write.

    Args:
        path: of the folder below which it is made, on a local disk; it is made too if it is not there, for this user
            alone, and stays.
        label: of this folder alone, see ``labels.new_label``.

    Attributes:
        path: its own.

    Raises:
        OSError: if no folder can be made there; a subclass that says why.
    """

    def __init__(self, path: str | os.PathLike[str], label: str | None = None) -> None:
        parent = os.path.abspath(path)
        self.path = os.path.join(parent, f"lightning_zero.swap-{label or new_label()}")
        try:
            make_private_folder(parent)
            _remove_leftovers(parent)
            os.mkdir(self.path, 0o700)  # what it holds is as private as the memory that it stands for
        except OSError as error:
            raise type(error)(
                error.errno,
                f"no folder for offloading can be made there ({error.strerror}): write the path of a folder on a local "
                "disk, in which this user may make files",
                parent,
            ) from error
        self._files: list[DirectFile] = []
        # One that is not run by a forked process, and which those that multiprocessing starts run too when they end.
        self._finalizer = Finalize(self, _remove, args=(self.path, self._files), exitpriority=0)

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be reserved."""
        return free_bytes(self.path)

    def open(self, name: str, nbytes: int) -> SwapFile:
        """A new file of zeros, of a size that it keeps, and for which the disk has the room reserved.

        Raises:
            OSError: if there is not enough room, or a file cannot be made; it is not there then.
        """
        path = os.path.join(self.path, name)
        assert not os.path.exists(path), f"{path} is open"
        file = DirectFile(path, readable=True)
        try:
            file.reserve(nbytes)
        except OSError as error:
            file.close()
            os.remove(path)
            error.filename = path  # which the system's calls on open files do not know
            raise
        self._files.append(file)
        return SwapFile(self, file, nbytes)

    def close(self) -> None:
        """Remove it, with its files."""
        self._finalizer()


def _remove_leftovers(parent: str) -> None:
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        with suppress(OSError):  # another user's, perhaps, or another rank is just removing it
            if (found := _NAME.fullmatch(name)) and is_left_over(found["label"], path):
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: str, files: list[DirectFile]) -> None:
    for file in files:
        file.close()
    shutil.rmtree(path, ignore_errors=True)


class SwapFile:
    """A file of a ``SwapFolder``. Several threads may read and write it at once, at different places.

    Bytes that the disk has not taken are kept in memory until it does: what is read is always what was written last.

    Attributes:
        path: where it is, for messages.
        nbytes: its size.
    """

    def __init__(self, folder: SwapFolder, file: DirectFile, nbytes: int) -> None:
        self.path, self.nbytes = file.path, nbytes
        self._folder = folder  # which is removed when nobody has it any more
        self._file = file
        self._kept: dict[tuple[int, int], memoryview] = {}  # by (start, stop); those that overlap agree
        self._lock = Lock()  # of what is kept, and held while it is written

    def close(self) -> None:
        """Remove it."""
        self._file.close()
        os.remove(self.path)

    @property
    def is_direct(self) -> bool:
        """Whether all that was aligned has gone past the system's cache so far."""
        return self._file.is_direct

    def read(self, into: memoryview, position: int) -> None:
        """Fill memory with what is at a position.

        Raises:
            OSError: naming the file and the position; what is in the memory then is of no use.
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
        """Put bytes at a position.

        Raises:
            OSError: naming the file and the position. The bytes are kept then: later reads give them, and each later
                read and write tries first to bring them to the disk.
        """
        stop = position + len(data)
        assert 0 <= position and stop <= self.nbytes
        if self._kept:
            self._retry()
            with self._lock:  # so that nobody writes there what is older after this
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
        """Write what is kept; what the disk does not take still, in the order of places."""
        if not self._kept:
            return []
        with self._lock:
            for (start, end), kept in list(self._kept.items()):
                with suppress(OSError):
                    self._file.write(kept, start)
                    del self._kept[start, end]
            return sorted(self._kept.items(), key=lambda item: item[0])


class Piece(NamedTuple):
    """What is in memory at once: ``nbytes`` of a file from ``position`` on, best a multiple of ``disk.ALIGNMENT``."""

    file: SwapFile
    position: int
    nbytes: int


class Ring:
    """Three buffers that pieces take in turn, and the threads that fill and empty them.

    Args:
        nbytes: of a buffer, as of the largest piece.
        threads: how many read at once, and how many write. A disk is the faster the more is asked of it at once.
    """

    def __init__(self, nbytes: int, threads: int = 4) -> None:
        self.nbytes, self.threads = nbytes, threads
        self._buffers = [huge_memory(max(nbytes, 1)) for _ in range(BUFFERS)]
        # Two, so that neither reads nor writes wait in a queue behind the others. The threads are started when they are
        # needed, and end with the ring.
        self._readers = ThreadPoolExecutor(threads, "lightning_zero-read")
        self._writers = ThreadPoolExecutor(threads, "lightning_zero-write")
        self.in_use = Lock()

    def buffer(self, index: int, nbytes: int) -> memoryview:
        """The memory of the piece of a number."""
        return self._buffers[index % BUFFERS][:nbytes]

    def read(self, index: int, piece: Piece, after: Sequence[Future[None]] = ()) -> list[Future[None]]:
        """Begin to read a piece into its buffer, after writes from there; it is not read if one of them fails."""

        def read(memory: memoryview, position: int) -> None:
            wait(after)
            if all(write.exception() is None for write in after):
                piece.file.read(memory, position)

        return self._in_slices(self._readers, read, index, piece)

    def write(self, index: int, piece: Piece) -> list[Future[None]]:
        """Begin to write a piece out of its buffer."""
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
    """Read pieces one after another, let each be changed in place, and write them back; all of this at the same time.

    If something fails, what is under way is brought to its end and nothing new is begun. Each piece is then as ``act``
    left it where ``act`` has returned, and else as it was before: what the disk did not take is kept by its file.

    Args:
        pieces: which do not overlap; none is larger than a buffer of the ring.
        act: is called in this thread with a piece's number and its bytes, which are its own until it returns.
        ring: in use by no other ``stream``.
        write_back: ``False`` to look at the pieces only; what is changed is dropped.
        on_written: is called with the number of a piece when it has been written: in other threads, one at a time, and
            of the last perhaps a moment after this has returned.

    Raises:
        OSError: if a read or a write fails, naming the file and the position.
        Exception: whatever ``act`` raises.
    """
    assert all(piece.nbytes <= ring.nbytes for piece in pieces), "a piece is larger than the ring's buffers"
    assert not (write_back and _overlap(pieces)), "a piece would be read before another has changed it"
    is_free = ring.in_use.acquire(blocking=False)
    assert is_free, "the ring is in use"
    telling = Lock()
    reads: deque[list[Future[None]]] = deque()  # of the piece whose turn is next, and those after
    writes: deque[list[Future[None]]] = deque(maxlen=BUFFERS)  # of the last pieces: earlier ones have succeeded
    try:
        for index, piece in enumerate(pieces[:BUFFERS]):
            reads.append(ring.read(index, piece))
        for index, piece in enumerate(pieces):
            _wait(reads[0])
            reads.popleft()
            # One that has failed raises, and if its buffer is this piece's, it is done: the read has waited for it.
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
        reads.clear()  # an exception that is raised refers to this frame, and they to the exception
        writes.clear()
        ring.in_use.release()


def _wait(futures: Iterable[Future[None]]) -> None:
    """Wait for each; the first that has failed raises."""
    waiting = deque(futures)
    del futures  # an exception that is raised refers to this frame, which is not to refer to it
    while waiting:
        waiting.popleft().result()


def _when_done(futures: Sequence[Future[None]], tell: Callable[[], object], telling: Lock) -> None:
    """Have the last of them that ends call ``tell``, with the lock held; if one fails, nobody does."""
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
    """Wait until no thread uses the ring. Reads that have not begun are not needed; writes all are."""
    for future in chain.from_iterable(reads):
        future.cancel()
    wait([*chain.from_iterable(reads), *chain.from_iterable(writes)])


def _overlap(pieces: Sequence[Piece]) -> bool:
    ordered = sorted((id(piece.file), piece.position, piece.position + piece.nbytes) for piece in pieces)
    return any(one[0] == next[0] and one[2] > next[1] for one, next in zip(ordered, ordered[1:]))
