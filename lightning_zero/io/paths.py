"""Read JSON, remove paths and sync folders."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any


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
