"""Read access to a checkpoint's files: a single file or a folder, local or through fsspec."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import tempfile
from typing import IO, Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_zero.io.untrusted import inside, open_regular

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # new in Python 3.13
_PRIVATE = mmap.MAP_PRIVATE | _NO_RESERVE


class Files:
    """The file or folder at a path. A file's name must not lead out of the folder, not even through a link."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._fs, self.root = url_to_fs(self.path)
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self._mappings: dict[str, memoryview] = {}
        self._temporary: Any = None  # the file of a download, which is removed when this object is deleted

    @property
    def exists(self) -> bool:
        return self._fs.exists(self.root)

    @property
    def is_folder(self) -> bool:
        return self._fs.isdir(self.root)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each entry in the folder, by name; names of subfolders end with a slash."""
        found = {}
        for entry in self._fs.ls(self.root, detail=True):
            name = entry["name"].rstrip("/").rsplit("/", 1)[-1]
            if name:
                found[name + ("/" if entry["type"] == "directory" else "")] = entry["size"] or 0
        return found

    def size(self) -> int:
        """Size in bytes of the file at the path."""
        return self._fs.size(self.root)

    def open(self, name: str = "") -> IO[bytes]:
        """Open a file in the folder or, without a name, the file at the path itself."""
        if self.is_local:
            return open_regular(self._where(name))
        return self._fs.open(self._where(name), "rb")

    def downloaded(self) -> Files:
        """Return a temporary local copy of a file at an HTTP address (servers may not send parts); else this object."""
        if "http" not in self._fs.protocol:
            return self
        temporary = tempfile.NamedTemporaryFile()
        with self._fs.open(self.root, "rb", block_size=0, headers={"Accept-Encoding": "identity"}) as file:
            if file.r.headers.get("Content-Encoding", "identity") != "identity":  # it might expand to any size
                raise ValueError(f"{self.path} is compressed by its server, although uncompressed data was requested")
            shutil.copyfileobj(file, temporary, 2**20)
        temporary.flush()
        local = Files(temporary.name)
        local.path, local._temporary = self.path, temporary
        return local

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def all(self) -> memoryview:
        """Return the bytes of the file at the path; see ``part``."""
        return self.part("", 0, self.size())

    def part(self, name: str, offset: int, length: int) -> memoryview:
        """Return bytes of a file, memory-mapped if the file is local, otherwise copied; ``name`` is as for ``open``."""
        if not self.is_local:
            return memoryview(bytearray(self._fs.cat_file(self._where(name), start=offset, end=offset + length)))
        if not length:  # an empty file cannot be mapped, but is checked
            self.open(name).close()
            return memoryview(b"")
        if name not in self._mappings:
            with open_regular(self._where(name)) as file:
                # Writable, because torch warns about read-only memory. The mapping is never written to, so the system
                # need not reserve memory for it, and the file may be larger than memory.
                mapped = mmap.mmap(file.fileno(), 0, _PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            self._mappings[name] = memoryview(mapped)
        return self._mappings[name][offset : offset + length]

    def _where(self, name: str) -> str:
        if not name:
            return self.root
        return inside(self.root, name) if self.is_local else f"{self.root.rstrip('/')}/{name}"
