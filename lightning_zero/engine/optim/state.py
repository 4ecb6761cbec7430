"""The state of an optimizer: by master, as the optimizer keeps it, and by parameter, as torch and user code know it."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.comm.background_work import is_synchronized, synchronize
from lightning_zero.engine.offload.states import DiskStates
from lightning_zero.engine.offload.updates import Updates, fields_by_parameter
from lightning_zero.engine.optim.kinds import (
    ByElement,
    Small,
    comparable,
    copied,
    described,
    is_by_element,
    placed,
)
from lightning_zero.engine.optim.master import Master, is_whole, runs_of
from lightning_zero.engine.optim.state_mapping import ByParameter, StateMapping
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.ledger import Ledger
from lightning_zero.engine.state.slot import BucketSlot
from lightning_zero.engine.tensor.lazy_tensor import StoredTensor
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor, local_range_of
from lightning_zero.engine.tensor.sharded_tree import Leaf, walk, whole

# Entries that exist from the start (Adagrad's), and the option that says what they begin with.
_INITIAL = {"sum": "initial_accumulator_value"}

States = dict[Any, dict[str, Any]]
"""Entries by name, by parameter."""


class Owner(Protocol):
    """The engine of a module, as far as optimizers need it."""

    ledger: Ledger
    background: Updates

    @property
    def buckets(self) -> list[Bucket]: ...

    def begin_update(self) -> None: ...

    def show(self, buckets: list[Bucket]) -> None: ...

    def updated(self, buckets: list[Bucket]) -> None: ...


class MasterStates:
    """Which masters an optimizer has, their state, and its translation to the module's parameters and back.

    Args:
        optimizer: the user's; the user alone keeps it alive.
        slot_of: finds the slot of one of the module's parameters, or None for a foreign one.
        owner: the engine.
    """

    def __init__(self, optimizer: Optimizer, slot_of: Callable[[Tensor], BucketSlot | None], owner: Owner) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.slot_of, self._ledger, self._owners = slot_of, owner.ledger, [weakref.ref(owner)]
        self._master_of: dict[BucketSlot, Master] = {}
        self._measured = 0
        self._bytes: Counter[str] = Counter()

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer was deleted while it steps"
        return optimizer

    @property
    def by_master(self) -> Any:
        """The optimizer's own mapping."""
        state = self.optimizer.state
        return state.own if isinstance(state, ByParameter) else state

    @property
    def owners(self) -> list[Owner]:
        """The engines of the modules whose parameters the optimizer holds."""
        return [owner for reference in self._owners if (owner := reference()) is not None]

    def join(self, owner: Owner) -> None:
        """Add the engine of one more module whose parameters the optimizer holds."""
        if not self.owners:  # those of deleted modules
            self._ledger, self._bytes = owner.ledger, Counter()
        self._owners = [weakref.ref(each) for each in (*self.owners, owner)]

    def synchronize(self) -> None:
        """Wait for background work, and raise what ended that of the engines whose parameters the optimizer holds."""
        synchronize(*(owner.background for owner in self.owners))

    # -- which masters there are ------------------------------------------------------------------------------------

    def masters_over(self, slots: list[BucketSlot]) -> list[Master]:
        """The masters that cover these slots and no others, split off or made where there are none."""
        wanted = set(slots)
        for master in dict.fromkeys(self._master_of[slot] for slot in slots if slot in self._master_of):
            if not wanted.issuperset(master.slots):
                self._split(master, wanted)
        new = [slot for slot in slots if slot not in self._master_of]
        for run in runs_of(new):
            self._add(Master(run[0].bucket, run[0].index, run[-1].index))
        return list(dict.fromkeys(self._master_of[slot] for slot in slots))

    def _add(self, master: Master) -> None:
        for slot in master.slots:
            self._master_of[slot] = master

    def _split(self, master: Master, wanted: set[BucketSlot]) -> None:
        """Split a master whose segments no longer all have gradients: each part keeps its own state."""
        state = self.by_master.pop(master.tensor, {})
        for chosen in (True, False):
            for run in runs_of([slot for slot in master.slots if (slot in wanted) == chosen]):
                part = Master(master.bucket, run[0].index, run[-1].index)
                self._add(part)
                if state and part.is_here:
                    offset = part.range.start - master.range.start
                    kept = slice(offset, offset + part.tensor.numel())
                    self.by_master[part.tensor] = {
                        key: part.stored(key)
                        if isinstance(value, StoredTensor)
                        else value[kept].clone()
                        if is_by_element(key, value, master.tensor.shape)
                        else copied(value)
                        for key, value in state.items()
                    }

    # -- memory and disk --------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Enter the bytes of optimizer state in the ledger, when state has come into being or gone."""
        optimizer = self._optimizer()
        if optimizer is not None and is_synchronized() and len(optimizer.state) != self._measured:
            self._measured = len(optimizer.state)
            away = {id(master.tensor) for master in self._master_of.values() if master.bucket.updates is not None}
            held = Counter[str]()
            # no background work is on it; errors of updates are raised elsewhere
            for tensor, state in dict.items(optimizer.state):
                held["host" if id(tensor) in away else "optimizer"] += _nbytes(state)
            self._enter(held)

    def release(self) -> None:
        """Take the bytes of optimizer state out of the ledger."""
        self._enter(Counter())

    def _enter(self, held: Counter[str]) -> None:
        for category in held.keys() | self._bytes.keys():
            self._ledger.add(category, held[category] - self._bytes[category])
        self._bytes = held

    def fields_on_disk(self) -> dict[DiskStates, set[str]]:
        """The entries that lie on a disk, or will: what an update needs, and what was loaded."""
        found = defaultdict(
            set, {states: set(fields) for states, fields in _fields_on_disk(self.optimizer, self.slot_of)}
        )
        for master in self._master_of.values():
            if master.bucket.states is not None:
                state = self.by_master.get(master.tensor, {})
                found[master.bucket.states] |= {key for key, value in state.items() if isinstance(value, StoredTensor)}
        return found

    # -- by parameter -----------------------------------------------------------------------------------------------

    def has_state(self, slot: BucketSlot) -> bool:
        """Whether a parameter has been updated, or its state been loaded."""
        master = self._master_of.get(slot)
        return master is not None and (not is_whole(slot.bucket) or dict.__contains__(self.by_master, master.tensor))

    def key_of(self, slot: BucketSlot) -> Tensor | None:
        """The key of one parameter's state in the optimizer's own mapping, where a master is that parameter alone."""
        return self.masters_over([slot])[0].tensor if is_whole(slot.bucket) else None

    def in_parts(self, slot: BucketSlot) -> dict[str, Any]:
        """One parameter's state, entries by element as sharded tensors over what the masters have. Collective."""
        with self._met([slot]):
            return self._in_parts([slot])[slot]

    def of(self, parameter: Tensor) -> dict[str, Any]:
        """One parameter's state in full shape. Collective."""
        slot = self.slot_of(parameter)
        if slot is None:
            return dict(self.by_master.get(parameter, {}))
        with self._met([slot]):
            state: dict[str, Any] = walk(self._in_parts([slot])[slot], whole)
            return state

    def by_parameter(self, leaf: Leaf) -> States:
        """All state by parameter: foreign parameters first, then the module's that have some. Collective.

        Args:
            leaf: what becomes of each tensor; ``in_parts`` leaves entries by element as sharded tensors over what the
                masters have.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        slots = {slot: p for p in parameters if (slot := self.slot_of(p)) is not None}
        with self._met(list(slots)):
            states = self._in_parts(list(slots))
            found = {p: state for p in parameters if self.slot_of(p) is None and (state := self.by_master.get(p))}
            found |= {slots[slot]: state for slot, state in states.items() if state}
            return walk(found, leaf)

    def state_dict(self, leaf: Leaf) -> dict[str, Any]:
        """The optimizer's ``state_dict()``. Collective; argument as for ``by_parameter``."""
        optimizer = self.optimizer
        self.put_back()
        optimizer.state = ByParameter(optimizer.state, self.by_parameter(leaf), is_by_hook=False)
        try:
            return optimizer.state_dict()
        finally:
            self.put_back()

    def before_state_dict(self, optimizer: Optimizer) -> None:
        """The hook before ``state_dict()``: torch finds whole state by parameter."""
        if isinstance(optimizer.state, ByParameter) and not optimizer.state.is_by_hook:
            return
        self.put_back()
        optimizer.state = ByParameter(optimizer.state, self.by_parameter(whole), is_by_hook=True)

    def put_back(self, *_: Any) -> None:
        """The hook after ``state_dict()``: undo the one before. Also after a call of ``state_dict()`` that raised."""
        state = self.optimizer.state
        if isinstance(state, ByParameter):
            self.optimizer.state = state.own

    def _met(self, slots: list[BucketSlot]) -> AbstractContextManager[None]:
        """Around collectives for the state of some parameters, which every rank must have asked for."""
        what = f"the state of {type(self.optimizer).__name__}"
        return slots[0].bucket.rendezvous.met(what) if slots else nullcontext()

    def _in_parts(self, slots: list[BucketSlot]) -> dict[BucketSlot, dict[str, Any]]:
        if not slots:
            return {}
        self.synchronize()
        own = {}
        for number, slot in enumerate(slots):
            master = self._master_of.get(slot)
            if master is not None and (slot.local_numel or slot.shape.numel() == 0):
                state = self.by_master.get(master.tensor, {})
                own[number] = {key: described(key, value, master.tensor.shape) for key, value in state.items()}
        # other ranks know the entries and the step counts of parameters that this one owns nothing of
        known: dict[int, dict[str, Any]] = {}
        for found in slots[0].bucket.communicator.control.gather_objects(own):
            for number, entries in found.items():
                known.setdefault(number, entries)
        return {
            slot: {key: self._entry(slot, key, entry) for key, entry in known.get(number, {}).items()}
            for number, slot in enumerate(slots)
        }

    def _entry(self, slot: BucketSlot, key: str, entry: ByElement | Small) -> Any:
        if isinstance(entry, Small):
            return entry.of_parameter(slot.device)
        master = self._master_of.get(slot)
        if master is None or not slot.local_numel:
            part = torch.empty(0, dtype=entry.dtype, device=slot.device)
        elif (on_disk := slot.bucket.states) is None:
            part = self.by_master[master.tensor][key].reshape(-1)[master.part_of(slot)]
        else:
            part = on_disk.tensor(key, slot.local_range.start, slot.local_range.stop)
        return ShardedTensor(slot, part, keep=self)

    # -- by master --------------------------------------------------------------------------------------------------

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The hook before ``load_state_dict()``: states that masters get go by parameter, and so past torch's cast.

        torch casts states that it finds by number to the dtype of the parameter, and keeps others as they are.
        """
        groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved_groups]:
            return state_dict  # torch names the mismatch
        saved = [index for group in saved_groups for index in group["params"]]
        parameters = [p for group in groups for p in group["params"]]
        states: dict[Any, Any] = {}
        for index, parameter in zip(saved, parameters):
            if index in state_dict["state"]:
                state, is_ours = state_dict["state"][index], self.slot_of(parameter) is not None
                # of ours a copy: torch replaces counts in it that are no tensors
                states[parameter if is_ours else index] = dict(state) if is_ours else state
        return {**state_dict, "state": states}

    def adopt(self, states: States) -> None:
        """Cut state by parameter into the state of masters, which takes the place of all that was there."""
        self.synchronize()
        optimizer = self.optimizer
        self._master_of.clear()
        self._measured = -1
        optimizer.state = StateMapping(self)
        by_slot: dict[BucketSlot, dict[str, Any]] = {}
        for parameter, state in states.items():
            slot = self.slot_of(parameter)
            if slot is None:
                optimizer.state[parameter] = {key: copied(value) for key, value in state.items()}
            elif state:
                by_slot[slot] = state
        group_of = {
            slot: group
            for group in optimizer.param_groups
            for p in group["params"]
            if (slot := self.slot_of(p)) is not None
        }
        alike: dict[Any, list[BucketSlot]] = {}
        for slot, state in by_slot.items():
            entries = tuple(
                (key, None if is_by_element(key, value, slot.shape) else comparable(value))
                for key, value in state.items()
            )
            alike.setdefault((id(group_of[slot]), entries), []).append(slot)
        for slots in alike.values():
            for run in runs_of(slots):
                master = Master(run[0].bucket, run[0].index, run[-1].index)
                self._add(master)
                if master.is_here:
                    cut = self._cut(master, group_of[run[0]], [by_slot[slot] for slot in run])
                    optimizer.state[master.tensor] = cut
        self.measure()

    def _cut(self, master: Master, group: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, Any]:
        """The state of one master, of that of its parameters, whose small entries are equal."""
        return {
            key: self._cut_entry(key, master, group, [state[key] for state in states])
            if is_by_element(key, first, master.slots[0].shape)
            else placed(key, first, group, master.device)
            for key, first in states[0].items()
        }

    def _cut_entry(self, key: str, master: Master, group: dict[str, Any], values: list[Tensor]) -> Tensor:
        """An entry by element: this rank's part of the values of a master's parameters."""
        own, first = master.tensor, values[0]
        dtype = torch.promote_types(first.dtype, own.dtype) if first.is_floating_point() else first.dtype
        if (on_disk := master.bucket.states) is not None:
            on_disk.add_fields({key: dtype})
            for value, slot in zip(values, master.slots):
                if slot.local_numel:
                    shown = value
                    if value.is_meta:
                        shown = torch.full(slot.shape, _initial(key, slot, group), device="cpu")
                    on_disk.write(key, slot.local_range.start, local_range_of(shown.detach(), slot))
            return master.stored(key)
        cut = torch.empty(own.shape, dtype=dtype, device=own.device)
        for value, slot in zip(values, master.slots):
            part = cut.view(-1)[master.part_of(slot)]
            if value.is_meta:  # as its parameter was when the optimizer was made
                part.fill_(_initial(key, slot, group))
            else:
                part.copy_(local_range_of(value.detach(), slot))
        return cut


def _initial(key: str, slot: BucketSlot, group: dict[str, Any]) -> float:
    """The value that the optimizer's constructor has filled an entry with."""
    if _INITIAL.get(key) in group:
        initial: float = group[_INITIAL[key]]
        return initial
    raise RuntimeError(
        f"The optimizer's state {key!r} of '{slot.name}' has no values, as it was made while the parameter was on "
        "the meta device. Make it in the first step() instead, as torch's optimizers do, or make the module "
        "outside of torch.device('meta')."
    )


def _fields_on_disk(
    optimizer: Optimizer, slot_of: Callable[[Tensor], BucketSlot | None]
) -> Iterator[tuple[DiskStates, dict[str, torch.dtype]]]:
    """The entries on disks that an optimizer's update needs."""
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
    """Make room on disks for all entries that an optimizer's update needs.

    Raises:
        OSError: if there is not enough.
    """
    for states, fields in _fields_on_disk(optimizer, slot_of):
        if not fields.keys() <= states.fields.keys():
            synchronize()
            states.add_fields(fields)


def _nbytes(state: dict[str, Any]) -> int:
    tensors = [v for v in state.values() if isinstance(v, Tensor) and not isinstance(v, StoredTensor)]
    return sum(v.numel() * v.element_size() for v in tensors if v.dim())
