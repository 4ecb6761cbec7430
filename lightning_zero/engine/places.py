"""Places: what identifies a sharded tensor, or an optimizer's state, on every rank, so that one rank may ask for it.

Objects such as hyperparameters may refer to sharded tensors on one rank only. That rank sends a tensor's place to the
others, which then take part in the gather of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from lightning_zero.engine.engine import engines
from lightning_zero.engine.optim.state import MasterStates
from lightning_zero.engine.state.gradient_shard import ShownGradient
from lightning_zero.engine.state.slot import BucketSlot, slots_of
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.sharded_tree import on_meta
from lightning_zero.engine.tensor.wrapper import read_by as read_by

Place = tuple[Any, ...]
"""The engine's name, a kind, and keys for that kind."""


def place_of(tensor: ShardedTensor) -> Place | None:
    """The place of a tensor; None if other ranks cannot find the tensor, as for a part of an optimizer's state."""
    slot: Any = tensor.slot
    engine = slot.bucket.communicator.name
    if tensor.is_parameter:
        return engine, "parameter", slot.name
    if isinstance(tensor.kept_object, ShownGradient):
        return engine, "gradient", slot.name
    name = next((name for name, each in slot.derived.items() if each is tensor), None)
    return None if name is None else (engine, "derived", *name)


def place_of_states(states: MasterStates) -> Place | None:
    """The place of an optimizer's state; None if no engine updates the optimizer's masters."""
    for engine in engines():
        for number, masters in enumerate(engine.masters):
            if masters.states is states:
                return engine.communicator.name, "optimizer", number
    return None


def gather_at(place: Place) -> Callable[[], Any] | None:
    """A function that takes part in the gather of what is at a place; None if nothing is there."""
    name, kind, which, *more = place
    engine = next((each for each in engines() if each.communicator.name == name), None)
    if engine is None:
        return None
    if kind == "optimizer":
        return partial(engine.masters[which].states.by_parameter, on_meta) if which < len(engine.masters) else None
    slots = (slot for bucket in engine.buckets for slot in slots_of(bucket))
    slot = next((slot for slot in slots if slot.name == which), None)
    tensor = None if slot is None else _of_slot(slot, kind, *more)
    return partial(collected, tensor) if isinstance(tensor, ShardedTensor) else None


def collected(tensor: ShardedTensor) -> Tensor:
    """The full value of a tensor. Collective."""
    return tensor.slot.collect(tensor.local.to(tensor.dtype))


def _of_slot(slot: BucketSlot, kind: str, *of_derived: Any) -> Tensor | None:
    if kind == "parameter":
        return slot.parameter
    if kind == "gradient":
        return slot.parameter.grad
    return slot.derived.get((slot.name, *of_derived))
