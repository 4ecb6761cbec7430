"""Files that are written and read past the system's cache: neither memory nor a processor's time goes into copies."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

ALIGNMENT = 4096
"""Bytes of which positions, sizes and addresses must be multiples, to go past the cache of any usual disk."""

BUFFER = 2**24
"""Bytes that are written at once: enough that a disk is not kept waiting for the next."""


def aligned_memory(nbytes: int) -> memoryview:
    """Memory that begins at a multiple of ``ALIGNMENT``; it costs nothing before it is used.

    It is shared with processes that are forked, as what ``O_DIRECT`` reads into must be: of private memory the child
    might get the page that the disk is just writing to (see open(2)).
    """
    return memoryview(mmap.mmap(-1, nbytes))


_MADV_WIPEONFORK = 18  # of Linux; Python has no name for it


def huge_memory(nbytes: int) -> memoryview:
    """As ``aligned_memory``, in huge pages where the system has them: the disk is then asked for more at once.

    Huge pages are for private memory. Forked processes see zeros there, so they neither hold pages nor make this
    process copy what the disk is just writing to.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return aligned_memory(nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(_MADV_WIPEONFORK)
    except OSError:  # Linux before 4.14
        return aligned_memory(nbytes)
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def aligned(number: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-number // ALIGNMENT) * ALIGNMENT


def free_bytes(place: str | int) -> int:
    """Bytes that this user may still write on the disk of a path or of an open file."""
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def is_in_memory(path: str) -> bool:
    """Whether files at a path, which need not be there yet, lie in memory and on no disk; False if nobody knows."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    device = os.stat(path).st_dev
    try:
        with open("/proc/self/mountinfo") as file:
            mounts = [line.partition(" - ") for line in file]
    except OSError:  # only Linux says it there
        return False
    kinds = {before.split()[2]: after.split()[0] for before, _, after in mounts}
    return kinds.get(f"{os.major(device)}:{os.minor(device)}") in ("tmpfs", "ramfs")


def make_private_folder(path: str) -> None:
    """Make a folder for this user alone, with those above it; one that is there already stays as it is.

    Raises:
        OSError: as the system gives it; also if the folder lies where anybody may make one, as the one for temporary
            files does, and another user may have prepared it, or may change what is in it.
    """
    os.makedirs(path, 0o700, exist_ok=True)
    if not os.stat(os.path.dirname(os.path.abspath(path))).st_mode & stat.S_IWOTH:
        return
    found = os.lstat(path)
    reason = None
    if stat.S_ISLNK(found.st_mode):
        reason = "it is a link"
    elif found.st_uid not in (os.geteuid(), 0):
        reason = f"it belongs to user {found.st_uid}"
    elif found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        reason = "every user may change what is in it"
    if reason is not None:
        raise PermissionError(
            errno.EACCES,
            f"{reason}, in a folder where every user may make some, so what is written there may come to others; "
            "remove it, or give another path",
            path,
        )


class DirectFile:
    """A new file, which goes past the system's cache (``O_DIRECT``) where the system, disk and values allow.

    ``read`` and ``write`` may be called by several threads at once, for different positions. What is in
    ``aligned_memory``, from a multiple of ``ALIGNMENT`` on and at a position that is one, goes past the cache up to its
    last whole ``ALIGNMENT`` of bytes; all else goes through it.

    Args:
        path: of what is not there yet, not even as a link.
        readable: whether it is read as well, by this process: it is for this user alone then. Some file systems over a
            network take only files that are not.

    Raises:
        FileExistsError: if something is there.

    Attributes:
        is_direct: whether all that was aligned has gone past the cache so far.
    """

    def __init__(self, path: str, *, readable: bool = False) -> None:
        access = (os.O_RDWR if readable else os.O_WRONLY) | getattr(os, "O_NOFOLLOW", 0)
        self.path = path
        self._cached = os.open(path, access | os.O_CREAT | os.O_EXCL, 0o600 if readable else 0o666)
        self._open = [self._cached]
        self._direct: int | None = None
        with suppress(OSError, AttributeError):  # file systems in memory refuse, and other systems do not know it
            direct = os.open(path, access | os.O_DIRECT)
            self._open.append(direct)
            if os.path.samestat(os.fstat(direct), os.fstat(self._cached)):  # else somebody has put another there
                self._direct = direct
        self.is_direct = self._direct is not None

    def reserve(self, nbytes: int) -> None:
        """Give a new file its size, and room on the disk for all of it: no later write there finds the disk full.

        Where the file system promises no room, there is at least enough at this moment.

        Raises:
            OSError: if there is not enough; nothing is taken of it then.
        """
        free = free_bytes(self._cached)
        try:
            if nbytes > free:  # it is not tried: the disk would be full for a moment, for everybody
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _allocate(self._cached, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            os.ftruncate(self._cached, 0)
            raise OSError(
                error.errno,
                f"{error.strerror}: {nbytes} bytes are wanted, and {free} are free; make room, or write the path of a "
                "folder on a larger disk",
                self.path,
            ) from None

    def write(self, data: memoryview, position: int) -> None:
        """Write bytes at a position."""
        while data:
            written = self._move(os.pwrite, data, position)
            if not self.is_direct and written >= BUFFER and hasattr(os, "posix_fadvise"):
                # begin to write it, not only when it is synced
                os.posix_fadvise(self._cached, position, written, os.POSIX_FADV_DONTNEED)
            data, position = data[written:], position + written

    def read(self, into: memoryview, position: int) -> None:
        """Fill memory with what is at a position of a ``readable`` file.

        Raises:
            OSError: also if the file ends before; what is in the memory then is of no use.
        """
        while into:
            count = self._move(_read_into, into, position)
            if count == 0:
                raise OSError(errno.EIO, f"the file ends at byte {position}, {len(into)} bytes too early", self.path)
            into, position = into[count:], position + count

    def _move(self, call: Callable[[int, memoryview, int], int], memory: memoryview, position: int) -> int:
        """One call of the system; how many bytes it has moved, from the first on."""
        whole = len(memory) // ALIGNMENT * ALIGNMENT
        if self._direct is not None and whole and position % ALIGNMENT == 0:
            try:
                return call(self._direct, memory[:whole], position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.is_direct = False  # because of this memory, or of the file system: it is tried again the next time
        return call(self._cached, memory, position)

    def sync(self) -> None:
        """Wait until all of it is on the disk."""
        os.fsync(self._cached)

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())
        self._cached, self._direct = -1, None  # the system gives the numbers to other files


def _read_into(descriptor: int, memory: memoryview, position: int) -> int:
    return os.preadv(descriptor, [memory], position)


def _allocate(descriptor: int, nbytes: int) -> None:
    if nbytes and hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    os.ftruncate(descriptor, nbytes)


class Appender:
    """Writes a new file from its beginning to its end: while one buffer goes to the disk, the next is filled.

    Args:
        path: as for ``DirectFile``.
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
