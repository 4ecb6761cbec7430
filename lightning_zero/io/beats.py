"""Heartbeats: each process of a job records its progress in a file, so that the launcher can detect a hang."""

from __future__ import annotations

import itertools
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import NamedTuple

FOLDER = "LIGHTNING_ZERO_BEATS"
"""Name of the environment variable with the heartbeat folder's path; if it is not set, nothing is recorded."""

_STEPS, _WAITING = struct.Struct("<q"), struct.Struct("<dq")
_FRESH = 10.0  # seconds for which ``note_waiting(True)`` remains valid


class Beats(NamedTuple):
    """The progress that a process has recorded.

    Attributes:
        rank: the process's rank.
        process: the process's id.
        steps: the number of steps started so far, or -1 after the last step.
        is_waiting: whether the process is currently waiting for other ranks.
    """

    rank: int
    process: int
    steps: int
    is_waiting: bool


_numbers = itertools.count(1)  # of this process's steps


def note_step() -> None:
    """Record that this process starts a step."""
    _note(0, _STEPS, next(_numbers))


def note_waiting(is_waiting: bool) -> None:
    """Record whether this process is waiting for other ranks. Repeat during a wait: the record expires after 10 s."""
    _note(_STEPS.size, _WAITING, time.time(), is_waiting)


def note_end() -> None:
    """Record that this process starts no further steps for now, so that the launcher does not report a hang."""
    _note(0, _STEPS, -1)


def _note(position: int, form: struct.Struct, *values: float) -> None:
    # If the disk is full, or the launcher has ended, neither the step nor the thread that detects failures may fail.
    with suppress(OSError):
        if (file := _file(os.getpid())) is not None:
            os.pwrite(file, form.pack(*values), position)


@cache
def _file(process: int) -> int | None:
    """The descriptor of a process's own file; None if nothing is recorded."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    path = os.path.join(folder, f"{os.environ.get('RANK', '0')}-{process}")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


def read_all(folder: str) -> Iterator[Beats]:
    """Iterate over the progress that live processes have recorded."""
    for name in os.listdir(folder):
        rank, process = map(int, name.split("-"))
        with suppress(OSError, struct.error), open(os.path.join(folder, name), "rb") as file:
            os.kill(process, 0)
            data = file.read()
            (steps,) = _STEPS.unpack_from(data)
            when, waiting = _WAITING.unpack_from(data, _STEPS.size) if len(data) > _STEPS.size else (0.0, 0)
            yield Beats(rank, process, steps, bool(waiting) and time.time() - when < _FRESH)
