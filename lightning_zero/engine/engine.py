"""The engine: shards a module's parameters, gradients and optimizer state over a data-parallel process group."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.comm.asynchronous import Streams, synchronize
from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.counters import Ledger, Phases, summed
from lightning_zero.engine.comm.process_group import ProcessGroup, world_size
from lightning_zero.engine.comm.simulation import Simulation
from lightning_zero.engine.comm.tensor_parallel import TENSOR, TensorParallel, check_mesh, is_dtensor
from lightning_zero.engine.compat import OwnHook, flatten_weights, leave_out_of_copies
from lightning_zero.engine.config import WIRE_DTYPES, EngineConfig
from lightning_zero.engine.init.bucketing import assign_to_buckets, check_compression, reserve_disk
from lightning_zero.engine.init.host_room import shortage_for_whole
from lightning_zero.engine.init.materialise import Materialiser, detach_kept_graphs, initialisers_of
from lightning_zero.engine.init.quantised_layers import QuantisedLayers, prepare
from lightning_zero.engine.init.restore import restore_parameters
from lightning_zero.engine.init.sources import (
    agree_on_sources,
    check_dtypes,
    check_float8,
    check_frozen,
    check_memory,
    check_ordinary,
    check_recorded,
    first_device,
)
from lightning_zero.engine.offload import Swap, Updates
from lightning_zero.engine.optim.compatibility import check_optimizers
from lightning_zero.engine.optim.master import restore_digits
from lightning_zero.engine.optim.masters import Masters
from lightning_zero.engine.optim.optimizers import Hyperparameters, Optimizers
from lightning_zero.engine.plan.layout import Placements, placements_of
from lightning_zero.engine.plan.units import UnitPlan, plan_units, share_of, torchscript_parameters
from lightning_zero.engine.report import Report, bytes_on_disk, ddp_bytes, formula_bytes, memory_of
from lightning_zero.engine.runtime import autograd_patches
from lightning_zero.engine.runtime.activations import (
    ActivationStore,
    CheckpointedModule,
    activation_store,
    modules_to_checkpoint,
)
from lightning_zero.engine.runtime.join import Join, join_generate
from lightning_zero.engine.runtime.reducer import GradientReducer
from lightning_zero.engine.runtime.schedule import Schedule, Unit
from lightning_zero.engine.runtime.windows import Windows
from lightning_zero.engine.state.bucket import Bucket, SharedByBuckets
from lightning_zero.engine.state.buffer import let_freed_memory_stay
from lightning_zero.engine.state.extensions import Extension, Scales, without_extensions
from lightning_zero.engine.state.slot import BucketSlot, slot_of, slots_of
from lightning_zero.engine.streaming import InOrder, whole_tensors
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.sharded_tree import Leaf, in_parts, on_cpu, walk
from lightning_zero.engine.tensor.wrapper import read_by
from lightning_zero.io.options import check_names, names_of_options

if TYPE_CHECKING:
    from lightning_zero.engine.comm.tensor_parallel import DeviceMesh

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()
_AHEAD_BYTES = 2**26  # of the tensors of a state dict that are gathered at once; a larger one is gathered alone


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that shards a module; None if the module has no engine, or if its engine has been closed."""
    reference = _engines.get(module)
    return reference() if reference is not None else None


def engines() -> list[Engine]:
    """All engines that have not been closed."""
    return [engine for reference in list(_engines.values()) if (engine := reference()) is not None]


def _before_fork() -> None:
    """Wait for updates and gathers of replicated parameters, which a forked process can read, but cannot await."""
    if threading.current_thread() is threading.main_thread():
        synchronize()
        for bucket in (bucket for engine in engines() for bucket in engine.buckets if bucket.is_replicated):
            bucket.wait()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


class Engine:
    """Shards a module in place; afterwards the module is trained as before.

    Args:
        module: the root module. Its parameters and buffers may be ordinary tensors (rank 0's values are used), on the
            meta device (each submodule initialises its own tensors; make the module within
            ``deferred_param.parameters_await_values()``), mapped from files (``torch.load(mmap=True)``, safetensors) or
            left in files by ``load_weights`` (each rank reads only its shard). The module is sharded unit by unit, so
            values on the meta device or in files are never all in memory at once.
        optimizers: the optimizers of the module's parameters; keep using the same objects afterwards.
        config: the options; ``EngineConfig()`` by default.
        device: the device of parameters and buffers; None for the device of the first parameter.
        group: the data-parallel process group; None for the default one.
        mesh: a ``DeviceMesh`` of all ranks with the dimensions ``data_parallel`` and ``tensor_parallel``, instead of a
            group. The user's project divides parameters over the second dimension, as DTensors; the engine shards each
            rank's share over the first.
        simulation: how the ranks of a process group of torch's backend ``fake`` are to appear, as in a plan.
        options: fields of ``EngineConfig`` that override those of ``config``: ``Engine(module, optimizers, stage=2)``.

    Attributes:
        config: the options.
        placements: how the stage shards parameters, gradients and optimizer state.
        units: the units in the order of the plan; the root unit is first.
        windows: opens and closes steps, and copies rank 0's buffers.

    Raises:
        ValueError, TypeError: if the module, the optimizers or the options are not supported; nothing has been changed.
        OSError: on every rank, if a disk lacks space for a rank's offloaded states; nothing has been changed.
        RuntimeError: if a module on the meta device does not initialise all of its parameters and buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        config: EngineConfig | None = None,
        device: torch.device | str | None = None,
        group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        simulation: Simulation | None = None,
        **options: Any,
    ) -> None:
        check_names(options, names_of_options(EngineConfig), "Engine")
        self.config = config = replace(config or EngineConfig(), **options)
        self._mesh, self._module = mesh, weakref.ref(module)
        self.background = Updates.of(config, simulation)
        self._swap: Swap | None = None
        self._scripted = torchscript_parameters(module)
        device = torch.device(device) if device is not None else first_device(module)
        check_float8(module, device)
        with without_extensions(module, device) as extension_of:
            self._check(module, optimizers, ranks=world_size(group if mesh is None else None))
            prepare(module, device)
            plans = plan_units(module, config.units, config.unit_numel)
            checkpointed = modules_to_checkpoint(module, plans, config.activation_checkpointing)
            if device.type == "cpu":
                let_freed_memory_stay()
            self.ledger = Ledger()
            self.phases = Phases(device)
            self._connect(group, device, simulation)
            self._shared = SharedByBuckets(
                self.communicator,
                Streams(device),
                self.ledger,
                self.phases,
                self.background,
                Scales(),
            )
            activations = activation_store(config, self.communicator, self.ledger)
            self.placements = placements_of(config.stage, shards_within=self.communicator.shards_within)
            self.units = self._shard(module, plans, optimizers, simulation, extension_of)
            for bucket in self.buckets:
                if bucket.extensions and bucket.is_replicated:
                    bucket.gather(refresh=True)
            self._share_unsharded(module)
            self._install(module, plans, optimizers, checkpointed, activations)
            _engines[module] = weakref.ref(self)
            for inner in module.modules():
                leave_out_of_copies(inner, OwnHook)

    # -- setting up -------------------------------------------------------------------------------------------------

    def _check(self, module: nn.Module, optimizers: Sequence[Optimizer], *, ranks: int) -> None:
        """Raise an error for what this rank alone can recognise as unsupported."""
        if self._mesh is not None:
            check_mesh(self._mesh)
        self.config.check_mesh(self._mesh[TENSOR].size() if self._mesh is not None else None)
        check_optimizers(optimizers, self.config, ranks=ranks)
        check_ordinary(module, may_be_divided=self._mesh is not None)
        check_dtypes(module, self.config)
        check_memory(module, optimizers)
        check_frozen(self._scripted)

    def _connect(self, group: ProcessGroup | None, device: torch.device, simulation: Simulation | None = None) -> None:
        """Make the communicator, which is closed when the engine is closed or deleted."""
        self.communicator = Communicator(group, device, self.config.shard_within, self._mesh, simulation)
        weakref.finalize(self, self.communicator.close)

    def _shard(
        self,
        module: nn.Module,
        plans: list[UnitPlan],
        optimizers: Sequence[Optimizer],
        simulation: Simulation | None,
        extension_of: dict[nn.Parameter, Extension],
    ) -> list[Unit]:
        """Shard the module, and return its units. Collective. Nothing is changed before disk space is reserved.

        The original values are freed on return; the buckets then hold the values.
        """
        sources = agree_on_sources(module, self.communicator, extension_of, self.config.rounding_options)
        if self._mesh is None:  # lazy tensors, which record writes, cannot become DTensors
            check_recorded(sources)
        initialisers = initialisers_of(module, sources)
        detach_kept_graphs(module)
        offload = self.config.offload
        if offload is not None and offload.optimizer == "nvme":
            assert offload.path is not None
            self._swap = Swap(os.path.abspath(offload.path), simulation)
        # At most a quarter of a small model should be reduced at once.
        share = share_of(module) // self.communicator.tensor.size
        try:
            unsharded = assign_to_buckets(
                self.config, self.placements, plans, share, optimizers, self._shared, extension_of
            )
            check_compression(self.config, unsharded, self.communicator)
            if self._swap is not None:
                reserve_disk(self._swap, unsharded, self.communicator)
            materialiser = Materialiser(module, plans, unsharded, sources, initialisers, self.communicator)
            return [Unit(plan, of_unit) for plan, of_unit in zip(plans, materialiser.run())]
        except BaseException:
            self._clear_disk()
            raise

    def _share_unsharded(self, module: nn.Module) -> None:
        """Copy rank 0's values of parameters that cannot be sharded, and of buffers, to all ranks. Collective."""
        device, tensor = self.communicator.device, self.communicator.tensor
        for parameter in self._scripted.values():
            parameter.data = parameter.data.to(device)
        unsharded = [parameter.detach() for parameter in self._scripted.values()]
        for each in (*module.buffers(), *unsharded):
            if not is_dtensor(each):
                tensor.control.broadcast(each)
        self.communicator.control.copy_from_first(unsharded)

    def _install(
        self,
        module: nn.Module,
        plans: list[UnitPlan],
        optimizers: Sequence[Optimizer],
        checkpointed: list[nn.Module],
        activations: ActivationStore | None,
    ) -> None:
        """Hook the module, so that its forwards gather parameters and its backwards reduce gradients. Collective."""
        config = self.config
        self.schedule = Schedule(self.units, config.prefetch if config.overlap else 0)
        self.schedule.install(module, plans)
        autograd_patches.install(self.schedule)
        regions = [CheckpointedModule(inner, activations) for inner in checkpointed]
        self.reducer = GradientReducer(
            self.units,
            self.schedule,
            self.communicator,
            self._shared.streams,
            self.phases,
            reduce_dtype=WIRE_DTYPES[config.reduce_dtype] if config.reduce_dtype else None,
            in_flight=config.reduction_buffers if config.overlap else 0,
            reduces_every_backward=self._reduces_every_backward,
        )
        self.join = Join(self.communicator, self.schedule, self.reducer, self.buckets)
        if self.gathers:
            join_generate(self.join, module)
        seed = torch.initial_seed() % 2**63  # of ``manual_seed`` or ``seed_everything``
        if config.rounding_options is not None:
            (seed,) = self.communicator.everyone.numbers_of(0, [seed], "the seed of stochastic rounding")
        schedule, scripted = self.schedule, self._scripted

        def check() -> None:
            schedule.check_not_replaced()
            check_frozen(scripted)

        self._optimizers = Optimizers(config, self.buckets, self._shared, seed, check)
        self.windows = Windows(
            module,
            self.schedule,
            self.reducer,
            self._shared,
            activations=activations,
            checkpointed=regions,
            before=self._optimizers.before_forward,
        )
        self.windows.sync_buffers()
        self.set_optimizers(optimizers)
        # The hooks on the module and the optimizers keep the engine alive, but the engine keeps neither of them alive.
        before = OwnHook(self._before_forward)
        after = OwnHook(self._after_forward)
        self._installed: list[Any] = [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
            *regions,
            QuantisedLayers(module, self.communicator, self.ledger),
            self.schedule,
            self.reducer,
        ]

    def _before_forward(self, *_: Any) -> None:
        self.windows.before_forward()

    def _after_forward(self, _: bool, module: nn.Module, arguments: Any, output: Any) -> None:
        self.windows.after_forward(output)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the module was deleted"
        return module

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for unit in self.units for bucket in unit.buckets]

    def holds_all_of(self, module: nn.Module) -> bool:
        """Whether the engine holds exactly the parameters that the module has now."""
        scripted = set(map(id, self._scripted.values()))
        slots = [slot_of(parameter) for parameter in module.parameters() if id(parameter) not in scripted]
        own = set(self.buckets)
        held = sum(len(bucket.layout.segments) for bucket in own)
        return len(slots) == held and all(slot is not None and slot.bucket in own for slot in slots)

    # -- a step -----------------------------------------------------------------------------------------------------

    def window(self) -> AbstractContextManager[None]:
        """Context for a step that is not merely a call of the root module, such as Lightning's ``training_step``."""
        return self.windows.step()

    def take_turn(self, position: int | None) -> None:
        """Join uneven evaluation loops: call before each batch and once at the end. Collective at stage 3.

        On a rank that has run out of batches in a dataloader, this call takes part in the other ranks' all-gathers. It
        returns once the other ranks have reached the dataloader of this rank's next batch, or the end. At stages 1 and
        2, ranks evaluate independently.

        Args:
            position: the index of the next batch's dataloader; None at the end of the loop.
        """
        if self.gathers:
            if self.windows.buffers_follow:
                self.windows.sync_buffers()  # here, since every rank makes this call
                self.windows.buffers_follow = False
            self.join.take(position)

    @property
    def gathers(self) -> bool:
        """Whether a forward communicates with the other ranks."""
        return any(bucket.layout.is_sharded and not bucket.is_replicated for bucket in self.buckets)

    @property
    def _reduces_every_backward(self) -> bool:
        """Whether gradients are reduced even under ``no_sync``.

        With tensor parallelism, an ordinary ``p.grad`` would have the shape of this rank's share only. With one rank, a
        reduction sends nothing that could be sent later.
        """
        is_sharded = any(bucket.layout.is_sharded for bucket in self.buckets)
        return self.placements.gradients.is_sharded or self.communicator.tensor.size > 1 or not is_sharded

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which stage 1 accumulates gradients locally; stages 2 and 3 still reduce every micro-batch.

        Stage 1 with tensor parallelism also reduces every micro-batch. With ``shard_within``, stage 3 reduces gradients
        only over the ranks that share one copy of the parameters.
        """
        before = self.reducer.synchronise
        self.reducer.enter_no_sync()
        try:
            yield
        finally:
            self.reducer.synchronise = before

    # -- optimizers -------------------------------------------------------------------------------------------------

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace the optimizers; this is also possible during a run. Removed optimizers lose their state. Collective.

        Raises:
            TypeError: if an optimizer cannot be used with this engine (see ``check_optimizers``).
            OSError: if a disk lacks space for an optimizer's states. After either error, no optimizer is replaced.
        """
        self._optimizers.replace(optimizers)
        self.reducer.hyperparameters = Hyperparameters(optimizers, self.communicator)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are still alive."""
        return self._optimizers.alive

    @property
    def masters(self) -> list[Masters]:
        return self._optimizers.masters

    @property
    def updates(self) -> int | None:
        """Number of updates of the master weights; None during an update, and after a failed update."""
        return self._optimizers.updates

    # -- looking inside ---------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.communicator.device

    @property
    def rank(self) -> int:
        """This rank among all ranks that train the module, tensor-parallel ones included."""
        return self.communicator.everyone.rank

    @property
    def tensor_parallel(self) -> TensorParallel:
        """The ranks over which tensor parallelism divides tensors."""
        return self.communicator.tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """All-gather a picklable value; the result is in the order of ranks. Collective."""
        return self.communicator.everyone.gather_objects(value)

    def met(self, what: str) -> AbstractContextManager[None]:
        """Context for reads of sharded tensors that every rank begins now; ``what`` is read, for errors. Collective."""
        return self.communicator.rendezvous.met(what)

    def have_met(self) -> AbstractContextManager[None]:
        """Like ``met``, but without an exchange, for reads that every rank is known to begin now."""
        return self.communicator.rendezvous.have_met()

    def traffic(self) -> Counter[tuple[str, str, str]]:
        """What collectives have sent so far: numbers by (elements, bytes or calls; kind of collective; link)."""
        counters = self.communicator.counters
        each = {"elements": counters.elements, "bytes": counters.bytes, "calls": counters.calls}
        return Counter({(what, kind, link): n for what, counts in each.items() for (kind, link), n in counts.items()})

    def bytes_saved_by(self, placements: Placements) -> int:
        """How many bytes of model states a rank would save with other placements, by the paper's formula."""
        return formula_bytes(self.placements, self.buckets) - formula_bytes(placements, self.buckets)

    def bytes_on_disk(self) -> tuple[int, int]:
        """Bytes of this rank's states on a disk, and those that updates may have in host memory at one time."""
        return bytes_on_disk(self.buckets)

    def owned_numels(self) -> list[int]:
        """By rank, the number of elements of the parameters that an optimizer needs whole, on their owning rank."""
        layouts = [bucket.layout for bucket in self.buckets if bucket.layout.is_whole]
        return [sum(layout.shard_numel(rank) for layout in layouts) for rank in range(self.communicator.size)]

    def report(self) -> Report:
        """Report the memory in use and the communication so far."""
        for masters in self.masters:
            masters.states.measure()
        counters = self.communicator.counters
        return Report(
            stage=self.placements.stage,
            world_size=self.communicator.everyone.size,
            tensor_parallel_size=self.communicator.tensor.size,
            numel=sum(unit.numel for unit in self.units),
            padded_numel=sum(bucket.layout.padded_numel for bucket in self.buckets),
            at_rest=dict(self.ledger.now),
            peak=dict(self.ledger.peak),
            calls=summed(counters.calls, "kind"),
            elements=summed(counters.elements, "kind"),
            bytes=summed(counters.bytes, "kind"),
            bytes_by_link={"within": 0, "across": 0} | summed(counters.bytes, "link"),
            steps=self._optimizers.steps,
            backwards=self.reducer.backwards,
            formula=formula_bytes(self.placements, self.buckets),
            replicated=ddp_bytes(self.buckets),
            units={unit.name: unit.numel for unit in self.units},
            device_memory=memory_of(self.device),
        )

    def reset_counters(self) -> None:
        self.communicator.counters.clear()
        self._optimizers.steps = self.reducer.backwards = 0

    def reset_peak(self) -> None:
        self.ledger.reset_peak()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def full_state_dict(
        self, *, leaf: Leaf = on_cpu, module: nn.Module | None = None, without: Collection[str] = ()
    ) -> dict[str, Any]:
        """The module's state dict, by default with full (unsharded) tensors on the CPU. Collective.

        Args:
            leaf: converts each tensor: ``on_cpu``; ``on_meta``, for ranks that join the gathers but write nothing; or
                ``in_parts``, which leaves tensors sharded, without gathers or copies.
            module: a submodule; by default, the root module.
            without: names of entries to omit, which are not gathered. Must be the same on every rank.
        """
        with torch.no_grad():
            state = (module or self.module).state_dict()
            for name in without:
                state.pop(name, None)
            if leaf is in_parts:
                return state
            sharded: list[tuple[str, ShardedTensor]] = []

            def is_sharded(value: Any) -> bool:
                return isinstance(value, ShardedTensor)

            walk(state, lambda tensor: sharded.append((tensor.slot.name, tensor)), is_sharded)  # aliases only once
            if all(tensor.whole_at_hand() is not None for _, tensor in sharded):
                return walk(state, leaf)
            with (
                self.communicator.rendezvous.met("the module's state dict"),
                closing(whole_tensors(sharded, _AHEAD_BYTES)) as values,
                read_by(InOrder(sharded, values)),
            ):
                return walk(state, leaf)

    def full_optimizer_state_dict(self, optimizer: Optimizer, *, leaf: Leaf = on_cpu) -> dict[str, Any]:
        """An optimizer's state dict in torch's usual form, by default with full tensors on the CPU. Collective.

        For an optimizer that the engine does not shard, each rank returns the optimizer's own state dict.

        Args:
            leaf: see ``full_state_dict``.
        """
        if (masters := self._optimizers.of(optimizer)) is not None:
            return masters.states.state_dict(leaf)
        state = optimizer.state_dict()
        return state if leaf is in_parts else copy.deepcopy(state)

    def masters_by_name(self, *, leaf: Leaf = on_cpu, module: nn.Module | None = None) -> dict[str, Tensor]:
        """The fp32 master weights of low-precision parameters by name; by default, full tensors on the CPU. Collective.

        Args:
            leaf: see ``full_state_dict``.
            module: a submodule, whose parameters are named as in it; by default, the root module.
        """
        finer = {
            name: slot
            for name, slot in self._slots_by_name(module).items()
            if slot.bucket.master_dtype != slot.bucket.dtype
        }
        masters = {name: ShardedTensor(slot, slot.parameter_at_rest(), keep=self) for name, slot in finer.items()}
        with self.communicator.rendezvous.met("the fp32 masters") if finer and leaf is not in_parts else nullcontext():
            return walk(masters, leaf)

    def load_masters(self, masters: dict[str, Tensor], *, module: nn.Module | None = None) -> None:
        """Restore saved fp32 master weights that match the current parameters. Collective.

        A parameter's element that differs from its rounded master weight was changed after the save, so it keeps its
        value. Parameters that are in fp32 now, but were saved in low precision, regain the precision of their master
        weights.

        Args:
            masters: full tensors by parameter name.
            module: a submodule, to which the names refer; by default, the root module.
        """
        for name, slot in self._slots_by_name(module).items():
            if name in masters:
                restore_digits(slot, masters[name])

    def _slots_by_name(self, module: nn.Module | None) -> dict[str, BucketSlot]:
        """Return the slots of a submodule's parameters by their names in it; by default, of the root module's."""
        slots = [slot for bucket in self.buckets for slot in slots_of(bucket)]
        if module is None:
            return {slot.name: slot for slot in slots}
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return {names[id(slot.parameter)]: slot for slot in slots if id(slot.parameter) in names}

    # -- the end ----------------------------------------------------------------------------------------------------

    def rejoin(self) -> None:
        """After a failed run, connect to the process group again, to save a checkpoint and close the engine."""
        self.communicator.end_transfers()
        self.communicator.close()
        self._connect(None, self.communicator.device)
        self._optimizers.communicator = self.communicator
        self._optimizers.recover()
        for bucket in self.buckets:
            bucket.abandon()
            bucket.rejoin(self.communicator)

    def shortage_for_whole(self, *, keeps_masters: bool) -> str | None:
        """Describe a host without memory for the tensors that ``close(device="cpu")`` makes; or None. Collective.

        Args:
            keeps_masters: whether this rank keeps the result of ``masters_by_name`` as well.

        Raises:
            Exception: the error of a failed update in the background.
        """
        self._optimizers.finish_updates()
        with self.communicator.rendezvous.met("the module's parameters"):
            return shortage_for_whole(self.buckets, self.optimizers, self.communicator, keeps_masters=keeps_masters)

    def close(self, *, communicate: bool = True, device: torch.device | str | None = None) -> None:
        """Turn sharded parameters and optimizer state back into ordinary full tensors. Collective.

        Args:
            communicate: False avoids collectives, for use after a failure: parameters that this rank does not hold in
                full stay sharded, and the optimizers lose their state.
            device: the device of the full parameters and states; by default the engine's device.

        Raises:
            Exception: the error of a failed update in the background, or else the first error while closing. The
                engine is then closed as with ``communicate=False``.
        """
        device = torch.device(device) if device is not None else self.communicator.device
        error = None
        try:
            self._optimizers.finish_updates()
        except Exception as raised:
            error = raised
        may_communicate = not self._optimizers.has_failed_update and (
            communicate or self.communicator.everyone.size == 1
        )
        try:
            for alone in (False, True) if may_communicate else (True,):
                if alone:
                    self.communicator.end_transfers()
                try:
                    self._make_ordinary(device, alone)
                    break
                except Exception as raised:
                    error = error or raised
        finally:
            self.communicator.close()
            is_sharded = any(bucket.parameters for bucket in self.buckets)
            self.units = []
            self._optimizers.buckets = []
            self.background.close()
            if is_sharded and self._swap is not None:  # the next run reads the parameters
                self._swap.buffers.free.clear()
            else:
                self._clear_disk()
        if error is not None:
            raise error

    def _make_ordinary(self, device: torch.device, alone: bool) -> None:
        """Remove all hooks, and give the module and the optimizers ordinary tensors.

        Args:
            alone: whether to avoid collectives, and ignore master weights that a failed update has left incomplete.
        """
        for masters in self.masters:
            if not masters.is_closed:  # another engine with the same optimizer may have closed them
                masters.close(None if alone else device)
        for part in self._installed:
            part.remove()
        self.windows.activations = None
        restore_parameters(self.buckets, self.communicator, device, alone)
        if (module := self._module()) is not None:
            _engines.pop(module, None)
            for inner in module.modules():
                if isinstance(inner, nn.RNNBase):
                    flatten_weights(inner)

    def _clear_disk(self) -> None:
        if self._swap is not None:
            self._swap.close()
