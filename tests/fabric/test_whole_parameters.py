"""Optimizers that need whole parameters under Fabric: DDP's numbers and state."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fabric.training import make_fabric, same_as_under_ddp, set_up, state_of, train, weights
from tests.support import whole


def train_and_look(strategy: str, optimizer: Any) -> Any:
    fabric = make_fabric(strategy)
    model, optimizer = set_up(fabric, whole.Layered, optimizer)
    losses = train(fabric, model, optimizer, steps=6)
    return losses, weights(model), state_of(optimizer)


@pytest.mark.parametrize("optimizer", [whole.adafactor, whole.shampoo], ids=lambda optimizer: optimizer.__name__)
def test_optimizers_that_need_whole_parameters_give_ddps_losses_weights_and_states(run_on, optimizer):
    run_on(2, same_as_under_ddp, case=train_and_look, optimizer=optimizer)
