"""Memory for direct file I/O, in-memory file systems, and folders that other users cannot change."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from contextlib import suppress

ALIGNMENT = 4096  # in bytes, as ``O_DIRECT`` requires it of offsets, sizes and addresses on common disks


def aligned_memory(nbytes: int) -> memoryview:
    """Allocate memory whose address is a multiple of ``ALIGNMENT``. The system allocates each page at its first use.

    The memory is shared with forked processes, as the target of ``O_DIRECT`` reads must be: with private memory, a
    child process might get the very page that the disk is writing to (see open(2)).
    """
    return memoryview(mmap.mmap(-1, nbytes) if nbytes else bytearray())


_MADV_WIPEONFORK = 18  # a Linux constant; Python has no name for it


def huge_memory(nbytes: int) -> memoryview:
    """Like ``aligned_memory``, but in huge pages if the system supports them, so that disk transfers are larger.

    Huge pages require private memory. Forked processes see zeros in this memory, so they keep no pages alive, and
    the system never copies a page that the disk is writing to.
    """
    if not nbytes or not hasattr(mmap, "MADV_HUGEPAGE"):
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
