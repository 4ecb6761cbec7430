"""Scopes: modules that run their forward with views of the gathered buffer in place of the sharded parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.compat import is_compiled, refresh_flat_weights
from lightning_zero.engine.runtime.saved_tensors import Attributes


class Call(Enum):
    """How a running forward of a module treats parameters."""

    REPLACED = "the user has replaced all parameters"
    WATCHED = "outside a window: views replace parameters, and saved-tensor hooks are active"
    ORDINARY = "views replace parameters"


class Scope:
    """A module, the parameters that views replace during its forward, and the dicts that hold these parameters."""

    def __init__(self, module: nn.Module, is_root: bool) -> None:
        self.module, self.is_root = weakref.ref(module), is_root  # ``is_root``: whether the unit is the root unit
        self.handles: list[Any] = []
        self.may_take_over = False  # see ``Schedule._take_over``
        self.entries: list[tuple[dict[str, Any], str, nn.Parameter, Tensor]] = []
        # By view: a function that returns the DTensor to use in place of the view. ``_shown_now``: DTensors in use.
        self.shown: dict[Tensor, Callable[[], Tensor]] = {}
        self._shown_now: list[tuple[dict[str, Any], str, nn.Parameter, Tensor]] = []
        self.recurrent: list[weakref.ref[nn.RNNBase]] = []
        self.calls: list[Call] = []  # running forwards of the module
        self.depth = 0

    @cached_property
    def attributes(self) -> Attributes:
        """The module's attributes that ``outlive_attributes`` checks; used only if the unit is released."""
        module = self.module()
        assert module is not None, "the module was deleted in its forward"
        return Attributes(module)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    @property
    def is_replaced(self) -> bool:
        """Whether other tensors have replaced all parameters, as in ``full_parameters``: nothing is gathered then."""
        if self.depth:
            return False
        for holder, name, parameter, _ in self.entries:  # runs in each forward; usually the first entry decides
            if holder.get(name) is parameter:
                return False
        return True

    def swap_in(self) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        for holder, attribute, parameter, view in self.entries:
            if holder.get(attribute) is not parameter:
                continue  # already replaced: within ``full_parameters`` or ``torch.func.functional_call``
            if view.dtype is not parameter.dtype and not torch.is_autocast_enabled(view.device.type):
                continue  # gathered in autocast's dtype; outside autocast, modules use the sharded parameter
            if view.requires_grad is not parameter.requires_grad:
                view.requires_grad_(parameter.requires_grad)
            if self.shown and view in self.shown:
                view = self.shown[view]()
                self._shown_now.append((holder, attribute, parameter, view))
            holder[attribute] = view
        self.refresh_recurrent()

    def swap_out(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            for holder, attribute, parameter, view in chain(self.entries, self._shown_now):
                if holder.get(attribute) is view:
                    holder[attribute] = parameter
            self._shown_now.clear()
            self.refresh_recurrent()

    def recover(self) -> None:
        """Reset to the state between two forwards."""
        self.calls.clear()
        if self.depth:
            self.depth = 1
            self.swap_out()

    def refresh_recurrent(self) -> None:
        for reference in self.recurrent:
            if (module := reference()) is not None:
                refresh_flat_weights(module)


def regions(root: nn.Module, owners: set[int]) -> Iterator[nn.Module]:
    """Yield the modules in which compiled code may begin, if they have a submodule whose ``id`` is in ``owners``.

    Compiled code may begin in the root, in its children (called by compiled methods of the root), and in modules that
    are already compiled.
    """
    for module in dict.fromkeys([root, *root.children(), *filter(is_compiled, root.modules())]):
        if any(id(inner) in owners for inner in module.modules() if inner is not module):
            yield module
