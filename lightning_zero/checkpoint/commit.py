"""Commit a checkpoint atomically: write it to a hidden partial path, sync it to disk, and then rename it."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_zero.checkpoint.form import DCP_METADATA, MANIFEST, REST
from lightning_zero.io.labels import LABEL, is_left_over, new_label
from lightning_zero.io.paths import is_folder, remove_path, sync_folder
from lightning_zero.io.text import listed

_OF_A_CHECKPOINT = re.compile(
    # DCP writes a .tmp file first; the patterns in the last line match files that macOS and NFS create
    rf"{re.escape(DCP_METADATA)}(\.tmp)?|{re.escape(MANIFEST)}|{re.escape(REST)}|__\d+_\d+\.distcp"
    r"|\.DS_Store|\._.*|\.nfs[0-9a-f]+"
)
"""Matches the names of all files that may be in the folder of a sharded checkpoint."""

_AT_ONCE = 2**22  # bytes per write
_LONGEST = 120  # length in bytes above which a name is cut off in temporary names, to stay below 255 bytes


class Destination:
    """Path that a checkpoint is committed to.

    Args:
        path: a local path, or an fsspec URL (``s3://...``).
        label: identifier of this save, the same on every rank; a new one if it is None.

    Attributes:
        partial: hidden path next to ``path``, to which the checkpoint is written first.
        number: a number for file names: the same on every rank, and almost certainly different for each save.
    """

    def __init__(self, path: Any, label: str | None = None) -> None:
        label = label or new_label()
        self.path = str(path)
        # Files of different saves that are mixed in a folder have different names, so that this is noticed.
        self.number = zlib.crc32(label.encode())
        self._fs, place = url_to_fs(self.path)
        self._place = place.rstrip("/") or place
        self._parent, self._name = os.path.split(self._place)
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self.partial = os.path.join(self._parent, f".{_short(self._name)}.partial-{label}")
        stem, suffix = os.path.splitext(_short(self._name))
        # Lightning's search for ``last`` also finds this name.
        self._old = os.path.join(self._parent, f"{stem}.old-{label}{suffix}")

    def check_replaceable(self) -> None:
        """Raise an OSError if a special file, or folder contents other than a checkpoint, would be lost."""
        if self._is_local and os.path.islink(self._place):
            return  # only the link would be replaced
        if not self._fs.isdir(self._place):
            if self._is_local and os.path.exists(self._place) and not os.path.isfile(self._place):
                raise FileExistsError(
                    f"{self.path} is neither a file nor a folder, so it is not replaced: choose another path"
                )
            return
        try:
            found = self._fs.ls(self._place, detail=True)
        except FileNotFoundError:  # another process has just moved or removed the folder
            return
        kinds = {os.path.basename(entry["name"].rstrip("/")): entry["type"] for entry in found}
        others = [name for name, kind in kinds.items() if kind == "directory" or not _OF_A_CHECKPOINT.fullmatch(name)]
        if others or set(kinds) == {REST}:  # a folder with only meta.pt may belong to any program
            raise IsADirectoryError(
                f"{self.path} is a folder with contents other than a checkpoint ({listed(sorted(others) or [REST])}), "
                f"so it is not replaced: save to {self.path}/NAME.ckpt, or move the other contents elsewhere"
            )

    def make_folder(self) -> None:
        """Create the folder that will contain the checkpoint."""
        self._fs.makedirs(self._parent, exist_ok=True)

    @contextmanager
    def writing(self, name: str | None = None) -> Iterator[Stream]:
        """Context that opens a stream to a new file; a local file is synced to the disk on exit.

        Args:
            name: the file's name in the folder of a sharded checkpoint; None if the checkpoint is a single file.
        """
        target = self.partial if name is None else os.path.join(self.partial, name)
        self._fs.makedirs(os.path.dirname(target), exist_ok=True)
        # "x", so that a link that another user has planted is not followed
        with open(target, "xb") if self._is_local else self._fs.open(target, "wb") as file:
            yield Stream(file, file.fileno() if self._is_local else None)
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())

    @contextmanager
    def replacing(self) -> Iterator[Stream]:
        """Context that writes a single file, and puts it in place; after an error, an earlier file is unchanged."""
        try:
            with self.writing() as stream:
                yield stream
            self.put_in_place()
        except BaseException:
            self.discard()
            raise

    def size_of(self, name: str) -> int | None:
        """Return the size in bytes of a written file; None if the file is not visible to this rank."""
        target = os.path.join(self.partial, name)
        self._fs.invalidate_cache(self.partial)
        return self._fs.size(target) if self._fs.exists(target) else None

    def put_in_place(self) -> None:
        """Move the written checkpoint to its path, and only then delete any earlier contents of the path."""
        self.check_replaceable()
        if self._is_local:
            is_folder_written = os.path.isdir(self.partial)
            if is_folder_written:
                sync_folder(self.partial)
            # the rename of a file replaces another file at once
            is_moved = is_folder(self._place) or (is_folder_written and os.path.lexists(self._place))
        else:
            is_moved = self._fs.exists(self._place)
        if is_moved:
            self._move(self._place, self._old)
        try:
            self._move(self.partial, self._place)
        except Exception:
            if is_moved:
                if not self._is_local and self._fs.exists(self._place):  # with some of the files
                    self._fs.rm(self._place, recursive=True)
                self._move(self._old, self._place)
            raise
        # The checkpoint is in place: a failure of the clean-up below must not be reported as a failed save.
        with suppress(OSError):
            if self._is_local:
                sync_folder(self._parent)
                remove_path(self._old)
            elif is_moved:
                self._fs.rm(self._old, recursive=True)

    def _move(self, source: str, target: str) -> None:
        """Rename a local path; copy and remove the files of another file system, which may have no rename."""
        if self._is_local:
            os.rename(source, target)
        else:
            self._fs.mv(source, target, recursive=True)

    def discard(self) -> None:
        """Delete the files written so far. Errors are ignored: callers raise the error that made the save fail."""
        with suppress(OSError):
            if self._fs.exists(self.partial):
                self._fs.rm(self.partial, recursive=True)

    def remove(self) -> None:
        """Remove the checkpoint at the path, so that other processes never open a partly removed checkpoint.

        A local folder is renamed first; if this process dies, the next save deletes the rest.
        """
        if self._is_local:
            with suppress(FileNotFoundError):  # already removed
                if not is_folder(self._place):
                    os.remove(self._place)
                    return
                os.rename(self._place, self.partial)
                sync_folder(self._parent)
                remove_path(self.partial)
        elif self._fs.exists(self._place):
            with suppress(FileNotFoundError):  # removed first: the other files alone are not a checkpoint
                self._fs.rm(f"{self._place}/{DCP_METADATA}")
            self._fs.rm(self._place, recursive=True)

    def clear_leftovers(self) -> None:
        """Delete partial files of dead processes next to the path, and old checkpoints that have been replaced."""
        if not self._is_local or not os.path.isdir(self._parent):
            return
        for entry in os.listdir(self._parent):
            path, found = os.path.join(self._parent, entry), _PARTIAL.fullmatch(entry)
            old = _OLD.fullmatch(entry)
            if old is not None and os.path.lexists(os.path.join(self._parent, old["stem"] + (old["suffix"] or ""))):
                found = old
            with suppress(OSError):  # the entry may belong to another user
                if found is not None and is_left_over(found["label"], path):
                    remove_path(path)


class Stream:
    """An open file, and the place of the bytes written since ``begin``."""

    def __init__(self, file: IO[bytes], descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._file = file
        self.position = self._start = 0

    def begin(self) -> None:
        """Start a piece at the next multiple of 64, to keep its records aligned."""
        self.write(bytes(-self.position % 64))
        self._start = self.position

    @property
    def piece(self) -> tuple[int, int]:
        """Offset and length of the bytes written since ``begin``."""
        return self._start, self.position - self._start

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _AT_ONCE):
            part = view[start : start + _AT_ONCE]
            self._file.write(part)
            if len(part) == _AT_ONCE and self._descriptor is not None and hasattr(os, "posix_fadvise"):
                # Write to the disk from now on, not only in ``fsync``, and keep nothing in the system's cache.
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        pass


_PARTIAL = re.compile(rf"\..+\.partial-{LABEL}")
_OLD = re.compile(rf"(?P<stem>.+)\.old-{LABEL}(?P<suffix>\.[^.]*)?")


def _short(name: str) -> str:
    return name.encode()[:_LONGEST].decode(errors="ignore")
