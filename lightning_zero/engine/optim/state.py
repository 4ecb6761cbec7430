"""Optimizer state: stored for each master weight tensor, but accessed by parameter from torch and user code."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.comm.asynchronous import is_synchronized, synchronize
from lightning_zero.engine.comm.tensor_parallel import in_full, is_dtensor
from lightning_zero.engine.compat import without_load_hooks
from lightning_zero.engine.offload import of_no_parameter
from lightning_zero.engine.optim.kinds import (
    Owned,
    Small,
    as_made_of_tensors,
    comparable,
    copied,
    described,
    in_dtype,
    in_plain_tensors,
    is_by_element,
    placed,
    resolved,
    tensors_in,
)
from lightning_zero.engine.optim.master import Master, field_of, is_alone, is_whole, runs_of
from lightning_zero.engine.state.slot import BucketSlot, OwnedSlot, slot_of
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor, local_range_of
from lightning_zero.engine.tensor.sharded_tree import Leaf, in_parts, walk, whole
from lightning_zero.engine.tensor.wrapper import reader

States = dict[Any, dict[str, Any]]
"""For each parameter, the entries of its state by name."""


# The ``Optimizers`` of one engine (``optimizers.py``, which imports this file).
OptimizedEngine = Any


class MasterStates:
    """The masters of an optimizer and their state, which is converted to state by parameter and back.

    Attributes:
        version: counts how often masters have been replaced by others, and engines added.
    """

    def __init__(self, optimizer: Optimizer, engine: OptimizedEngine) -> None:
        self.reference = weakref.ref(optimizer)
        self._ledger, self._engines = engine.ledger, [weakref.ref(engine)]
        self._master_of: dict[BucketSlot, Master] = {}
        self.version = 0
        self._own: Any = None  # the optimizer's own mapping, while ``state_dict()`` uses another
        self._leaf: Leaf = whole  # converts each tensor in ``state_dict()``
        self._measured = 0
        self._bytes: Counter[str] = Counter()

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self.reference()
        assert optimizer is not None, "the optimizer was deleted during its step"
        return optimizer

    @property
    def by_master(self) -> Any:
        """The optimizer's own mapping, from masters to their states."""
        return self.optimizer.state if self._own is None else self._own

    @property
    def engines(self) -> list[OptimizedEngine]:
        """The engines of the modules whose parameters the optimizer holds."""
        return [engine for reference in self._engines if (engine := reference()) is not None]

    def join(self, engine: OptimizedEngine) -> None:
        """Add an engine, whose module's parameters the optimizer also holds."""
        if not self.engines:  # the earlier engines are gone
            self._ledger, self._bytes = engine.ledger, Counter()
        self._engines = [weakref.ref(each) for each in (*self.engines, engine)]
        self.version += 1

    def synchronize(self) -> None:
        """Wait for all background work, and raise the errors of the engines' work."""
        for engine in self.engines:
            engine.background.synchronize()
        synchronize()  # an engine that is gone may have updates left

    # -- masters ----------------------------------------------------------------------------------------------------

    def masters_over(self, slots: list[BucketSlot]) -> list[Master]:
        """Return masters of exactly these slots: split masters that also have other slots, and create missing ones."""
        wanted = set(slots)
        for master in dict.fromkeys(self._master_of[slot] for slot in slots if slot in self._master_of):
            if not wanted.issuperset(master.slots):
                self._split(master, wanted)
        for run in runs_of([slot for slot in slots if slot not in self._master_of]):
            self._add(run)
        return list(dict.fromkeys(self._master_of[slot] for slot in slots))

    def _add(self, run: list[BucketSlot]) -> Master:
        master = Master(run)
        self._master_of |= dict.fromkeys(run, master)
        return master

    def _split(self, master: Master, wanted: set[BucketSlot]) -> None:
        """Split a master of which only the wanted slots are updated now. Each part keeps its part of the state."""
        self.version += 1
        state, slots = self.by_master.pop(master.tensor, {}), set(master.slots)
        for run in (*runs_of(list(slots & wanted)), *runs_of(list(slots - wanted))):
            part = self._add(run)
            if state and part.is_here:
                offset = part.range.start - master.range.start
                kept = slice(offset, offset + part.tensor.numel())
                self.by_master[part.tensor] = {
                    key: part.state_on_disk(key, value.dtype)
                    if isinstance(value, LazyTensor)
                    else value[kept]  # not a copy: user code may have kept sharded tensors over this memory
                    if is_by_element(key, value, master.tensor.shape)
                    else copied(value)
                    for key, value in state.items()
                }

    def measure(self) -> None:
        """Enter the bytes of optimizer state in the ledger, if the number of masters with state has changed."""
        optimizer = self.reference()
        if optimizer is not None and is_synchronized() and len(optimizer.state) != self._measured:
            self._measured = len(optimizer.state)
            offloaded = {id(master.tensor) for master in self._master_of.values() if master.bucket.updates is not None}
            held = Counter[str]()
            # ``dict.items``, since the mapping's own ``items`` waits for background updates and raises their errors
            for tensor, state in dict.items(optimizer.state):
                held["host" if id(tensor) in offloaded else "optimizer"] += sum(
                    value.nbytes for value in tensors_in(in_plain_tensors(state)) if not isinstance(value, LazyTensor)
                )
            self._enter(held)

    def release(self) -> None:
        """Remove the bytes of optimizer state from the ledger."""
        self._enter(Counter())

    def forget_masters(self) -> None:
        """Forget all masters, because the state of all parameters has been cleared; the next update makes new ones."""
        self.version += 1
        self._master_of.clear()

    def _enter(self, held: Counter[str]) -> None:
        for category in held.keys() | self._bytes.keys():
            self._ledger.add(category, held[category] - self._bytes[category])
        self._bytes = held

    # -- by parameter -----------------------------------------------------------------------------------------------

    def has_state(self, slot: BucketSlot) -> bool:
        """Whether a parameter has state: it has been updated, or its state has been loaded."""
        master = self._master_of.get(slot)
        if master is None:
            return False
        return not is_alone(slot.bucket) or dict.__contains__(self.by_master, master.tensor)

    def key_of(self, slot: BucketSlot) -> Tensor:
        """The key of one parameter's state in the optimizer's own mapping. The parameter gets a separate master."""
        return self.masters_over([slot])[0].tensor

    def by_parameter(self, leaf: Leaf, parameters: Sequence[Tensor] | None = None) -> States:
        """The state by parameter: first for parameters without an engine, then for engines' parameters. Collective.

        Args:
            leaf: converts each tensor; with ``in_parts``, entries by element are sharded tensors that share memory with
                the masters' entries.
            parameters: the parameters whose state to return; by default all that the optimizer holds, and before them
                the entries that belong to no parameter.
        """
        found: States = {}
        if parameters is None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            found = of_no_parameter(self.by_master)
        slots = {slot: p for p in parameters if (slot := slot_of(p)) is not None}
        with self._met(list(slots)):
            states = self._in_parts(list(slots))
            # also of parameters in user code's own mapping, until the next step
            found |= {p: state for p in parameters if (state := dict.get(self.by_master, p))}
            found |= {slots[slot]: state for slot, state in states.items() if state and slots[slot] not in found}
            if leaf is in_parts:
                return found
            return {p: as_made_of_tensors(state) for p, state in walk(found, leaf).items()}

    def shown(self, parameter: Tensor) -> dict[str, Any]:
        """The state of one parameter, to whose tensors user code may write. Collective."""
        state = self.by_parameter(in_parts, [parameter]).get(parameter, {})
        return {
            key: self._writable(parameter, key, value) if type(value) is Tensor and not value.dim() else value
            for key, value in state.items()
        }

    def _writable(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        """A small entry that is written to this parameter's state alone, though parameters share their master's."""
        slot = slot_of(parameter)
        assert slot is not None

        def write(new: Tensor) -> None:
            value.copy_(new)
            self.synchronize()
            (master,) = self.masters_over([slot])
            if master.is_here:
                self.by_master[master.tensor][key].copy_(new)

        return LazyTensor(
            f"{key} of {slot.name}", (), value.dtype, lambda *_: value.view(1), write=write, device=value.device
        )

    def state_dict(self, leaf: Leaf) -> dict[str, Any]:
        """The optimizer's ``state_dict()``, with each tensor converted by ``leaf``. Collective."""
        self._leaf = leaf
        try:
            return self.optimizer.state_dict()
        finally:
            self._leaf = whole
            self.put_back()

    def before_state_dict(self, _: Any) -> None:
        """Hook before ``state_dict()``: provide the state by parameter, as torch expects it.

        The argument may be a wrapper of the optimizer, such as Lightning's, which has no ``state`` of its own.
        """
        self.put_back()
        states = self.by_parameter(self._leaf)
        self._own, self.optimizer.state = self.optimizer.state, defaultdict(dict, states)

    def put_back(self, *_: Any) -> None:
        """Hook after ``state_dict()``: undo ``before_state_dict``. Also called after ``state_dict()`` has raised."""
        if self._own is not None:
            self.optimizer.state, self._own = self._own, None

    def _met(self, slots: list[BucketSlot]) -> AbstractContextManager[None]:
        """Context for collectives on these parameters' state; every rank must enter it."""
        what = f"the state of {type(self.optimizer).__name__}"
        return slots[0].bucket.communicator.rendezvous.met(what) if slots else nullcontext()

    def _in_parts(self, slots: list[BucketSlot]) -> dict[BucketSlot, dict[str, Any]]:
        if not slots:
            return {}
        self.synchronize()
        own: dict[int, dict[str, Any]] = {}
        of_masters: dict[Master, dict[str, Any]] = {}  # a master's parameters share its description
        for number, slot in enumerate(slots):
            master = self._master_of.get(slot)
            is_empty = slot.share.own_shape.numel() == 0
            if master is not None and (slot.local_numel or (is_empty and master.is_here)):
                if master not in of_masters:
                    of_masters[master] = self._description(master)
                own[number] = of_masters[master]
        # for parameters of which this rank owns no part, other ranks provide the dtypes and the small entries
        known: dict[int, dict[str, Any]] = {}
        for found in slots[0].bucket.communicator.control.gather_objects(own):
            known = found | known
        return {
            slot: {key: self._entry(slot, key, entry) for key, entry in known.get(number, {}).items()}
            for number, slot in enumerate(slots)
        }

    def _description(self, master: Master) -> dict[str, Any]:
        """A master's state in a form for other ranks: dtypes of entries by element, and all other entries described."""
        of_rest = described if master.bucket.layout.is_whole else Small
        shape, description = master.tensor.shape, {}
        for key, value in self.by_master.get(master.tensor, {}).items():
            is_one = is_by_element(key, value, shape)
            if not is_one and not is_whole(master.bucket) and any(t.shape == shape for t in tensors_in(value)):
                raise TypeError(
                    f"{type(self.optimizer).__name__} has tensors with a number for each element inside of the entry "
                    f"{key!r} of its state, which cannot be divided by parameter: set whole_parameters=True."
                )
            description[key] = value.dtype if is_one else of_rest(in_plain_tensors(value))
        return description

    def _entry(self, slot: BucketSlot, key: str, entry: Any) -> Any:
        master = self._master_of.get(slot)
        if not isinstance(entry, torch.dtype):
            is_here = slot.local_numel and master is not None and not isinstance(entry, Small)
            tensors = tensors_in(in_plain_tensors(self.by_master[master.tensor][key])) if is_here else None  # type: ignore[union-attr]

            def owned(what: Owned) -> Tensor:
                part = tensors[what.number].detach().reshape(-1) if tensors is not None else None
                if part is None:
                    part = torch.empty(0, dtype=what.dtype, device=slot.device)
                of_it = OwnedSlot(slot, f"{key} of {slot.name}", what.shape, what.dtype)
                return ShardedTensor(of_it, part, keep=self)

            return resolved(entry, owned, slot.device)
        if master is None or not slot.local_numel:
            return ShardedTensor(slot, torch.empty(0, dtype=entry, device=slot.device), keep=self)
        if (on_disk := slot.bucket.states) is not None:
            return ShardedTensor(slot, on_disk.tensor(field_of(key, entry), slot.local_range), keep=self)
        part = self.by_master[master.tensor][key].reshape(-1)[master.part_of(slot)]
        return ShardedTensor(slot, part, keep=self)

    # -- by master --------------------------------------------------------------------------------------------------

    def load(self, state_dict: dict[str, Any]) -> None:
        """Replaces the optimizer's ``load_state_dict``, and converts the loaded state to state by master.

        The method of the optimizer's class, which may write to ``state``, runs while stand-ins of the same shapes,
        which take almost no memory, replace the parameters. For integer stand-ins, torch's own method casts no states.
        Users' post-hooks are called once the state has been converted.
        """
        self.synchronize()  # an update that is still queued needs the present state
        is_torchs = type(self.optimizer).load_state_dict is Optimizer.load_state_dict
        optimizer, parameter_of = self.optimizer, dict[Tensor, Tensor]()
        groups, state = optimizer.param_groups, optimizer.state
        for parameter in (p for group in groups for p in group["params"]):
            slot, stand_in = slot_of(parameter), parameter
            if slot is not None:
                dtype = torch.int8 if is_torchs else slot.bucket.residency.plan.update_dtype
                value = torch.empty((), dtype=dtype, device="cpu" if is_torchs else slot.device)
                stand_in = torch.nn.Parameter(value.expand(slot.shape), parameter.requires_grad and not is_torchs)
            parameter_of[stand_in] = parameter
        stand_ins = iter(parameter_of)
        before = dict(vars(optimizer))
        optimizer.param_groups = [{**group, "params": [next(stand_ins) for _ in group["params"]]} for group in groups]
        optimizer.state = defaultdict(dict)
        if is_torchs:
            entries = state_dict["state"].items()
            state_dict = {**state_dict, "state": {key: _map_values(_Unread.of, entry) for key, entry in entries}}
        try:
            with without_load_hooks(optimizer) as hooks:
                type(optimizer).load_state_dict(optimizer, state_dict)
            loaded, states = optimizer.param_groups, optimizer.state
        finally:
            optimizer.param_groups, optimizer.state = groups, state
        # the method may have kept stand-ins in attributes
        new = {name: value for name, value in vars(optimizer).items() if value is not before.get(name, before)}
        vars(optimizer).update(walk(new, lambda tensor: parameter_of.get(tensor, tensor)))
        optimizer.param_groups = [
            {**of_file, "params": group["params"]} for group, of_file in zip(groups, loaded, strict=True)
        ]
        read = {parameter_of.get(key, key): _map_values(_Unread.value_of, state) for key, state in states.items()}
        self.adopt(read, loaded=is_torchs)
        for hook in hooks:
            hook(optimizer)

    def adopt(self, states: States, loaded: bool = False) -> None:
        """Replace all state by ``states``, converted from state by parameter to state by master.

        Args:
            loaded: whether to cast tensors to the dtype of the update, as torch casts loaded ones to the parameter's.
        """
        self.synchronize()
        states = walk(states, in_full, is_dtensor)  # DTensor states from before the module was sharded
        optimizer = self.optimizer
        self.forget_masters()
        self._measured = -1
        optimizer.state, self._own = StateMapping(self), None
        by_slot: dict[BucketSlot, dict[str, Any]] = {}
        for parameter, state in states.items():
            slot = slot_of(parameter)
            if not isinstance(parameter, Tensor):
                optimizer.state[parameter] = state
            elif slot is None:
                optimizer.state[parameter] = {key: copied(value) for key, value in state.items()}
            elif state:
                by_slot[slot] = state
        alike: dict[Any, list[BucketSlot]] = {}  # parameters that may share a master
        for number, group in enumerate(optimizer.param_groups):
            for slot in (slot for parameter in group["params"] if (slot := slot_of(parameter)) in by_slot):
                entries: Any = slot  # a parameter that one rank owns whole shares no master
                if not slot.bucket.layout.is_whole:
                    entries = tuple(
                        (key, None if is_by_element(key, value, slot.shape) else comparable(value))
                        for key, value in by_slot[slot].items()
                    )
                alike.setdefault((number, entries), []).append(slot)
        for (number, _), slots in alike.items():
            for run in runs_of(slots):
                if (master := self._add(run)).is_here:
                    group = optimizer.param_groups[number]
                    cut = self._cut(master, group, [by_slot[slot] for slot in run], loaded)
                    optimizer.state[master.tensor] = cut
        self.measure()

    def _cut(self, master: Master, group: dict[str, Any], states: list[dict[str, Any]], loaded: bool) -> dict[str, Any]:
        """The state of one master, from the states of its parameters, whose small entries are equal."""
        casts = loaded and master.tensor.is_floating_point()

        def other(key: str, value: Any) -> Any:
            value = _held_here(in_plain_tensors(value))
            if casts and key != "step":
                value = in_dtype(value, master.bucket.residency.plan.update_dtype)
            return as_made_of_tensors(placed(key, value, group, master.device))

        return {
            key: self._cut_entry(key, master, group, [state[key] for state in states], casts)
            if is_by_element(key, first, master.slots[0].shape)
            else other(key, first)
            for key, first in states[0].items()
        }

    def _cut_entry(self, key: str, master: Master, group: dict[str, Any], values: list[Tensor], casts: bool) -> Tensor:
        """A master's entry by element: this rank's parts of ``values``, the entries of the master's parameters."""
        first, plan = values[0], master.bucket.residency.plan
        dtype = first.dtype
        if first.is_floating_point():
            if casts:
                dtype = plan.update_dtype
            elif dtype == master.slots[0].dtype:  # any other dtype is the optimizer's own choice
                dtype = torch.promote_types(dtype, plan.update_dtype)
            dtype = plan.state_dtype_of(dtype)
        entry = torch.empty(master.tensor.shape, dtype=dtype, device=master.device)
        for value, slot in zip(values, master.slots):
            part = _initial(key, slot, group) if value.is_meta else local_range_of(value.detach(), slot)
            entry.view(-1)[master.part_of(slot)] = part
        if master.bucket.states is None:
            return entry
        master.write_state(key, entry)
        return master.state_on_disk(key, dtype)


class _Unread:
    """Holds a dict in a loaded state. torch copies dicts entry by entry, and replaces strings in them by generators."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value

    @staticmethod
    def of(value: Any) -> Any:
        return _Unread(value) if isinstance(value, dict) else value

    @staticmethod
    def value_of(value: Any) -> Any:
        return value.value if isinstance(value, _Unread) else value


def _map_values(function: Callable[[Any], Any], state: Any) -> Any:
    return {key: function(value) for key, value in state.items()} if isinstance(state, dict) else state


class StateMapping(defaultdict[Any, dict[str, Any]]):
    """``optimizer.state``, whose keys are masters. A lookup by a module's parameter returns state in sharded tensors.

    On a single rank without offload, where each parameter has its own master, the lookup returns that master's state.

    Raises:
        TypeError: if user code replaces or removes the state of a single parameter of a sharded module.
    """

    def __init__(self, states: MasterStates) -> None:
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
        return StateOfParameter(self._states.shown(key))

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
        super().clear()
        self._states.forget_masters()

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


class StateOfParameter(Mapping[str, Any]):
    """The state of one parameter. Values that user code assigns to its tensors are copied to the shards."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries = entries

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return repr(self._entries)

    def __setitem__(self, key: str, value: Any) -> None:
        present = self._entries.get(key)
        if not isinstance(present, Tensor) or not isinstance(value, Tensor) or value.shape != present.shape:
            raise TypeError(
                f"{key!r} cannot be set in the optimizer's state of a sharded parameter: outside of step(), only a "
                "tensor can be replaced, by one of the same shape. Keep values of your own in a dict by parameter "
                "(kept[p] = p.detach().clone()), or call load_state_dict() to change other entries."
            )
        with torch.no_grad():
            present.copy_(value)


def _held_here(entry: Any) -> Any:
    """On the owning rank, replace an entry's sharded tensors (of an ``OwnedSlot``) by ordinary ones."""
    return walk(entry, lambda t: t.local.view(t.shape) if isinstance(t, ShardedTensor) else t)


def _initial(key: str, slot: BucketSlot, group: dict[str, Any]) -> Tensor:
    """This rank's part of an entry (Adagrad's ``sum``) that was created while the parameter was on the meta device."""
    if key == "sum" and "initial_accumulator_value" in group:
        return torch.full((slot.local_numel,), group["initial_accumulator_value"], dtype=torch.float64, device="cpu")
    raise RuntimeError(
        f"The optimizer's state {key!r} of '{slot.name}' has no values, because it was created while the parameter was "
        "on the meta device. Create the state in the first step(), as torch's optimizers do, or create the module "
        "outside of torch.device('meta')."
    )
