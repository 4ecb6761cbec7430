"""Offloaded updates, when the optimizer's groups have changed since the last step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, NAdam, Optimizer, RMSprop

from lightning_zero.engine import Engine
from lightning_zero.engine.offload import Update


def swap(optimizer: Optimizer) -> None:
    """Give each group the other's parameters."""
    one, two = optimizer.param_groups
    one["params"], two["params"] = two["params"], one["params"]


def delete(optimizer: Optimizer) -> None:
    del optimizer.param_groups[0]


def remove(optimizer: Optimizer) -> None:
    del optimizer.param_groups[1]["params"][0]


def begin_momentum(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["momentum"] = 0.9


CHANGES = {change.__name__: change for change in (swap, delete, remove, begin_momentum)}


def change_groups(stage: int, change: str, offload: Any) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    reference = copy.deepcopy(module)
    optimizers = [
        SGD([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "lr": 0.1}])
        for model in (module, reference)
    ]
    engine = Engine(module, optimizers[:1], stage=stage, offload=offload, units=[nn.Linear])
    inputs = torch.arange(14.0).view(2, 7) / 7
    for step in range(4):
        if step == 2:
            for optimizer in optimizers:
                CHANGES[change](optimizer)
        module(inputs).square().mean().backward()
        reference(inputs).square().mean().backward()
        for optimizer, model in zip(optimizers, (module, reference)):
            optimizer.step()
            model.zero_grad()
    weights = engine.full_state_dict()
    engine.close()
    for name, expected in reference.state_dict().items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-6, atol=1e-7, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("stage", "offload"), [(1, "cpu"), (3, "cpu"), (3, "nvme")])
def test_offloaded_updates_follow_groups_that_have_changed(run_on, tmp_path, stage, offload, change):
    offload = offload if offload == "cpu" else {"optimizer": "nvme", "path": tmp_path}
    run_on(2, change_groups, stage=stage, change=change, offload=offload)


@pytest.mark.parametrize("kind", [Adam, RMSprop, NAdam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_options_that_only_a_device_allows_do_not_reach_an_update_on_the_cpu(kind, dtype):
    """``capturable``, which CUDA graphs need, and fused kernels, which have no complex numbers."""
    parameters = [nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(2)]
    gradient = torch.arange(4.0).to(dtype)
    optimizers = [kind([parameter]) for parameter in parameters]
    optimizers[0].param_groups[0]["capturable"] = True
    update = Update.of(optimizers[0], optimizers[0].param_groups[0], torch.device("cuda"), {})
    values = parameters[0].detach().clone()
    update.act([values], [gradient], [{}], nn.Parameter)
    parameters[1].grad = gradient
    optimizers[1].step()
    torch.testing.assert_close(values, parameters[1].detach(), rtol=1e-6, atol=1e-7)
