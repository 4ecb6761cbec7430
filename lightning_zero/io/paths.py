"""Replace files and folders so that other processes never see incomplete ones; remove paths and sync folders."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_zero.io.labels import new_label


def replace(new: str, place: str, aside: str) -> None:
    """Rename ``new`` to ``place``. A file at ``place`` is replaced at once; a folder is first renamed to ``aside``.

    All three paths are in one folder.
    """
    try:
        os.rename(new, place)  # succeeds if ``place`` does not exist, or if both are files
        return
    except OSError:
        if not os.path.lexists(place):
            raise
    os.rename(place, aside)
    try:
        os.rename(new, place)
    except OSError:
        os.rename(aside, place)
        raise


def write_anew(path: Path, text: str) -> None:
    """Write a text file as a new file that replaces the old one at once. A link at ``path`` is replaced, not followed.

    Raises:
        OSError: if the file cannot be written; the old file is then unchanged.
    """
    new = f"{path}.{new_label()}"
    try:
        with open(new, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            os.remove(new)
        raise


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a file with a JSON object.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file contains something else; the message names the file.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} cannot be read: it contains no JSON object")
    return found


def is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def remove_path(path: str) -> None:
    if is_folder(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # these mean that the file system cannot sync folders
            raise
    finally:
        os.close(descriptor)
