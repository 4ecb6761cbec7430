"""Work beside training on values that the engine keeps: a copy for a checkpoint, an update of what is kept elsewhere.

Parameters' shards, optimizer states and what users made of parameters are read and written at a few places in the
engine, each of which calls ``settle`` first. The forward and the backward of a step go on: they read what was gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

_under_way: list[Work] = []


class Work:
    """Something that another thread will do; until it is done, nobody else reads or writes what it works on.

    Args:
        act: what is to be done. It must be called, through the object.
        tells: whether its error is raised where somebody waits for it.
    """

    def __init__(self, act: Callable[[], Any], *, tells: bool) -> None:
        self._act: Callable[[], Any] | None = act
        self._tells, self._ended = tells, Event()
        self._error: BaseException | None = None
        _under_way.append(self)

    def __call__(self) -> Any:
        act, self._act = self._act, None
        assert act is not None, "it was done"
        try:
            return act()
        except BaseException as error:
            self._error = error
            raise
        finally:
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
    def has_ended(self) -> bool:
        return self._ended.is_set()


def settle() -> None:
    """Wait until nothing works on the engine's values any more."""
    if _under_way:
        works = list(_under_way)
        for work in works:
            work._ended.wait()
        _under_way[:] = [work for work in _under_way if not work.has_ended]
        for work in works:
            work.wait()
