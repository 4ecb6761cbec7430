"""Memory counted by the device's allocator on one of 64 ranks: the paper's formula, less offloaded states.

Without accumulation, stage 1 holds as much as stage 2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_zero.engine import Engine
from tests.emulated import device
from tests.emulated.device import in_order
from tests.gpu.one_device import Layers, twins

RANKS, WIDTH, DEPTH = 64, 1024, 6
LAYER = WIDTH * WIDTH + WIDTH
PARAMETERS = 4 * DEPTH * LAYER  # bytes in fp32; gradients take as many, Adam's moments twice as many


@in_order
def measured(stage: int, offload: dict[str, Any] | None) -> tuple[int, int]:
    """Bytes on the device after a backward pass, with its gradients, and at the peak of forward and backward."""
    with twins(RANKS):
        module = Layers(WIDTH, DEPTH)
        optimizer = torch.optim.Adam(module.parameters())
        x = torch.randn(1, WIDTH, device=device.NAME)
        before, _ = device.native.memory()
        options = {"units": [Layers.Layer], "prefetch": 1, "reduction_buffers": 1, "device": device.NAME}
        engine = Engine(module, [optimizer], stage=stage, offload=offload, **options)
        for step in range(3):
            if step == 2:
                torch.accelerator.synchronize()
                device.native.memory()
            module(x).backward()
            torch.accelerator.synchronize()
            allocated, peak = device.native.memory()
            if step < 2:
                optimizer.step()
                optimizer.zero_grad()
        engine.close(communicate=False)
    return allocated - before, peak - before


KEPT = {
    "stage 1": (1, None, 1 + 3 / RANKS),
    "stage 2": (2, None, 1 + 3 / RANKS),
    "stage 3": (3, None, 4 / RANKS),
    "stage 1, masters and moments elsewhere": (1, {"optimizer": "cpu"}, 1 + 1 / RANKS),
    "stage 3, masters and moments elsewhere": (3, {"optimizer": "cpu"}, 2 / RANKS),
    "gradients too": (3, {"optimizer": "cpu", "gradients": "cpu"}, 1 / RANKS),
    "parameters too": (3, {"optimizer": "cpu", "parameters": "cpu"}, 1 / RANKS),
    "all": (3, {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu"}, 0),
    "all on a disk": (3, {"optimizer": "nvme", "gradients": "cpu", "parameters": "nvme", "path": "swap"}, 0),
}


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(["stage", "offload", "share"], KEPT.values(), ids=KEPT)
def test_the_device_holds_only_the_states_that_are_not_offloaded(run_on_device, stage, offload, share):
    ((allocated, peak),) = run_on_device(1, measured, stage=stage, offload=offload)
    # memory is allocated in units of 512 bytes, which count next to a 64th of a layer
    assert share <= allocated / PARAMETERS <= 1.02 * share + 0.001
    # In addition: the gradient of a layer as autograd makes it, the buffer that it goes into, and the previous buffer,
    # in reduction; at stage 3 also this layer and the next one, whole.
    assert (peak - allocated) / (4 * LAYER) <= (5.1 if stage == 3 else 3.1)
