"""The engine: shards a module's parameters, gradients and optimizer state over a data-parallel process group."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.comm.background_work import synchronize
from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.phases import Phases
from lightning_zero.engine.comm.process_group import ProcessGroup, world_size
from lightning_zero.engine.comm.rendezvous import Rendezvous
from lightning_zero.engine.comm.simulation import Simulation
from lightning_zero.engine.comm.streams import Streams
from lightning_zero.engine.comm.tensor_parallel import TENSOR, check_mesh, is_dtensor, own_share
from lightning_zero.engine.compat import flatten_weights, not_copied, running_calls
from lightning_zero.engine.config import EngineConfig, OffloadConfig, check_names, names_of_options
from lightning_zero.engine.init.bucketing import assign_to_buckets, check_compression, reserve_disk
from lightning_zero.engine.init.host_room import Shortage, check_room, check_room_of_owners, without_room_for_whole
from lightning_zero.engine.init.initialisation import Initialisation
from lightning_zero.engine.init.materialise import Materialiser, detach_kept_graphs
from lightning_zero.engine.init.restore import restore_parameters
from lightning_zero.engine.init.shared_memory import check_memory
from lightning_zero.engine.init.sources import (
    Source,
    agree_on_sources,
    check_frozen,
    check_ordinary,
    common_device,
    move_own_kinds,
)
from lightning_zero.engine.offload.states import Swap
from lightning_zero.engine.offload.updates import Updates
from lightning_zero.engine.optim.compatibility import check_optimizers
from lightning_zero.engine.optimizers import Optimizers
from lightning_zero.engine.plan.placement import placements_of
from lightning_zero.engine.plan.units import plan_units, share_of, torchscript_parameters
from lightning_zero.engine.report import Report, report_of
from lightning_zero.engine.runtime import autograd_patches
from lightning_zero.engine.runtime.activation_checkpointing import CheckpointedModule, modules_to_checkpoint
from lightning_zero.engine.runtime.activation_offload import activation_store
from lightning_zero.engine.runtime.compile_hooks import OwnHook
from lightning_zero.engine.runtime.join import Join, JoinedMethod
from lightning_zero.engine.runtime.reducer import GradientReducer
from lightning_zero.engine.runtime.schedule import Schedule, Unit, in_backward
from lightning_zero.engine.state.bucket import Bucket, SharedByBuckets
from lightning_zero.engine.state.buffer import let_freed_memory_stay
from lightning_zero.engine.state.ledger import Ledger
from lightning_zero.engine.state.slot import slot_of

if TYPE_CHECKING:
    from lightning_zero.engine.comm.tensor_parallel import DeviceMesh

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()
_NOT_COPIED = not_copied(lambda value: isinstance(value, (OwnHook, JoinedMethod)))


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


class Engine(Optimizers):
    """Shards a module in place; afterwards the module is trained as before.

    Args:
        module: the root module. Its parameters and buffers may be ordinary tensors (rank 0's values are used), on the
            meta device (each submodule initialises its own tensors), or mapped from files (``torch.load(mmap=True)``,
            safetensors; each rank reads only its shard). The module is sharded unit by unit, so values on the meta
            device or in files are never all in memory at once.
        optimizers: the optimizers of the module's parameters; keep using the same objects afterwards.
        config: the options; ``EngineConfig()`` by default.
        device: the device of parameters and buffers; None for their current device, which must be the same for all.
        group: the data-parallel process group; None for the default one.
        mesh: a ``DeviceMesh`` of all ranks with the dimensions ``data_parallel`` and ``tensor_parallel``, instead of a
            group. The user's project divides parameters over the second dimension, as DTensors; the engine shards each
            rank's share over the first.
        simulation: how the ranks of a process group of torch's backend ``fake`` are to appear, as in a plan.
        options: fields of ``EngineConfig`` that override those of ``config``: ``Engine(module, optimizers, stage=2)``.

    Attributes:
        buffers_follow: whether the next step's forward begins by copying rank 0's buffers to all ranks.

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
        super().__init__()
        check_names(options, names_of_options(EngineConfig), "Engine")
        self.config = config = replace(config or EngineConfig(), **options)
        self._mesh = mesh
        if mesh is not None:
            check_mesh(mesh)
        config.check_mesh(mesh[TENSOR].size() if mesh is not None else None)
        offload = config.offloads
        self.background = Updates.of(config, simulation)
        self._swap: Swap | None = None
        check_optimizers(optimizers, config, ranks=world_size(group if mesh is None else None))
        check_ordinary(module, may_be_divided=mesh is not None)
        check_memory(module, optimizers)
        self._scripted = torchscript_parameters(module)
        check_frozen(self._scripted)
        if device is not None:
            device = torch.device(device)
            move_own_kinds(module, device)
        plans = plan_units(module, config.units, config.unit_numel)
        device = device or common_device(plans)
        checkpointed = modules_to_checkpoint(module, plans, config.activation_checkpointing)

        self._module = weakref.ref(module)
        if device.type == "cpu":
            let_freed_memory_stay()
        self.ledger = Ledger()
        self.streams = Streams(device)
        self.phases = Phases(device)
        self._connect(group, device, simulation)
        self._activations = activation_store(config, self.communicator, self.ledger)
        self.placements = placements_of(config.stage, shards_within=self.communicator.shards_within)
        sources = agree_on_sources(module, self.communicator)
        initialisers = Initialisation(module, sources).calls
        self.buffers_follow = True
        self._is_forward_a_step = True  # whether a call of the module is a step; False once ``window`` is used
        self._is_window_a_forward = False  # whether a call of the module has opened the outermost window
        detach_kept_graphs(module)
        if offload is not None and offload.optimizer == "nvme":
            assert offload.path is not None
            self._swap = Swap(os.path.abspath(offload.path), offload.sub_group, simulation)
        shared = SharedByBuckets(
            self.communicator, self.rendezvous, self.streams, self.ledger, self.phases, self.background
        )
        # At most a quarter of a small model should be reduced at once.
        share = share_of(module) // self.communicator.tensor.size
        uncut = assign_to_buckets(config, self.placements, plans, share, optimizers, shared)
        check_compression(config, uncut, self.communicator)
        try:
            self._reserve_room(offload, sources, uncut, bool(optimizers), simulation)
            materialiser = Materialiser(module, plans, uncut, sources, initialisers, self.communicator, self.rendezvous)
            buckets = materialiser.run()
        except BaseException:
            self._clear_disk()
            raise
        for parameter in self._scripted.values():
            parameter.data = parameter.data.to(device)
        del sources, uncut  # frees the original values, too; the buckets hold the values now
        self.units = [Unit(plan, of_unit) for plan, of_unit in zip(plans, buckets)]
        unsharded = [parameter.detach() for parameter in self._scripted.values()]
        for tensor in (*module.buffers(), *unsharded):
            if not is_dtensor(tensor):
                self.communicator.tensor.broadcast(tensor)
        self.communicator.copy_from_first(unsharded)
        self.sync_buffers()
        self.schedule = Schedule(self.units, config.prefetch if config.overlap else 0)
        self.schedule.install(module, plans)
        autograd_patches.install(self.schedule)
        self._checkpointed = [CheckpointedModule(inner, self._activations) for inner in checkpointed]
        self.join = Join(self.communicator, self.rendezvous, self.schedule, self.buckets)
        self.reducer = GradientReducer(
            self.units,
            self.schedule,
            self.communicator,
            self.streams,
            self.phases,
            reduce_dtype=config.wire_dtype,
            in_flight=config.reduction_buffers,
            overlap=config.overlap,
            # with tensor parallelism, an ordinary ``p.grad`` would have the shape of this rank's share only
            reduces_every_backward=self.placements.gradients.is_sharded or self.communicator.tensor.size > 1,
        )
        self.set_optimizers(optimizers)
        # The hooks on the module and the optimizers keep the engine alive, but the engine keeps neither of them alive.
        before = OwnHook(self._before_forward)
        after = OwnHook(self._after_forward)
        may_join = module.modules() if self.gathers else ()
        self._installed: list[Any] = [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
            *self._checkpointed,
            *(JoinedMethod(self.join, inner) for inner in may_join if JoinedMethod.is_method_of(inner)),
            self.schedule,
            self.reducer,
        ]
        _engines[module] = weakref.ref(self)
        for patch in _NOT_COPIED:
            patch.hold(self)

    # -- setting up -------------------------------------------------------------------------------------------------

    def _reserve_room(
        self,
        offload: OffloadConfig | None,
        sources: Mapping[str, Source],
        uncut: Any,
        has_optimizers: bool,
        simulation: Simulation | None,
    ) -> None:
        """Reserve disk space. Collective. Raise an error on every rank if any rank lacks memory or disk space."""
        if simulation is None:  # a simulation may be of another host
            if offload is not None:
                check_room(offload, sources, uncut, self.communicator, has_optimizers)
            check_room_of_owners(sources, uncut, self.communicator)
        if self._swap is not None:
            reserve_disk(self._swap, uncut, self.communicator)

    def _connect(self, group: ProcessGroup | None, device: torch.device, simulation: Simulation | None = None) -> None:
        """Make the communicator and the rendezvous, which are closed when the engine is closed or deleted."""
        self.communicator = Communicator(group, device, self.config.shard_within, self._mesh, simulation)
        self.rendezvous = Rendezvous(self.communicator, self.config.handshake_timeout)
        for part in (self.rendezvous, self.communicator):
            weakref.finalize(self, part.close)

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

    @contextmanager
    def window(self) -> Iterator[None]:
        """Context for a step that is not merely a call of the root module, such as Lightning's ``training_step``."""
        self._is_forward_a_step = False
        self._recover_if_interrupted(running=0)
        self._check_parameters()
        windows = self.schedule.windows
        try:
            self._open_window(is_step=True)
            yield
            self.note_forward()
        except (KeyboardInterrupt, SystemExit):
            self._recover(windows + 1)
            raise
        finally:
            if self.schedule.windows > windows:
                self._close_window()

    def take_turn(self, position: int | None) -> None:
        """Join uneven evaluation loops: call before each batch and once at the end. Collective at stage 3.

        On a rank that has run out of batches in a dataloader, this call takes part in the other ranks' all-gathers. It
        returns once the other ranks have reached the dataloader of this rank's next batch, or the end. At stages 1 and
        2, ranks evaluate independently.

        Args:
            position: the index of the next batch's dataloader; None at the end of the loop.
        """
        if self.gathers:
            if self.buffers_follow:
                self.sync_buffers()  # here, since every rank makes this call
                self.buffers_follow = False
            self.join.take(position)

    @property
    def gathers(self) -> bool:
        """Whether a forward communicates with the other ranks."""
        return self.communicator.size > 1 and not all(unit.stays for unit in self.units)

    def _before_forward(self, *_: Any) -> None:
        self._recover_if_interrupted(running=1)
        if self.schedule.windows == 0:
            if torch.is_grad_enabled() and not in_backward():
                self._check_parameters(in_forward=True)
            self._is_window_a_forward = True
        self._open_window(is_step=self._is_forward_a_step)

    def _after_forward(self, _: bool, module: nn.Module, arguments: Any, output: Any) -> None:
        self._close_window()
        if self._is_forward_a_step and not self.schedule.windows and output is not None:  # None after an exception
            self.note_forward()

    def _check_parameters(self, *, in_forward: bool = False) -> None:
        """Raise if user code has replaced or unfrozen parameters that the engine would then not train."""
        self.schedule.check_in_place(in_forward=in_forward)
        check_frozen(self._scripted)

    def _recover_if_interrupted(self, running: int) -> None:
        """Recover if Ctrl-C or ``sys.exit`` has interrupted a forward outside of ``window``.

        Args:
            running: how many calls of the module are running, if no call has been interrupted.
        """
        if in_backward():
            return
        if self.schedule.windows == 0:
            was_interrupted = any(unit.depth for unit in self.units)
        else:
            was_interrupted = self._is_window_a_forward and running_calls(self.module) <= running
        if was_interrupted:
            self._recover(0)

    def _recover(self, windows: int) -> None:
        for checkpointed in self._checkpointed:
            checkpointed.recover()
        self.schedule.recover(windows)

    def _open_window(self, *, is_step: bool) -> None:
        if not in_backward():
            self.reducer.abort()  # in case an exception ended the last backward
        if self.schedule.windows == 0:
            if not in_backward():
                for masters in self.masters:
                    masters.recover()
                if self._sizes_of_groups() != self._group_sizes:  # changed by ``add_param_group``
                    self._give_owners()
                self.streams.begin_forward()
                if self._activations is not None:
                    self._activations.begin_forward()
            if is_step and self.buffers_follow:
                self.sync_buffers()
        self.schedule.open_window()

    def _close_window(self) -> None:
        if self.schedule.windows:
            self.schedule.close_window()
        if not self.schedule.windows:
            self._is_window_a_forward = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which stage 1 accumulates gradients locally; stages 2 and 3 still reduce every micro-batch.

        Stage 1 with tensor parallelism also reduces every micro-batch. With ``shard_within``, stage 3 reduces gradients
        only over the ranks that share one copy of the parameters.
        """
        before = self.reducer.synchronise
        self.reducer.synchronise = False
        try:
            yield
        finally:
            self.reducer.synchronise = before

    def note_forward(self) -> None:
        """Set ``buffers_follow`` after a step's forward: like DDP, only if the forward's backward is synchronised."""
        self.buffers_follow = torch.is_grad_enabled() and self.reducer.synchronise

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers, as DDP does. Collective."""
        with torch.no_grad(), self.phases("wait for the other ranks", "buffers of rank 0"):
            self.communicator.copy_from_first(list(map(own_share, self.module.buffers())))

    # -- looking inside ---------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Report the memory in use and the communication so far."""
        for masters in self.masters:
            masters.states.measure()
        done = {"steps": self._steps, "backwards": self.reducer.backwards}
        return report_of(self.placements, self.units, self.communicator, self.ledger, **done)

    def reset_counters(self) -> None:
        self.communicator.counters.clear()
        self._steps = self.reducer.backwards = 0

    def reset_peak(self) -> None:
        self.ledger.reset_peak()

    # -- the end ----------------------------------------------------------------------------------------------------

    def rejoin(self) -> None:
        """After a failed run, switch to the new default process group, to save a checkpoint and close the engine."""
        self.rendezvous.close()
        self.communicator.close()
        self._connect(None, self.communicator.device)
        for masters in self.masters:
            masters.recover()
        for bucket in self.buckets:
            bucket.abandon()
            bucket.rejoin(self.communicator, self.rendezvous)

    def without_room(self, *, keeps_masters: bool) -> list[Shortage]:
        """The hosts whose memory is too small for the ordinary tensors that ``close(device="cpu")`` makes. Collective.

        Args:
            keeps_masters: whether this rank keeps the result of ``masters_by_name`` as well.

        Raises:
            Exception: the error of a failed update in the background.
        """
        self._finish_updates()
        with self.rendezvous.met("the module's parameters"):
            return without_room_for_whole(self.buckets, self.optimizers, self.communicator, keeps_masters=keeps_masters)

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
            self._finish_updates()
        except Exception as raised:
            error = raised
        may_communicate = not self._has_failed_update and (communicate or self.communicator.everyone.size == 1)
        try:
            for alone in (False, True) if may_communicate else (True,):
                try:
                    self._make_ordinary(device, alone)
                    break
                except Exception as raised:
                    error = error or raised
        finally:
            self.rendezvous.close()
            self.communicator.close()
            self.units = []
            self.background.close()
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
        self._activations = None
        restore_parameters(self.buckets, self.communicator, self.rendezvous, device, alone)
        if (module := self._module()) is not None:
            _engines.pop(module, None)
            for inner in module.modules():
                if isinstance(inner, nn.RNNBase):
                    flatten_weights(inner)

    def _clear_disk(self) -> None:
        if self._swap is not None:
            self._swap.close()
