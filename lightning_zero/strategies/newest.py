"""Resolve ``ckpt_path="last"``, and find older checkpoints to fall back to."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

from fsspec.core import url_to_fs
from lightning.pytorch import Trainer

from lightning_zero.checkpoint.form import DCP_METADATA
from lightning_zero.strategies.lightning_internals import last_checkpoints


def is_last(trainer: Trainer, path: Any) -> bool:
    """Whether Lightning found the path itself, as for ``ckpt_path="last"``, instead of receiving it from the user.

    The strategy receives only the path, so the user's argument is read from the local variables of calling frames.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        arguments = frame.f_locals.get("args")
        if frame.f_locals.get("trainer") is trainer and isinstance(arguments, tuple):
            given = [each for each in arguments if isinstance(each, (str, os.PathLike))]
            return given in ([], ["last"]) and _plain(path) in {_plain(candidate) for candidate in _last_ones(trainer)}
        frame = frame.f_back
    return False


def others_by_age(trainer: Trainer, path: Any) -> list[str]:
    """Return the other checkpoints in the folders of ``path`` and of the Trainer's callbacks, newest first."""
    found: dict[str, Any] = {}
    for folder in {os.path.dirname(str(each)) for each in (path, *_last_ones(trainer))}:
        fs, place = url_to_fs(folder)
        for entry in fs.ls(place, detail=False) if fs.exists(place) else []:
            hidden = os.path.basename(entry).startswith(".")
            if not hidden and entry.endswith(".ckpt") and os.path.normpath(entry) != _plain(path):
                with suppress(OSError):  # the entry may be a dangling link, or a folder without metadata
                    # an object store has times of files only
                    dated = f"{entry}/{DCP_METADATA}" if fs.isdir(entry) else entry
                    found[fs.unstrip_protocol(entry) if "://" in folder else entry] = fs.modified(dated)
    return sorted(found, key=lambda entry: found[entry], reverse=True)


def _last_ones(trainer: Trainer) -> set[str]:
    candidates: set[str] = set()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        candidates |= last_checkpoints(trainer, callback)
        if type(callback).__name__ == "OnExceptionCheckpoint":
            candidates.add(str(callback.ckpt_path))
    return candidates


def _plain(path: Any) -> str:
    return os.path.normpath(url_to_fs(str(path))[1])
