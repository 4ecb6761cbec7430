"""Streams of a device that belong to a thread beside training."""

from __future__ import annotations

import threading

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
