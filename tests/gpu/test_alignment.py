"""Parameters are views of a bucket, aligned to 32 elements: kernels must not round differently than with own memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine.plan.layout import ALIGNMENT

LAYERS = [nn.Linear(768, 3072), nn.Linear(1000, 1000), nn.LayerNorm(768), nn.Conv2d(32, 64, 3), nn.Embedding(1000, 768)]


def move_into_a_bucket(layer: nn.Module) -> None:
    """Put each parameter ``ALIGNMENT`` elements behind the start of a block of memory."""
    for parameter in layer.parameters():
        flat = torch.empty(ALIGNMENT + parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        parameter.data = flat[ALIGNMENT:].view(parameter.shape).copy_(parameter.data)


def outcome(layer: nn.Module, x: Tensor) -> list[Tensor]:
    y = layer(x)
    return [y, *torch.autograd.grad(y, list(layer.parameters()), torch.ones_like(y))]


def input_of(layer: nn.Module) -> Tensor:
    if isinstance(layer, nn.Embedding):
        return torch.arange(1000).view(4, 250)
    size = (4, 32, 16, 16) if isinstance(layer, nn.Conv2d) else (16, 128, layer.weight.shape[-1])
    return torch.linspace(-1, 1, torch.Size(size).numel()).view(size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_kernels_round_alike_for_a_view_of_a_bucket(device, layer, dtype):
    layer = layer.to(device, dtype)
    x = input_of(layer).to(device)
    x = x.to(dtype) if x.is_floating_point() else x
    expected = outcome(layer, x)
    move_into_a_bucket(layer)
    for found, own in zip(outcome(layer, x), expected):
        torch.testing.assert_close(found, own, rtol=0, atol=0)
