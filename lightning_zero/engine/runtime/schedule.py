"""The schedule: module hooks that gather and release units, the order of units, and prefetching along it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.compat import current_autograd_node, current_graph_task, queue_callback
from lightning_zero.engine.plan.units import UnitPlan
from lightning_zero.engine.runtime.compile_hooks import EntryHook, OwnHook, is_compiled
from lightning_zero.engine.runtime.saved_tensors import Attributes, SavedTensors, tensors_in
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.slot import slots_of


class Unit:
    """Modules whose parameters are gathered and released together.

    Attributes:
        name: qualified name of the module, ``""`` for the root unit.
        buckets: one for each (dtype, requires_grad) of its parameters, or more where the unit is very large.
    """

    def __init__(self, plan: UnitPlan, buckets: list[Bucket]) -> None:
        self.name, self.is_root, self.buckets = plan.name, plan.is_root, buckets
        self.is_resident = plan.is_resident  # gathered from the start of a window to the end of the backward after it
        self.parameter_names = list(plan.parameters)
        self.numel = sum(parameter.numel() for parameter in plan.parameters.values())
        self.ran: set[_Scope] = set()  # scopes that ran with a graph since the last backward
        self.ran_twice = False  # whether one of its scopes ran twice since the last backward
        self.turns = 0  # times it began in forward with a graph and has not been left in backward yet
        self.stays = all(bucket.is_replicated for bucket in buckets)  # unsharded at rest
        self.held = False  # not to be released now: a resident unit within a window, or any unit under ``torch.func``
        self.depth = 0  # number of nested forwards
        self.outstanding = False  # ran under grad since the last backward

    def __repr__(self) -> str:
        return f"Unit({self.name or 'root'}: {self.numel} elements in {len(self.buckets)} bucket(s))"

    @property
    def is_gathered(self) -> bool:
        return all(bucket.is_ready for bucket in self.buckets)

    def fetch(self) -> None:
        """Start to read values that are on a disk."""
        for bucket in self.buckets:
            bucket.fetch()

    def gather(self) -> None:
        for bucket in self.buckets:
            bucket.gather()

    def prefetch(self) -> None:
        """Start to gather ahead of need, unless the unit's update may still be running: the gather would wait for it.

        Every rank decides alike; whether an update has ended in fact would differ between ranks.
        """
        if not any(bucket.is_updated_late for bucket in self.buckets):
            self.gather()

    def wait(self) -> None:
        for bucket in self.buckets:
            bucket.wait()

    def release(self) -> None:
        for bucket in self.buckets:
            bucket.release()


class _Scope:
    """A module in whose forward some of a unit's parameters are ordinary ones, and the dicts that hold them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.handles: list[Any] = []
        self.may_take_over = False  # see ``Schedule._take_over``
        self.entries: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
        self.recurrent: list[weakref.ref[nn.RNNBase]] = []
        self.calls: list[_Call] = []  # running forwards of the module
        self.depth = 0

    @cached_property
    def attributes(self) -> Attributes:
        """The module's attributes, for units that are released."""
        module = self.module()
        assert module is not None, "the module was deleted in its forward"
        return Attributes(module)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    @property
    def is_replaced(self) -> bool:
        """Whether all its parameters are replaced, as within ``full_parameters``: nothing is gathered then."""
        if self.depth:
            return False
        for holder, name, parameter, _ in self.entries:  # at each call of each module; usually the first entry decides
            if holder.get(name) is parameter:
                return False
        return True

    def swap_in(self) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        for holder, attribute, parameter, view in self.entries:
            if holder.get(attribute) is not parameter:
                continue  # replaced by the user: within ``full_parameters`` or ``torch.func.functional_call``
            if view.dtype is not parameter.dtype and not torch.is_autocast_enabled(view.device.type):
                continue  # gathered for autocast; without autocast the module computes in the parameter's own dtype
            if view.requires_grad is not parameter.requires_grad:
                view.requires_grad_(parameter.requires_grad)
            holder[attribute] = view
        self._refresh_recurrent()

    def swap_out(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self._restore()

    def recover(self) -> None:
        """Reset to the state between two forwards."""
        self.calls.clear()
        if self.depth:
            self.depth = 0
            self._restore()

    def _restore(self) -> None:
        for holder, attribute, parameter, view in self.entries:
            if holder.get(attribute) is view:
                holder[attribute] = parameter
        self._refresh_recurrent()

    def check_in_place(self) -> None:
        for holder, attribute, parameter, _ in self.entries:
            found = holder.get(attribute)
            if found is not parameter and isinstance(found, nn.Parameter):
                name = parameter.slot.name  # type: ignore[attr-defined]
                raise RuntimeError(
                    f"'{name}' was replaced by another parameter while the module is sharded, and would not be "
                    "trained. Write the values into it (with torch.no_grad(): parameter.copy_(values); load_state_dict "
                    "without assign=True), or replace it before the strategy sets the module up, in configure_model()."
                )

    def _refresh_recurrent(self) -> None:
        # nn.LSTM and similar modules keep a list of their own parameters
        for reference in self.recurrent:
            module = reference()
            if module is not None:
                module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]


class _Call(Enum):
    """How a running forward of a module treats parameters."""

    REPLACED = "with the user's own parameters in the place of all"
    WATCHED = "outside of any window, in which somebody else looks at what autograd saves"
    ORDINARY = "as a rule"


class Schedule:
    """Gathers each unit before its forward and its backward, and releases it when another unit begins.

    A unit is not released when it is left: backward begins with the last unit of forward, and several modules of one
    unit may run one after another.

    Args:
        units: the root unit first, if there is one.
        prefetch: number of units to gather ahead.
    """

    def __init__(self, units: list[Unit], prefetch: int) -> None:
        self.units, self.prefetch = units, prefetch
        self._resident = [unit for unit in units if unit.is_resident]
        self.windows = 0
        # The order of units in the last window, which the next window is expected to repeat.
        self._order: list[Unit] = []
        self._position: dict[Unit, int] = {}
        self._expect([unit for unit in units if not unit.is_root])
        self._current: Unit | None = None  # the unit that began last, in forward or in backward
        self._is_backward = False
        self.on_left_in_backward: Callable[[Unit], None] | None = None
        self._saved = SavedTensors([bucket for unit in units for bucket in unit.buckets])
        self.is_joining = False  # ranks run different numbers of forwards, whose order does not predict the next step's
        self._watched = False
        self._keeping = 0  # nested transforms of ``torch.func``
        self._scopes: list[_Scope] = []
        self._root_scopes: list[_Scope] = []
        self._ran: list[Unit] = []

    # -- hooks ------------------------------------------------------------------------------------------------------

    def install(self, root: nn.Module, plans: list[UnitPlan]) -> None:
        """Register hooks on the modules. The hooks hold the units; the schedule holds no module."""
        for plan, unit in zip(plans, self.units):
            block_of = {id(inner): block for block in plan.blocks for inner in block.modules()}
            slots = {slot.name: (bucket, slot.index) for bucket in unit.buckets for slot in slots_of(bucket)}
            scopes: dict[int, tuple[nn.Module, _Scope]] = {}
            for name, owners in plan.owners.items():
                bucket, index = slots[name]
                for owner in owners:
                    module = block_of.get(id(owner.module), owner.module)
                    scope = scopes.setdefault(id(module), (module, _Scope(module)))[1]
                    view = bucket.views[index]
                    scope.entries.append((owner.module._parameters, owner.attribute, bucket.parameter(index), view))
                    if isinstance(owner.module, nn.RNNBase):
                        if not any(reference() is owner.module for reference in scope.recurrent):
                            scope.recurrent.append(weakref.ref(owner.module))
            if unit.is_root:
                for module in _regions(root, {id(module) for module, _ in scopes.values()}):
                    scope = scopes.setdefault(id(module), (module, _Scope(module)))[1]
                    scope.may_take_over = True
            for module, scope in scopes.values():
                scope._refresh_recurrent()
                self._hook(module, unit, scope)
                (self._root_scopes if unit.is_root else self._scopes).append(scope)

    def remove(self) -> None:
        self.recover(windows=0)
        for scope in self._all_scopes:
            scope.remove()

    def recover(self, windows: int) -> None:
        """Reset forwards that Ctrl-C or ``sys.exit`` has interrupted, for which torch calls no forward hooks.

        Args:
            windows: how many of the open windows stay open.
        """
        for scope in self._all_scopes:
            scope.recover()
        for unit in self.units:
            unit.depth = 0
        if windows == 0:
            self._saved.stop()
            self._watched = False
        self.windows = windows

    def _hook(self, module: nn.Module, unit: Unit, scope: _Scope) -> None:
        calls = scope.calls

        def begin_backward(_: Tensor) -> None:
            self.begin_backward(unit)

        def before(from_compiled: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
            if scope.may_take_over and (from_compiled or is_compiled(module)):
                self._take_over(module, scope)
            if not scope.entries:
                return
            if scope.is_replaced:
                calls.append(_Call.REPLACED)
                return
            self._enter(unit)
            scope.swap_in()
            is_seen = self.windows or unit.stays or unit.held or in_backward()
            if torch.is_grad_enabled() and not is_seen:
                calls.append(_Call.WATCHED)
                self._saved.watch()
            else:
                calls.append(_Call.ORDINARY)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if not calls:
                return None  # a scope without entries, or the forward failed before our hook
            call = calls.pop()
            if call is _Call.REPLACED:
                return None
            scope.swap_out()
            if call is _Call.WATCHED:
                self._saved.unwatch()
            if not self._keeping and not unit.stays:
                output = self._saved.outlive(output)
                self._saved.outlive_attributes(scope.attributes)
            if torch.is_grad_enabled() and not unit.stays and not unit.held:
                for tensor in tensors_in(output):
                    if tensor.grad_fn is not None:  # a leaf would keep the hook for ever
                        tensor.register_hook(begin_backward)
            self._leave(unit, scope)
            return output

        scope.handles = [
            module.register_forward_pre_hook(EntryHook(before), prepend=True, with_kwargs=True),
            # Recomputation in activation checkpointing raises as soon as it has all tensors, so call this always.
            module.register_forward_hook(OwnHook(after), always_call=True),
        ]

    def _take_over(self, module: nn.Module, region: _Scope) -> None:
        """Swap in the root unit's parameters where compiled code begins, as hooks within it would break the graph."""
        region.may_take_over = False
        inside = {id(inner) for inner in module.modules()}
        for scope in list(self._root_scopes):
            if scope is not region and id(scope.module()) in inside:
                scope.remove()
                self._root_scopes.remove(scope)
                region.entries += scope.entries
                region.recurrent += scope.recurrent

    @property
    def _all_scopes(self) -> list[_Scope]:
        return self._root_scopes + self._scopes

    def check_in_place(self) -> None:
        """Raise if parameters of the module have been replaced, which the engine would not train.

        Raises:
            RuntimeError: with the name of the first one, and what to do instead.
        """
        for scope in self._all_scopes:
            scope.check_in_place()

    # -- forward ----------------------------------------------------------------------------------------------------

    @property
    def order(self) -> list[int]:
        """The order in which units are expected to run, as indices of ``units``: the same on every rank."""
        number_of = {unit: number for number, unit in enumerate(self.units)}
        return [number_of[unit] for unit in self._order]

    @order.setter
    def order(self, order: list[int]) -> None:
        self._expect([self.units[index] for index in order])

    def _expect(self, order: list[Unit]) -> None:
        self._order, self._position = order, {unit: position for position, unit in enumerate(order)}

    def open_window(self) -> None:
        """Begin a step: from here on the root unit is gathered."""
        self.windows += 1
        if self.windows > 1:
            return
        self._ran = []
        self._watched = torch.is_grad_enabled()
        if self._watched:
            self._saved.watch()
        self._turn_to(None)
        for unit in self.units:
            if unit.held and not unit.is_resident:  # held by ``torch.func`` in the last window
                unit.held = False
                self.release_if_idle(unit)
        for unit in self._resident:
            unit.gather()
            unit.held = True
        if self._resident:
            self._prefetch_after(-1)

    def close_window(self) -> None:
        self.windows -= 1
        if self.windows:
            return
        if self._watched:
            self._saved.unwatch()
        if self._ran:
            self._expect(list(dict.fromkeys(self._ran)))
        last = self._current if torch.is_grad_enabled() else None
        if last is None or not last.outstanding:
            last = self._current = None
        for unit in self.units:
            if not unit.is_resident and unit is not last:  # backward begins with it
                self.release_if_idle(unit)  # prefetched, but not run
        for unit in self._resident:
            unit.outstanding = torch.is_grad_enabled()
            if not unit.outstanding:
                unit.held = False
                unit.release()

    def _enter(self, unit: Unit) -> None:
        if self._keeping and not unit.stays and not unit.held:
            unit.gather()
            unit.wait()
            unit.held = True
            unit.depth += 1
            return
        if unit.depth or unit.is_resident and unit.held:
            unit.wait()
            unit.depth += 1
            return
        is_forward = not in_backward()  # in backward a recomputed unit's backward follows at once
        if is_forward and self.windows:
            if unit is not self._current and torch.is_grad_enabled():
                unit.turns += 1
            self._turn_to(unit)
        unit.gather()
        if is_forward and self.windows:
            if not self.is_joining:
                self._ran.append(unit)
            if unit in self._position:
                self._prefetch_after(self._position[unit])
        unit.wait()
        unit.depth += 1

    def _leave(self, unit: Unit, scope: _Scope) -> None:
        unit.depth -= 1
        if torch.is_grad_enabled():
            unit.outstanding = True
            if not in_backward():
                unit.ran_twice = unit.ran_twice or scope in unit.ran
                unit.ran.add(scope)
        # A recomputed unit is needed at once; within a window the next unit releases this one.
        if not in_backward() and (not self.windows or unit is not self._current):
            self.release_if_idle(unit)

    def _turn_to(self, unit: Unit | None, is_backward: bool = False) -> None:
        """Make a unit the current one, and release the unit before it."""
        before, self._current, self._is_backward = self._current, unit, is_backward
        if before is not None and before is not unit:
            self.release_if_idle(before)

    def _prefetch_after(self, position: int) -> None:
        next_ones = self._order[position + 1 : position + 1 + 2 * self.prefetch]
        for unit in next_ones[: self.prefetch]:
            unit.prefetch()
        for unit in next_ones[self.prefetch :]:
            unit.fetch()

    # -- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self, unit: Unit) -> None:
        """A gradient of a unit's output is there: gather the unit for its backward."""
        if self._is_backward and unit is self._current:
            return
        if torch.is_grad_enabled() and not self.windows:
            # Tensors saved for a second backward would not be watched, and would be read after their release.
            raise RuntimeError(
                f"backward(create_graph=True) through unit {unit.name!r}, whose parameters are released, is possible "
                "only inside of training_step, or of 'with engine.window():' around forward and both backwards."
            )
        if not self._is_backward:
            own = weakref.ref(self)  # weak: the callback must not keep the engine alive
            queue_callback(lambda: _end_differentiation(own()))
        elif self._current is not None:
            self._current.turns -= 1
            if self._current.turns <= 0 and self.on_left_in_backward is not None:
                self.on_left_in_backward(self._current)
        self._turn_to(unit, is_backward=True)
        unit.gather()
        if (position := self._position.get(unit)) is not None:
            first = max(0, position - self.prefetch)
            for before in self._order[first:position][::-1]:
                if before.outstanding:
                    before.prefetch()
            for before in self._order[max(0, first - 1) : first] if self.prefetch else ():
                if before.outstanding:
                    before.fetch()
        unit.wait()

    def release_if_idle(self, unit: Unit) -> None:
        if unit.depth == 0 and not unit.held:
            if in_backward():
                unit.outstanding = False
            unit.release()

    @contextmanager
    def keeping_gathered(self) -> Iterator[None]:
        """Context for a transform of ``torch.func``: removes the engine's saved-tensor hooks and keeps units gathered.

        Units that run in the context stay gathered until the next window, as graphs made in it cannot regather them.
        """
        self._keeping += 1
        for unit in self.units:
            if unit.depth and not unit.stays:
                unit.held = True
        with self._saved.set_aside():
            try:
                yield
            finally:
                self._keeping -= 1

    def end_differentiation(self) -> None:
        """Release what a backward or ``torch.autograd.grad`` has gathered."""
        if not self._keeping:
            self._turn_to(None)
            for unit in self.units:
                self.release_if_idle(unit)

    def end_backward(self) -> None:
        """Release all units that are still gathered, and reset them for the next step."""
        self._turn_to(None)
        for unit in self.units:
            unit.outstanding, unit.ran_twice, unit.turns = False, False, 0
            unit.ran.clear()
            if unit.is_resident and not self.windows:
                unit.held = False
            if unit.depth == 0 and not unit.held:
                unit.release()


def _end_differentiation(schedule: Schedule | None) -> None:
    # not at the end of a backward within another one, which continues: reentrant activation checkpointing
    if schedule is not None and current_autograd_node() is None:
        schedule.end_differentiation()


def _regions(root: nn.Module, owners: set[int]) -> Iterator[nn.Module]:
    """Modules around the owners (given by ``id``) where compiled code may begin.

    These are the root; its children, which compiled methods of the root call; and modules that are compiled already.
    """
    for module in dict.fromkeys([root, *root.children(), *filter(is_compiled, root.modules())]):
        if any(id(inner) in owners for inner in module.modules() if inner is not module):
            yield module


def in_backward() -> bool:
    return current_graph_task() != -1
