"""When units are gathered and released: hooks on modules, the order of units, and prefetching along it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.bucket import Bucket
from lightning_zero.engine.compilation import EntryHook, OwnHook, is_compiled
from lightning_zero.engine.saved_tensors import SavedTensors, tensors_in
from lightning_zero.engine.units import UnitPlan


class Unit:
    """Modules whose parameters are gathered and released together.

    Attributes:
        name: qualified name of the module, ``""`` for the root unit.
        buckets: one for each (dtype, requires_grad) of its parameters, or more where it is gigantic.
    """

    def __init__(self, plan: UnitPlan, buckets: list[Bucket]) -> None:
        self.name, self.is_root, self.buckets = plan.name, plan.is_root, buckets
        self.parameter_names = list(plan.parameters)
        self.numel = sum(parameter.numel() for parameter in plan.parameters.values())
        self.forwards = 0  # since the last backward, with a graph
        self.held = False  # the root unit, by a window and until the backward after it; others under ``torch.func``
        self.depth = 0  # of nested forwards
        self.outstanding = False  # ran under grad since the last backward
        self.missing_gradients = 0  # of parameters that a backward is expected to give one
        self.calls: set[_Call] = set()  # whose backward is under way

    def __repr__(self) -> str:
        return f"Unit({self.name or 'root'}: {self.numel} elements in {len(self.buckets)} bucket(s))"

    @property
    def is_gathered(self) -> bool:
        return all(bucket.is_ready for bucket in self.buckets)

    @property
    def stays(self) -> bool:
        """Whether its parameters are whole at rest, so that nothing is to be gathered or released."""
        return all(bucket.replicated for bucket in self.buckets)

    def fetch(self) -> None:
        """Start to read what of the values lies on a disk."""
        for bucket in self.buckets:
            bucket.fetch()

    def gather(self) -> None:
        for bucket in self.buckets:
            bucket.gather()

    def prefetch(self) -> None:
        """Start to gather it ahead, unless its update may be under way still: what comes first would wait for it too.

        Every rank decides alike: whether an update has ended would differ between them.
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
    """The module in whose forward some parameters of a unit are ordinary ones, and the dictionaries that hold them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.handles: list[Any] = []
        self.may_take_over = False  # see ``Schedule._take_over``
        self.entries: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
        self.recurrent: list[weakref.ref[nn.RNNBase]] = []
        self.calls: list[tuple[_Call | None, bool] | None] = []  # forwards of the module under way
        self.depth = 0

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    @property
    def is_replaced(self) -> bool:
        """Whether others are in the place of all its parameters, as within ``full_parameters``: nothing is gathered."""
        return self.depth == 0 and all(holder.get(name) is not parameter for holder, name, parameter, _ in self.entries)

    def swap_in(self) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        for holder, attribute, parameter, view in self.entries:
            if holder.get(attribute) is not parameter:
                continue  # the user's own is there: within ``full_parameters``, or ``torch.func.functional_call``
            if view.dtype is not parameter.dtype and not torch.is_autocast_enabled(view.device.type):
                continue  # gathered for autocast, outside of which the module computes with the parameter's own digits
            if view.requires_grad is not parameter.requires_grad:
                view.requires_grad_(parameter.requires_grad)
            holder[attribute] = view
        self._refresh_recurrent()

    def swap_out(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self._restore()

    def recover(self) -> None:
        """Be as between two forwards."""
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
        # nn.LSTM and its kin keep a list of their own parameters
        for reference in self.recurrent:
            module = reference()
            if module is not None:
                module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]


class _Call:
    """One forward of a unit under grad, as its backward sees it.

    The gradient of an output announces it; the gradients of the inputs, or those of all parameters, end it.
    """

    def __init__(self, schedule: Schedule, unit: Unit) -> None:
        self._schedule, self._unit = schedule, unit
        self._inputs_missing = 0
        self._has_inputs = self._first_done = False

    def watch_inputs(self, tensors: Iterator[Tensor]) -> None:
        # a leaf would keep its hook for ever, and is given no gradient before the end in any case
        for position, tensor in enumerate(tensor for tensor in tensors if tensor.grad_fn is not None):
            self._has_inputs = True
            self._inputs_missing += 1
            done = self._first_input_done if position == 0 else self._input_done
            announcement = getattr(tensor, "_announcement", None)
            if announcement is not None:
                announcement.ends.append(done)
            else:
                tensor.register_hook(done)

    def watch_outputs(self, tensors: Iterator[Tensor]) -> None:
        for tensor in tensors:
            if tensor.requires_grad:
                tensor._announcement = _Announcement(self)  # type: ignore[attr-defined]
                tensor.register_hook(tensor._announcement)  # type: ignore[attr-defined]

    def end_if_done(self) -> None:
        """End it if nothing of the unit's values can be needed any more."""
        unit = self._unit
        gradients_in = unit.missing_gradients <= 0
        if self._has_inputs:
            trainable = all(bucket.views[0].requires_grad for bucket in unit.buckets)
            done = self._inputs_missing <= 0 or (self._first_done and trainable and gradients_in)
        else:
            done = gradients_in
        if done:
            unit.calls.discard(self)
            self._schedule.release_if_idle(unit)

    def begin(self) -> None:
        """Its backward is about to start."""
        if self not in self._unit.calls:
            self._unit.calls.add(self)
            self._schedule.gather_for_backward(self._unit)

    def _first_input_done(self, gradient: Tensor) -> None:
        self._first_done = True
        self._input_done(gradient)

    def _input_done(self, _: Tensor) -> None:
        self._inputs_missing -= 1
        if self in self._unit.calls:
            self.end_if_done()


class _Announcement:
    """The hook on a tensor that one unit put out and others took in: ends theirs, and frees them, before it begins."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self.ends: list[Callable[[Tensor], None]] = []

    def __call__(self, gradient: Tensor) -> None:
        for end in self.ends:
            end(gradient)
        self._call.begin()


class Schedule:
    """Gathers each unit before its forward and its backward, and releases it after.

    Args:
        units: the root unit first, if there is one.
        prefetch: units whose gather is started ahead.
    """

    def __init__(self, units: list[Unit], prefetch: int) -> None:
        self.units, self.prefetch = units, prefetch
        self.root = next((unit for unit in units if unit.is_root), None)
        self.windows = 0
        # The order in which units ran in the last window, which the next one is expected to repeat.
        self._order: list[Unit] = [unit for unit in units if not unit.is_root]
        self._saved = SavedTensors([bucket for unit in units for bucket in unit.buckets])
        self.is_uneven = False  # ranks run different numbers of forwards, of which they take no order for the next step
        self._watched = False
        self._keeping = 0  # nested transforms of ``torch.func``
        self._scopes: list[_Scope] = []
        self._root_scopes: list[_Scope] = []
        self._ran: list[Unit] = []

    # -- hooks ------------------------------------------------------------------------------------------------------

    def install(self, plans: list[UnitPlan]) -> None:
        """Hook the modules. The hooks hold the units; nothing here holds a module."""
        for plan, unit in zip(plans, self.units):
            slots = {slot.name: (bucket, slot.index) for bucket in unit.buckets for slot in bucket.slots}
            scopes: dict[int, tuple[nn.Module, _Scope]] = {}
            for name, owners in plan.owners.items():
                bucket, index = slots[name]
                for owner in owners:
                    module = owner.module if unit.is_root else plan.module
                    scope = scopes.setdefault(id(module), (module, _Scope(module)))[1]
                    view = bucket.views[index]
                    scope.entries.append((owner.module._parameters, owner.attribute, bucket.parameter(index), view))
                    if isinstance(owner.module, nn.RNNBase):
                        if not any(reference() is owner.module for reference in scope.recurrent):
                            scope.recurrent.append(weakref.ref(owner.module))
            if unit.is_root:
                for module in _regions(plan.module, {id(module) for module, _ in scopes.values()}):
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
        """End forwards that Ctrl-C or ``sys.exit`` has ended, for which torch calls no hooks.

        Args:
            windows: how many of those that are open stay so.
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

        def before(from_compiled: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
            if scope.may_take_over and (from_compiled or is_compiled(module)):
                self._take_over(module, scope)
            if not scope.entries:
                return
            if scope.is_replaced:
                calls.append(None)
                return
            self._enter(unit)
            scope.swap_in()
            watched = torch.is_grad_enabled() and not unit.stays and not unit.held
            call = _Call(self, unit) if watched else None
            alone = call is not None and not self.windows and not in_backward()
            calls.append((call, alone))
            if call is not None:
                call.watch_inputs(tensors_in((args, kwargs)))
            if alone:
                self._saved.watch()

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if not calls:
                return None  # there is nothing to put in here, or the forward failed before ours began
            begun = calls.pop()
            if begun is None:
                return None
            call, alone = begun
            scope.swap_out()
            if alone:
                self._saved.unwatch()
            if not self._keeping and not unit.stays:
                output = self._saved.outlive(output)
                for inner in module.modules():
                    self._saved.outlive_attributes(inner)
            if call is not None:
                call.watch_outputs(tensors_in(output))
            self._leave(unit)
            return output

        scope.handles = [
            module.register_forward_pre_hook(EntryHook(before), prepend=True, with_kwargs=True),
            # Recomputation for activation checkpointing ends by an exception as soon as it has what it needs.
            module.register_forward_hook(OwnHook(after), always_call=True),
        ]

    def _take_over(self, module: nn.Module, region: _Scope) -> None:
        """Put the root unit's parameters in at the beginning of compiled code: hooks within it would break it up."""
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
        """Raise if the module has parameters of which the engine knows nothing, in the place of its own.

        Raises:
            RuntimeError: naming the first one, and what to do instead.
        """
        for scope in self._all_scopes:
            scope.check_in_place()

    # -- forward ----------------------------------------------------------------------------------------------------

    @property
    def order(self) -> list[int]:
        """The order in which units are expected to run, as indices of ``units``: the same on every rank."""
        return [self.units.index(unit) for unit in self._order]

    @order.setter
    def order(self, order: list[int]) -> None:
        self._order = [self.units[index] for index in order]

    def open_window(self) -> None:
        """Begin a step: the root unit is whole from here on."""
        self.windows += 1
        if self.windows > 1:
            return
        self._ran = []
        self._watched = torch.is_grad_enabled()
        if self._watched:
            self._saved.watch()
        for unit in self.units:
            if unit.held and not unit.is_root:  # by ``torch.func`` in the last one
                unit.held = False
                self.release_if_idle(unit)
        if self.root is not None:
            self.root.gather()
            self.root.held = True
            self._prefetch_after(-1)

    def close_window(self) -> None:
        self.windows -= 1
        if self.windows:
            return
        if self._watched:
            self._saved.unwatch()
        if self._ran:
            self._order = list(dict.fromkeys(self._ran))
        for unit in self.units:
            if unit is not self.root:
                self.release_if_idle(unit)  # a prefetched one that never ran
        if self.root is not None:
            self.root.outstanding = torch.is_grad_enabled()
            if not self.root.outstanding:
                self.root.held = False
                self.root.release()

    def _enter(self, unit: Unit) -> None:
        if self._keeping and not unit.stays and not unit.held:
            unit.gather()
            unit.wait()
            unit.held = True
            unit.depth += 1
            return
        if unit.depth or unit.is_root and unit.held:
            unit.wait()
            unit.depth += 1
            return
        unit.gather()
        if self.windows and not in_backward():
            if not self.is_uneven:
                self._ran.append(unit)
            if unit in self._order:
                self._prefetch_after(self._order.index(unit))
        unit.wait()
        unit.depth += 1

    def _leave(self, unit: Unit) -> None:
        unit.depth -= 1
        if torch.is_grad_enabled():
            unit.outstanding = True
            unit.forwards += not in_backward()
        if not in_backward():  # what was recomputed is needed at once
            self.release_if_idle(unit)

    def _prefetch_after(self, position: int) -> None:
        for unit in self._order[position + 1 : position + 1 + self.prefetch]:
            unit.prefetch()
        for unit in self._order[position + 1 + self.prefetch :][: self.prefetch]:
            unit.fetch()

    # -- backward ---------------------------------------------------------------------------------------------------

    def gather_for_backward(self, unit: Unit) -> None:
        if torch.is_grad_enabled() and not self.windows:
            # What it saves for a second backward would not be watched, and would be read after its release.
            raise RuntimeError(
                f"backward(create_graph=True) through unit {unit.name!r}, whose parameters are released, is possible "
                "only inside of training_step, or of 'with engine.window():' around forward and both backwards."
            )
        unit.gather()
        if unit in self._order:
            position = self._order.index(unit)
            for before in self._order[max(0, position - self.prefetch) : position][::-1]:
                if before.outstanding:
                    before.prefetch()
            for before in self._order[: max(0, position - self.prefetch)][-1:] if self.prefetch else ():
                if before.outstanding:
                    before.fetch()
        unit.wait()

    def gradients_in(self, unit: Unit) -> None:
        """Every gradient that was expected of the unit has come."""
        for call in list(unit.calls):
            call.end_if_done()

    def release_if_idle(self, unit: Unit) -> None:
        if unit.depth == 0 and not unit.calls and not unit.held:
            if in_backward():
                unit.outstanding = False
            unit.release()

    @contextmanager
    def keeping_gathered(self) -> Iterator[None]:
        """Within a transform of ``torch.func``: without saved-tensor hooks of ours, so that nothing may be released.

        What runs in here stays gathered until the next window, as graphs from here cannot gather it again.
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
        """Release what gradients asked for by name (``torch.autograd.grad``) had gathered."""
        if not self._keeping:
            for unit in self.units:
                unit.calls.clear()
                self.release_if_idle(unit)

    def end_backward(self) -> None:
        """Release what is still whole."""
        for unit in self.units:
            unit.calls.clear()
            unit.outstanding, unit.forwards = False, 0
            if unit.is_root and not self.windows:
                unit.held = False
            if unit.depth == 0 and not unit.held:
                unit.release()


def _regions(root: nn.Module, owners: set[int]) -> Iterator[nn.Module]:
    """The modules around owners (given by ``id``) where compiled code may begin.

    That is, the root; its children, which compiled methods of the root call; and what is compiled already.
    """
    for module in dict.fromkeys([root, *root.children(), *filter(is_compiled, root.modules())]):
        if any(id(inner) in owners for inner in module.modules() if inner is not module):
            yield module


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
