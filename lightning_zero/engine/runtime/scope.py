"""Scopes: modules in whose forward the sharded parameters are ordinary tensors over the gathered buffer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_zero.engine.compat import FLAT_WEIGHTS, flattening_of_weights, forward_hooks, is_compiled
from lightning_zero.engine.state.slot import BucketSlot, slot_of


class Call(Enum):
    """How a running forward of a module treats parameters."""

    REPLACED = "the user has replaced all parameters"
    WATCHED = "outside a window: parameters are ordinary tensors, and saved-tensor hooks are active"
    ORDINARY = "parameters are ordinary tensors"


class Entry(NamedTuple):
    """A parameter of a scope.

    Attributes:
        holder, attribute: the dict that holds the parameter, and its key.
    """

    holder: dict[str, Any]
    attribute: str
    parameter: nn.Parameter
    slot: BucketSlot


class Scope:
    """A module and the parameters that are ordinary tensors during its forward."""

    def __init__(self, module: nn.Module, is_root: bool) -> None:
        self.module, self.is_root = weakref.ref(module), is_root  # ``is_root``: whether the unit is the root unit
        self.handles: list[Any] = []
        self.may_take_over = False  # see ``Schedule._take_over``
        self.may_be_fused = False  # see ``plan.units.Owner``
        self.entries: list[Entry] = []
        self._undo: list[Callable[[], None]] = []  # undoes, for each parameter, what ``enter_forward`` did
        self.calls: list[Call] = []  # running forwards of the module
        self._set_aside: list[tuple[Any, dict[int, Any]]] = []  # the module's dicts of hooks, and their contents before
        self.depth = 0

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    @property
    def is_replaced(self) -> bool:
        """Whether other tensors have replaced all parameters, as in ``full_parameters``: nothing is gathered then."""
        if self.depth:
            return False
        for holder, name, parameter, *_ in self.entries:  # runs in each forward; usually the first entry decides
            if holder.get(name) is parameter:
                return False
        return True

    def enter_forward(self) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        for holder, attribute, parameter, slot in self.entries:
            if holder.get(attribute) is not parameter:
                continue  # replaced, within ``full_parameters`` or ``torch.func.functional_call``
            if slot.is_in_forward:
                continue  # an outer scope, or another name of the parameter, has entered it
            view, extensions = slot.view, slot.bucket.extensions
            if extensions:
                view.grad_dtype = parameter.dtype
                view.requires_grad_(parameter.requires_grad)
                holder[attribute] = extensions[slot.index].computed(view, parameter.dtype)
                self._undo.append(partial(holder.__setitem__, attribute, parameter))
                continue
            if view.dtype is not parameter.dtype:
                if not torch.is_autocast_enabled(view.device.type):
                    continue  # gathered in autocast's dtype; outside autocast, modules use the sharded parameter
                # Autocast without a cache casts the parameter at each use, so DDP adds the uses' gradients in fp32.
                view.grad_dtype = view.dtype if torch.is_autocast_cache_enabled() else parameter.dtype
            if view.requires_grad is not parameter.requires_grad:
                view.requires_grad_(parameter.requires_grad)
            stand_in = slot.bucket.communicator.tensor.shown(view, slot.placed)
            self._undo.append(partial(slot.leave_forward, parameter, stand_in))
            slot.enter_forward(parameter, stand_in)

    def leave_forward(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            while self._undo:
                self._undo.pop()()

    def enter_window(self) -> None:
        """Like ``enter_forward``, but for a whole window, during which the module has only hooks of users."""
        self.enter_forward()
        module, own = self.module(), {handle.id for handle in self.handles}
        for hooks in forward_hooks(module) if module is not None else ():
            self._set_aside.append((hooks, dict(hooks)))
            for number in own.intersection(hooks):
                del hooks[number]

    def leave_window(self) -> None:
        """Undo ``enter_window``, unless ``recover`` has done so; hooks that users have added or removed stay so."""
        if not self._set_aside:
            return
        own = {handle.id for handle in self.handles}
        for hooks, before in self._set_aside:
            now = dict(hooks)
            hooks.clear()
            hooks.update({number: hook for number, hook in before.items() if number in own or number in now} | now)
        self._set_aside = []
        self.leave_forward()

    def recover(self) -> None:
        """Reset to the state between two forwards."""
        self.calls.clear()
        self.leave_window()
        if self.depth:
            self.depth = 1
            self.leave_forward()


def regions(root: nn.Module, owners: set[int]) -> Iterator[nn.Module]:
    """Yield the modules in which compiled code may begin, if they have a submodule whose ``id`` is in ``owners``.

    Compiled code may begin in the root, in its children (called by compiled methods of the root), and in modules that
    are already compiled.
    """
    for module in dict.fromkeys([root, *root.children(), *filter(is_compiled, root.modules())]):
        if any(id(inner) in owners for inner in module.modules() if inner is not module):
            yield module


def _flatten_unless_sharded(flatten: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """On a GPU, ``flatten`` replaces the memory of weights by a copy, which no update would reach.

    Compiled code flattens no weights, sharded or not: a graph break here would end ``fullgraph=True`` in an error.
    """

    def flatten_parameters(module: nn.Module) -> None:
        is_traced = torch.compiler.is_compiling()
        if not is_traced and all(slot_of(weight) is None for weight in getattr(module, FLAT_WEIGHTS)):
            flatten(module)

    return flatten_parameters


WEIGHTS_IN_PLACE = flattening_of_weights(_flatten_unless_sharded)
"""While held, recurrent modules keep sharded parameters where they are."""
