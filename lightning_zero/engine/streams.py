"""Streams of a device: those that belong to a thread beside training, and those that a module computes on."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_own = threading.local()


def own_stream(device: torch.device) -> torch.Stream:
    """The calling thread's own stream of a device.

    Always the same: torch has 32 of a device, which it gives out in turn, those of collectives among them. And a new
    thread's current device is the first one, where every rank of a machine would begin to keep a context.
    """
    streams: dict[torch.device, torch.Stream] = _own.__dict__.setdefault("streams", {})
    if device not in streams:
        if device.index is not None and threading.current_thread() is not threading.main_thread():
            torch.accelerator.set_device_index(device.index)
        streams[device] = torch.Stream(device)
    return streams[device]


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which this thread computes now; None on the CPU, which has none."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def at(home: torch.Stream | None) -> AbstractContextManager[Any]:
    """Go on upon this stream, which waits for the current one; nothing where that is the same, or there are none."""
    if home is None or (stream := torch.accelerator.current_stream(home.device)) == home:
        return nullcontext()
    home.wait_stream(stream)
    return home


def wait_for(others: Iterable[torch.Stream | None], stream: torch.Stream | None) -> None:
    """Let a stream wait for others, before it is given what they have made, or gets back memory that they have used.

    The latter in the place of ``record_stream``, after which the allocator cannot tell for a while what is free.
    """
    for other in others:
        if stream is not None and other is not None and other != stream:
            stream.wait_stream(other)
