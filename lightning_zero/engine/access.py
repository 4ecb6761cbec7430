"""Looking inside a sharded module from user code, on every rank together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.masters import masters_that_hold
from lightning_zero.engine.sharded_tensor import ShardedTensor


@contextmanager
def full_parameters(module: nn.Module, writeback: bool = False) -> Iterator[None]:
    """Within the context the module's parameters are ordinary tensors of the full shape. Collective.

    Args:
        module: sharded, in part or not at all. A forward in here computes with these tensors; the gradients
            of what was computed with them become the parameters'.
        writeback: keep what is written to them, alike on every rank; otherwise it is dropped at the end.
    """
    swapped: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
    ordinary: dict[int, nn.Parameter] = {}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if isinstance(parameter, ShardedTensor):
                if id(parameter) not in ordinary:
                    value = nn.Parameter(parameter.whole().detach().clone(), parameter.requires_grad)
                    if value.requires_grad and parameter.slot.take_gradient is not None:
                        value.register_post_accumulate_grad_hook(parameter.slot.take_gradient)
                    ordinary[id(parameter)] = value
                swapped.append((inner._parameters, name, parameter, ordinary[id(parameter)]))
    for holder, name, _, value in swapped:
        holder[name] = value
    try:
        yield
    finally:
        for holder, name, parameter, _ in swapped:
            holder[name] = parameter
    if writeback:
        with torch.no_grad():
            for parameter, value in {id(p): (p, value) for _, _, p, value in swapped}.values():
                parameter.copy_(value)


def full_grad(parameter: Tensor) -> Tensor | None:
    """The whole reduced gradient of a parameter, in its full shape; None if it has none. Collective."""
    gradient = parameter.grad
    return gradient.whole().clone() if isinstance(gradient, ShardedTensor) else gradient


def full_optimizer_state(parameter: Tensor) -> dict[str, Any]:
    """What the optimizer that holds a sharded parameter keeps for it, each tensor in the full shape. Collective.

    Returns:
        The optimizer's state for it, empty before its first step, and for a parameter that no optimizer holds.
    """
    masters = masters_that_hold(parameter)
    return {} if masters is None else masters.state_of(parameter)


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or of a gradient, 1-D; an ordinary tensor whole, flattened.

    A parameter's part is a view of its (fp32) master: a write to it is seen once the unit is gathered again.
    """
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor.detach().reshape(-1)
