"""Copies from the host run while the device computes: seen in torch's own profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.gpu.one_device import Layers

Span = tuple[float, float]


def covered(spans: list[Span], by: list[Span]) -> float:
    """The share of the spans' time in which one of the other spans, which may overlap, is active too."""
    whole = sum(end - start for start, end in spans)
    merged: list[Span] = []
    for start, end in sorted(by):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    both = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in spans for begin, stop in merged)
    return both / whole if whole else 0.0


def on_device(profiled: profile) -> list[Any]:
    """The kernels and copies, without labels, which span the work that they name."""
    events = profiled.events()
    return [event for event in events if event.device_type is DeviceType.CUDA and not event.is_user_annotation]


def copies_under_compute(device: str, overlap: bool, width: int = 4096, batch: int = 8192) -> float:
    """The share of the time for copying parameters from the host's memory in which kernels run."""
    from lightning_zero.engine import Engine

    module = Layers(width, 6)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    offload = {"optimizer": "cpu", "parameters": "cpu", "overlap": overlap}
    engine = Engine(module, [optimizer], offload=offload, overlap=overlap, device=device)
    x = torch.randn(batch, width, device=device)

    module(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    module(x).backward()  # waits for the update, before which nothing is gathered ahead
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=kinds) as profiled:
        module(x).backward()
        if device == "cuda":
            torch.cuda.synchronize()
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in on_device(profiled):
        if "Memcpy" not in event.name or "HtoD" in event.name:
            spans["HtoD" in event.name].append((event.time_range.start, event.time_range.end))
    engine.close()
    # without the inputs' few bytes: a layer's copy takes at least a tenth of the longest
    longest = max((end - start for start, end in spans[True]), default=0.0)
    return covered([(start, end) for start, end in spans[True] if end - start > longest / 10], spans[False])


@pytest.mark.alone
def test_copies_of_parameters_overlap_with_compute(run_on, device):
    (beside,) = run_on(1, copies_under_compute, timeout=170, device=device, overlap=True)
    (serial,) = run_on(1, copies_under_compute, timeout=170, device=device, overlap=False)
    # the first copy of a pass has no compute to overlap with, nor has the last one of the backward pass
    assert beside >= 0.5 > 0.2 >= serial, f"{beside:.0%} of copies under compute, {serial:.0%} without overlap"
