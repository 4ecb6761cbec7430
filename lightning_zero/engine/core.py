"""The engine: a module's parameters, gradients and optimizer state over the ranks of a data-parallel group."""

from __future__ import annotations

import copy
import ctypes
import logging
import sys
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine import differentiation
from lightning_zero.engine.agreement import Agreement
from lightning_zero.engine.autocast import is_cast_by_autocast
from lightning_zero.engine.bucket import LOW_PRECISION, Bucket, BucketSlot, Ledger, become
from lightning_zero.engine.checkpointing import CheckpointedModule, modules_to_checkpoint
from lightning_zero.engine.collectives import Communicator, size_of, wire_dtype_of
from lightning_zero.engine.compilation import OwnHook
from lightning_zero.engine.elementwise import check_optimizer
from lightning_zero.engine.gradients import GradientReducer
from lightning_zero.engine.layout import BucketLayout
from lightning_zero.engine.masters import Masters, make_room, masters_of
from lightning_zero.engine.materialise import Materialiser, check_can_be_initialised
from lightning_zero.engine.offload.activations import activation_store
from lightning_zero.engine.offload.config import offload_config
from lightning_zero.engine.offload.planning import available_memory, check_room
from lightning_zero.engine.offload.states import Swap
from lightning_zero.engine.offload.swap import SwapFolder
from lightning_zero.engine.offload.updates import Updates, fields_by_parameter
from lightning_zero.engine.placement import Placement, placements_of, replicated_bytes
from lightning_zero.engine.promises import values_of
from lightning_zero.engine.schedule import Schedule, Unit, in_backward
from lightning_zero.engine.settling import settle
from lightning_zero.engine.sharded_tensor import ShardedTensor, local_range_of
from lightning_zero.engine.sources import agree_on_sources
from lightning_zero.engine.streams import current_stream
from lightning_zero.engine.uneven import Turns, UnevenMethod
from lightning_zero.engine.units import UnitPlan, Units, plan_units, share_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What an engine holds and what it has communicated.

    Attributes:
        stage, world_size: as set up.
        numel: Psi, elements of all parameters.
        padded_numel: the same with the gaps and padding of the buckets.
        at_rest: bytes held now by category: parameters, gathered, gradients, reduction, optimizer.
        peak: the same at the moment of the highest total since the last ``reset_peak``.
        calls, elements, bytes: per kind of collective ("all_gather", "reduce_scatter", "control") since the last
            ``reset_counters``. Elements are logical: one all-gather of a bucket counts the whole padded bucket.
        steps, backwards: optimizer steps and synchronised backwards since the last ``reset_counters``.
        formula: bytes of model states a rank by the paper's formula for this stage, with Adam's two moments.
        replicated: bytes of the same under DDP, which keeps all of them on every rank.
        units: elements by the unit's name, in the order of the plan; the root unit's name is "".
    """

    stage: int
    world_size: int
    numel: int
    padded_numel: int
    at_rest: dict[str, int]
    peak: dict[str, int]
    calls: dict[str, int]
    elements: dict[str, int]
    bytes: dict[str, int]
    steps: int
    backwards: int
    formula: int
    replicated: int
    units: dict[str, int]

    def elements_per_step(self) -> float:
        """Elements of parameters and gradients communicated an optimizer step."""
        moved = self.elements.get("all_gather", 0) + self.elements.get("reduce_scatter", 0)
        return moved / max(self.steps, 1)


WORKING_BUFFERS = ("gathered", "reduction")
"""The categories of a report that are no model states: what is gathered, and gradients until they are reduced."""

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that has sharded a module and not ended since."""
    reference = _engines.get(module)
    return reference() if reference is not None else None


class Engine:
    """Shard a module in place, and keep it trainable as before.

    Args:
        module: with ordinary parameters, of which rank 0's and its buffers count; on the meta device, where each module
            in it is initialised anew; or with values in files that are mapped into memory (``torch.load(mmap=True)``,
            safetensors), of which each rank reads its share. Whatever is not whole yet is never made so: it is cut unit
            by unit.
        optimizers: over the module's parameters; the objects stay the user's own.
        stage: 1, 2, 3, or one of the paper's names for them (SC20, section 5).
        units: how modules are grouped for gathering; see ``plan_units``.
        unit_numel: elements up to which neighbouring blocks are gathered together; see ``plan_units``.
        prefetch: units gathered ahead of their forward and backward (stage 3).
        overlap: False waits for every collective where it is started.
        reduction_buffers: gradient buffers that may be in reduction at once.
        compute_dtype: dtype in which the fp32 parameters of linear, convolution and attention layers are gathered,
            which autocast casts to it in any case; None for their own, as that of all others.
        reduce_dtype: dtype in which gradients travel, "fp32", "bf16", "fp16" or a ``torch.dtype``; None for the one in
            which they are kept and added up over micro-batches (fp32, or wider as the parameters are).
        bucket_numel: elements from which on a unit is cut into several collectives; in a model of fewer than four
            times as many, a quarter of the model.
        activation_checkpointing: modules whose forward is computed again in backward: ``"units"`` for the blocks of
            which units are made, module classes, or a predicate of (qualified name, module); None for what the module
            does by itself.
        allow_any_optimizer: accept optimizer classes that are not known to be elementwise.
        device: where parameters and buffers are to be; None for where they are, which is then one device for all.
        group: the data-parallel process group, None for the default one.
        offload: which model states are kept outside of the device's memory, see ``offload_config``; None for none.
        handshake_timeout: seconds that a rank waits for the others where user code reads a sharded tensor.

    Raises:
        ValueError, TypeError: for what cannot be set up; nothing has been changed then.
        OSError: on every rank, if a disk has not the room for what one is to keep there; likewise.
        RuntimeError: if a module on the meta device does not initialise all that it has.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        stage: int | str = 3,
        units: Units = "auto",
        unit_numel: int | None = None,
        prefetch: int = 1,
        overlap: bool = True,
        reduction_buffers: int = 2,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | str | None = None,
        bucket_numel: int = 2**25,
        activation_checkpointing: Units | None = None,
        allow_any_optimizer: bool = False,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        offload: Any = None,
        handshake_timeout: float = 600.0,
    ) -> None:
        self.placements = placements_of(stage)
        for name, value, least in (
            ("prefetch", prefetch, 0),
            ("reduction_buffers", reduction_buffers, 1),
            ("bucket_numel", bucket_numel, 1),
            ("unit_numel", 0 if unit_numel is None else unit_numel, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}.")
        wire_dtype = wire_dtype_of(reduce_dtype)
        self._offload, self._numel_that_stay = offload_config(offload), 0
        self._elsewhere = Updates()
        if self._offload is not None:
            self._offload.check_stage(self.placements.stage)
            self._elsewhere = Updates(overlap and self._offload.overlap, self._offload.gradients is not None)
        self._swap: Swap | None = None
        self._allow_any_optimizer = allow_any_optimizer
        self._check_optimizers(optimizers, size_of(group))
        _check_ordinary(module)
        plans = plan_units(module, units, unit_numel)
        device = torch.device(device) if device is not None else _common_device(plans)
        checkpointed = modules_to_checkpoint(module, plans, activation_checkpointing)
        activations = activation_store(self._offload, activation_checkpointing, device)

        self._module = weakref.ref(module)
        if device.type == "cpu":
            _let_freed_memory_stay()
        self.ledger = Ledger()
        self._handshake_timeout = handshake_timeout
        self._join(group, device)
        sources = agree_on_sources(module, self.communicator)
        check_can_be_initialised(module, sources)
        self._overlap, self._compute_dtype = overlap, compute_dtype
        self._bucket_numel = min(bucket_numel, share_of(module))  # so that one in reduction is a part of a small model
        self._steps = self._numbers = self._updates = 0
        self._is_updating = False
        self._buffers_follow = True
        self._is_forward_a_step = True  # until somebody says what is, by window()
        for inner in module.modules():
            for attribute, value in vars(inner).items():
                # old-style weight_norm and its kin keep what they computed, and with it a graph that holds parameters
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    setattr(inner, attribute, value.detach())
        rank_in_groups = _rank_in_groups(optimizers)
        if self._offload is not None:
            trained = [p.numel() for plan in plans for p in plan.parameters.values() if p.requires_grad]
            self._numel_that_stay = round((1 - self._offload.fraction) * sum(trained))
            if self._offload.optimizer == "nvme":
                assert self._offload.path is not None
                self._swap = Swap(SwapFolder(self._offload.path), self._offload.sub_group)
        self.units = [Unit(plan, self._buckets_of(plan, rank_in_groups)) for plan in plans]
        try:
            if self._offload is not None:
                check_room(self._offload, plans, sources, self.buckets, optimizers, self.communicator)
                self._reserve(plans, optimizers)
            Materialiser(module, plans, self.units, sources, self.communicator, self.agreement).run()
        except BaseException:
            self._clear_disk()
            raise
        del sources  # and the values, which are in the buckets now
        self.sync_buffers()
        self.schedule = Schedule(self.units, prefetch if overlap else 0)
        self.schedule.install(module, plans)
        differentiation.serve(self.schedule)
        self._checkpointed = [CheckpointedModule(inner, activations) for inner in checkpointed]
        self._turns = Turns(self.communicator, self.schedule, self.buckets)
        self._uneven_methods = [
            UnevenMethod(self._turns, inner)
            for inner in (module.modules() if self._gathers else ())
            if UnevenMethod.is_method_of(inner)
        ]
        self.reducer = GradientReducer(
            self.units,
            self.schedule,
            self.communicator,
            reduce_dtype=wire_dtype,
            in_flight=reduction_buffers,
            overlap=overlap,
            reduces_every_backward=self.placements.gradients is Placement.SHARDED,
        )
        self.masters: list[Masters] = []
        self.set_optimizers(optimizers)
        # the module's and the optimizers' hooks keep the engine; nothing in the engine keeps these
        self._root_hooks = [
            module.register_forward_pre_hook(
                OwnHook(lambda *_: self._open_window(is_step=self._is_forward_a_step)), prepend=True
            ),
            module.register_forward_hook(OwnHook(lambda *_: self._close_window()), always_call=True),
        ]
        _engines[module] = weakref.ref(self)
        if self.communicator.rank == 0:
            log.debug("ZeRO stage %d, units: %s", self.placements.stage, self.units)

    # -- setting up -------------------------------------------------------------------------------------------------

    def _join(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Communicate over a group from here on; its means end with the engine, however that ends."""
        self.communicator = Communicator(group, device)
        self.agreement = Agreement(self.communicator, self._handshake_timeout)
        for part in (self.agreement, self.communicator):
            weakref.finalize(self, part.close)

    def _buckets_of(self, plan: UnitPlan, rank_in_groups: dict[int, int]) -> list[Bucket]:
        """Cut a unit's parameters into buckets of one (compute dtype, dtype, requires_grad)."""
        kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in plan.parameters.items():
            compute = self._compute_dtype_of(parameter, plan, name)
            kinds.setdefault((compute, parameter.dtype, parameter.requires_grad), []).append((name, parameter))
        buckets: list[Bucket] = []
        for (compute, _, _), members in kinds.items():
            # parameters of one optimizer group lie together, so that it has one master in a bucket
            members.sort(key=lambda member: rank_in_groups.get(id(member[1]), -1))
            for part in _cut(members, self._bucket_numel):
                layout = BucketLayout.of([(name, p.shape) for name, p in part], self.communicator.size)
                stays = part[0][1].requires_grad and self._numel_that_stay >= layout.numel
                self._numel_that_stay -= layout.numel if stays else 0
                buckets.append(
                    Bucket(
                        layout,
                        [p for _, p in part],
                        number=self._numbers,
                        unit_name=plan.name or "root",
                        compute_dtype=compute,
                        replicated=self.placements.parameters is Placement.REPLICATED,
                        masters_on=None if stays else self._place("optimizer"),
                        source_on=self._place("parameters"),
                        updates=self._elsewhere,
                        communicator=self.communicator,
                        agreement=self.agreement,
                        ledger=self.ledger,
                    )
                )
                self._numbers += 1
        return buckets

    def _reserve(self, plans: list[UnitPlan], optimizers: Sequence[Optimizer]) -> None:
        """Make room on the disk for all that is to lie there. Collective."""
        if self._swap is None:
            return
        fields_of, error = fields_by_parameter(optimizers), None
        try:
            for plan, unit in zip(plans, self.units):
                for bucket in unit.buckets:
                    members = [plan.parameters[segment.name] for segment in bucket.layout.segments]
                    bucket.reserve(fields_of(members, bucket.master_dtype) if members[0].requires_grad else {})
        except OSError as raised:
            error = raised
        told = self.communicator.gather_objects(error and (error.errno, error.strerror, error.filename))
        if error is not None:
            raise error
        for rank, (number, reason, path) in ((rank, said) for rank, said in enumerate(told) if said is not None):
            raise OSError(number, f"on rank {rank}: {reason}", path)

    def _place(self, what: str) -> Any:
        """Where some model states are to be, if not where the module computes."""
        place = getattr(self._offload, what, None)
        if place == "nvme":
            return self._swap
        return None if place is None else torch.device("cpu")

    def _compute_dtype_of(self, parameter: nn.Parameter, plan: UnitPlan, name: str) -> torch.dtype:
        if self._compute_dtype is None or parameter.dtype != torch.float32:
            return parameter.dtype
        return self._compute_dtype if all(map(is_cast_by_autocast, plan.owners[name])) else parameter.dtype

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the module was deleted"
        return module

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for unit in self.units for bucket in unit.buckets]

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Make these the optimizers, in mid-run too: one that stays keeps its state, one that goes is let go of.

        Raises:
            TypeError: for an optimizer that would have to update parts of parameters, and cannot; nothing has been
                changed then.
            OSError: if a disk has not the room for what one keeps; likewise.
        """
        self._check_optimizers(optimizers, self.communicator.size)
        for optimizer in optimizers:
            make_room(optimizer, slot_of)
        before, known = self.masters, {masters._optimizer(): masters for masters in self.masters}
        self.masters = [known.get(optimizer) or masters_of(optimizer, slot_of, self) for optimizer in optimizers]
        gone = [masters for masters in before if masters not in self.masters]
        if gone:
            settle()  # an update of theirs may be under way
        for masters in gone:
            masters.close(None)
            if (former := masters._optimizer()) is not None:
                former.state = defaultdict(dict)
        if gone and self._swap is not None:
            wanted = [masters.fields_on_disk() for masters in self.masters]
            for states in (bucket.states for bucket in self.buckets if bucket.states is not None):
                states.drop_fields({field for fields in wanted for field in fields.get(states, ())})

    def _check_optimizers(self, optimizers: Sequence[Optimizer], ranks: int) -> None:
        offloads = self._offload is not None and self._offload.optimizer is not None
        for optimizer in optimizers:
            check_optimizer(optimizer, self._allow_any_optimizer, ranks=ranks, offloads=offloads)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that live of the ones that it was given."""
        return [optimizer for masters in self.masters if (optimizer := masters._optimizer()) is not None]

    # -- a step -----------------------------------------------------------------------------------------------------

    @contextmanager
    def window(self) -> Iterator[None]:
        """Around what is a forward without being the module's own: Lightning's ``training_step`` and its kin."""
        self._is_forward_a_step = False
        self.schedule.check_in_place()
        windows = self.schedule.windows
        try:
            self._open_window(is_step=True)
            yield
        except (KeyboardInterrupt, SystemExit):
            for checkpointed in self._checkpointed:
                checkpointed.recover()
            self.schedule.recover(windows + 1)
            raise
        finally:
            if self.schedule.windows > windows:
                self._close_window()

    @contextmanager
    def last_backward(self, optimizer: Optimizer) -> Iterator[None]:
        """Around the backward before the optimizer's ``step``, if nothing between them is to see or change gradients.

        What is kept elsewhere is updated as soon as its gradient is there, while backward goes on. For modules that
        alone compute with their parameters: what backward needs of a parameter used elsewhere would be its new value.

        Raises:
            RuntimeError: by it, or by a forward, after it and before the optimizer's ``step``; nothing is changed then.
        """
        self._check_no_step_is_due()
        masters = next((masters for masters in self.masters if masters._optimizer() is optimizer), None)
        begins = self._elsewhere.overlap and any(bucket.updates is not None for bucket in self.buckets)
        self.reducer.on_reduced = masters.begin if masters is not None and begins else None
        try:
            yield
            if masters is not None:
                masters.awaits_step = begins  # on every rank alike, whichever updates have begun there
        except BaseException:
            if masters is not None:
                masters.recover()  # nobody is to wait for gradients that will not come
            raise
        finally:
            self.reducer.on_reduced = None

    def _check_no_step_is_due(self) -> None:
        for masters in self.masters:
            if masters.awaits_step and (optimizer := masters._optimizer()) is not None:
                raise RuntimeError(
                    "engine.last_backward(optimizer) was left, and optimizer.step() has not been called since: "
                    f"{type(optimizer).__name__} has begun to update what is kept elsewhere, and a forward would find "
                    "old values of some parameters and new ones of others. Call optimizer.step() before the next "
                    "forward, or write loss.backward() without engine.last_backward(optimizer) around it."
                )

    def take_turn(self, position: int | None) -> None:
        """Before each batch of an evaluation loop, and at its end: let the loop be of another length on other ranks.

        A rank that has no batch where others have one serves their gathers, and returns when it is its turn. Collective
        at stage 3; at stages 1 and 2 ranks evaluate for themselves.

        Args:
            position: the index of the dataloader that the batch is from; None at the end.
        """
        if self._gathers:
            self._follow_buffers()  # here, where every rank is
            self._turns.take(position)

    @property
    def _gathers(self) -> bool:
        """Whether a forward needs the other ranks."""
        return self.communicator.size > 1 and not all(unit.stays for unit in self.units)

    def _open_window(self, *, is_step: bool) -> None:
        if self.schedule.windows == 0:
            if not in_backward():
                self._check_no_step_is_due()
                self.reducer.abort()  # if an exception ended the last backward
                for masters in self.masters:
                    masters.recover()
                self.communicator.home = current_stream(self.communicator.device)
            if is_step:
                self._follow_buffers()
            self._buffers_follow = torch.is_grad_enabled() and self.reducer.synchronise
        self.schedule.open_window()

    def _close_window(self) -> None:
        if self.schedule.windows:
            self.schedule.close_window()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, without communication, at stage 1; stages 2 and 3 reduce every micro-batch."""
        before = self.reducer.synchronise
        self.reducer.synchronise = False
        try:
            yield
        finally:
            self.reducer.synchronise = before

    def _follow_buffers(self) -> None:
        if self._buffers_follow:
            self.sync_buffers()
            self._buffers_follow = False

    def sync_buffers(self) -> None:
        """Buffers follow rank 0's, as under DDP. Collective."""
        with torch.no_grad():
            self.communicator.all_from_first(list(self.module.buffers()))

    def begin_update(self) -> None:
        """Masters are about to change: until ``updated`` some are a step ahead of others."""
        self._is_updating = True

    def updated(self, buckets: list[Bucket]) -> None:
        """The masters of these buckets have changed, or will have: what shows their values is gathered anew.

        In the order of the plan, which is that of forward as a rule, and the same on every rank whatever ran there.
        """
        self._steps += 1
        self._updates += 1
        self._is_updating = False
        self.show(buckets)

    def show(self, buckets: list[Bucket]) -> None:
        """Gather the values of these buckets anew, where they are shown."""
        changed, kept = set(buckets), []
        for unit in self.units:
            for bucket in unit.buckets:
                if bucket in changed:
                    if bucket.refresh():
                        kept.append(bucket)
                    if not self._overlap:
                        bucket.wait()
        for bucket in kept:
            bucket.wait()

    # -- looking inside ---------------------------------------------------------------------------------------------

    def full_state_dict(
        self, *, keep: bool = True, module: nn.Module | None = None, without: Collection[str] = ()
    ) -> dict[str, Any]:
        """The module's state dict with whole tensors, on the CPU. Collective.

        Args:
            keep: False gives tensors on the meta device, for ranks that take part but do not write.
            module: a part of the module, by default all of it.
            without: names that are left out; nothing is gathered for them. The same on every rank.
        """

        tied: dict[Any, Tensor] = {}

        def whole(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            slot = slot_of(value)
            if slot in tied:
                return tied[slot]
            value = value.whole() if isinstance(value, ShardedTensor) else value
            value = value.detach().to("cpu", copy=True) if keep else torch.empty_like(value, device="meta")
            if slot is not None:
                tied[slot] = value
            return value

        with torch.no_grad():
            state = (module or self.module).state_dict()
            for name in without:
                state.pop(name, None)
            in_parts = any(isinstance(v, ShardedTensor) and v.whole_at_hand() is None for v in state.values())
            with self.agreement.met("the module's state dict") if in_parts else nullcontext():
                for name, value in state.items():
                    state[name] = whole(value)
            return state

    def full_optimizer_state_dict(self, optimizer: Optimizer, *, keep: bool = True) -> dict[str, Any]:
        """An optimizer's state dict in torch's ordinary form, with whole tensors of its own, on the CPU. Collective.

        One that the engine was not given has its own, on each rank.
        """
        masters = next((masters for masters in self.masters if masters._optimizer() is optimizer), None)
        if masters is None:
            return copy.deepcopy(optimizer.state_dict())
        with torch.no_grad():
            return masters.whole_state_dict(lambda t: t.to("cpu") if keep else torch.empty_like(t, device="meta"))

    def optimizer_state_dict_in_parts(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state dict in torch's ordinary form, of sharded tensors over what this rank has. Collective.

        One that the engine was not given has its own, on each rank.
        """
        masters = next((masters for masters in self.masters if masters._optimizer() is optimizer), None)
        return optimizer.state_dict() if masters is None else masters.state_dict_in_parts()

    def masters_in_parts(self) -> dict[str, Tensor]:
        """The fp32 masters of low-precision parameters, by name, as sharded tensors over what this rank has."""
        finer = [bucket for bucket in self.buckets if bucket.master_dtype != bucket.dtype]
        return {
            slot.name: ShardedTensor(slot, slot.parameter_at_rest(), keep=self)
            for bucket in finer
            for slot in bucket.slots
        }

    def masters_by_name(self, *, keep: bool = True) -> dict[str, Tensor]:
        """The fp32 masters of low-precision parameters, whole, on the CPU. Collective."""
        found = {}
        finer = [bucket for bucket in self.buckets if bucket.master_dtype != bucket.dtype]
        with torch.no_grad(), self.agreement.met("the fp32 masters") if finer else nullcontext():
            for bucket in finer:
                for slot in bucket.slots:
                    value = slot.collect(slot.local_parameter())
                    found[slot.name] = value.to("cpu", copy=True) if keep else value.to("meta")
        return found

    def load_masters(self, masters: dict[str, Tensor]) -> None:
        """Give parameters the digits of fp32 masters, whole tensors by name. No communication.

        Where a parameter is not its master rounded, somebody has changed it since they were saved: there it counts.
        Parameters that are in fp32 now take on the digits that low-precision ones had only in their masters.
        """
        with torch.no_grad():
            for bucket in self.buckets:
                for slot in bucket.slots:
                    if slot.name in masters and bucket.dtype in (*LOW_PRECISION, torch.float32):
                        bucket.promote()
                        shard = slot.local_parameter()
                        saved = local_range_of(masters[slot.name], slot).to(shard)
                        for dtype in (bucket.dtype,) if bucket.dtype in LOW_PRECISION else LOW_PRECISION:
                            is_rounded = saved.to(dtype).to(shard) == shard.to(dtype).to(shard)
                            if bucket.dtype not in LOW_PRECISION:
                                is_rounded &= shard.to(dtype).to(shard) == shard
                            shard.copy_(torch.where(is_rounded, saved, shard))
                        if bucket.dtype not in LOW_PRECISION or bucket.states is not None:
                            slot.written_locally(shard)

    def report(self) -> Report:
        """What it holds now and has communicated so far."""
        counters = self.communicator.counters
        for masters in self.masters:
            masters.measure()
        formula = replicated = 0
        for bucket in self.buckets:
            trains = bucket.views[0].requires_grad
            formula += (self.placements.model_state_bytes if trains else self.placements.parameter_bytes)(
                bucket.layout.numel,
                self.communicator.size,
                parameter_bytes=bucket.full.element_size(),
                master_bytes=bucket.master_dtype.itemsize,
            )
            replicated += replicated_bytes(bucket.layout.numel, bucket.dtype.itemsize, trains=trains)
        return Report(
            stage=self.placements.stage,
            world_size=self.communicator.size,
            numel=sum(unit.numel for unit in self.units),
            padded_numel=sum(bucket.layout.padded_numel for bucket in self.buckets),
            at_rest=dict(self.ledger.now),
            peak=dict(self.ledger.peak),
            calls=dict(counters.calls),
            elements=dict(counters.elements),
            bytes=dict(counters.bytes),
            steps=self._steps,
            backwards=self.reducer.backwards,
            formula=formula,
            replicated=replicated,
            units={unit.name: unit.numel for unit in self.units},
        )

    def reset_counters(self) -> None:
        counters = self.communicator.counters
        for counter in (counters.calls, counters.elements, counters.bytes):
            counter.clear()
        self._steps = self.reducer.backwards = 0

    def reset_peak(self) -> None:
        self.ledger.reset_peak()

    # -- the end ----------------------------------------------------------------------------------------------------

    @property
    def updates(self) -> int | None:
        """How many updates of masters there were; None in the midst of one, and after one that failed."""
        has_failed = any(bucket.update is not None and bucket.update.has_failed for bucket in self.buckets)
        return None if self._is_updating or has_failed else self._updates

    def rejoin(self) -> None:
        """Go on, to be saved and closed, over the process group that took the place of one whose run failed."""
        self.agreement.close()
        self.communicator.close()
        self._join(None, self.communicator.device)
        for masters in self.masters:
            masters.recover()
        for bucket in self.buckets:
            bucket.abandon()
            bucket.rejoin(self.communicator, self.agreement)

    def close(self, *, communicate: bool = True, device: torch.device | str | None = None) -> None:
        """Make the parameters ordinary again, whole, and the optimizers' state with them. Collective.

        Args:
            communicate: False asks nothing of other ranks, as after a failure: then what does not lie here whole stays
                sharded, and the optimizers lose their state.
            device: where parameters and state are put whole, by default where they are.

        Raises:
            Exception: what ended an update, or else went wrong first. All is closed then as with ``communicate=False``.
        """
        device = torch.device(device) if device is not None else self.communicator.device
        error = self._error_of_updates()
        is_torn = any(bucket.update is not None and bucket.update.has_failed for bucket in self.buckets)
        states: dict[Optimizer, Any] = {}
        try:
            for alone in (False, True):
                if not alone and (is_torn or not communicate and self.communicator.size > 1):
                    continue
                try:
                    self._make_ordinary(device, states, alone)
                    break
                except Exception as raised:
                    error = error or raised
        finally:
            self.agreement.close()
            self.communicator.close()
            self.units = []
            self._elsewhere.close()
            self._clear_disk()
        if error is not None:
            raise error

    def _error_of_updates(self) -> Exception | None:
        """Wait until nothing works on masters; what has ended an update that nobody was told of yet."""
        try:
            settle()
            for bucket in self.buckets:
                if bucket.update is not None:
                    bucket.update.wait()
        except Exception as error:
            return error
        return None

    def _make_ordinary(self, device: torch.device, states: dict[Optimizer, Any], alone: bool) -> None:
        """Unhook the module and the optimizers, and give them what they had without the engine.

        Args:
            states: of optimizers that have been unhooked, whole; those to come are added.
            alone: ask nothing of other ranks, nor of masters that an update has failed to change.
        """
        for masters in self.masters:
            if not masters.is_closed:  # by the engine of another module whose parameters its optimizer holds
                state = masters.close(None if alone else device)
                if (optimizer := masters._optimizer()) is not None:
                    states[optimizer] = state
        for hook in self._root_hooks:
            hook.remove()
        for checkpointed in self._checkpointed:
            checkpointed.remove()
        for method in self._uneven_methods:
            method.remove()
        self.schedule.remove()
        self.reducer.remove()
        with torch.no_grad(), nullcontext() if alone else self.agreement.met("the module's parameters"):
            derived = self._derived(not alone)
            parameters = {slot: slot.parameter for slot in derived}
            values = {
                id(tensor): slot.collect(tensor.local).to(device, copy=True)
                for slot, tensors in derived.items()
                for tensor in tensors
                if not tensor.is_parameter
            }
            for bucket in self.buckets:
                if not bucket.parameters:
                    continue  # restored before the other ranks failed
                if not alone:
                    bucket.restore(device)
                elif bucket.is_whole_here:
                    bucket.restore(device, as_gathered=True)
                else:
                    self._restore_alone(bucket, device)
            for slot, tensors in derived.items():
                if isinstance(parameters[slot], ShardedTensor):
                    continue
                for tensor in tensors:
                    value = values.get(id(tensor), parameters[slot].detach())
                    is_parameter = isinstance(tensor, nn.Parameter)
                    become(tensor, nn.Parameter(value, tensor.requires_grad) if is_parameter else value)
        for optimizer, state in states.items():
            optimizer.state = defaultdict(dict, state or {})
        module = self._module()
        if module is not None:
            _engines.pop(module, None)
            for inner in module.modules():
                if isinstance(inner, nn.RNNBase):
                    inner._init_flat_weights()

    def _restore_alone(self, bucket: Bucket, device: torch.device) -> None:
        """Make parameters ordinary from this rank's masters if these are all there is; else leave them in parts."""
        bucket.update, room = None, available_memory()  # it has ended, and what was wrong with it is told
        bucket.leave_disk(room is None or room > 2 * bucket.layout.shard_numel * bucket.master_dtype.itemsize)
        if self.communicator.size == 1:
            bucket.restore(device)
        else:
            bucket.abandon()

    def _clear_disk(self) -> None:
        if self._swap is not None:
            self._swap.folder.close()

    def _derived(self, communicate: bool) -> dict[BucketSlot, list[ShardedTensor]]:
        """What user code made of parameters and keeps: all aliases, and other tensors that every rank keeps.

        Tensors of several ranks are the same if as many were made before them everywhere; where ranks have made
        different numbers, none is taken for another's.
        """
        derived = {slot: slot.derived for bucket in self.buckets if bucket.parameters for slot in bucket.slots}
        kept = {
            slot.name: (slot.remembered, {key for key, tensor in tensors.items() if not tensor.is_parameter})
            for slot, tensors in derived.items()
            if slot.remembered
        }
        everywhere = self.communicator.gather_objects(kept) if communicate else []

        def is_everywhere(slot: BucketSlot, key: tuple[str, int]) -> bool:
            found = [names.get(slot.name, (0, set())) for names in everywhere]
            return communicate and all(made == slot.remembered and key in keys for made, keys in found)

        return {
            slot: [t for key, t in sorted(tensors.items()) if t.is_parameter or is_everywhere(slot, key)]
            for slot, tensors in derived.items()
        }


@contextmanager
def uneven_forwards(module: nn.Module) -> Iterator[None]:
    """Within the context each rank may run as many forwards as its data ask for; they leave it together. Collective.

    At stage 3 a forward needs the other ranks' parts: those that have left theirs behind serve the forwards of the
    others, which must run the same units. Reading parameters takes every rank, and is for before or after. Methods
    called ``generate`` do this by themselves. At stages 1 and 2, and where nothing is sharded, it does nothing.

    Args:
        module: the one that is called in it: sharded, or part of what is.
    """
    slots = filter(None, map(slot_of, module.parameters()))
    communicators = {slot.bucket.communicator for slot in slots}
    engines = [engine for engine in map(engine_of, list(_engines)) if engine and engine.communicator in communicators]
    with engines[0]._turns.each_forward(module) if engines and engines[0]._gathers else nullcontext():
        yield


def slot_of(tensor: Any) -> BucketSlot | None:
    """The place of a sharded parameter in its bucket; None for any other tensor."""
    if isinstance(tensor, ShardedTensor) and tensor.is_parameter:
        return tensor.slot  # type: ignore[return-value]
    return None


def _let_freed_memory_stay() -> None:
    """Let buffers be made of memory that others had before them, which the system need not clear again.

    glibc gives back at once what is larger than the largest block freed so far (up to 32 MiB), and what is free at the
    end of its heap beyond twice that: ``mallopt(3)``, M_MMAP_THRESHOLD. So one that is never touched sets both; not by
    ``mallopt``, which would set aside what a user says in the environment.
    """
    if sys.platform == "linux":
        system = ctypes.CDLL(None)
        system.malloc.argtypes, system.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        system.free.argtypes = [ctypes.c_void_p]
        system.free(system.malloc(2**25 - 2**16))


def _check_ordinary(module: nn.Module) -> None:
    tensors = sys.modules.get("torch.distributed.tensor")  # whose import takes half a second
    for name, parameter in module.named_parameters():
        if isinstance(parameter, ShardedTensor):
            raise ValueError(f"{name} is sharded already: one module belongs to one engine at a time.")
        if tensors is not None and isinstance(parameter, tensors.DTensor):
            raise ValueError(
                f"{name} is a DTensor, cut by another: take fully_shard(...) or distribute_tensor(...) out of the "
                "module, whose parameters must be ordinary tensors."
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} is not initialised yet: run a batch through the lazy module first.")


def _common_device(plans: list[UnitPlan]) -> torch.device:
    """The one device of all values; the CPU where there are none yet."""
    found = None
    for plan in plans:
        for name, parameter in plan.parameters.items():
            values = values_of(parameter)
            if values is not None:
                found = found or values.device
                if values.device != found:
                    raise ValueError(
                        f"{name} is on {values.device}, other parameters on {found}: move the module to one device."
                    )
    return found or torch.device("cpu")


def _rank_in_groups(optimizers: Sequence[Optimizer]) -> dict[int, int]:
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    return {id(parameter): number for number, group in enumerate(groups) for parameter in group}


def _cut(members: list[tuple[str, nn.Parameter]], bucket_numel: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Cut a list of parameters where a bucket would grow over ``bucket_numel`` elements."""
    part: list[tuple[str, nn.Parameter]] = []
    numel = 0
    for member in members:
        if part and numel + member[1].numel() > bucket_numel:
            yield part
            part, numel = [], 0
        part.append(member)
        numel += member[1].numel()
    yield part
