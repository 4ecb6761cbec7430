"""What user code calls for a sharded module: read its full values, run different numbers of forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.engine import engines
from lightning_zero.engine.optim.masters import masters_that_hold
from lightning_zero.engine.state.slot import slot_of
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.sharded_tree import whole


@contextmanager
def full_parameters(module: nn.Module, writeback: bool = False) -> Iterator[None]:
    """Context in which the module's parameters are ordinary tensors of the full shape. Collective.

    Args:
        module: fully sharded, partly sharded or not sharded. A forward within the context computes with the full
            tensors, and backward through it adds to the gradients of the sharded parameters.
        writeback: keep writes to the full tensors, which must be the same on every rank; otherwise they are dropped.
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
    """The reduced gradient of a parameter in its full shape; None if it has none. Collective."""
    gradient = parameter.grad
    return gradient.whole().clone() if isinstance(gradient, ShardedTensor) else gradient


def full_optimizer_state(parameter: Tensor) -> dict[str, Any]:
    """The optimizer state of a sharded parameter, each tensor in the full shape. Collective.

    Returns:
        The state by name; empty before the first step, and for a parameter that no optimizer holds.
    """
    masters = masters_that_hold(parameter)
    return {} if masters is None else masters.states.by_parameter(whole, [parameter]).get(parameter, {})


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter or gradient, 1-D; of an ordinary tensor all elements, flattened.

    A parameter's shard is a view of its (fp32) master weight: modules see writes once the unit is gathered again.
    """
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor.detach().reshape(-1)


@contextmanager
def uneven_forwards(module: nn.Module) -> Iterator[None]:
    """Join of uneven inputs: within the context ranks may run different numbers of forwards. Collective.

    At stage 3 a forward all-gathers parameters. A rank that has finished takes part in the gathers of the others, so
    every rank must run the same units. Read parameters before or after the context only, since reading takes every
    rank. Methods called ``generate`` are wrapped automatically. No effect at stages 1 and 2 and on unsharded modules.

    Args:
        module: the module that is called: sharded, or a submodule of a sharded one.
    """
    communicators = {slot.bucket.communicator for slot in map(slot_of, module.parameters()) if slot is not None}
    engine = next((engine for engine in engines() if engine.communicator in communicators), None)
    with engine.join.each_forward(module) if engine is not None and engine.gathers else nullcontext():
        yield
