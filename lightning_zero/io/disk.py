"""Direct file I/O (``O_DIRECT``), which bypasses the page cache to save memory and the CPU time of copying."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from collections.abc import Callable
from contextlib import suppress

ALIGNMENT = 4096  # in bytes, as ``O_DIRECT`` requires it of offsets, sizes and addresses on common disks


def aligned_memory(nbytes: int) -> memoryview:
    """Allocate memory whose address is a multiple of ``ALIGNMENT``. The system allocates each page at its first use.

    The memory is shared with forked processes, as the target of ``O_DIRECT`` reads must be: with private memory, a
    child process might get the very page that the disk is writing to (see open(2)).
    """
    return memoryview(mmap.mmap(-1, nbytes))


_MADV_WIPEONFORK = 18  # a Linux constant; Python has no name for it


def huge_memory(nbytes: int) -> memoryview:
    """Like ``aligned_memory``, but in huge pages if the system supports them, so that disk transfers are larger.

    Huge pages require private memory. Forked processes see zeros in this memory, so they keep no pages alive, and
    the system never copies a page that the disk is writing to.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return aligned_memory(nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(_MADV_WIPEONFORK)
    except OSError:  # Linux before 4.14
        return aligned_memory(nbytes)
    with suppress(OSError):  # the system does not support huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def aligned(number: int) -> int:
    """Round up to a multiple of ``ALIGNMENT``."""
    return -(-number // ALIGNMENT) * ALIGNMENT


def free_bytes(place: str | int) -> int:
    """Return the free bytes that this user may use on the disk of a path or an open file."""
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def is_in_memory(path: str) -> bool:
    """Whether a path, which need not exist yet, is on an in-memory file system (tmpfs, ramfs); False if unknown."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    device = os.stat(path).st_dev
    try:
        with open("/proc/self/mountinfo") as file:
            mounts = [line.partition(" - ") for line in file]
    except OSError:  # not Linux
        return False
    kinds = {before.split()[2]: after.split()[0] for before, _, after in mounts}
    return kinds.get(f"{os.major(device)}:{os.minor(device)}") in ("tmpfs", "ramfs")


def make_private_folder(path: str) -> None:
    """Create a folder, and its missing parents, for this user alone; an existing folder is left unchanged.

    A folder in one in which every user may write, such as ``/tmp``, is checked as by ``make_own_folder``.
    """
    os.makedirs(path, 0o700, exist_ok=True)
    if os.stat(os.path.dirname(os.path.abspath(path))).st_mode & stat.S_IWOTH:
        make_own_folder(path)


def make_own_folder(path: str) -> None:
    """Create a folder in an existing one, for this user alone.

    Raises:
        PermissionError: if the folder exists, and another user may have put files into it, or may replace it.
    """
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found, parent = os.lstat(path), os.stat(os.path.dirname(os.path.abspath(path)))
    reason = None
    if not stat.S_ISDIR(found.st_mode):
        reason = "the path is a link or a file"
    elif found.st_uid != os.geteuid():
        reason = f"the folder belongs to user {found.st_uid}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"other users may change the folder (mode {stat.S_IMODE(found.st_mode):04o} instead of 0700)"
    elif parent.st_uid not in (os.geteuid(), 0):
        reason = f"the parent folder belongs to user {parent.st_uid}, who might replace the folder"
    elif parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        reason = "every user may replace the folder in its parent folder"
    if reason is not None:
        raise PermissionError(
            errno.EACCES, f"{reason}, so its files cannot be trusted: remove the folder or choose another", path
        )


class DirectFile:
    """A new file with direct I/O (``O_DIRECT``) wherever the system, disk and alignment allow it.

    Several threads may read and write different positions at once. Data bypasses the page cache if its address and its
    position in the file are multiples of ``ALIGNMENT``. All other data goes through the cache.

    Args:
        path: the file's path, which must not exist yet, not even as a link.

    Attributes:
        is_direct: whether all aligned data has bypassed the cache so far.
    """

    def __init__(self, path: str) -> None:
        access = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
        self.path = path
        self._cached = os.open(path, access | os.O_CREAT | os.O_EXCL, 0o600)
        self._open = [self._cached]
        weakref.finalize(self, _close, self._open)
        self._direct: int | None = None
        with suppress(OSError, AttributeError):  # in-memory file systems and some operating systems lack direct I/O
            direct = os.open(path, access | os.O_DIRECT)
            self._open.append(direct)
            if os.path.samestat(os.fstat(direct), os.fstat(self._cached)):  # otherwise the path has been replaced
                self._direct = direct
        self.is_direct = self._direct is not None

    def reserve(self, nbytes: int) -> None:
        """Set the size of a new file and allocate its blocks, so that no later write fails on a full disk.

        A file system that cannot allocate blocks in advance must at least have the space now.
        """
        free = free_bytes(self._cached)
        try:
            if nbytes > free:  # an attempt would briefly fill the disk for all users
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _allocate(self._cached, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                error.filename = self.path  # errors from calls on open files have no path
                raise
            os.ftruncate(self._cached, 0)
            raise OSError(
                error.errno,
                f"{error.strerror}: {nbytes} bytes are required, {free} are available: free some space, or choose a "
                "folder on a larger disk",
                self.path,
            ) from None

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
        """Make one system call, with direct I/O if possible, and return the number of bytes transferred."""
        whole = len(memory) // ALIGNMENT * ALIGNMENT
        try:
            if self._direct is not None and whole and position % ALIGNMENT == 0:
                try:
                    return call(self._direct, memory[:whole], position)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self.is_direct = False  # refused for this memory or file system; the next call tries it again
            return call(self._cached, memory, position)
        except OSError as error:
            message = f"{len(memory)} bytes cannot be {done} at byte {position} ({error.strerror})"
            raise OSError(error.errno, message, self.path) from error

    def close(self) -> None:
        _close(self._open)
        self._cached, self._direct = -1, None  # the system may reuse the closed descriptors


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _allocate(descriptor: int, nbytes: int) -> None:
    if nbytes and hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    os.ftruncate(descriptor, nbytes)
