"""A checkpoint is written beside its place, under a hidden name, and put there when it is whole and on the disk."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import IO, Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_zero.checkpoint.form import DCP_METADATA, MANIFEST, REST
from lightning_zero.disk import Appender
from lightning_zero.labels import LABEL, is_left_over, new_label

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

_OF_A_CHECKPOINT = re.compile(
    "|".join(
        [
            rf"{re.escape(DCP_METADATA)}(\.tmp)?",  # DCP itself has the latter before it has written all
            *map(re.escape, (MANIFEST, REST)),
            r"__\d+_\d+\.distcp",
            r"\.DS_Store|\._.*|\.nfs[0-9a-f]+",  # macOS and NFS put them into folders that somebody looks at
        ]
    )
)
"""The names of a sharded checkpoint's files."""

_LONGEST = 120
"""Bytes of a name from which on that of its partial file is shortened: the system allows 255 for both."""


class Destination:
    """Where a checkpoint goes.

    Args:
        path: a local one, or one of fsspec's (``s3://...``).
        label: of this save alone, and the same on every rank; ``labels.new_label`` makes it.

    Attributes:
        path: as given.
        partial: where it is written to, beside.
    """

    def __init__(self, path: Any, label: str) -> None:
        self.path = str(path)
        self._fs, place = url_to_fs(self.path)
        self._place = place.rstrip("/") or place
        self._parent, self._name = os.path.split(self._place)
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self.partial = os.path.join(self._parent, f".{_short(self._name)}.partial-{label}")
        self._old = os.path.join(self._parent, _put_aside(self._name, label))

    def check_replaceable(self) -> None:
        """Refuse to replace a folder with anything in it that is no part of a checkpoint: all of it would be lost.

        Raises:
            IsADirectoryError: then.
            FileExistsError: if it is a device, a pipe or a socket.
        """
        if self._is_local and os.path.islink(self._place):
            return  # no more than the link is lost
        is_known = os.path.isfile(self._place) or os.path.isdir(self._place)
        if self._is_local and os.path.exists(self._place) and not is_known:
            raise FileExistsError(
                f"{self.path} is neither a file nor a folder, and is not replaced: write the name of a file or folder"
            )
        if not self._fs.isdir(self._place):
            return
        try:
            found = self._fs.ls(self._place, detail=True)
        except FileNotFoundError:  # another run is just replacing it
            return
        kinds = {os.path.basename(entry["name"].rstrip("/")): entry["type"] for entry in found}
        from lightning_zero.engine.sources import listed  # which needs torch

        others = [name for name, kind in kinds.items() if kind == "directory" or not _OF_A_CHECKPOINT.fullmatch(name)]
        if others or set(kinds) == {REST}:  # which by itself may be anybody's
            raise IsADirectoryError(
                f"{self.path} is a folder with more in it than a checkpoint has ({listed(sorted(others) or [REST])}), "
                "and is not replaced: write the checkpoint's own name behind it, FOLDER/NAME.ckpt, or move that "
                "somewhere else"
            )

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
                yield Stream(file)
            return
        with closing(Appender(target)) as appender:
            yield Stream(appender)
            appender.finish()

    def size_of(self, name: str) -> int | None:
        """Bytes of a file that was written, as this rank sees it; None where it sees none."""
        target = os.path.join(self.partial, name)
        if self._is_local:
            return os.path.getsize(target) if os.path.exists(target) else None
        self._fs.invalidate_cache(self.partial)
        return self._fs.size(target) if self._fs.exists(target) else None

    def put_in_place(self) -> None:
        """Let the name stand for what was written; what it stood for before is gone then, and no moment earlier.

        Raises:
            OSError: if that fails, also as ``check_replaceable``: somebody may have put a file there meanwhile.
        """
        self.check_replaceable()
        if self._is_local:
            if os.path.isdir(self.partial):
                _sync(self.partial)
            self._rename()
            # It is there now. What cannot be cleared away is no reason to say that it is not.
            with suppress(OSError):
                _sync(self._parent)
            for old in (self.partial, self._old):  # under its partial name, if the two were exchanged
                with suppress(OSError):
                    _remove(old)
            return
        had_one = self._fs.exists(self._place)
        if had_one:
            self._fs.mv(self._place, self._old, recursive=True)
        self._fs.mv(self.partial, self._place, recursive=True)
        if had_one:
            self._fs.rm(self._old, recursive=True)

    def _rename(self) -> None:
        are_files = not os.path.isdir(self.partial) and not _is_folder(self._place)
        if (are_files or not os.path.lexists(self._place)) and self._replace():
            return
        if _exchange(self.partial, self._place):
            return
        os.rename(self._place, self._old)
        try:
            os.rename(self.partial, self._place)
        except OSError:
            os.rename(self._old, self._place)
            raise

    def _replace(self) -> bool:
        try:
            os.replace(self.partial, self._place)
        except OSError:
            if not _is_folder(self._place):
                raise
            return False  # another run has just put a folder there
        return True

    def discard(self) -> None:
        """Remove what was written so far, as far as that is possible: why it is not wanted is to be told, not this."""
        with suppress(OSError):
            if self._is_local:
                _remove(self.partial)
            elif self._fs.exists(self.partial):
                self._fs.rm(self.partial, recursive=True)

    def remove(self) -> None:
        """Remove what is at the path: all of it is gone at once, for whoever looks there.

        What a process that dies meanwhile leaves has a partial file's name, and goes as those do.

        Raises:
            OSError: if it may not be removed. Then it is there as before; or under a partial file's name, if this user
                may take its name and not remove its files.
        """
        if self._is_local:
            with suppress(FileNotFoundError):  # it is gone already
                if not _is_folder(self._place):
                    os.remove(self._place)
                    return
                os.rename(self._place, self.partial)
                _sync(self._parent)
                _remove(self.partial)
        elif self._fs.exists(self._place):
            with suppress(FileNotFoundError):  # without it the rest is no checkpoint
                self._fs.rm(f"{self._place}/{DCP_METADATA}")
            self._fs.rm(self._place, recursive=True)

    def clear_leftovers(self) -> None:
        """Remove what processes that have died had begun to write in this folder, and let an old one back."""
        if not self._is_local or not os.path.isdir(self._parent):
            return
        for entry in os.listdir(self._parent):
            found = _PARTIAL.fullmatch(entry) or _OLD.fullmatch(entry)
            path = os.path.join(self._parent, entry)
            with suppress(OSError):  # another's, perhaps, that this user may not remove
                if found is None or not is_left_over(found["label"], path):
                    continue
                name = found["stem"] + (found["suffix"] or "")
                is_own = name == _short(self._name)
                place = self._place if is_own else os.path.join(self._parent, name)
                if found.re is _PARTIAL or os.path.lexists(place):
                    _remove(path)
                elif is_own or not _SHORTENED.search(name):
                    os.rename(path, place)


def remove(path: Any) -> None:
    """Remove a checkpoint, so that nobody finds a part of it; see ``Destination.remove``."""
    Destination(path, new_label()).remove()


class Stream:
    """A file being written, with the checksum of what went into it since ``begin``."""

    def __init__(self, file: IO[bytes] | Appender) -> None:
        self._file = file
        self.position = self.crc32 = 0

    def begin(self) -> int:
        """Begin a piece; where it begins: at a multiple of 64, as records within it do, so that it can be mapped."""
        self.write(bytes(-self.position % 64))
        self.crc32 = 0
        return self.position

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        written = 0
        while written < len(view):  # a file may take less at a time
            written += self._file.write(view[written:])
        self.position += written
        return written

    def flush(self) -> None:
        pass


def stand_in(path: str) -> str | None:
    """Where the checkpoint is that a path stood for before it was to be replaced; None if there is none.

    The path stands for nothing if a process died in the middle of that, on a file system that cannot exchange names.
    """
    fs, place = url_to_fs(path)
    parent, name = os.path.split(place.rstrip("/"))
    if not fs.exists(parent):
        return None
    start, _, suffix = _put_aside(name, "\0").partition("\0")
    found = []
    for entry in fs.ls(parent, detail=False):
        entry_name = os.path.basename(entry.rstrip("/"))
        if entry_name.startswith(start) and entry_name.endswith(suffix) and _OLD.fullmatch(entry_name):
            found.append(entry)
    if not found:
        return None
    newest = max(found, key=fs.modified)
    return fs.unstrip_protocol(newest) if "://" in path else newest


_PARTIAL = re.compile(rf"\.(?P<stem>.+)\.partial-{LABEL}(?P<suffix>)")
_OLD = re.compile(rf"(?P<stem>.+)\.old-{LABEL}(?P<suffix>\.[^.]*)?")
_SHORTENED = re.compile(r"~[0-9a-f]{8}(\.|$)")


def _short(name: str) -> str:
    encoded = name.encode()
    if len(encoded) <= _LONGEST:
        return name
    stem, suffix = os.path.splitext(name)
    return f"{encoded[: _LONGEST - 40].decode(errors='ignore')}~{zlib.crc32(encoded):08x}{suffix[:16]}"


def _put_aside(name: str, label: str) -> str:
    """The name of what is to be replaced, meanwhile. It is one that Lightning finds where it looks for the last one."""
    stem, suffix = os.path.splitext(_short(name))
    return f"{stem}.old-{label}{suffix}"


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
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems that have no such thing for folders
            raise
    finally:
        os.close(descriptor)
