"""Work beside training on values that the engine keeps: a copy for a checkpoint, an update of what is kept elsewhere.

Parameters' shards, optimizer states and what users made of parameters are read and written at a few places in the
engine, each of which calls ``settle`` first. The forward and the backward of a step go on: they read what was gathered.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Event, Lock

_under_way: list[Work] = []
_lock = Lock()  # threads that fetch settle, too
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_under_way.clear)  # a forked process has none of the threads


class Work:
    """Something that another thread does, or will do; until it ends, nobody else reads or writes what it works on.

    As a context it ends when the context does.

    Args:
        tells: whether its error is raised where somebody waits for it.
        settles: whether ``settle`` waits for it.
        cut_short: lets it end without what it waits for of training, before somebody in training waits for it.
    """

    def __init__(self, *, tells: bool, settles: bool = True, cut_short: Callable[[], object] | None = None) -> None:
        self._tells, self._ended, self._cut_short = tells, Event(), cut_short
        self._error: BaseException | None = None
        if settles:
            with _lock:
                _under_way.append(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """It is done, or has failed. Only the first call counts."""
        if not self._ended.is_set():
            self._error, self._cut_short = error, None  # which refers to what has this, as a rule
            self._ended.set()

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            Exception: what ended it, if it is to be told; each time.
        """
        self._ended.wait()
        if self._tells and self._error is not None:
            raise self._error

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()


def is_settled() -> bool:
    """Whether nothing works on the engine's values now."""
    return all(work.has_ended for work in list(_under_way))


def settle() -> None:
    """Wait until nothing works on the engine's values any more.

    Raises:
        Exception: what ended an update.
    """
    if _under_way:
        works = list(_under_way)
        for work in works:
            cut_short = work._cut_short
            if cut_short is not None:
                cut_short()
            work._ended.wait()
        with _lock:
            _under_way[:] = [work for work in _under_way if not work.has_ended]
        for work in works:
            work.wait()
