"""ZeRO as a strategy of Fabric's: modules and optimizers come one by one, and the loop is the user's own."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from lightning import fabric
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import STRATEGY_REGISTRY, ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint.fitting import check_module
from lightning_zero.checkpoint.form import CHECKPOINT_KEY
from lightning_zero.checkpoint.reading import by_number
from lightning_zero.checkpoint.saving import by_name, names_in
from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.collectives import Communicator
from lightning_zero.engine.elementwise import check_optimizer
from lightning_zero.engine.offload.config import OffloadConfig
from lightning_zero.engine.promises import awaits_values
from lightning_zero.engine.reunion import reunite
from lightning_zero.engine.units import Units
from lightning_zero.precision import compute_dtype_of
from lightning_zero.processes import ZeroProcesses


class FabricStrategy(ZeroProcesses):
    """ZeRO (Rajbhandari et al., SC20) for modules and optimizers that ``Fabric.setup`` is given.

    Each module that is set up has an engine of its own, until it is deleted or the strategy torn down. An optimizer
    may be set up with its module, before or after it, and may hold parameters of several modules.

    Arguments:
        stage: 1 shards the optimizer state, 2 the gradients too, 3 the parameters too. Also by the paper's names
            ``"os"``, ``"os+g"``, ``"os+g+p"``.
        offload, units, unit_numel, prefetch, overlap, reduction_buffers, reduce_dtype, bucket_numel,
            activation_checkpointing, allow_any_optimizer: as of ``lightning_zero.ZeroStrategy``.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: as of every strategy.
        process_group_backend: for example ``"nccl"`` or ``"gloo"``; by default what suits the device.
        timeout: of the process group.
        start_method: how ``Fabric.launch`` starts the other processes: ``"popen"`` runs the script again,
            ``"spawn"``, ``"fork"`` and ``"forkserver"`` are ``torch.multiprocessing``'s.

    Raises:
        ValueError: if an argument is not one of the allowed values.
    """

    def __init__(
        self,
        stage: int | str = 3,
        offload: Literal["cpu", "nvme"] | OffloadConfig | Mapping[str, Any] | None = None,
        units: Units = "auto",
        unit_numel: int | None = None,
        prefetch: int = 1,
        overlap: bool = True,
        reduction_buffers: int = 2,
        reduce_dtype: torch.dtype | str | None = None,
        bucket_numel: int = 2**25,
        activation_checkpointing: Units | None = None,
        allow_any_optimizer: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        checkpoint: Literal["full", "sharded"] = "full",
        async_save: bool = False,
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision,
            offload=offload,
            checkpoint=checkpoint,
            async_save=async_save,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            stage=stage,
            units=units,
            unit_numel=unit_numel,
            prefetch=prefetch,
            overlap=overlap,
            reduction_buffers=reduction_buffers,
            reduce_dtype=reduce_dtype,
            bucket_numel=bucket_numel,
            activation_checkpointing=activation_checkpointing,
            allow_any_optimizer=allow_any_optimizer,
        )
        # in the order in which they were set up, the same on every rank; modules and optimizers are the user's
        self._engines: list[weakref.ref[Engine]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._backward_sync_control: Any = _BackwardSyncControl()
        self._every_rank_keeps, self._in_parts = True, False

    # -- the processes ----------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if not self._is_single:
            _tell_of_uncaught_exceptions()
            _strategies.add(self)

    _set_world_ranks = ZeroProcesses.set_world_ranks

    @property
    @override
    def _communicator(self) -> Communicator | None:
        return self.engines[0].communicator if self.engines else None

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduce(tensor, group, reduce_op)

    # -- setting up -------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if precision is not None:
            compute_dtype_of(precision, self.lightning)  # refuses some, before any process is started
        super(FabricStrategy, type(self)).precision.fset(self, precision)

    @property
    def engines(self) -> list[Engine]:
        """The engines of the modules that have been set up, in that order."""
        return [engine for reference in self._engines if (engine := reference()) is not None]

    def module_to_device(self, module: nn.Module) -> None:
        """Leave it where it is if it may be too large for the device: ``setup_module`` moves it as it is cut."""
        if not self._is_sharded and not awaits_values(module):
            module.to(self.root_device)

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """``Fabric.init_module``."""
        stack = ExitStack()
        stack.enter_context(self._making_module(empty_init))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        for optimizer in optimizers:
            self.setup_optimizer(optimizer)
        return self.setup_module(module), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module in place, with the optimizers over its parameters that were set up before. Collective."""
        reunite(module, self._handshake_timeout)
        engine = Engine(
            module,
            [optimizer for optimizer in self._known_optimizers() if _hold_in_common(optimizer, module)],
            device=self.root_device,
            compute_dtype=compute_dtype_of(self.precision, self.lightning),
            handshake_timeout=self._handshake_timeout,
            **self._engine_options,
        )
        self._engines = [weakref.ref(each) for each in (*self.engines, engine)]
        return _Sharded(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer update this rank's parts of the modules that are, and will be, set up."""
        allow_any, offload = self._engine_options["allow_any_optimizer"], self._offload
        offloads = offload is not None and offload.optimizer is not None
        check_optimizer(optimizer, allow_any, ranks=self.world_size, offloads=offloads)
        known = self._known_optimizers()
        if not any(optimizer is each for each in known):
            self._optimizers = [weakref.ref(each) for each in (*known, optimizer)]
            for engine in self.engines:
                if _hold_in_common(optimizer, engine.module):
                    engine.set_optimizers([*engine.optimizers, optimizer])
        return optimizer

    def _known_optimizers(self) -> list[Optimizer]:
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The whole state dict, on the CPU. Collective."""
        module = _unwrapped(module)
        for engine in self.engines:
            if any(inner is module for inner in engine.module.modules()):
                if self._in_parts:
                    return module.state_dict()
                return self._whole_weights(engine, keep=self._keeps, module=module)
        return super().get_module_state_dict(module)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's whole state in torch's ordinary form, on the CPU. Collective."""
        for engine in self.engines:
            if any(own is optimizer for own in engine.optimizers):
                if self._in_parts:
                    return engine.optimizer_state_dict_in_parts(optimizer)
                return self._whole_optimizer_state(engine, optimizer, keep=self._keeps)
        return super().get_optimizer_state(optimizer)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        check_module(_unwrapped(module), state_dict, strict)
        _unwrapped(module).load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write an ordinary file on rank 0, which alone has the values meanwhile, or a folder of parts. Collective."""
        # a filter is rank 0's alone in a file, and may look at values
        with self._written_by_first(self._saves_in_parts or (self._saves_in_background and filter is None)):
            masters = {}
            if any(isinstance(value, Optimizer) for value in state.values()):
                masters = {key: found for key, value in state.items() if (found := self._masters_of(value))}
            if not self.is_global_zero and not self._saves_in_parts:
                filter = None  # it may look at values
            for key, keeps in (filter or {}).items():
                if key in masters:
                    masters[key] = {name: value for name, value in masters[key].items() if keeps(name, value)}
            about = {CHECKPOINT_KEY: {"masters": masters}} if masters else {}
            if not self._saves_in_parts and (not self._has_default_io or storage_options is not None):
                super().save_checkpoint(path, {**state, **about}, storage_options, filter)
                return
            converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
            if not self._saves_in_parts:
                communicator = self._communicator if self._in_parts else None
                self._save_whole({**converted, **about}, path, communicator)
                return
            self._check_storage_options(storage_options)
            self._alike(self._saver.finish)
            tree = {
                key: by_name(converted[key], _names_in(state[key], state))
                if isinstance(state[key], Optimizer)
                else converted[key]
                for key in _large(state)
                if key in converted
            }
            rest = {**{key: value for key, value in converted.items() if key not in tree}, **about}
            self._saver.save_in_parts(tree, rest, path, self._written_by, self.global_rank, self._gather)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As Fabric's, of a file or a folder; each rank reads its share of weights and optimizers' state."""
        self._alike(self._saver.finish)
        if not self._has_default_io or str(path).startswith("http"):
            remainder = super().load_checkpoint(path, state, strict, weights_only)
        else:
            opened = self._opened(path, weights_only)
            checkpoint = dict(opened.as_saved)
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Optimizer) and key in checkpoint and opened.form == "sharded":
                    checkpoint[key] = by_number(checkpoint[key])
            own, self._checkpoint_io = self._checkpoint_io, _AlreadyRead(checkpoint)
            try:
                remainder = super().load_checkpoint(path, state, strict, weights_only)
            finally:
                self._checkpoint_io = own
        if isinstance(state, dict) and state:
            for key, masters in remainder.pop(CHECKPOINT_KEY, {"masters": {}}).get("masters", {}).items():
                engine = engine_of(_unwrapped(state[key])) if isinstance(state.get(key), nn.Module) else None
                if engine is not None:
                    engine.load_masters(masters)
        return remainder

    @property
    def _keeps(self) -> bool:
        return self._every_rank_keeps or self.is_global_zero

    @contextmanager
    def _written_by_first(self, in_parts: bool) -> Iterator[None]:
        """Around what every rank collects for rank 0 to write; an error in seconds if not every rank comes."""
        self._every_rank_keeps, self._in_parts = False, in_parts
        try:
            with self.engines[0].agreement.met("what fabric.save() writes") if self.engines else nullcontext():
                yield
        finally:
            self._every_rank_keeps, self._in_parts = True, False

    def _masters_of(self, value: Any) -> dict[str, Tensor]:
        engine = engine_of(_unwrapped(value)) if isinstance(value, nn.Module) else None
        if engine is None:
            return {}
        return engine.masters_in_parts() if self._in_parts else self._whole_masters(engine, keep=self._keeps)

    # -- the end ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Make the modules ordinary again, whole, where they are. Collective, but after a failure."""
        try:
            self._finish_saving()
        finally:
            self._teardown()

    def _teardown(self) -> None:
        engines = self.engines
        self._engines = []
        try:
            self._close(engines)
        finally:
            super().teardown()


class _Sharded(nn.Module):
    """In the place where Fabric expects DistributedDataParallel: a module's other methods go through its forward, too.

    There the root unit is gathered, and Fabric's precision applies.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _AlreadyRead(CheckpointIO):
    """In the place of what reads a checkpoint."""

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        raise NotImplementedError

    def remove_checkpoint(self, path: Any) -> None:
        raise NotImplementedError


def _large(state: dict[str, Any]) -> list[str]:
    """What may be in parts: modules and optimizers."""
    return [key for key, value in state.items() if isinstance(value, (nn.Module, Optimizer))]


def _names_in(optimizer: Optimizer, state: dict[str, Any]) -> list[str]:
    """The names of an optimizer's parameters in the order of its groups; with the module's where there are several."""
    modules = {key: _unwrapped(value) for key, value in state.items() if isinstance(value, nn.Module)}
    names = {
        id(parameter): name if len(modules) == 1 else f"{key}.{name}"
        for key, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    return names_in(optimizer, names)


class _BackwardSyncControl:
    """What ``Fabric.no_backward_sync`` asks for."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        engine = engine_of(_unwrapped(module))
        return engine.no_sync() if engine is not None and enabled else nullcontext()


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, _Sharded) else module


def _hold_in_common(optimizer: Optimizer, module: nn.Module) -> bool:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in held for parameter in module.parameters())


_strategies: weakref.WeakSet[FabricStrategy] = weakref.WeakSet()


@cache
def _tell_of_uncaught_exceptions() -> None:
    """Let the other ranks know when a script ends by an exception: nothing of Fabric's is around it to catch it."""
    before = sys.excepthook

    def tell(cls: type[BaseException], exception: BaseException, *rest: Any) -> None:
        for strategy in list(_strategies):
            strategy.on_exception(exception)
        before(cls, exception, *rest)

    sys.excepthook = tell


class ZeroStrategy(FabricStrategy, ParallelStrategy):
    __doc__ = FabricStrategy.__doc__
    lightning: ClassVar[ModuleType] = fabric


ZeroStrategy.register_strategies(STRATEGY_REGISTRY)
