"""Fill a module and cut it, module by module, so that of what is new no more than a unit, and the root, is ever whole.

A module that was made on the meta device is initialised in the order of ordinary construction: the modules inside of
another before it. Each tensor is written straight into the flat buffer of its bucket, and a bucket is cut when its unit
is complete. What a module initialises of units that are complete, inside of it, is written to their parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.agreement import Agreement
from lightning_zero.engine.bucket import Bucket
from lightning_zero.engine.collectives import Communicator
from lightning_zero.engine.promises import is_on_meta
from lightning_zero.engine.schedule import Unit
from lightning_zero.engine.sharded_tensor import ShardedTensor
from lightning_zero.engine.sources import Source, listed
from lightning_zero.engine.stored import in_memory
from lightning_zero.engine.units import UnitPlan


def check_can_be_initialised(module: nn.Module, sources: dict[str, Source]) -> None:
    """Refuse new parameters and buffers that no module would initialise.

    Raises:
        ValueError: naming all of them.
    """
    lacking = dict(_lacking(module, "", sources, [], False))
    if lacking:
        raise ValueError(
            f"{listed(lacking)}: on the meta device, and nothing gives them values, as "
            f"{listed(dict.fromkeys(lacking.values()))} has no reset_parameters(). Define that method, which "
            "initialises the module's own parameters and buffers in place and takes no argument; or load the values in "
            "configure_model (lightning_zero.load_weights); or make the module outside of torch.device('meta')."
        )


def _lacking(
    module: nn.Module, prefix: str, sources: dict[str, Source], ancestors: list[nn.Module], has_initialiser: bool
) -> Iterator[tuple[str, str]]:
    """Name, and class of the owner, of what is new and has no module around that could initialise it."""
    has_initialiser = has_initialiser or bool(_initialisers(module, ancestors))
    for name in (*module._parameters, *module._buffers):
        source = sources.get(f"{prefix}{name}")  # a tied one has its first name there
        if source is not None and source.is_new and not has_initialiser:
            yield f"{prefix}{name}", type(module).__name__
    for name, child in module.named_children():
        yield from _lacking(child, f"{prefix}{name}.", sources, [*ancestors, module], has_initialiser)


class Materialiser:
    """Fills and cuts the units of one module.

    Args:
        module: the root.
        plans, units: as planned; their buckets are not cut yet.
        sources: by name.
    """

    def __init__(
        self,
        module: nn.Module,
        plans: list[UnitPlan],
        units: list[Unit],
        sources: dict[str, Source],
        communicator: Communicator,
        agreement: Agreement,
    ) -> None:
        self._communicator, self._agreement = communicator, agreement
        self._sources = sources
        # by the module with which a unit is complete
        self._unit_of = {
            id(module if plan.is_root else plan.blocks[-1]): (plan, unit) for plan, unit in zip(plans, units)
        }
        self._new_parameters: dict[int, tuple[Bucket, int]] = {}
        for plan, unit in zip(plans, units):
            for bucket in unit.buckets:
                for index, segment in enumerate(bucket.layout.segments):
                    if sources[segment.name].is_new:
                        self._new_parameters[id(plan.parameters[segment.name])] = bucket, index
        self._new_replicas: list[Bucket] = []  # that are cut
        self._buffers_before = list(module.buffers())  # kept, as they are told apart by id
        by_id = {id(buffer): sources[name] for name, buffer in module.named_buffers()}
        self._source_of_buffer = {
            (id(inner), name): by_id[id(buffer)]
            for inner in module.modules()
            for name, buffer in inner._buffers.items()
            if buffer is not None
        }
        self._placed: dict[int, Tensor] = {}
        self._initialised: set[int] = set()
        self._written: set[int] = set()
        self._seen: set[int] = set()
        self._module = module

    def run(self) -> None:
        """Do it all. Collective.

        Raises:
            RuntimeError: on every rank, if a new parameter or buffer has no values in the end.
        """
        is_new = any(source.is_new for source in self._sources.values())
        meeting = self._agreement.met("the module's initial values") if is_new else nullcontext()
        drawing = _drawing_as_rank_0(self._communicator) if is_new else nullcontext()
        with torch.no_grad(), meeting, drawing:
            self._visit(self._module, [])
            if is_new:
                self._check_all_have_values()

    def _visit(self, module: nn.Module, ancestors: list[nn.Module]) -> bool:
        """Fill and cut what is inside of a module, then itself; whether any of it is new."""
        self._seen.add(id(module))
        is_new = any(id(parameter) in self._new_parameters for parameter in module._parameters.values())
        for child in module.children():
            if id(child) not in self._seen:
                is_new |= self._visit(child, [*ancestors, module])
        is_new |= self._place_buffers(module)
        if is_new:
            self._initialise(module, ancestors)
        if id(module) in self._unit_of:
            plan, unit = self._unit_of[id(module)]
            for bucket in unit.buckets:
                names = [segment.name for segment in bucket.layout.segments]
                sources = [self._sources[name] for name in names]
                bucket.cut([plan.parameters[name] for name in names], sources)
                if bucket.replicated and any(source.is_new for source in sources):
                    self._new_replicas.append(bucket)
        return is_new

    def _place_buffers(self, module: nn.Module) -> bool:
        """Put the buffers of a module on the device; whether any is new."""
        device, is_new = self._communicator.device, False
        for name, buffer in module._buffers.items():
            if buffer is not None:
                source = self._source_of_buffer[id(module), name]
                is_new = is_new or source.is_new
                if id(buffer) not in self._placed:
                    if source.values is not None:
                        self._placed[id(buffer)] = in_memory(source.values).to(device)
                    else:
                        self._placed[id(buffer)] = _unset(torch.empty_like(buffer, device=device))
                module._buffers[name] = self._placed[id(buffer)]
        return is_new

    # -- what is new ------------------------------------------------------------------------------------------------

    def _initialise(self, module: nn.Module, ancestors: list[nn.Module]) -> None:
        calls = _initialisers(module, ancestors)
        if not calls:
            return
        versions = [bucket.full._version for bucket in self._new_replicas]
        with self._only_new_in_reach(module):
            for call in calls:
                call()
        for bucket, version in zip(self._new_replicas, versions):
            if bucket.full._version != version:
                bucket.gather(refresh=True)  # whatever the ranks have drawn, replicas are alike
                bucket.wait()
        self._initialised.update(id(p) for p in module._parameters.values() if id(p) in self._new_parameters)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(self._communicator.device)

    @contextmanager
    def _only_new_in_reach(self, module: nn.Module) -> Iterator[None]:
        """While a module initialises itself: what has values stands there on the meta device, where writes are lost."""
        rooms: dict[int, Tensor] = {}
        places: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        for inner in module.modules():
            for name, parameter in inner._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in self._new_parameters:
                    instead = _on_meta(parameter)
                elif inner is module and id(parameter) in self._initialised:
                    # tied: the first module that owns it has given it values, this one draws its numbers in vain
                    instead = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._communicator.device)
                    instead = nn.Parameter(instead, parameter.requires_grad)
                elif id(parameter) in rooms:
                    instead = rooms[id(parameter)]
                else:
                    instead = rooms[id(parameter)] = self._room_of(parameter)
                places.append((inner._parameters, name, parameter, instead))
            for name, buffer in inner._buffers.items():
                source = self._source_of_buffer.get((id(inner), name))
                if buffer is not None and source is not None and not source.is_new:
                    places.append((inner._buffers, name, buffer, _on_meta(buffer)))
        for holder, name, _, instead in places:
            holder[name] = instead
        try:
            yield
            for holder, name, _, instead in places:
                if holder[name] is not instead and not is_on_meta(instead):
                    instead.copy_(holder[name])  # what was put in its place counts as its values
        finally:
            for holder, name, tensor, _ in places:
                holder[name] = tensor

    def _room_of(self, parameter: nn.Parameter) -> Tensor:
        if isinstance(parameter, ShardedTensor):
            return parameter
        bucket, index = self._new_parameters[id(parameter)]
        room = bucket.room(index)
        if id(parameter) not in self._written:
            self._written.add(id(parameter))
            _unset(room)
        return nn.Parameter(room, parameter.requires_grad)

    def _check_all_have_values(self) -> None:
        unset = [
            bucket.layout.segments[index].name
            for bucket, index in self._new_parameters.values()
            if _is_unset(bucket.slots[index].local_parameter())
        ]
        unset += [
            name
            for name, buffer in self._module.named_buffers()
            if name in self._sources and self._sources[name].is_new and _is_unset(buffer)
        ]
        found = list(dict.fromkeys(name for names in self._communicator.gather_objects(unset) for name in names))
        if found:
            raise RuntimeError(
                f"{listed(found)}: still without values after every module was initialised. A module made on the meta "
                "device gets what reset_parameters() writes, not what __init__ does: write all of the module's own "
                "parameters and buffers there, or make the module outside of torch.device('meta')."
            )


def _initialisers(module: nn.Module, ancestors: list[nn.Module]) -> list[Callable[[], Any]]:
    """What gives a module its values, in the order of ordinary construction.

    Its own method, by torch's convention (torch's attention and transformer have an underscore before it); then what a
    model around it does to each of its modules (``self.apply(self._init_weights)``: transformers, timm, minGPT); then
    what PEFT does to the adapters in it.
    """
    calls: list[Callable[[], Any]] = []
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method) and _required_arguments(method) == 0:
            calls.append(method)
            break
    for model in (module, *reversed(ancestors)):
        method = getattr(model, "_init_weights", None)
        if callable(method) and _required_arguments(method) == 1:
            calls.append(partial(method, module))
            break
    reset_adapter: Any = getattr(module, "reset_lora_parameters", None)
    if callable(reset_adapter):
        configs: Any = next((m.peft_config for m in reversed(ancestors) if hasattr(m, "peft_config")), {})
        for adapter in (*module.lora_A, *module.lora_embedding_A):  # type: ignore[misc]
            how = getattr(configs.get(adapter), "init_lora_weights", True)
            calls.append(partial(reset_adapter, adapter, how))
    return calls


def _required_arguments(method: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return 0
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _on_meta(tensor: Tensor) -> Tensor:
    if is_on_meta(tensor):
        return tensor
    instead = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(instead, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else instead


def _unset(tensor: Tensor) -> Tensor:
    """Mark a tensor as not written to."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min)


def _is_unset(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    least = 0 if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min
    return least < 0 and tensor.numel() > 0 and bool((tensor == least).all())


@contextmanager
def _drawing_as_rank_0(communicator: Communicator) -> Iterator[None]:
    """Draw rank 0's random numbers. A rank that would have drawn others has its own again after it."""
    states = []
    devices = [torch.device("cpu"), *([communicator.device] if communicator.device.type != "cpu" else [])]
    for device in devices:
        generators: Any = torch.random if device.type == "cpu" else torch.get_device_module(device)
        where = () if device.type == "cpu" else (device,)
        own = generators.get_rng_state(*where)
        first = communicator.from_first(own.clone())
        generators.set_rng_state(first, *where)
        if not torch.equal(own, first):
            states.append((generators, own, where))
    try:
        yield
    finally:
        for generators, own, where in states:
            generators.set_rng_state(own, *where)
