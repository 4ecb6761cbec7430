"""Partitioned activations on a device: the same numbers, and all work on the device is in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine import Engine
from tests.emulated.device import NAME, in_order
from tests.engine.test_tensor_parallel import LENGTH, WIDE, Deep, WideBlock


def train(**options: Any) -> list[Tensor]:
    """Losses of three steps on two tensor-parallel ranks, and the weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(NAME, (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    torch.manual_seed(0)
    model = Deep().to(NAME)
    plan: dict[str, Any] = {f"blocks.{n}.up": ColwiseParallel() for n in range(4)}
    plan |= {f"blocks.{n}.down": RowwiseParallel() for n in range(4)}
    parallelize_module(model, mesh["tensor_parallel"], plan, src_data_rank=None)  # the device's backend has no scatter
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(
        model,
        [optimizer],
        mesh=mesh,
        unit_numel=0,
        stage=3,
        activation_checkpointing=WideBlock,
        device=NAME,
        **options,
    )
    losses = []
    for step in range(3):
        x = torch.randn(2, LENGTH, WIDE, generator=torch.Generator().manual_seed(step)).to(NAME)
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    weights = [value.cpu() for value in engine.full_state_dict().values()]
    engine.close()
    return losses + weights


@in_order
def compare() -> None:
    expected = train()
    for options in ({}, {"offload": {"optimizer": None, "activations": "cpu"}}):
        found = train(partition_activations=True, **options)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), options


def test_partitioned_activations_change_no_bit_and_cause_no_ordering_errors(run_on_device):
    run_on_device(2, compare)
