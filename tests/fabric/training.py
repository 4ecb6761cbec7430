"""A Fabric training loop for DDP and for each stage, and the comparison of two runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_zero
from tests.support.models import OddModel, adam
from tests.support.training import batch, same_values
from tests.support.workers import world_size

STRATEGIES = ("zero1", "zero2", "zero3")


def make_fabric(strategy: Any, **options: Any) -> Fabric:
    """A launched Fabric on all ranks of the pool; on one rank "ddp" stands for a single device."""
    if world_size() == 1 and strategy == "ddp":
        strategy = "auto"
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    fabric = Fabric(**({"accelerator": "cpu", "devices": world_size(), "strategy": strategy} | options))
    fabric.launch()
    return fabric


def set_up(
    fabric: Fabric, model: Callable[[], nn.Module] = OddModel, optimizer: Callable[[nn.Module], Optimizer] = adam
) -> Any:
    """A model and its optimizer, the same on every rank and under every strategy."""
    torch.manual_seed(0)
    module = model()
    return fabric.setup(module, optimizer(module))


def train(fabric: Fabric, model: Any, optimizer: Any, steps: int = 3, first: int = 0) -> list[Tensor]:
    """Run some steps on this rank's batches, beginning with batch `first`; return the losses."""
    losses = []
    for index in range(first, first + steps):
        loss = model(*batch(index))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Full parameters and buffers, by the module's own names. Collective."""
    with lightning_zero.full_parameters(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def state_of(optimizer: Any) -> dict[str, Any]:
    """An optimizer's full state dict, sorted by parameter. Collective."""
    state_dict = optimizer.state_dict()
    return {**state_dict, "state": dict(sorted(state_dict["state"].items()))}


def same_as_under_ddp(case: Callable[..., Any], bound: float = 0, **options: Any) -> None:
    """Run a case under DDP and at each stage, and compare the return values."""
    results = {}
    for strategy in ("ddp", *STRATEGIES):
        torch.manual_seed(0)
        results[strategy] = case(strategy, **options)
    assert results["ddp"] is not None, "nothing was compared"
    for strategy in STRATEGIES:
        same_values(results[strategy], results["ddp"], strategy, bound)
