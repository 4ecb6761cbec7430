"""Heartbeats: each process of a job records its progress in a file, so that the launcher can detect a hang."""

from __future__ import annotations

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


class _Writer:
    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, f"{os.environ.get('RANK', '0')}-{os.getpid()}")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        os.pwrite(self._file, _STEPS.pack(self._steps), 0)

    def waits(self, is_waiting: bool) -> None:
        os.pwrite(self._file, _WAITING.pack(time.time(), is_waiting), _STEPS.size)

    def end(self) -> None:
        os.pwrite(self._file, _STEPS.pack(-1), 0)


@cache
def _writer(process: int) -> _Writer | None:
    folder = os.environ.get(FOLDER)
    return _Writer(folder) if folder else None


def note_step() -> None:
    """Record that this process starts a step."""
    if (writer := _writer(os.getpid())) is not None:
        writer.step()


def note_waiting(is_waiting: bool) -> None:
    """Record whether this process is waiting for other ranks. Repeat during a wait: the record expires after 10 s."""
    if (writer := _writer(os.getpid())) is not None:
        writer.waits(is_waiting)


def note_end() -> None:
    """Record that this process starts no further steps for now, so that the launcher does not report a hang."""
    if (writer := _writer(os.getpid())) is not None:
        writer.end()


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
