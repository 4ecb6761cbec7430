"""What runs beside the program: tasks in other threads on values that the engine keeps, and streams of a device.

The tasks are copies for a checkpoint and updates of offloaded states. Parameter shards, optimizer states and tensors
that users have derived from parameters are read and written in a few places in the engine, each of which calls
``synchronize`` first. Forward and backward need not call it, since they read gathered values.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from typing import Any

import torch

_under_way: list[Future[Any]] = []  # changed without a lock, which Ctrl-C could leave locked
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_under_way.clear)  # a forked process has none of its parent's threads


def await_always(work: Future[Any]) -> None:
    """Make ``synchronize`` wait for a task: until it ends, no other thread may read or write the values it works on."""
    _under_way.append(work)


def is_synchronized() -> bool:
    """Whether no background work on the engine's values is running."""
    return all(work.done() for work in list(_under_way))


def synchronize() -> None:
    """Wait for all background work on the engine's values. ``Updates.synchronize`` also raises errors of updates."""
    if _under_way:
        works = list(_under_way)
        wait(works)
        for work in works:
            with suppress(ValueError):  # another thread may have removed it
                _under_way.remove(work)


# -- streams -----------------------------------------------------------------------------------------------------------


_own = threading.local()


class Streams:
    """The streams of one engine.

    Args:
        device: the device that the module computes on.

    Attributes:
        home: the stream that was current when the module's forward began, or None on the CPU; gradients are reduced on
            it. Parts of the module may compute on other streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.home: torch.Stream | None = None

    def begin_forward(self) -> None:
        """Record the current stream as that of the module's forward."""
        self.home = current_stream(self._device)

    @cached_property
    def copies(self) -> torch.Stream:
        """The stream for copies from the host's memory."""
        return torch.Stream(self._device)


def own_stream(device: torch.device) -> torch.Stream:
    """The calling thread's own stream of a device.

    A thread always gets the same stream: torch has only 32 streams per device, and reuses them in turn, also for
    collectives. The first call in a background thread also makes ``device`` current: otherwise the first device would
    be current there, and every rank of a machine would create a context on that device.
    """
    streams: dict[torch.device, torch.Stream] = _own.__dict__.setdefault("streams", {})
    if device not in streams:
        if device.index is not None and threading.current_thread() is not threading.main_thread():
            torch.accelerator.set_device_index(device.index)
        streams[device] = torch.Stream(device)
    return streams[device]


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which this thread computes now; None on the CPU, which has no streams."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def at(home: torch.Stream | None) -> AbstractContextManager[Any]:
    """Context that makes ``home`` current, and makes it wait for the previous stream; no effect if ``home`` is None."""
    if home is None or (stream := torch.accelerator.current_stream(home.device)) == home:
        return nullcontext()
    home.wait_stream(stream)
    return home


def wait_for(others: Iterable[torch.Stream | None], stream: torch.Stream | None) -> None:
    """Make a stream wait for others, before it uses their results, or before memory that they have used is freed.

    ``record_stream`` would make freeing safe as well, but the memory could then be reused only later.
    """
    for other in others:
        if stream is not None and other is not None and other != stream:
            stream.wait_stream(other)
