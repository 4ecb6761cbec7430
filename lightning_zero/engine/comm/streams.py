"""The streams of a device that engines, background threads and modules use."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

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
