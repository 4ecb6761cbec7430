"""The processes of a run: how they start, talk to each other and fail. The same for both Trainers and for Fabric."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.init import _EmptyInit
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_zero.engine.collectives import Communicator, wire_dtype_of
from lightning_zero.engine.placement import Placement, placements_of
from lightning_zero.engine.promises import parameters_await_values
from lightning_zero.engine.watch import explained, fail, failure, renew

if TYPE_CHECKING:
    ParallelStrategy: Any  # of one of the namespaces: the classes that are used derive from it as well
else:
    ParallelStrategy = object


CHECKPOINT_KEY = "lightning_zero"
"""Where a checkpoint keeps the fp32 masters of low-precision parameters; all else is where Lightning puts it."""


class ZeroProcesses(ParallelStrategy):
    """What every ZeRO strategy is, beside a ``ParallelStrategy`` of the namespace whose Trainer or Fabric it is for.

    ``lightning.pytorch``, ``pytorch_lightning``, ``lightning.fabric`` and ``lightning_fabric`` have base classes,
    launchers and exceptions of their own, under the same names. So what is derived from, tested by class or caught is
    looked up in ``lightning``; functions do the same in all of them.

    Arguments:
        base: positional arguments of the ``ParallelStrategy``.
        offload, process_group_backend, timeout, start_method: see ``ZeroStrategy``.
        engine_options: the engine's.

    Attributes:
        lightning: the namespace's package.
        stage: as a number.

    Raises:
        ValueError: if an argument is not one of the allowed values.
    """

    lightning: ClassVar[ModuleType]

    def __init__(
        self,
        *base: Any,
        offload: None,
        process_group_backend: str | None,
        timeout: timedelta | None,
        start_method: str,
        **engine_options: Any,
    ) -> None:
        if offload is not None:
            raise ValueError(f"offload={offload!r} is not supported yet: leave it out, or write offload=None.")
        if start_method not in ("popen", "spawn", "fork", "forkserver"):
            raise ValueError(f"start_method={start_method!r} must be 'popen', 'spawn', 'fork' or 'forkserver'.")
        self.stage = placements_of(engine_options["stage"]).stage
        self._engine_options = {**engine_options, "reduce_dtype": wire_dtype_of(engine_options["reduce_dtype"])}
        super().__init__(*base)
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._failed = False

    def __repr__(self) -> str:
        # shown by Lightning's error where a strategy is passed to what is of another namespace
        user = "Fabric" if self.lightning.__name__.endswith("fabric") else "Trainer"
        return f"<{type(self).__name__}(stage={self.stage}) for {self.lightning.__name__}.{user}>"

    # -- the processes ----------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    @property
    def _is_single(self) -> bool:
        return self.num_nodes * self.num_processes == 1

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._is_single:
            return
        launchers = self.lightning.strategies.launchers
        if self._start_method == "popen":
            cls = type("_Launcher", (_Telling, launchers._SubprocessScriptLauncher), {"strategy": weakref.ref(self)})
            self._launcher = cls(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = launchers._MultiProcessingLauncher(self, start_method=self._start_method)

    def setup_environment(self) -> None:
        self._failed = False
        super().setup_environment()
        self.set_world_ranks()
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        if not self._is_single:
            assert self.cluster_environment is not None
            if _distributed_is_initialized() and failure() is not None:
                renew(**self._group_options)
            _init_dist_connection(self.cluster_environment, self._process_group_backend, **self._group_options)

    @property
    def _group_options(self) -> dict[str, Any]:
        device_id = self.root_device if self.root_device.type != "cpu" else None
        return {"timeout": self._timeout, "device_id": device_id}

    @property
    def _handshake_timeout(self) -> float:
        return (self._timeout or default_pg_timeout).total_seconds()

    def set_world_ranks(self) -> None:
        """Tell the environment and the loggers which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # -- setting up -------------------------------------------------------------------------------------------------

    @property
    def _is_sharded(self) -> bool:
        """Whether a device need not have room for the whole module."""
        return placements_of(self.stage).parameters is Placement.SHARDED

    @contextmanager
    def _making_module(self, empty_init: bool | None) -> Iterator[None]:
        """Around the making of a module: parameters that are to be empty have no memory, others a GPU's if they fit."""
        with ExitStack() as stack:
            if empty_init:
                stack.enter_context(_EmptyInit())
                stack.enter_context(parameters_await_values())
            elif not self._is_sharded:
                stack.enter_context(self.root_device)
            yield

    # -- collectives ------------------------------------------------------------------------------------------------

    @property
    def _is_alone(self) -> bool:
        """Whether there is no other rank to talk to, also after a failure, when callbacks may still save and log."""
        return self._is_cut_off or not _distributed_is_initialized()

    @property
    def _is_cut_off(self) -> bool:
        return self._failed

    @contextmanager
    def _blocked_in(self, what: str, everyone: bool = True) -> Iterator[None]:
        """Tell ranks that wait elsewhere where this one is, and say why if it waits in vain."""
        communicator = self._communicator
        with communicator.waiting(what, everyone) if communicator is not None else explained(what):
            yield

    @property
    def _communicator(self) -> Communicator | None:
        """That of an engine, if there is one."""
        raise NotImplementedError

    def barrier(self, name: str | None = None) -> None:
        if not self._is_alone:
            device_ids = [self.root_device.index] if dist.get_backend() == "nccl" else None
            with self._blocked_in(f"the barrier {name or ''}".strip()):
                dist.barrier(device_ids=device_ids)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._is_alone:
            return obj
        holder = [obj]
        with self._blocked_in("Strategy.broadcast"):
            dist.broadcast_object_list(holder, src)
        return holder[0]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        with self._blocked_in("Strategy.all_gather", everyone=group in (None, dist.group.WORLD)):
            return super().all_gather(tensor, group, sync_grads)

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        if self._is_cut_off or not isinstance(tensor, Tensor):
            return tensor
        with self._blocked_in("Strategy.reduce", everyone=group in (None, dist.group.WORLD)):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    # -- failures ---------------------------------------------------------------------------------------------------

    @property
    def _shared_exceptions(self) -> tuple[type[BaseException], ...]:
        """Which every rank raises at once, so that none need be told."""
        return ()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, which may wait for this one, and wake them. With one rank none waits."""
        if self._failed or self._is_single:
            return
        self._failed = True
        if _distributed_is_initialized() and not isinstance(exception, self._shared_exceptions):
            first, *_ = str(exception).splitlines() or [""]
            fail(f"rank {self.global_rank} failed with {type(exception).__name__}: {first[:500]}")

    # -- names ------------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Give the names ``zero1`` to ``zero3``, with the start methods that DDP has names for, to a registry."""
        variants: list[tuple[str, Callable[[int], dict[str, Any]]]] = [
            ("", lambda stage: {"stage": stage}),
            ("_spawn", lambda stage: {"stage": stage, "start_method": "spawn"}),
            ("_fork", lambda stage: {"stage": stage, "start_method": "fork"}),
            ("_notebook", lambda stage: {"stage": stage, "start_method": "fork"}),
        ]
        for stage in (1, 2, 3):
            for suffix, options in variants:
                name = f"zero{stage}{suffix}"
                if name not in strategy_registry:
                    description = f"ZeRO stage {stage}{f' ({suffix[1:]})' if suffix else ''}"
                    strategy_registry.register(name, cls, description=description, **options(stage))


class _Telling:
    """A launcher that tells the strategy of an exception first: callbacks may want to save a checkpoint then."""

    strategy: Callable[[], ZeroProcesses | None]

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return super().launch(function, *args, **kwargs)  # type: ignore[misc]
        except BaseException as exception:
            strategy = type(self).strategy()
            if strategy is not None and not isinstance(exception, strategy._shared_exceptions):
                strategy.on_exception(exception)
            raise
