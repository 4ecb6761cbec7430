"""A checkpoint is written beside its place, under a hidden name, and put there when it is whole and on the disk."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

_AT_ONCE = 2**25
"""Bytes after which the system is asked to begin writing, so that it does not begin only when they are synced."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Destination:
    """Where a checkpoint goes.

    Args:
        path: a local one, or one of fsspec's (``s3://...``).
        label: of this save alone, and the same on every rank; ``new_label`` makes it.

    Attributes:
        path: as given.
        partial: where it is written to, beside.
    """

    def __init__(self, path: Any, label: str) -> None:
        self.path = str(path)
        self._fs, place = url_to_fs(self.path)
        self._place = place.rstrip("/")
        self._parent, self._name = os.path.split(self._place)
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self.partial = os.path.join(self._parent, f".{self._name}.partial-{label}")
        self._old = os.path.join(self._parent, f".{self._name}.old-{label}")

    @contextmanager
    def writing(self, name: str | None = None) -> Iterator[Stream]:
        """A stream whose contents are on the disk afterwards.

        Args:
            name: of a file in the folder that the checkpoint is; None where it is a file itself.
        """
        if name is None:
            self._fs.makedirs(self._parent, exist_ok=True)
            target = self.partial
        else:
            self._fs.makedirs(self.partial, exist_ok=True)
            target = os.path.join(self.partial, name)
        if not self._is_local:
            with self._fs.open(target, "wb") as file:
                yield Stream(file, None)
            return
        with open(target, "wb", buffering=0) as file:
            yield Stream(file, file.fileno())
            os.fsync(file.fileno())

    def size_of(self, name: str) -> int | None:
        """Bytes of a file that was written, as this rank sees it; None where it sees none."""
        target = os.path.join(self.partial, name)
        if self._is_local:
            return os.path.getsize(target) if os.path.exists(target) else None
        self._fs.invalidate_cache(self.partial)
        return self._fs.size(target) if self._fs.exists(target) else None

    def put_in_place(self) -> None:
        """Let the name stand for what was written; what it stood for before is gone then, and no moment earlier."""
        if self._is_local:
            if os.path.isdir(self.partial):
                _sync(self.partial)
            self._rename()
            _sync(self._parent)
            _remove(self.partial)  # which is what was there before, if the two were exchanged
            _remove(self._old)
            return
        had_one = self._fs.exists(self._place)
        if had_one:
            self._fs.mv(self._place, self._old, recursive=True)
        self._fs.mv(self.partial, self._place, recursive=True)
        if had_one:
            self._fs.rm(self._old, recursive=True)

    def _rename(self) -> None:
        if not os.path.lexists(self._place) or not (os.path.isdir(self.partial) or _is_folder(self._place)):
            os.replace(self.partial, self._place)
        elif not _exchange(self.partial, self._place):
            os.rename(self._place, self._old)
            os.rename(self.partial, self._place)

    def discard(self) -> None:
        """Remove what was written so far."""
        if self._is_local:
            _remove(self.partial)
        elif self._fs.exists(self.partial):
            self._fs.rm(self.partial, recursive=True)

    def clear_leftovers(self) -> None:
        """Remove what processes of this machine that have died had begun to write beside, and let an old one back."""
        if not self._is_local or not os.path.isdir(self._parent):
            return
        for entry in os.listdir(self._parent):
            for kind in (".partial-", ".old-"):
                stem, found, label = entry.rpartition(kind)
                if not found or not stem.startswith(".") or not _is_of_the_dead(label):
                    continue
                place = os.path.join(self._parent, stem[1:])
                if kind == ".old-" and not os.path.lexists(place):
                    os.rename(os.path.join(self._parent, entry), place)
                else:
                    _remove(os.path.join(self._parent, entry))


class Stream:
    """A file being written, with the checksum of what went into it since ``begin``."""

    def __init__(self, file: IO[bytes] | Any, descriptor: int | None) -> None:
        self._file, self._descriptor = file, descriptor
        self.position = self._flushed = self.crc32 = 0

    def begin(self) -> int:
        """Begin a piece; where it begins: at a multiple of 64, as records within it do, so that it can be mapped."""
        self.write(bytes(-self.position % 64))
        self.crc32 = 0
        return self.position

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        written = 0
        while written < len(view):  # the system takes at most 2 GiB at a time
            written += self._file.write(view[written:])
        self.position += written
        if self._descriptor is not None and self.position - self._flushed >= _AT_ONCE and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, self._flushed, self.position - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self.position
        return written

    def flush(self) -> None:
        pass


_saves = itertools.count()


def new_label() -> str:
    """Of one save by this process."""
    return f"{socket.gethostname()}-{os.getpid()}-{next(_saves)}"


def _is_of_the_dead(label: str) -> bool:
    host, _, rest = label.rpartition("-")[0].rpartition("-")
    if host != socket.gethostname() or not rest.isdigit():
        return False
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _exchange(one: str, other: str) -> bool:
    """Let two names change places at once (Linux); False where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _remove(path: str) -> None:
    if _is_folder(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
