"""``optimizer.state`` of a sharded module: stored for each master weight tensor, but accessed by parameter."""

from __future__ import annotations

from collections import defaultdict
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from lightning_zero.engine.optim.master import is_alone
from lightning_zero.engine.state.slot import BucketSlot, slot_of
from lightning_zero.engine.tensor.sharded_tree import Leaf, in_parts
from lightning_zero.engine.tensor.wrapper import reader

States = dict[Any, dict[str, Any]]
"""For each parameter, the entries of its state by name."""


class _Stored(Protocol):
    """The states of masters, as far as the mapping uses them."""

    def has_state(self, slot: BucketSlot) -> bool: ...

    def key_of(self, slot: BucketSlot) -> Tensor: ...

    def shown(self, parameter: Tensor) -> dict[str, Any]: ...

    def by_parameter(self, leaf: Leaf) -> States: ...

    def synchronize(self) -> None: ...

    def cleared(self) -> None: ...


class StateMapping(defaultdict[Any, dict[str, Any]]):
    """``optimizer.state``, whose keys are masters. A lookup by a module's parameter returns state in sharded tensors.

    On a single rank without offload, where each parameter has its own master, the lookup returns that master's state.

    Raises:
        TypeError: if user code replaces or removes the state of a single parameter of a sharded module.
    """

    def __init__(self, states: _Stored) -> None:
        super().__init__(dict)
        self._states = states

    def __contains__(self, key: Any) -> bool:
        slot = slot_of(key)
        return super().__contains__(key) if slot is None else self._states.has_state(slot)

    def __missing__(self, key: Any) -> Any:
        slot = slot_of(key)
        if slot is None:
            return super().__missing__(key)
        if is_alone(slot.bucket):
            return self[self._states.key_of(slot)]
        return MappingProxyType(self._states.shown(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **by_name: Any) -> None:
        for key, value in dict(*others, **by_name).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def values(self) -> Any:
        self._states.synchronize()  # callers may write to states that background work is using
        return super().values()

    def items(self) -> Any:
        self._states.synchronize()
        return super().items()

    def clear(self) -> None:
        self._states.synchronize()  # an update that is still running would bring its state back
        self._states.cleared()
        super().clear()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._own_key(key), value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(self._own_key(key))

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(self._own_key(key), *default)

    def _own_key(self, key: Any) -> Any:
        slot = slot_of(key)
        if slot is None:
            return key
        if not is_alone(slot.bucket):
            raise TypeError(
                f"The optimizer's state of '{slot.name}' is sharded together with the state of other parameters and "
                "cannot be replaced or removed alone: write to its tensors (optimizer.state[p]['exp_avg'].zero_()), "
                "clear the state of all parameters (optimizer.state.clear()), or call load_state_dict()."
            )
        return self._states.key_of(slot)

    def __reduce__(self) -> Any:
        # Copies need the state by parameter, as they hold copies of the parameters, and no masters. Collective.
        reading = reader.get()
        states = self._states.by_parameter(in_parts) if reading is None else reading.states(self._states)
        return defaultdict, (dict,), None, None, iter(states.items())
