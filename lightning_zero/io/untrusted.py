"""Read files that others may have prepared: names stay within their folder, and only regular files are opened."""

from __future__ import annotations

import os
import stat
from typing import IO


def inside(folder: str | os.PathLike[str], name: str) -> str:
    """Return the path of a file whose name was found in data. The folder itself may be reached through a link.

    Raises:
        ValueError: if the name leads out of the folder: absolute, with ``..``, or through a link.
    """
    root = os.path.realpath(folder)
    roots = [root]
    parent, kind = os.path.split(os.path.dirname(root))
    if kind == "snapshots":  # in Hugging Face's cache, the files of a snapshot are links to blobs beside the snapshots
        roots.append(os.path.join(parent, "blobs"))
    path = os.path.join(folder, name)
    try:
        place = os.path.realpath(path)
    except ValueError:  # a null byte
        place = ""
    if not any(place.startswith(os.path.join(each, "")) for each in roots):
        raise ValueError(
            f"{os.fspath(folder)} refers to {name[:200]!r}, which leads out of this folder: copy the file into the "
            "folder if you trust its source"
        )
    return path


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file for reading. Reading a pipe or a device might never end.

    Raises:
        ValueError: if it is not a regular file.
        OSError: if it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{os.fspath(path)} is not a regular file")
    return open(descriptor, "rb")
