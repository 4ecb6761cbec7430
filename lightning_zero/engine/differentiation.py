"""What differentiates other than by ``loss.backward()``: gradients asked for by name, and ``torch.func``.

A module computes with an ordinary view of its parameter (see ``schedule``); user code may use the sharded one as well.
``torch.autograd.grad(loss, parameter)`` is the sum of what came to either, ``backward(inputs=[parameter])`` goes
to both. The tensor itself cannot tell these functions so: what both of them call is wrapped, once for all engines.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.schedule import Schedule, in_backward
from lightning_zero.engine.sharded_tensor import ShardedTensor

_run_backward = torch.autograd._engine_run_backward
_disable_hooks = torch.autograd.graph.disable_saved_tensors_hooks
_schedules: weakref.WeakSet[Schedule] = weakref.WeakSet()


def serve(schedule: Schedule) -> None:
    """Let torch's functions find what the units of a schedule computed with, for as long as it lives."""
    _schedules.add(schedule)
    torch.autograd._engine_run_backward = _run_backward_by_name  # type: ignore[assignment]
    torch.autograd.graph.disable_saved_tensors_hooks = _disable_hooks_but_ours


def _run_backward_by_name(
    outputs: Sequence[Any],
    grad_outputs: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any] = (),
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> Any:
    own = {
        position: tensor
        for position, tensor in enumerate(inputs)
        if isinstance(tensor, ShardedTensor) and tensor.is_parameter and tensor.requires_grad
    }
    options = {"allow_unreachable": allow_unreachable or bool(own), "accumulate_grad": accumulate_grad}
    views = [tensor.slot.view for tensor in own.values()]
    found = _run_backward(outputs, grad_outputs, retain_graph, create_graph, (*inputs, *views), **options)
    if accumulate_grad:
        return found
    if not in_backward():
        for schedule in _schedules:
            schedule.end_differentiation()
    if not own:
        return found
    gradients: list[Tensor | None] = list(found[: len(inputs)])
    for (position, parameter), gradient in zip(own.items(), found[len(inputs) :]):
        gradients[position] = _sum(gradients[position], gradient, parameter)
    if None in gradients and not allow_unreachable:
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    return tuple(gradients)


def _sum(direct: Tensor | None, through_modules: Tensor | None, parameter: ShardedTensor) -> Tensor | None:
    if through_modules is None:
        return direct
    gradient = with_hooks_of(parameter, through_modules)
    return gradient if direct is None else direct + gradient


def with_hooks_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Run the hooks that users registered on a parameter on the gradient that came to a view of it."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


@contextmanager
def _disable_hooks_but_ours(error_message: str) -> Iterator[None]:
    """``torch.func`` does not run under saved-tensor hooks: ours give way, as what runs meanwhile stays gathered."""
    with ExitStack() as stack:
        for schedule in _schedules:
            stack.enter_context(schedule.keeping_gathered())
        stack.enter_context(_disable_hooks(error_message))
        yield
