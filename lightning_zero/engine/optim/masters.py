"""The step of an optimizer: masters take the place of the module's parameters while ``optimizer.step`` runs.

Between steps, an optimizer's ``param_groups`` hold the module's own parameters, so that user code finds them there.
During the update, each group holds its masters instead. A master is a 1-D tensor with this rank's part of one or
more adjacent segments in a bucket. The update thus takes few kernels, and each of N ranks updates 1/N of the elements
(P_os in the ZeRO paper, section 5.1). With one rank, each parameter has a master of the same shape, in the same order.
"""

from __future__ import annotations

import dis
import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.compat import call_first, let_hooks_be_registered, running_steps
from lightning_zero.engine.offload import Update, of_no_parameter
from lightning_zero.engine.optim.kinds import is_by_element
from lightning_zero.engine.optim.master import Master, is_alone
from lightning_zero.engine.optim.state import MasterStates, OptimizedEngine, StateMapping, States
from lightning_zero.engine.optim.updating import count_update, gains_by_chunks, update_offloaded, updated
from lightning_zero.engine.plan.layout import balanced_owners
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.gradient_shard import shard_of_all
from lightning_zero.engine.state.slot import repartition, slot_of, slots_of
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor, local_range_of
from lightning_zero.engine.tensor.sharded_tree import gathered, in_parts, whole


class Masters:
    """The step of one optimizer.

    Args:
        optimizer: the user's optimizer; only a weak reference is kept.
        engine: the engine. It is notified before and after each update, and when a closure is called within an update.
    """

    def __init__(self, optimizer: Optimizer, engine: OptimizedEngine) -> None:
        _masters_of[optimizer] = self
        self.states = MasterStates(optimizer, engine)
        self.is_closed = False
        self.hooks_after_update: dict[int, Callable[[list[Tensor]], None]] = OrderedDict()
        self._replaced: list[list[Any]] | None = None  # in a step, or after one that raised: the module's parameters
        self._active: list[Master] = []
        self._given: dict[Master, Tensor] = {}  # in a step, the gradients that it has received
        self._signature: Any = None
        self._arranged: list[list[Master | Tensor]] = []  # by group: masters, and parameters without a master
        self._own_entries: dict[Any, Any] = {}  # before a step, what ``optimizer.state`` has under other keys
        let_hooks_be_registered(optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
            optimizer.register_state_dict_pre_hook(self.states.before_state_dict),
            optimizer.register_state_dict_post_hook(self.states.put_back),
        ]
        optimizer.load_state_dict = self.states.load  # type: ignore[method-assign]
        # called before users' post-hooks, which then see the module's parameters
        call_first(self._handles[1])
        self.states.adopt(dict(optimizer.state))  # Adagrad's accumulators exist from the start

    def join(self, engine: OptimizedEngine) -> None:
        """Add another engine, whose module's parameters this optimizer also updates. Collective."""
        self.states.join(engine)
        if any(slot_of(key) is not None for key in self.states.by_master):
            self.states.adopt(self.states.by_parameter(in_parts))

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None after the user has deleted it."""
        return self.states.reference()

    # -- the step ---------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.states.put_back()
        if self._replaced is not None and running_steps(optimizer) > 1:
            return None  # a subclass's ``step`` has called its base class's ``step``
        self.recover()  # an earlier step may have raised
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        has_none = closure is None and "closure" not in inspect.signature(optimizer.step).parameters
        kind: Any = type(optimizer)
        if has_none or _ignores_closure(kind):
            self._swap_in()
            return None

        # Swap masters in from a closure, even if none was passed, so user step pre-hooks see the module's parameters.
        def closure_then_swap() -> Any:
            if self._replaced is not None:  # LBFGS calls the closure again, after writing values
                self.recover()
                for engine in self.states.engines:
                    engine.show(self._buckets)
            result = closure() if closure is not None else None
            self._swap_in()
            return result

        if len(args) > 1:
            return (optimizer, closure_then_swap, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_swap}

    def _swap_in(self) -> None:
        if self._replaced is not None:
            return  # in a nested call, to which a subclass's ``step`` has passed its closure
        if not isinstance(self.states.by_master, StateMapping):  # user code has replaced ``optimizer.state``
            self.states.adopt(self.states.by_parameter(in_parts))
        for engine in self.states.engines:
            engine.begin_update()
        self.states.synchronize()
        self._own_entries = of_no_parameter(self.states.by_master)
        for engine in self.states.engines:
            for bucket in engine.buckets:
                bucket.before_update()
        groups = self.states.optimizer.param_groups
        self._arrange(groups)
        self._replaced = [list(group["params"]) for group in groups]
        gradients = {master: self._gradient(master) for master in self._active}
        for master in gradients:
            master.bucket.note_update(slot.index for slot in master.slots)
        if any(master.rounds for master in gradients):
            count_update(groups, self.states.engines[0].seed)
        offloaded: dict[Bucket, list[tuple[int, Master]]] = {}  # (group number, master), by bucket
        for number, arranged in enumerate(self._arranged):
            for each in arranged:
                if isinstance(each, Master) and each.bucket.updates is not None:
                    offloaded.setdefault(each.bucket, []).append((number, each))
        update_offloaded(self.states.optimizer, offloaded, gradients, self._own_entries)
        if not all(bucket.background.overlap for bucket in offloaded):
            self.states.synchronize()
        for group, arranged in zip(groups, self._arranged):
            left: list[Tensor] = []
            for each in arranged:
                if not isinstance(each, Master):
                    left.append(each)
                elif each.bucket.updates is None and each.is_here:
                    left += self._updated_by_optimizer(each, gradients[each], group)
            group["params"][:] = left  # in place, since an optimizer may keep the list (LBFGS)

    def _updated_by_optimizer(self, master: Master, gradient: Tensor | None, group: dict[str, Any]) -> list[Tensor]:
        """Update a master in chunks if that is needed or faster; otherwise return it for ``step``, with a gradient."""
        optimizer, states, tensor = self.states.optimizer, self.states.by_master, master.tensor
        if gradient is not None and (master.rounds or gains_by_chunks(type(optimizer), group, tensor)):
            update = Update.of(optimizer, group, torch.device("cpu"), self._own_entries)  # leaves options as they are
            with master.bucket.phases("update", master.bucket.unit_name):
                states[tensor] = updated(update, master, tensor.detach(), gradient, dict.get(states, tensor, {}))
            return []
        tensor.grad = gradient.to(tensor.dtype) if gradient is not None else None
        if tensor.grad is not None:
            self._given[master] = tensor.grad
        return [tensor]

    def _after_step(self) -> None:
        if self._replaced is not None:
            self._take_over_gradients()
            self.recover()
            self._call_hooks()
            self.states.measure()
            for engine in self.states.engines:
                engine.updated(self._buckets)

    def _take_over_gradients(self) -> None:
        """Drop or replace parameters' gradients as ``step`` has done with those of their masters."""
        left = {master: master.tensor.grad for master in self._given}
        if all(gradient is self._given[master] for master, gradient in left.items()):
            return  # as in nearly every optimizer
        if not any(gradient is not None for gradient in left.values()):
            left |= dict.fromkeys(self._active)  # also those of which this rank has no part
        for master, gradient in left.items():
            for slot in master.slots:
                if gradient is None:
                    slot.parameter.grad = None
                elif gradient is not self._given[master]:
                    part = gradient.reshape(-1)[master.part_of(slot)]
                    slot.parameter.grad = ShardedTensor(slot, part, slot.dtype)

    def _call_hooks(self) -> None:
        """Call ``hooks_after_update``, which may write to shards before these are gathered."""
        if not self.hooks_after_update:
            return
        buckets, groups = self._buckets, self.states.optimizer.param_groups
        ordinary = [p for group in groups for p in group["params"] if slot_of(p) is None]
        for bucket in buckets:
            bucket.awaits_refresh = True
        try:
            for hook in list(self.hooks_after_update.values()):
                hook([slot.parameter for bucket in buckets for slot in slots_of(bucket)] + ordinary)
        finally:
            for bucket in buckets:
                bucket.awaits_refresh = False

    @property
    def _buckets(self) -> list[Bucket]:
        return list(dict.fromkeys(master.bucket for master in self._active))

    def recover(self) -> None:
        """Put the module's parameters back into the groups; also called after a step that raised."""
        if self._replaced is None:
            return
        if self.optimizer is not None:
            for group, parameters in zip(self.optimizer.param_groups, self._replaced):
                group["params"][:] = parameters
        self._replaced = None
        self._given.clear()
        for master in self._active:
            if master.bucket.updates is None:
                master.tensor.grad = None
                master.take_over_data()

    def begin_anew(self) -> None:
        """Recover from a step that raised. Clear gradients if ``zero_grad`` has cleared those of the masters."""
        if self._replaced is not None and (optimizer := self.optimizer) is not None and not running_steps(optimizer):
            if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
                for parameter in (p for group in self._replaced for p in group):
                    parameter.grad = None
        self.recover()

    def _arrange(self, groups: list[dict[str, Any]]) -> None:
        """Choose each group's masters, which cover its parameters with gradients; reuse the last choice if possible."""
        signature = self._state_of_groups(), [[p.grad is None for p in group["params"]] for group in groups]
        if signature == self._signature:
            return
        self._signature, self._active, self._arranged = None, [], []
        for group in groups:
            slots = {p: slot for p in group["params"] if (slot := slot_of(p)) is not None}
            # On a single rank without offload, parameters without a gradient also stay in the group, in order.
            kept = [p for p in group["params"] if p.grad is not None or p not in slots or is_alone(slots[p].bucket)]
            trained = [p for p in kept if p in slots and (p.grad is not None or p.requires_grad)]
            masters = self.states.masters_over([slots[p] for p in trained])
            self._active.extend(masters)
            of_slot = {slot: master for master in masters for slot in master.slots}
            order = (of_slot.get(slots[p], p) if p in slots else p for p in kept)
            self._arranged.append(list(dict.fromkeys(order)))
        self._signature = self._state_of_groups(), signature[1]  # the version may have changed

    def _state_of_groups(self) -> Any:
        """A value that changes if parameters move between groups, are added or removed, or masters are replaced."""
        return [[id(p) for p in group["params"]] for group in self.states.optimizer.param_groups], self.states.version

    def _gradient(self, master: Master) -> Tensor | None:
        gradients = [gradient for slot in master.slots if (gradient := slot.parameter.grad) is not None]
        if not gradients:
            return None
        if (shard := shard_of_all(master.slots)) is not None:
            values = shard.range_of(master.range)
        else:
            # User code has assigned ``p.grad``. Ranks that own no part of the master run this code, too, since
            # ``local_range_of`` gathers a gradient that was derived from another parameter.
            values = torch.zeros(master.tensor.numel(), dtype=master.tensor.dtype, device=master.device)
            for slot, gradient in zip(master.slots, gradients):
                values[master.part_of(slot)] = local_range_of(gradient, slot)
        return values.view(master.tensor.shape)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self, device: torch.device | None) -> None:
        """Remove all hooks, and give the optimizer its full state by parameter, for use without the engine. Collective.

        Args:
            device: the device to put the state on. None drops the state; the call is then not collective.
        """
        self.states.release()
        self.recover()
        for handle in self._handles:
            handle.remove()
        if (optimizer := self.optimizer) is not None:
            _masters_of.pop(optimizer, None)
            vars(optimizer).pop("load_state_dict", None)
            states: States = {}
            if device is not None:
                states = self.states.by_parameter(lambda tensor: gathered(tensor).to(device, copy=True))
                states = {p: _ordinary(p, state) for p, state in states.items()}
            optimizer.state = defaultdict(dict, states)
        self.is_closed = True


def _ordinary(parameter: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state without the engine: not below the parameter's precision, and a DTensor if it becomes one."""
    if not isinstance(parameter, Tensor):  # an entry that belongs to no parameter
        return state
    slot, ordinary = slot_of(parameter), dict(state)
    for key, value in state.items():
        if not is_by_element(key, value, parameter.shape):
            continue
        is_lean = slot is not None and slot.bucket.residency.plan.config.state_dtype is not None
        if is_lean and value.is_floating_point():
            ordinary[key] = value.to(torch.promote_types(value.dtype, parameter.dtype))
        if slot is not None and slot.placed.placements is not None:
            share = slot.share.own(ordinary[key]).contiguous()
            ordinary[key] = slot.bucket.communicator.tensor.shown(share, slot.placed)
    return ordinary


_masters_of: weakref.WeakKeyDictionary[Optimizer, Masters] = weakref.WeakKeyDictionary()


def masters_of(optimizer: Optimizer, engine: OptimizedEngine) -> Masters:
    """Add an engine to an optimizer's masters, creating them if necessary, and return them. Collective."""
    masters = _masters_of.get(optimizer)
    if masters is None:
        return Masters(optimizer, engine)
    masters.join(engine)
    return masters


def after_updates(optimizer: Optimizer, hook: Callable[[list[Tensor]], None]) -> RemovableHandle:
    """Register a hook to call after each update by an optimizer, before the new parameters are gathered.

    If the hook writes to parameters elementwise (``p.mul_(mask)``), the gather also sends these writes to all ranks.

    Args:
        hook: called with the parameters that may have been updated. The hook must not read whole parameters.
    """
    if (masters := _masters_of.get(optimizer)) is None:
        return optimizer.register_step_post_hook(
            lambda *_: hook([p for group in optimizer.param_groups for p in group["params"]])
        )
    handle = RemovableHandle(masters.hooks_after_update)
    masters.hooks_after_update[handle.id] = hook
    return handle


def give_owners(late: list[Bucket], buckets: list[Bucket], all_masters: list[Masters]) -> None:
    """Reshard the buckets in ``late`` so that each of their parameters is whole on one rank. Collective."""
    ranks = late[0].layout.world_size
    loads = [0] * ranks  # numbers of elements owned so far, by position among the shards
    for layout in (bucket.layout for bucket in buckets if bucket.layout.is_whole):
        for rank in range(ranks):
            loads[layout.position(rank)] += layout.shard_numel(rank)
    owners = balanced_owners([[s.numel for s in bucket.layout.segments] for bucket in late], ranks, loads)

    def of_late(tensor: Tensor) -> Tensor:
        is_late = isinstance(tensor, ShardedTensor) and tensor.slot.bucket in late
        return whole(tensor) if is_late else tensor

    held = [(masters, masters.states.by_parameter(of_late)) for masters in all_masters]
    for bucket, of_bucket in zip(late, owners):
        repartition(bucket, of_bucket)
    for masters, states in held:
        masters.states.adopt(states)


def masters_that_hold(parameter: Tensor) -> Masters | None:
    """The masters of the optimizer that holds a parameter; None if no optimizer of an engine holds it."""
    for optimizer, masters in _masters_of.items():
        if any(held is parameter for group in optimizer.param_groups for held in group["params"]):
            return masters
    return None


@cache
def _ignores_closure(kind: Any) -> bool:
    """Whether an optimizer's ``step`` has an argument ``closure`` that its code never reads."""
    code = getattr(inspect.unwrap(kind.step), "__code__", None)
    if code is None or "closure" not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return False
    # one instruction may read two variables (Python 3.13)
    names = (each.argval if isinstance(each.argval, tuple) else (each.argval,) for each in dis.get_instructions(code))
    return not any("closure" in read for read in names)
