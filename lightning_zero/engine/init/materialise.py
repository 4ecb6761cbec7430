"""Materialise and shard a module unit by unit, so that only the root and one other unit are unsharded at a time.

A module that was made on the meta device is initialised in the order of ordinary construction: submodules before the
module that contains them. A unit is sharded when all of its modules have been initialised. A module may later
initialise parameters of sharded units inside it: the new values are then written to the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.compat import replaced
from lightning_zero.engine.init.bucketing import shard
from lightning_zero.engine.init.deferred_param import is_on_meta
from lightning_zero.engine.init.sources import Source
from lightning_zero.engine.plan.units import UnitPlan
from lightning_zero.engine.state.bucket import Bucket, UnshardedBucket
from lightning_zero.engine.state.slot import slot_of
from lightning_zero.engine.tensor import sharded_tree
from lightning_zero.engine.tensor.identity import with_attributes
from lightning_zero.engine.tensor.lazy_tensor import (
    APPLIED,
    OF_ADAPTERS,
    OWN,
    in_memory,
    initialiser_label,
    is_unset,
    takes,
    unset,
)
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.io.text import listed

Call = Callable[[], Any]


def initialisers_of(module: nn.Module, sources: dict[str, Source]) -> dict[int, list[Call]]:
    """The initialisers of each module that has new tensors, in the order of ordinary construction, by the module's id.

    Raises:
        ValueError: if a new tensor has no initialiser.
    """
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    calls: dict[int, list[Call]] = {}
    owner_of: dict[str, str] = {}  # the class of the first module that holds the tensor
    lacking: set[str] = set()
    for inner, ancestors in inside_out(module):
        new = {name for tensor in _tensors(inner) if sources[name := names[id(tensor)]].is_new}
        own = {name for tensor in _tensors(inner, recurse=False) if (name := names[id(tensor)]) in new}
        if new:
            recorded = {label for name in own or new for label in sources[name].initialised_by}
            calls[id(inner)] = _own(inner) + _applied(inner, ancestors, recorded) + _of_adapters(inner, ancestors)
        if not any(map(_has_initialiser, (inner, *ancestors))):
            lacking |= own - owner_of.keys()
        for name in own:
            owner_of.setdefault(name, type(inner).__name__)
    if lacking:
        lacking_in_order = [name for name in sources if name in lacking]
        raise ValueError(
            f"{listed(lacking_in_order)}: on the meta device without values, and there is no reset_parameters() in "
            f"{listed(dict.fromkeys(owner_of[name] for name in lacking_in_order))}. Define it, without arguments, to "
            "initialise the module's own parameters and buffers in place; or load the values in configure_model "
            "(lightning_zero.load_weights); or construct the module outside of torch.device('meta')."
        )
    return calls


def _applied(module: nn.Module, ancestors: Sequence[nn.Module], recorded: set[str]) -> list[Call]:
    """The methods that models have applied to the module (``self.apply(self._init_weights)``), innermost first.

    Args:
        recorded: the initialisers that lazy tensors of the module have recorded. If there are none, as with tensor
            parallelism, the innermost model's method counts.
    """
    models: list[Any] = [model for model in (module, *reversed(ancestors)) if takes(getattr(model, APPLIED, None), 1)]
    models = [model for model in models if initialiser_label(APPLIED, model) in recorded] if recorded else models[:1]
    return [partial(getattr(model, APPLIED), module) for model in models]


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor or parameter on the meta device with the same shape, dtype and attributes."""
    return with_attributes(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def inside_out(
    module: nn.Module, ancestors: tuple[nn.Module, ...] = (), seen: set[nn.Module] | None = None
) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Each module once, after its submodules, with the modules that contain it, outermost first."""
    seen = set() if seen is None else seen
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from inside_out(child, (*ancestors, module), seen)
    yield module, ancestors


def _tensors(module: nn.Module, recurse: bool = True) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _own(module: nn.Module) -> list[Call]:
    """``reset_parameters``, or ``_reset_parameters`` in torch's attention and transformer modules."""
    methods = [getattr(module, name, None) for name in OWN]
    return [method for method in methods if takes(method, 0)][:1]


def _of_adapters(module: nn.Module, ancestors: Sequence[nn.Module]) -> list[Call]:
    """PEFT's ``reset_lora_parameters``, once per adapter."""
    reset: Any = getattr(module, OF_ADAPTERS, None)
    if not callable(reset):
        return []
    configs: Any = next((m.peft_config for m in reversed(ancestors) if hasattr(m, "peft_config")), {})
    adapters = (*module.lora_A, *module.lora_embedding_A)  # type: ignore[misc]
    return [partial(reset, name, getattr(configs.get(name), "init_lora_weights", True)) for name in adapters]


def _has_initialiser(module: nn.Module) -> bool:
    """Whether a module initialises tensors, of its own or of modules in it."""
    return bool(_own(module)) or hasattr(module, OF_ADAPTERS) or takes(getattr(module, APPLIED, None), 1)


def detach_kept_graphs(module: nn.Module) -> None:
    """Detach tensors stored in modules by a forward (as in old ``weight_norm``): their graphs keep parameters alive."""
    for inner in module.modules():
        for attribute, value in vars(inner).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(inner, attribute, value.detach())


# -- materialising -----------------------------------------------------------------------------------------------------


class Materialiser:
    """Materialises and shards the units of one module, whose values come from ``sources`` or from initialisation."""

    def __init__(
        self,
        module: nn.Module,
        plans: list[UnitPlan],
        unsharded: list[list[UnshardedBucket]],
        sources: dict[str, Source],
        initialisers: dict[int, list[Call]],
        communicator: Communicator,
    ) -> None:
        self._module, self._unsharded, self._sources = module, unsharded, sources
        self._initialisers, self._communicator = initialisers, communicator
        # Unit numbers, by the id of the unit's last module: once that module is materialised, the unit is complete.
        self._unit_of = {id(module if plan.is_root else plan.blocks[-1]): number for number, plan in enumerate(plans)}
        self._buckets: list[list[Bucket]] = [[] for _ in unsharded]
        named = ((name, parameter) for plan in plans for name, parameter in plan.parameters.items())
        self._new_parameters = {id(p): (name, p) for name, p in named if sources[name].is_new}
        self._rooms: dict[int, Tensor] = {}  # memory for new parameters that are not sharded yet, by the parameter's id
        self._buffers_with_values: set[int] = set()  # ids
        self._initialised: set[int] = set()

    def run(self) -> list[list[Bucket]]:
        """Materialise and shard all units, and return each unit's buckets. Collective."""
        is_new = any(source.is_new for source in self._sources.values())
        meeting = self._communicator.rendezvous.met("the module's initial values") if is_new else nullcontext()
        drawing = _drawing_as_rank_0(self._communicator) if is_new else nullcontext()
        with torch.no_grad(), meeting, drawing:
            self._place_buffers()
            for module, _ in inside_out(self._module):
                self._initialise(module)
                if id(module) in self._unit_of:
                    self._shard_unit(self._unit_of[id(module)])
            self._repeat_writes()
            if is_new:
                self._check_all_have_values()
        return self._buckets

    def _shard_unit(self, number: int) -> None:
        for unsharded in self._unsharded[number]:
            sources = []
            for segment, parameter in zip(unsharded.plan.layout.segments, unsharded.parameters):
                source = self._sources[segment.name]
                if source.is_new:
                    source = source._replace(values=segment.share.own(self._room_of(parameter)))
                    del self._rooms[id(parameter)]
                sources.append(source)
            self._buckets[number].append(shard(unsharded, sources))

    def _place_buffers(self) -> None:
        """Move all buffers to the device. Those without values get memory that is marked as unset."""
        device, parallel, placed = self._communicator.device, self._communicator.tensor, dict[int, Tensor]()
        originals = dict(self._module.named_buffers())  # kept alive, so that their ids stay unique as keys
        for buffer_name, buffer in originals.items():
            source = self._sources[buffer_name]
            if source.values is not None:
                own = in_memory(source.values).to(device)
                placed[id(buffer)] = parallel.shown(own, parallel.placed(buffer_name, buffer))
            else:
                placed[id(buffer)] = unset(torch.empty_like(buffer, device=device))
            if not source.is_new:
                self._buffers_with_values.add(id(placed[id(buffer)]))
        for inner in self._module.modules():
            for name, present in inner._buffers.items():
                if present is not None:
                    inner._buffers[name] = placed[id(present)]

    # -- new parameters and buffers ---------------------------------------------------------------------------------

    def _initialise(self, module: nn.Module) -> None:
        calls = self._initialisers.get(id(module), [])
        if not calls:
            return
        with self._only_new_in_reach(module):
            for call in calls:
                call()
        self._initialised.update(id(p) for p in module._parameters.values() if id(p) in self._new_parameters)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(self._communicator.device)

    @contextmanager
    def _only_new_in_reach(self, module: nn.Module) -> Iterator[None]:
        """Context for a module's initialiser: meta tensors replace tensors that have values and must not change."""
        instead: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in self._new_parameters:
                instead[name] = on_meta(parameter)
            elif id(parameter) in self._initialised and name in module._parameters:
                # tied, and already initialised by another module: this module's values are dropped
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._communicator.device)
                instead[name] = with_attributes(parameter, value)
            else:
                instead[name] = self._room_of(parameter)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if id(buffer) in self._buffers_with_values:
                instead[name] = on_meta(buffer)
        present = dict(instead)
        with replaced(module, present, tied=False):
            yield
        for name, tensor in instead.items():
            if present[name] is not tensor and not is_on_meta(tensor):
                tensor.copy_(present[name])  # the initialiser assigned a new tensor

    def _room_of(self, parameter: nn.Parameter) -> Tensor:
        """Memory for a new parameter's values, which are marked as unset; the parameter itself if it is sharded."""
        if isinstance(parameter, ShardedTensor):
            return parameter
        if id(parameter) not in self._rooms:
            room = unset(torch.empty(parameter.shape, dtype=parameter.dtype, device=self._communicator.device))
            self._rooms[id(parameter)] = with_attributes(parameter, room)
        return self._rooms[id(parameter)]

    def _repeat_writes(self) -> None:
        """Repeat rank 0's writes to new tensors, now that modules have initialised these tensors."""
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            if name in self._sources and (writes := self._sources[name].writes):
                values = sharded_tree.whole(tensor.detach())  # each write to a shard would gather it
                for write in writes:
                    write(values)
                tensor.copy_(_of_rank_0(self._communicator, values))

    def _check_all_have_values(self) -> None:
        missing = [
            name
            for name, parameter in self._new_parameters.values()
            if (slot := slot_of(parameter)) is not None and is_unset(slot.local_parameter())
        ]
        missing += [
            name
            for name, buffer in self._module.named_buffers()
            if name in self._sources and self._sources[name].is_new and is_unset(buffer)
        ]
        everywhere = self._communicator.everyone.gather_objects(missing)
        found = list(dict.fromkeys(name for names in everywhere for name in names))
        if found:
            raise RuntimeError(
                f"{listed(found)}: still without values after every module was initialised. On the meta device, values "
                "that __init__ writes are lost: initialise all of the module's own parameters and buffers in "
                "reset_parameters(), or construct the module outside of torch.device('meta')."
            )


def _of_rank_0(communicator: Communicator, values: Tensor) -> Tensor:
    return communicator.tensor.control.broadcast(communicator.control.broadcast(values.clone()))


@contextmanager
def _drawing_as_rank_0(communicator: Communicator) -> Iterator[None]:
    """Context in which all ranks use rank 0's RNG state; on exit, ranks whose own state differed restore that state."""
    device, states = communicator.device, []
    generators: list[tuple[Any, tuple[Any, ...]]] = [(torch.random, ())]
    if device.type != "cpu":
        generators.append((torch.get_device_module(device), (device,)))
    for module, where in generators:
        own = module.get_rng_state(*where)
        first = _of_rank_0(communicator, own)
        module.set_rng_state(first, *where)
        if not torch.equal(own, first):
            states.append((module, own, where))
    try:
        yield
    finally:
        for module, own, where in states:
            module.set_rng_state(own, *where)
