"""Autograd patches for ``torch.autograd.grad``, ``backward(inputs=...)`` and ``torch.func`` on sharded parameters.

Modules compute with an ordinary view of a parameter (see ``schedule``); user code may also use the sharded parameter.
``torch.autograd.grad(loss, parameter)`` must return the sum of the gradients of both tensors, and
``backward(inputs=[parameter])`` must accumulate both gradients. A tensor subclass cannot override these
functions, so the internal function that they call is patched.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from lightning_zero.engine import compat
from lightning_zero.engine.runtime.schedule import Schedule, in_backward
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor

_schedules: weakref.WeakSet[Schedule] = weakref.WeakSet()


def install(schedule: Schedule) -> None:
    """Patch torch's functions to include the views of a schedule's parameters, as long as the schedule exists."""
    _schedules.add(schedule)
    for patch in _PATCHES:
        patch.hold(schedule)


def _run_backward_by_name(
    run_backward: Callable[..., Any],
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
    accumulates = accumulate_grad and bool(own or not inputs)
    if accumulates and create_graph:
        warnings.warn(
            "backward(create_graph=True): p.grad of sharded parameters is the mean over ranks, without a graph. For "
            "penalties and Hessians, use torch.autograd.grad(loss, parameters, create_graph=True).",
            stacklevel=4,
        )
    options = {"allow_unreachable": allow_unreachable or bool(own), "accumulate_grad": accumulate_grad}
    # Only its module's forward updates a view's ``requires_grad`` after the parameter was frozen or unfrozen.
    views = [tensor.slot.view.requires_grad_(True) for tensor in own.values()]
    with ExitStack() as stack:
        for schedule in _schedules:
            stack.enter_context(schedule.differentiating(accumulates=accumulates))
            if create_graph:
                stack.enter_context(schedule.watching())
        found = run_backward(outputs, grad_outputs, retain_graph, create_graph, (*inputs, *views), **options)
    if accumulate_grad:
        return found
    if not in_backward():
        for schedule in _schedules:
            schedule.end_differentiation()
    if not own:
        return found
    gradients: list[Tensor | None] = list(found[: len(inputs)])
    for (position, parameter), gradient in zip(own.items(), found[len(inputs) :]):
        if gradient is not None:
            slot: Any = parameter.slot
            through_modules = with_hooks_of(parameter, slot.bucket.whole_of(slot.index, gradient))
            direct = gradients[position]
            gradients[position] = through_modules if direct is None else direct + through_modules
    if None in gradients and not allow_unreachable:
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    return tuple(gradients)


def with_hooks_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Apply the hooks that users registered on a parameter to a gradient of its view, and return the result."""
    for hook in list((compat.gradient_hooks(parameter) or {}).values()):  # a hook may remove itself
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


@contextmanager
def _disable_hooks_but_ours(disable_hooks: Callable[[str], Any], error_message: str) -> Iterator[None]:
    """Remove the engine's saved-tensor hooks during ``torch.func``, which forbids such hooks; units stay gathered."""
    with ExitStack() as stack:
        for schedule in _schedules:
            stack.enter_context(schedule.keeping_gathered())
        stack.enter_context(disable_hooks(error_message))
        yield


_PATCHES = (
    compat.run_backward(lambda before: partial(_run_backward_by_name, before)),
    compat.hooks_disabled(lambda before: partial(_disable_hooks_but_ours, before)),
)
