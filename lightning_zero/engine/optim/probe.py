"""Try an optimizer on small tensors, to find out whether the user's ``whole_parameters`` is wrong for it.

Equal updates prove nothing: in some optimizers, an update depends on other parameters only after the first steps.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.offload.updates import Update

_SHAPE = (8, 12)
_STEPS = 3


def what_refutes(optimizer: Optimizer, *, is_elementwise: bool) -> tuple[str, bool] | None:
    """Compare joint with separate updates of two parameters, and updates of a whole parameter with those of its parts.

    Args:
        is_elementwise: whether the optimizer is declared to be elementwise; parts are compared only then.

    Returns:
        The observed difference, in words, and whether it is between a whole parameter and its parts. None if updates
        are equal, or if the optimizer cannot be tried.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            return _seen(optimizer, is_elementwise)
    except Exception:  # the optimizer may need other shapes, or a closure
        return None


def _seen(optimizer: Optimizer, is_elementwise: bool) -> tuple[str, bool] | None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(_SHAPE, generator=generator, device="cpu") for _ in range(2)]
    gradients = [
        [torch.randn(_SHAPE, generator=generator, device="cpu") * (1 + k) for k in range(2)] for _ in range(_STEPS)
    ]
    for group in optimizer.param_groups:
        together = _updated(optimizer, group, values, gradients)
        for index, value in enumerate(values):
            (alone,) = _updated(optimizer, group, [value], [[step[index]] for step in gradients])
            if not torch.equal(alone, together[index]):
                return (
                    "the update of a parameter depends on other parameters: with random gradients, separate updates "
                    f"of two parameters differ by up to {(alone - together[index]).abs().max():.1e} from joint updates"
                ), False
        if is_elementwise:
            half = values[0].numel() // 2
            parts = _updated(
                optimizer,
                group,
                list(values[0].view(-1).split(half)),
                [list(s[0].view(-1).split(half)) for s in gradients],
            )
            difference = (torch.cat(parts) - together[0].view(-1)).abs().max()
            if difference > 0:
                return (
                    "the update of an element depends on other elements of the parameter: with random gradients, "
                    f"separate updates of the two halves of a matrix differ by up to {difference:.1e} from one update"
                ), True
    return None


def _updated(
    optimizer: Optimizer, group: dict[str, Any], values: list[Tensor], gradients: list[list[Tensor]]
) -> list[Tensor]:
    update = Update.of(optimizer, group, torch.device("cpu"))
    mine = {key: value for key, value in update.attributes.items() if key != "param_groups"}
    update = update._replace(attributes=copy.deepcopy(mine), group=copy.deepcopy({**update.group, "params": []}))
    values = [value.clone() for value in values]
    states = update.try_on(values, gradients[0], optimizer, group)
    for step in gradients[1:]:
        states = update.act_on(values, step, states)
    return values
