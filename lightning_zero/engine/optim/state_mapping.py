"""``optimizer.state`` while an engine keeps the optimizer's masters: by master inside, by parameter for user code."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from lightning_zero.engine.comm.background_work import synchronize
from lightning_zero.engine.state.slot import BucketSlot


class Owner(Protocol):
    """What the mapping needs of ``MasterStates``."""

    def slot_of(self, parameter: Any) -> BucketSlot | None: ...

    def has_state(self, slot: BucketSlot) -> bool: ...

    def key_of(self, slot: BucketSlot) -> Tensor | None: ...

    def in_parts(self, slot: BucketSlot) -> dict[str, Any]: ...

    def synchronize(self) -> None: ...


class StateMapping(defaultdict[Any, dict[str, Any]]):
    """The state by master. For a parameter of the module it returns that parameter's state as sharded tensors.

    Over one rank, where each parameter has a master in its shape, it returns the optimizer's own entries.

    Args:
        owner: translates between masters and parameters.

    Raises:
        TypeError: where user code would replace or remove the state of one parameter.
    """

    def __init__(self, owner: Owner) -> None:
        super().__init__(dict)
        self._owner = weakref.ref(owner)

    def _slot_of(self, key: Any) -> tuple[Owner, BucketSlot] | None:
        owner = self._owner()
        slot = owner.slot_of(key) if owner is not None else None
        return (owner, slot) if owner is not None and slot is not None else None

    def __contains__(self, key: Any) -> bool:
        found = self._slot_of(key)
        return super().__contains__(key) if found is None else found[0].has_state(found[1])

    def __missing__(self, key: Any) -> Any:
        found = self._slot_of(key)
        if found is None:
            return super().__missing__(key)
        own = found[0].key_of(found[1])
        return self[own] if own is not None else MappingProxyType(found[0].in_parts(found[1]))

    def values(self) -> Any:
        self._synchronize()  # readers may write to them
        return super().values()

    def items(self) -> Any:
        self._synchronize()
        return super().items()

    def _synchronize(self) -> None:
        owner = self._owner()
        owner.synchronize() if owner is not None else synchronize()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._own_key(key), value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(self._own_key(key))

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(self._own_key(key), *default)

    def _own_key(self, key: Any) -> Any:
        found = self._slot_of(key)
        if found is None:
            return key
        own = found[0].key_of(found[1])
        if own is None:
            raise TypeError(
                f"The optimizer's state of '{found[1].name}' is kept in parts, with that of its neighbours, and cannot "
                "be replaced or removed alone: write into its tensors (optimizer.state[p]['exp_avg'].zero_()), clear "
                "all of it (optimizer.state.clear()), or call load_state_dict()."
            )
        return own

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


class ByParameter(defaultdict[Any, dict[str, Any]]):
    """The state by parameter, in the place of ``optimizer.state`` while ``optimizer.state_dict()`` reads it.

    Attributes:
        own: the mapping that it stands in for.
        is_by_hook: whether a call of ``state_dict()`` by user code has put it there.
    """

    def __init__(self, own: Any, states: Mapping[Tensor, dict[str, Any]], *, is_by_hook: bool) -> None:
        super().__init__(dict, states)
        self.own, self.is_by_hook = own, is_by_hook
