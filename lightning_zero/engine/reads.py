"""What is read in the background, as a checkpoint is that training goes on beside, is not written to meanwhile.

Parameters' shards, optimizer states and what users made of parameters are written at a few places in the engine, each
of which calls ``settle`` first. Nothing waits but a write: the forward and the backward of the next step only read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

_under_way: list[Event] = []


class Read:
    """Values are being read from now on, until ``done``."""

    def __init__(self) -> None:
        self._event = Event()
        _under_way.append(self._event)

    @contextmanager
    def done(self) -> Iterator[None]:
        """Around the reading, in whichever thread; at its end, however that comes, the values may change."""
        try:
            yield
        finally:
            self._event.set()


def settle() -> None:
    """Wait until the values of the engine may be written to."""
    if _under_way:
        for event in list(_under_way):
            event.wait()
        _under_way[:] = [event for event in _under_way if not event.is_set()]
