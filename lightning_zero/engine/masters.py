"""What optimizers update: masters, put in place of the module's parameters while ``optimizer.step`` runs.

Between steps an optimizer's ``param_groups`` hold the module's own parameters, so that everything that users do with
them works. During the update each group holds its masters instead: one 1-D tensor for each run of neighbouring segments
of a bucket, this rank's part only, so that the update is a handful of kernels over 1/N of the elements (P_os in the
paper, section 5.1). Over one rank that is one master for each parameter, in its shape and order.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam
from torch.utils._pytree import tree_map_only

from lightning_zero.engine.bucket import Bucket, BucketSlot, Ledger
from lightning_zero.engine.gradient_shard import GradientShard, shard_of_all
from lightning_zero.engine.master import Master, is_whole, runs_of
from lightning_zero.engine.offload.masters_elsewhere import MastersElsewhere
from lightning_zero.engine.offload.states import DiskStates
from lightning_zero.engine.offload.updates import fields_by_parameter
from lightning_zero.engine.pieces_of_updates import CutMaster, copied, is_elementwise
from lightning_zero.engine.settling import is_settled, settle
from lightning_zero.engine.sharded_tensor import ShardedTensor, local_range_of
from lightning_zero.engine.sparse_rows import SparseRows
from lightning_zero.engine.stored import StoredTensor


class Owner(Protocol):
    """What masters ask of the engine."""

    ledger: Ledger

    @property
    def buckets(self) -> list[Bucket]: ...

    def begin_update(self) -> None: ...

    def show(self, buckets: list[Bucket]) -> None: ...

    def updated(self, buckets: list[Bucket]) -> None: ...


class Masters:
    """The masters of one optimizer, and the translation of its state to the module's parameters and back.

    Args:
        optimizer: the user's; it is kept alive by the user alone.
        slot_of: finds the slot of one of the module's parameters, or None for a foreign one.
        owner: the engine, told before and after each update, and where a closure is called in the midst of one.

    Attributes:
        is_closed: after ``close``.
        awaits_step: after a backward in which updates may have begun, until the optimizer's step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        slot_of: Callable[[Tensor], BucketSlot | None],
        owner: Owner,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        _masters_of[optimizer] = self
        self.slot_of, self._ledger, self._owners = slot_of, owner.ledger, [weakref.ref(owner)]
        self.is_closed = self.awaits_step = False
        self._master_of: dict[BucketSlot, Master] = {}
        self._module_parameters: list[list[Any]] | None = None
        self._active: list[Master] = []
        self._signature: Any = None
        self._arranged: list[list[Master | Tensor]] = []  # by group: masters, and what is not the engine's
        self._arranged_in: dict[Bucket, list[tuple[int, Master]]] = {}  # the same masters with their group's number
        self._cut_masters: list[CutMaster] = []  # while the optimizer updates
        self._begun: set[Bucket] = set()
        self._elsewhere = MastersElsewhere()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._sparse_rows = {
            slot: SparseRows(slot)
            for p in (parameters if isinstance(optimizer, SparseAdam) else ())
            if (slot := slot_of(p)) is not None and is_whole(slot.bucket) and p.requires_grad
        }
        self._loaded: dict[Any, dict[str, Any]] | None = None
        self._own_state: Any = None
        self._states_measured = 0
        self._state_bytes: Counter[str] = Counter()
        self._keep: Callable[[Tensor], Tensor] = _unchanged
        self._in_parts = False
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        # before the users' own, so that these see the module's parameters
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[1].id, last=False)  # type: ignore[attr-defined]
        self._adopt(dict(optimizer.state))  # Adagrad's accumulators exist from the start

    def join(self, owner: Owner) -> None:
        """Update the parameters of one more engine as well: the optimizer holds some of its module's. Collective."""
        if not self.owners:  # those of deleted modules
            self._ledger, self._state_bytes = owner.ledger, Counter()
        self._owners = [weakref.ref(each) for each in (*self.owners, owner)]
        self._signature = None
        state: dict[Any, dict[str, Any]] = self.optimizer.state
        before = {key: dict.pop(state, key) for key in list(state) if self.slot_of(key) is not None}
        if before:
            self._adopt({**self.whole_state(), **before})

    @property
    def owners(self) -> list[Owner]:
        """The engines of the modules whose parameters the optimizer holds."""
        return [owner for reference in self._owners if (owner := reference()) is not None]

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer was deleted while it steps"
        return optimizer

    # -- the step ---------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._put_back()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None and "closure" not in inspect.signature(optimizer.step).parameters:
            self._swap_in()
            return None

        # By a closure in any case, so that the users' step hooks, which come before it, see the module's parameters.
        def closure_then_swap() -> Any:
            self._show_update()
            result = closure() if closure is not None else None
            self._swap_in()
            return result

        if len(args) > 1:
            return (optimizer, closure_then_swap, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_swap}

    def _show_update(self) -> None:
        """Show the module what the optimizer has written so far, if it calls the closure once more (LBFGS)."""
        if self._module_parameters is not None:
            self._put_back()
            for owner in self.owners:
                owner.show(self._buckets)

    def _swap_in(self) -> None:
        if self._module_parameters is not None:
            return  # the ``step`` of a subclass has called that of its base class
        self._begin_update()
        for owner in self.owners:
            for bucket in owner.buckets:
                if bucket not in self._begun:
                    bucket.before_update()
        groups = self.optimizer.param_groups
        self._arrange(groups)
        self._module_parameters = [list(group["params"]) for group in groups]
        gradients = {master: self._gradient(master) for master in self._active if master.bucket not in self._begun}
        buckets = list(dict.fromkeys(master.bucket for master in gradients if master.bucket.updates is not None))
        self._elsewhere.read_ahead(buckets)
        for bucket in buckets:
            self._update_elsewhere(bucket, gradients)
        self._elsewhere.drop()
        if not all(bucket.updates.overlap for bucket in buckets if bucket.updates is not None):
            settle()
        for group, arranged in zip(groups, self._arranged):
            updated: list[Tensor] = []
            for each in arranged:
                if not isinstance(each, Master):
                    updated.append(each)
                elif each.bucket.updates is None:
                    gradient = gradients[each]
                    each.tensor.grad = gradient.to(each.tensor.dtype) if gradient is not None else None
                    updated += self._updated(group, each.tensor) if each.is_here else ()
            group["params"][:] = updated  # the list itself, which an optimizer may keep (LBFGS)

    def _updated(self, group: dict[str, Any], master: Tensor) -> list[Tensor]:
        """What the optimizer is given of a master: itself, or pieces of it."""
        if master.grad is None or not CutMaster.is_of_use(self.optimizer, group, master):
            return [master]
        state: dict[Any, Any] = self.optimizer.state
        cut = CutMaster(master, dict.pop(state, master, {}))
        self._cut_masters.append(cut)
        for piece, part in zip(cut.pieces, cut.states):
            if part:
                state[piece] = part
        return list(cut.pieces)

    def _begin_update(self) -> None:
        """Masters are about to change, unless some have begun to: nothing may still be reading them."""
        if not self._begun:
            for owner in self.owners:
                owner.begin_update()
            settle()

    def begin(self, bucket: Bucket, shard: GradientShard, order: Sequence[Bucket]) -> None:
        """Update the masters of a bucket before ``optimizer.step`` is called, where they are kept elsewhere.

        Args:
            shard: the gradient, of all parameters of the bucket, as it will be then.
            order: in which buckets come, as far as that is known.
        """
        masters = [master for _, master in self._arranged_in.get(bucket, ())]
        held = {slot for master in masters for slot in master.slots}
        if (
            bucket.updates is None
            or self._signature is None
            or any(slot not in held or slot.hooks_after_reduction for slot in bucket.slots)
        ):
            return
        self._begin_update()
        bucket.before_update()
        if not self._begun:
            self._elsewhere.read_ahead(each for each in order if each in self._arranged_in)
        self._elsewhere.read_ahead([bucket])
        self._begun.add(bucket)
        bucket.has_begun = True
        # not asked for here: it may be on its way still
        self._update_elsewhere(bucket, {m: partial(shard.range_of, m.slots, m.range) for m in masters})

    def _update_elsewhere(self, bucket: Bucket, gradients: Mapping[Master, Any]) -> None:
        is_early = bucket.has_begun or self.awaits_step
        masters = self._arranged_in[bucket]
        self._elsewhere.update(self.optimizer, bucket, masters, gradients, is_early=is_early)

    def _after_step(self) -> None:
        if self._module_parameters is None:
            return
        self.recover()
        self.measure()
        for owner in self.owners:
            owner.updated(self._buckets)

    @property
    def _buckets(self) -> list[Bucket]:
        return list(dict.fromkeys(master.bucket for master in self._active))

    def recover(self) -> None:
        """Put the module's parameters back, also after a step that raised."""
        self._put_back()
        for bucket in self._begun:
            bucket.has_begun = False
        self._begun, self.awaits_step = set(), False
        self._elsewhere.drop()

    def _put_back(self) -> None:
        if self._module_parameters is None:
            return
        for group, parameters in zip(self.optimizer.param_groups, self._module_parameters):
            group["params"][:] = parameters
        self._module_parameters = None
        state: dict[Any, Any] = self.optimizer.state
        while self._cut_masters:
            cut = self._cut_masters.pop()
            joined = cut.joined([dict.pop(state, piece, {}) for piece in cut.pieces])
            if joined:
                state[cut.master] = joined
        for master in self._active:
            if master.bucket.updates is None:
                master.tensor.grad = None

    def _arrange(self, groups: list[dict[str, Any]]) -> None:
        """Lay each group's parameters that have a gradient out as masters; the same as last time, as a rule."""
        signature = [[(id(p), p.grad is None) for p in group["params"]] for group in groups]
        if signature == self._signature:
            return
        self._signature, self._active, self._arranged, self._arranged_in = None, [], [], {}
        for number, group in enumerate(groups):
            slots = {p: slot for p in group["params"] if (slot := self.slot_of(p)) is not None}
            # Where the optimizer is given whole parameters, it finds those without a gradient in their places, too.
            kept = [p for p in group["params"] if p.grad is not None or p not in slots or is_whole(slots[p].bucket)]
            trained = [p for p in kept if p in slots and (p.grad is not None or p.requires_grad)]
            masters = self._masters_of([slots[p] for p in trained])
            self._active.extend(masters)
            of_slot = {slot: master for master in masters for slot in master.slots}
            order = (of_slot.get(slots[p], p) if p in slots else p for p in kept)
            self._arranged.append(list(dict.fromkeys(order)))
            for master in masters:
                self._arranged_in.setdefault(master.bucket, []).append((number, master))
        make_room(self.optimizer, self.slot_of)
        self._signature = signature

    def _masters_of(self, slots: list[BucketSlot]) -> list[Master]:
        """The masters that cover these slots and no others, split off or made where there are none."""
        wanted = set(slots)
        for master in dict.fromkeys(self._master_of[slot] for slot in slots if slot in self._master_of):
            if not wanted.issuperset(master.slots):
                self._split(master, wanted)
        new = [slot for slot in slots if slot not in self._master_of]
        for run in runs_of(new):
            self._own(Master(run[0].bucket, run[0].index, run[-1].index))
        return list(dict.fromkeys(self._master_of[slot] for slot in slots))

    def _own(self, master: Master) -> None:
        for slot in master.slots:
            self._master_of[slot] = master

    def _split(self, master: Master, wanted: set[BucketSlot]) -> None:
        """Split a master whose segments no longer all have gradients: each part keeps its own state."""
        state = self.optimizer.state.pop(master.tensor, {})
        for chosen in (True, False):
            for run in runs_of([slot for slot in master.slots if (slot in wanted) == chosen]):
                part = Master(master.bucket, run[0].index, run[-1].index)
                self._own(part)
                if state and part.is_here:
                    offset = part.range.start - master.range.start
                    kept = slice(offset, offset + part.tensor.numel())
                    self.optimizer.state[part.tensor] = {
                        key: part.stored(key)
                        if isinstance(value, StoredTensor)
                        else value[kept].clone()
                        if is_elementwise(value, master.tensor.shape)
                        else copied(value)
                        for key, value in state.items()
                    }

    def _gradient(self, master: Master) -> Tensor | None:
        if not master.is_here:
            return None
        pieces = [slot.parameter.grad for slot in master.slots]
        if len(pieces) == 1 and pieces[0] is None:
            return None
        if len(pieces) == 1 and isinstance(pieces[0], ShardedTensor):
            own = local_range_of(pieces[0], master.slots[0]).view(master.tensor.shape)
            rows = self._sparse_rows.get(master.slots[0]) if self._sparse_rows else None
            return rows.of(own) if rows is not None else own
        if (shard := shard_of_all(master.slots)) is not None:
            assert isinstance(shard.flat, Tensor)
            return shard.flat[master.range]
        gathered = torch.zeros_like(master.tensor, device=master.device)  # the user put gradients of his own in p.grad
        for slot, gradient in zip(master.slots, pieces):
            assert gradient is not None
            gathered.view(-1)[master.part_of(slot)] = local_range_of(gradient, slot)
        return gathered

    def measure(self) -> None:
        """Enter the bytes of optimizer state in the ledger, when state has come into being or gone."""
        optimizer = self._optimizer()
        if optimizer is not None and is_settled() and len(optimizer.state) != self._states_measured:
            self._states_measured = len(optimizer.state)
            away = {id(master.tensor) for master in self._master_of.values() if master.bucket.updates is not None}
            held = Counter[str]()
            for tensor, state in dict.items(optimizer.state):  # it is settled, and an update's error is told elsewhere
                held["host" if id(tensor) in away else "optimizer"] += _nbytes(state)
            for category in held.keys() | self._state_bytes.keys():
                self._ledger.add(category, held[category] - self._state_bytes[category])
            self._state_bytes = held

    def fields_on_disk(self) -> dict[DiskStates, set[str]]:
        """What there is to be of states on a disk: what an update will ask for, and what was loaded."""
        found = defaultdict(
            set, {states: set(fields) for states, fields in _fields_on_disk(self.optimizer, self.slot_of)}
        )
        for master in self._master_of.values():
            if master.bucket.states is not None:
                state = self.optimizer.state.get(master.tensor, {})
                found[master.bucket.states] |= {key for key, value in state.items() if isinstance(value, StoredTensor)}
        return found

    # -- state in the terms of the module's parameters --------------------------------------------------------------

    def has_state(self, slot: BucketSlot) -> bool:
        """Whether a parameter has been updated, or its state been loaded."""
        master = self._master_of.get(slot)
        return master is not None and (
            not is_whole(slot.bucket) or dict.__contains__(self.optimizer.state, master.tensor)
        )

    def key_of(self, slot: BucketSlot) -> Tensor | None:
        """What the optimizer's state of one parameter is found by, where that is of the parameter alone and whole."""
        return self._masters_of([slot])[0].tensor if is_whole(slot.bucket) else None

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """One parameter's state in full shape. Collective."""
        slot = self.slot_of(parameter)
        if slot is None:
            return dict(self.optimizer.state.get(parameter, {}))
        with self._met([slot]):
            return self._whole_state([slot])[slot]

    def state_in_parts(self, slot: BucketSlot) -> dict[str, Any]:
        """One parameter's state as sharded tensors over what the masters have of it. Collective."""
        with self._met([slot]):
            return self._whole_state([slot], in_parts=True)[slot]

    def whole_state(
        self, keep: Callable[[Tensor], Tensor] | None = None, *, in_parts: bool = False
    ) -> dict[Tensor, dict[str, Any]]:
        """The state by parameter of the module, each tensor in the parameter's full shape. Collective.

        Args:
            keep: what becomes of each gathered tensor (moved to the CPU, or dropped on ranks that do not write).
            in_parts: gather none; give sharded tensors over what the masters have.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        slots = {slot: p for p in parameters if (slot := self.slot_of(p)) is not None}
        with self._met(list(slots)):
            states = self._whole_state(list(slots), keep, in_parts=in_parts)
        found = {slots[slot]: state for slot, state in states.items() if state}
        foreign = {p: state for p in parameters if self.slot_of(p) is None and (state := self.optimizer.state.get(p))}
        if keep is not None:
            foreign = tree_map_only(Tensor, lambda tensor: keep(tensor.clone()), foreign)
        return {**foreign, **found}

    def _met(self, slots: list[BucketSlot]) -> AbstractContextManager[None]:
        """Around collectives for the state of some parameters, which every rank must have asked for."""
        what = f"the state of {type(self.optimizer).__name__}"
        return slots[0].bucket.agreement.met(what) if slots else nullcontext()

    def _whole_state(
        self, slots: list[BucketSlot], keep: Callable[[Tensor], Tensor] | None = None, *, in_parts: bool = False
    ) -> dict[BucketSlot, dict[str, Any]]:
        if not slots:
            return {}
        settle()
        local = {}
        for number, slot in enumerate(slots):
            master = self._master_of.get(slot)
            if master is not None and (slot.local_numel or slot.shape.numel() == 0):
                state = self.optimizer.state.get(master.tensor, {})
                local[number] = {
                    key: value.dtype if is_elementwise(value, master.tensor.shape) else _Scalar(value)
                    for key, value in state.items()
                }
        # what a rank owns nothing of, another knows the keys and the step counts of
        known: dict[int, dict[str, Any]] = {}
        for found in slots[0].bucket.communicator.gather_objects(local):
            for number, keys in found.items():
                known.setdefault(number, keys)
        states: dict[BucketSlot, dict[str, Any]] = {}
        for number, slot in enumerate(slots):
            state = states[slot] = {}
            master = self._master_of.get(slot)
            held = self.optimizer.state.get(master.tensor, {}) if master is not None else {}
            for key, kind in known.get(number, {}).items():
                if isinstance(kind, _Scalar):
                    value = copied(kind.value)  # each parameter's own, also after pickling
                    state[key] = (keep or _unchanged)(value.to(slot.device)) if kind.is_on_device else value
                    continue
                if master is None or not slot.local_numel:
                    part = torch.empty(0, dtype=kind, device=slot.device)
                elif (on_disk := slot.bucket.states) is None:
                    part = held[key].reshape(-1)[master.part_of(slot)]
                else:
                    part = on_disk.tensor(key, slot.local_range.start, slot.local_range.stop)
                if in_parts:
                    state[key] = ShardedTensor(slot, part, keep=self)
                else:
                    state[key] = (keep or _unchanged)(slot.collect(part).clone())
        return states

    def whole_state_dict(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The optimizer's ``state_dict()`` with every tensor whole. Collective."""
        self._keep = keep
        try:
            return self.optimizer.state_dict()
        finally:
            self._keep = _unchanged

    def state_dict_in_parts(self) -> dict[str, Any]:
        """The optimizer's ``state_dict()`` with sharded tensors over what the masters have. Collective."""
        self._in_parts = True
        try:
            return self.optimizer.state_dict()
        finally:
            self._in_parts = False

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        self._own_state = optimizer.state
        optimizer.state = defaultdict(dict, self.whole_state(self._keep, in_parts=self._in_parts))

    def _after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        optimizer.state, self._own_state = self._own_state, None

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take out what masters get, so that torch does not cast it to the parameters' dtype; it loads the rest."""
        groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved_groups]:
            return state_dict  # torch names the mismatch
        saved = [index for group in saved_groups for index in group["params"]]
        parameters = [p for group in groups for p in group["params"]]
        states, foreign = state_dict["state"], {}
        self._loaded = {}
        for index, parameter in zip(saved, parameters):
            if index in states and self.slot_of(parameter) is not None:
                self._loaded[parameter] = states[index]
            elif index in states:
                foreign[index] = states[index]
        return {**state_dict, "state": foreign}

    def _after_load(self, optimizer: Optimizer) -> None:
        loaded, self._loaded = self._loaded, None
        self._adopt({**dict(dict.items(optimizer.state)), **(loaded or {})})

    def _adopt(self, states: dict[Any, dict[str, Any]]) -> None:
        """Cut whole state by parameter into the state of masters."""
        settle()
        optimizer = self.optimizer
        self._master_of.clear()
        self._signature, self._states_measured = None, -1
        optimizer.state = _State(self)
        by_slot: dict[BucketSlot, dict[str, Any]] = {}
        for parameter, state in states.items():
            slot = self.slot_of(parameter)
            if slot is None:
                optimizer.state[parameter] = {key: copied(value) for key, value in state.items()}
            elif state:
                by_slot[slot] = state
        group_of = {
            slot: number
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if (slot := self.slot_of(p)) is not None
        }
        alike: dict[Any, list[BucketSlot]] = {}
        for slot, state in by_slot.items():
            scalars = tuple(
                (key, _told(value))
                for key, value in state.items()
                if not is_elementwise(value, slot.shape) or (value.dim() == 0 and key in _COUNTERS)
            )
            alike.setdefault((group_of[slot], scalars), []).append(slot)
        for slots in alike.values():
            for run in runs_of(slots):
                master = Master(run[0].bucket, run[0].index, run[-1].index)
                self._own(master)
                if master.is_here:
                    group = optimizer.param_groups[group_of[run[0]]]
                    optimizer.state[master.tensor] = self._cut(master, group, [by_slot[slot] for slot in run])
        self.measure()

    def _cut(self, master: Master, group: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, Any]:
        cut: dict[str, Any] = {}
        for key, first in states[0].items():
            whole = [state[key] for state in states]
            elementwise = key not in _COUNTERS and all(
                is_elementwise(value, slot.shape) for value, slot in zip(whole, master.slots)
            )
            if not elementwise:
                cut[key] = _placed(key, first, group, master)
                continue
            dtype = torch.promote_types(first.dtype, master.tensor.dtype) if first.is_floating_point() else first.dtype
            if (on_disk := master.bucket.states) is not None:
                on_disk.add_fields({key: dtype})
                for value, slot in zip(whole, master.slots):
                    if slot.local_numel:
                        shown = value
                        if value.is_meta:
                            shown = torch.full(slot.shape, self._initial(key, slot), device="cpu")
                        on_disk.write(key, slot.local_range.start, local_range_of(shown.detach(), slot))
                cut[key] = master.stored(key)
                continue
            cut[key] = torch.empty(master.tensor.shape, dtype=dtype, device=master.tensor.device)
            for value, slot in zip(whole, master.slots):
                part = cut[key].view(-1)[master.part_of(slot)]
                if value.is_meta:  # as its parameter was when the optimizer was made
                    part.fill_(self._initial(key, slot))
                else:
                    part.copy_(local_range_of(value.detach(), slot))
        return cut

    def _initial(self, key: str, slot: BucketSlot) -> float:
        """What the optimizer's constructor has filled a state with."""
        for group in self.optimizer.param_groups:
            if _INITIAL.get(key) in group and any(self.slot_of(p) is slot for p in group["params"]):
                return group[_INITIAL[key]]
        raise RuntimeError(
            f"The optimizer's state {key!r} of '{slot.name}' has no values, as it was made while the parameter was on "
            "the meta device. Make it in the first step() instead, as torch's optimizers do, or make the module "
            "outside of torch.device('meta')."
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self, device: torch.device | None) -> dict[Tensor, dict[str, Any]] | None:
        """Unhook the optimizer and return its state by parameter, whole, for when those are ordinary again.

        Args:
            device: where to put it; None returns None, and asks nothing of other ranks.
        """
        optimizer = self._optimizer()
        for category, nbytes in self._state_bytes.items():
            self._ledger.add(category, -nbytes)
        self._state_bytes = Counter()
        state = None
        if optimizer is None:
            self._module_parameters = None
        self.recover()
        for rows in self._sparse_rows.values():
            rows.close()
        if optimizer is not None:
            for handle in self._handles:
                handle.remove()
            _masters_of.pop(optimizer, None)
            state = self.whole_state(lambda tensor: tensor.to(device)) if device is not None else None
        self.is_closed = True
        return state


def _fields_on_disk(
    optimizer: Optimizer, slot_of: Callable[[Tensor], BucketSlot | None]
) -> Iterator[tuple[DiskStates, dict[str, torch.dtype]]]:
    """Of all that lies on a disk, what an optimizer's update will ask for."""
    members: dict[DiskStates, list[Tensor]] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        slot = slot_of(parameter)
        if slot is not None and slot.bucket.states is not None:
            members.setdefault(slot.bucket.states, []).append(parameter)
    if not members:
        return  # as without offload, where each change of what has gradients comes here
    fields_of = fields_by_parameter([optimizer])
    for states, parameters in members.items():
        yield states, fields_of(parameters, states.dtype)


def make_room(optimizer: Optimizer, slot_of: Callable[[Tensor], BucketSlot | None]) -> None:
    """Make room on the disk for all that an optimizer's update will ask for.

    Raises:
        OSError: if there is not enough.
    """
    for states, fields in _fields_on_disk(optimizer, slot_of):
        if not fields.keys() <= states.fields.keys():
            settle()
            states.add_fields(fields)


class _State(defaultdict[Any, dict[str, Any]]):
    """``optimizer.state``, by master. Asked for a parameter of the module it gives that one's state as sharded tensors.

    Over one rank, where each parameter has a master in its shape, it gives what the optimizer has.

    Args:
        masters: whose it is.

    Raises:
        TypeError: where user code would replace or remove the state of one parameter.
    """

    def __init__(self, masters: Masters) -> None:
        super().__init__(dict)
        self._masters = weakref.ref(masters)

    def _slot_of(self, key: Any) -> tuple[Masters, BucketSlot] | None:
        masters = self._masters()
        slot = masters.slot_of(key) if masters is not None else None
        return (masters, slot) if masters is not None and slot is not None else None

    def __contains__(self, key: Any) -> bool:
        found = self._slot_of(key)
        return super().__contains__(key) if found is None else found[0].has_state(found[1])

    def __missing__(self, key: Any) -> Any:
        found = self._slot_of(key)
        if found is None:
            return super().__missing__(key)
        own = found[0].key_of(found[1])
        return self[own] if own is not None else MappingProxyType(found[0].state_in_parts(found[1]))

    def values(self) -> Any:
        settle()  # whoever asks may write to them
        return super().values()

    def items(self) -> Any:
        settle()
        return super().items()

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


_masters_of: weakref.WeakKeyDictionary[Optimizer, Masters] = weakref.WeakKeyDictionary()


def masters_of(optimizer: Optimizer, slot_of: Callable[[Tensor], BucketSlot | None], owner: Owner) -> Masters:
    """The masters of an optimizer for one more engine: new ones, if it has none. Collective."""
    masters = _masters_of.get(optimizer)
    if masters is None:
        return Masters(optimizer, slot_of, owner)
    masters.join(owner)
    return masters


def masters_that_hold(parameter: Tensor) -> Masters | None:
    """The masters of the optimizer in whose groups a parameter is, if an engine keeps any."""
    for masters in _masters_of.values():
        if any(held is parameter for group in masters.optimizer.param_groups for held in group["params"]):
            return masters
    return None


def _placed(key: str, value: Any, group: dict[str, Any], master: Master) -> Any:
    """A state that is not by element where torch's own ``load_state_dict`` puts it: with the parameter, as a rule."""
    if key != "step":  # lists of tensors, too (LBFGS)
        return tree_map_only(Tensor, lambda tensor: tensor.to(master.device, copy=True), value)
    if not isinstance(value, Tensor):
        return value
    if group.get("capturable") or group.get("fused"):
        return value.to(master.device, torch.float32, copy=True)
    # A kernel for the CPU needs it there, where an optimizer may not have made it: with a default device of the user's.
    return value.to("cpu", copy=True) if master.device.type == "cpu" else copied(value)


class _Scalar:
    """A state that is not by element, such as a count of steps, on its way between ranks.

    Args:
        is_on_device: whether it is with the parameter, on each rank's own device, and not in the host's memory.
    """

    def __init__(self, value: Any, is_on_device: bool = False) -> None:
        self.value = value
        self.is_on_device = is_on_device or isinstance(value, Tensor) and value.device.type != "cpu"

    def __reduce__(self) -> Any:
        if not isinstance(self.value, Tensor):
            return _Scalar, (self.value,)
        return _scalar_of, (self.value.tolist(), self.value.dtype, self.is_on_device)  # a tensor takes ten times longer


def _scalar_of(value: Any, dtype: torch.dtype, is_on_device: bool) -> _Scalar:
    return _Scalar(torch.tensor(value, dtype=dtype, device="cpu"), is_on_device)


# States that exist from the start (Adagrad's), and the option that says what they begin with.
_INITIAL = {"sum": "initial_accumulator_value"}

# Zero-dimensional states of zero-dimensional parameters that are nevertheless not by element.
_COUNTERS = {"step", "mu_product", "eta", "mu"}


def _told(value: Any) -> Any:
    """A state that is not by element as something to compare."""
    if not isinstance(value, Tensor):
        return repr(value)
    return float(value) if value.numel() == 1 else id(value)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _nbytes(state: dict[str, Any]) -> int:
    tensors = [v for v in state.values() if isinstance(v, Tensor) and not isinstance(v, StoredTensor)]
    return sum(v.numel() * v.element_size() for v in tensors if v.dim())
