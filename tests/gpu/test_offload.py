"""With offloaded model states a GPU computes the same as without offload, bit for bit where arithmetic allows.

The update then runs on the CPU. SGD with powers of two rounds once per element, whichever operations a device fuses;
Adam's roots and quotients may differ in the last bit between CPU and GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.one_device import same, train

OFFLOADS = {
    "optimizer": {"optimizer": "cpu"},
    "gradients too": {"optimizer": "cpu", "gradients": "cpu"},
    "parameters too": {"optimizer": "cpu", "parameters": "cpu"},
    "all": {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu"},
}
POWERS_OF_TWO = {"lr": 2.0**-4, "momentum": 0.5}


def compare(device: str, dtype: torch.dtype, offload: dict[str, str]) -> None:
    options = {"optimizer": torch.optim.SGD, "settings": POWERS_OF_TWO, "dtype": dtype}
    assert same(train(device, 3, offload=offload, **options), train(device, 3, **options))
    adam, expected = train(device, 3, offload=offload, dtype=dtype), train(device, 3, dtype=dtype)
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    for name, value in expected.items():
        assert (adam[name].double() - value.double()).norm() <= bound * value.double().norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_training_with_offload_equals_training_without(run_on, device, dtype, offload):
    run_on(1, compare, timeout=120, device=device, dtype=dtype, offload=OFFLOADS[offload])
