"""The schedule: module hooks that gather and release units, the order of units, and prefetching in this order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from lightning_zero.engine.comm.counters import label
from lightning_zero.engine.compat import (
    OwnHook,
    accumulation_hooks,
    current_autograd_node,
    current_graph_task,
    is_compiled,
    is_profiling,
    queue_callback,
    untraced,
)
from lightning_zero.engine.plan.units import UnitPlan
from lightning_zero.engine.runtime.saved_tensors import SavedTensors, is_watched_by_others, tensors_in
from lightning_zero.engine.runtime.scope import WEIGHTS_IN_PLACE, Call, Entry, Scope, regions
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.slot import slots_of


class Phase(Enum):
    """What a unit is needed for, besides forwards that are running (see ``Unit.depth``)."""

    IDLE = "nothing: the unit may be released"
    AWAITED = "a backward, since the unit has run with gradients; only the root unit stays gathered until then"
    KEPT = "graphs of ``torch.func``, which cannot gather the unit, so that it stays gathered until the next window"


TRANSITIONS = {
    "kept": {Phase.IDLE: Phase.KEPT, Phase.AWAITED: Phase.KEPT},
    "let go": {Phase.KEPT: Phase.IDLE},
    "ran": {Phase.IDLE: Phase.AWAITED, Phase.AWAITED: Phase.AWAITED, Phase.KEPT: Phase.KEPT},
    "differentiated": {Phase.IDLE: Phase.IDLE, Phase.AWAITED: Phase.IDLE, Phase.KEPT: Phase.KEPT},
}
"""A unit's next phase, by what happens to it and its phase now."""


class Unit:
    """Modules whose parameters are gathered and released together.

    Attributes:
        name: qualified name of the unit's module or modules; ``""`` for the root unit.
        buckets: at least one for each combination of dtype and ``requires_grad`` that the parameters have.
        phase: what the unit is needed for next.
    """

    def __init__(self, plan: UnitPlan, buckets: list[Bucket]) -> None:
        self.name, self.is_root, self.buckets = plan.name, plan.is_root, buckets
        self.numel = sum(parameter.numel() for parameter in plan.parameters.values())
        self.stays = all(bucket.is_replicated for bucket in buckets)  # whether all values stay gathered between uses
        self.phase = Phase.IDLE
        self.depth = 0  # number of running forwards, one within another
        self.labels: list[Any] = []  # profiler labels of the running forwards

    def __repr__(self) -> str:
        return f"Unit({self.name or 'root'}: {self.numel} elements in {len(self.buckets)} bucket(s))"

    @property
    def is_trained(self) -> bool:
        """Whether any parameter requires gradients now."""
        parameters = (bucket.parameter(index) for bucket in self.buckets for index in range(len(bucket.views)))
        return any(parameter.requires_grad for parameter in parameters)

    def now(self, event: str) -> None:
        """Enter the next phase; see ``TRANSITIONS``."""
        self.phase = TRANSITIONS[event][self.phase]

    def fetch(self) -> None:
        """Start to read values that are on a disk."""
        for bucket in self.buckets:
            bucket.fetch()

    def gather(self) -> None:
        for bucket in self.buckets:
            bucket.gather()

    def prefetch(self) -> None:
        """Start to gather ahead of need, unless the gather might wait for an update that is still running.

        All ranks must decide the same way, but an update may have ended on only some ranks. So the decision does not
        depend on whether the update has ended.
        """
        if all(bucket.update is None for bucket in self.buckets):
            self.gather()

    def wait(self) -> None:
        for bucket in self.buckets:
            bucket.wait()

    def release(self) -> None:
        for bucket in self.buckets:
            bucket.release()


def _made(output: Any, inputs: Any) -> list[Tensor]:
    """The tensors in a module's output, without inputs that it returns next to others, as T5's blocks do."""
    tensors = list(tensors_in(output))
    if len(tensors) < 2:
        return tensors
    returned = set(map(id, tensors_in(inputs)))
    # A module that skips itself, perhaps on some ranks only, returns nothing but inputs: all begin its backward.
    return [tensor for tensor in tensors if id(tensor) not in returned] or tensors


class Schedule:
    """Gathers each unit before its forward and its backward, and releases it when another unit begins.

    A unit is not released as soon as its forward ends, since it may be needed next: backward begins with the last unit
    of forward, and several modules of one unit may run one after another.

    Args:
        units: the root unit first, if there is one.
        prefetch: number of units to gather ahead.
    """

    def __init__(self, units: list[Unit], prefetch: int) -> None:
        self.units, self.prefetch = units, prefetch
        self.windows = 0
        # The order in which units ran in the last window. The next window is expected to repeat this order.
        self._order: list[Unit] = []
        self._position: dict[Unit, int] = {}
        self._expect([unit for unit in units if not unit.is_root])
        self._current: Unit | None = None  # the unit that began last, in forward or in backward
        self._is_backward = False
        self.accumulates = False  # whether the running backward may add to ``.grad``, unlike ``torch.autograd.grad``
        # Called when a unit's backward begins, with the unit and the one whose backward began before it, if any.
        self.on_turn_in_backward: Callable[[Unit, Unit | None], None] = lambda unit, left: None
        self._saved = SavedTensors([bucket for unit in units for bucket in unit.buckets])
        self.records_order = True  # False while ranks may run different numbers of forwards
        self._watched = False  # whether saved-tensor hooks are active for the whole window
        self._keeping = 0  # number of nested ``torch.func`` transforms
        self._scopes: list[Scope] = []
        self._fused: list[tuple[Unit, Scope]] = []  # layers that torch may run as one kernel in evaluation
        self._ran: list[Unit] = []

    # -- hooks ------------------------------------------------------------------------------------------------------

    def install(self, root: nn.Module, plans: list[UnitPlan]) -> None:
        """Register hooks on the modules. The hooks keep the units alive; the schedule keeps no module alive."""
        WEIGHTS_IN_PLACE.hold(self)
        for plan, unit in zip(plans, self.units):
            block_of = {id(inner): block for block in plan.blocks for inner in block.modules()}
            slots = {slot.name: slot for bucket in unit.buckets for slot in slots_of(bucket)}
            scopes: dict[int, Scope] = {}
            for name, owners in plan.owners.items():
                slot = slots[name]
                for owner in owners:
                    module = block_of.get(id(owner.module), owner.module)
                    scope = scopes.setdefault(id(module), Scope(module, unit.is_root))
                    holder = owner.module._parameters
                    scope.may_be_fused |= owner.may_be_fused and module is not root
                    scope.entries.append(Entry(holder, owner.attribute, slot.parameter, slot))
            if unit.is_root:
                for module in regions(root, set(scopes)):
                    scopes.setdefault(id(module), Scope(module, True)).may_take_over = True
            for scope in scopes.values():
                self._hook(unit, scope)
                is_extended = any(entry.slot.bucket.extensions for entry in scope.entries)  # no kernel takes float8
                if unit.stays and scope.may_be_fused and not is_extended:
                    self._fused.append((unit, scope))
            self._scopes += scopes.values()

    def remove(self) -> None:
        self.recover(windows=0)
        for scope in self._scopes:
            scope.remove()

    def recover(self, windows: int) -> None:
        """Reset after Ctrl-C or ``sys.exit`` has interrupted forwards: torch then skips even ``always_call`` hooks."""
        for scope in self._scopes:
            scope.recover()
        for unit in self.units:
            unit.depth = 0
            unit.labels.clear()
        if windows == 0:
            self._saved.stop()
            self._watched = False
        self.windows = windows

    def _hook(self, unit: Unit, scope: Scope) -> None:
        calls, module = scope.calls, scope.module()
        assert module is not None
        # TorchScript modules have their attributes in C++, and no view reaches their parameters
        modules = [weakref.ref(inner) for inner in module.modules() if not isinstance(inner, ScriptModule)]

        def before(from_compiled: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
            if scope.may_take_over and (from_compiled or is_compiled(module)):
                self._take_over(module, scope)
            if not scope.entries:
                return
            if scope.is_replaced:
                calls.append(Call.REPLACED)
                return
            self._enter(unit)
            is_seen = self._watched or unit.stays or self._is_held(unit) or in_backward()
            # The hooks of others, such as those of activation checkpointing, keep all tensors that are saved in them.
            if torch.is_grad_enabled() and not is_seen and not is_watched_by_others():
                self._saved.watch()
                calls.append(Call.WATCHED)
            else:
                calls.append(Call.ORDINARY)
            scope.enter_forward()  # from here on, ``after`` undoes all of this, also after an exception
            if is_profiling():
                unit.labels.append(label("forward", unit.name))
                unit.labels[-1].__enter__()

        def after(from_compiled: bool, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not calls:
                return None  # no entries, or the forward failed before the engine's pre-hook ran
            call = calls.pop()
            if call is Call.REPLACED:
                return None
            scope.leave_forward()
            if unit.labels:
                unit.labels.pop().__exit__(None, None, None)
            if call is Call.WATCHED:
                self._saved.unwatch()
            if not self._keeping and not unit.stays:
                output = self._saved.outlive(output)
                self._saved.outlive_attributes(modules)
            if torch.is_grad_enabled() and not unit.stays and not self._is_held(unit):
                begin_backward = partial(self.begin_backward, unit)
                for tensor in _made(output, (args, kwargs)):
                    if tensor.grad_fn is not None:  # a leaf would keep the hook forever
                        tensor.register_hook(begin_backward)
            self._leave(unit)
            return output

        scope.handles = [
            module.register_forward_pre_hook(OwnHook(before), prepend=True, with_kwargs=True),
            # Called even after exceptions: activation checkpointing raises one to stop a recomputation early.
            module.register_forward_hook(OwnHook(after), always_call=True, with_kwargs=True),
        ]

    def _take_over(self, module: nn.Module, region: Scope) -> None:
        """Merge root scopes inside ``module`` into its scope ``region``: inner hooks would break the compiled graph."""
        region.may_take_over = False
        inside = {id(inner) for inner in module.modules()}
        for scope in [scope for scope in self._scopes if scope.is_root]:
            if scope is not region and id(scope.module()) in inside:
                scope.remove()
                self._scopes.remove(scope)
                region.entries += scope.entries

    def check_not_replaced(self) -> None:
        """Raise if the user has replaced parameters of the module: the engine would not train the new parameters."""
        for scope in self._scopes:
            for holder, attribute, parameter, slot in scope.entries:
                found = holder.get(attribute)
                if found is parameter or not isinstance(found, nn.Parameter) or not found.requires_grad:
                    continue
                if slot.take_gradient in (accumulation_hooks(found) or {}).values():
                    continue  # within ``full_parameters``
                raise RuntimeError(
                    f"'{slot.name}' was replaced by another parameter while the module was sharded; the new parameter "
                    "would not be trained. Write new values into the original parameter (with torch.no_grad(): "
                    "parameter.copy_(values), or load_state_dict without assign=True), or replace the parameter in "
                    "configure_model(), before the strategy sets up the module."
                )

    # -- forward ----------------------------------------------------------------------------------------------------

    def _expect(self, order: list[Unit]) -> None:
        self._order, self._position = order, {unit: position for position, unit in enumerate(order)}

    def open_window(self) -> None:
        """Begin a step, and gather the root unit."""
        self.windows += 1
        if self.windows > 1:
            return
        self._ran = []
        self._watched = torch.is_grad_enabled() and not self._keeping  # ``torch.func`` forbids these hooks
        if self._watched:
            self._saved.watch()
        self._turn_to(None)
        for unit in self.units:
            if unit.phase is Phase.KEPT:
                unit.now("let go")
                self.release_if_idle(unit)
            if unit.is_root:
                unit.gather()
        if not torch.is_grad_enabled():
            for unit, scope in self._fused:
                unit.gather()
                unit.wait()
                scope.enter_window()
        if self.units and self.units[0].is_root:
            self._prefetch(self._order[: 2 * self.prefetch])

    def close_window(self) -> None:
        self.windows -= 1
        if self.windows:
            return
        if self._watched:
            self._saved.unwatch()
            self._watched = False
        else:
            for _, scope in self._fused:
                scope.leave_window()
        if self._ran:
            self._expect(list(dict.fromkeys(self._ran)))
        last = self._current if torch.is_grad_enabled() else None
        if last is None or last.phase is not Phase.AWAITED:
            last = self._current = None
        for unit in self.units:
            if unit.is_root and torch.is_grad_enabled():
                unit.now("ran")
            if unit is not last:  # backward begins with ``last``
                self.release_if_idle(unit)  # it may have been prefetched, but did not run

    def _enter(self, unit: Unit) -> None:
        if self._keeping and not unit.stays and not self._is_held(unit):
            unit.gather()
            unit.now("kept")
        elif not unit.depth and not (unit.is_root and self._is_held(unit)):
            is_turn = self.windows and not in_backward()  # not in a recomputation
            if is_turn:
                self._turn_to(unit)
            unit.gather()
            if is_turn:
                if self.records_order:
                    self._ran.append(unit)
                if (position := self._position.get(unit)) is not None:
                    self._prefetch(self._order[position + 1 : position + 1 + 2 * self.prefetch])
        unit.wait()
        unit.depth += 1

    def _leave(self, unit: Unit) -> None:
        unit.depth -= 1
        if torch.is_grad_enabled():
            unit.now("ran")
        # Keep the unit after a recomputation, since backward follows, and in a window until another unit begins.
        if not in_backward() and (not self.windows or unit is not self._current):
            self.release_if_idle(unit)

    def _turn_to(self, unit: Unit | None, is_backward: bool = False) -> None:
        """Make a unit the current one, and release the previous one."""
        before, self._current, self._is_backward = self._current, unit, is_backward
        if before is not None and before is not unit:
            self.release_if_idle(before)

    def _prefetch(self, upcoming: list[Unit], *, only_awaited: bool = False) -> None:
        """Gather the next units ahead of need; start to read the units after them from disk."""
        for number, unit in enumerate(upcoming):
            if unit.phase is Phase.AWAITED or not only_awaited:
                if number < self.prefetch:
                    unit.prefetch()
                else:
                    unit.fetch()

    # -- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self, unit: Unit, _: Tensor) -> None:
        """Gather a unit for its backward. Called when a gradient of an output has been computed."""
        if self._is_backward and unit is self._current:
            return
        left = self._current if self._is_backward else None
        if not self._is_backward:
            queue_callback(weakly(self._end_of_backward))  # weakly: the callback must not keep the engine alive
        self._turn_to(unit, is_backward=True)
        self.on_turn_in_backward(unit, left)
        with label("backward", unit.name) if is_profiling() else nullcontext():
            unit.gather()
            if (position := self._position.get(unit)) is not None:
                before = self._order[max(0, position - 2 * self.prefetch) : position]
                self._prefetch(before[::-1], only_awaited=True)
            unit.wait()

    def _is_held(self, unit: Unit) -> bool:
        """Whether the unit must stay gathered, even while no code of it runs: the root unit during a window."""
        if unit.is_root and (self.windows or unit.phase is Phase.AWAITED):
            return True
        return unit.phase is Phase.KEPT

    def release_if_idle(self, unit: Unit) -> None:
        if unit.depth == 0 and not self._is_held(unit):
            if in_backward():
                unit.now("differentiated")
            unit.release()

    @contextmanager
    def differentiating(self, *, accumulates: bool) -> Iterator[None]:
        """Context for autograd's backward. ``accumulates``: whether it may add to ``.grad`` of sharded parameters."""
        before, self.accumulates = self.accumulates, accumulates
        try:
            yield
        finally:
            self.accumulates = before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context for a backward with ``create_graph=True``, which saves tensors for another backward."""
        if self._watched or self._keeping:  # in a window, or in torch.func, which forbids saved-tensor hooks
            yield
            return
        self._saved.watch()
        try:
            yield
        finally:
            self._saved.unwatch()

    @contextmanager
    def keeping_gathered(self) -> Iterator[None]:
        """Context for a ``torch.func`` transform: removes the engine's saved-tensor hooks and keeps units gathered.

        Units that run in the context stay gathered until the next window, since graphs built there cannot gather them.
        """
        self._keeping += 1
        for unit in self.units:
            if unit.depth and not unit.stays and not self._is_held(unit):
                unit.now("kept")
        with self._saved.set_aside():
            try:
                yield
            finally:
                self._keeping -= 1

    def _end_of_backward(self) -> None:
        # not at the end of a nested backward (reentrant activation checkpointing): the outer backward continues
        if current_autograd_node() is None:
            self.end_differentiation()

    def end_differentiation(self) -> None:
        """Release the units that a backward or ``torch.autograd.grad`` has gathered."""
        if not self._keeping:
            self._turn_to(None)
            for unit in self.units:
                self.release_if_idle(unit)

    def end_backward(self) -> None:
        """Release all units that are still gathered, and reset them for the next step."""
        self._turn_to(None)
        for unit in self.units:
            unit.now("differentiated")
            self.release_if_idle(unit)


def in_backward() -> bool:
    return current_graph_task() != -1


def weakly(method: Any) -> Callable[..., None]:
    """Return a function that calls a bound method while the method's object lives, without keeping the object alive.

    Where compiled code calls ``backward``, ``torch.compile`` does not trace the function.
    """
    owner, function = weakref.ref(method.__self__), method.__func__

    @untraced
    def call(*args: Any) -> None:
        if (found := owner()) is not None:
            function(found, *args)

    return call
