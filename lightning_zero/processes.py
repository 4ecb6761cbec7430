"""The processes of a run: how they start, talk to each other and fail. The same for both Trainers and for Fabric."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
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
from torch.optim import Optimizer

import lightning_zero
from lightning_zero.checkpoint.checksums import DamagedCheckpointError, NoCheckpointError
from lightning_zero.checkpoint.reading import OpenedCheckpoint, open_checkpoint
from lightning_zero.checkpoint.saver import Saver
from lightning_zero.checkpoint.saving import CheckpointNotSavedError, without_parts
from lightning_zero.engine import Engine
from lightning_zero.engine.collectives import Communicator, wire_dtype_of
from lightning_zero.engine.offload.config import offload_config
from lightning_zero.engine.placement import Placement, placements_of
from lightning_zero.engine.promises import parameters_await_values
from lightning_zero.engine.watch import explain, explained, fail, failure, lifelines_over, renew

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    ParallelStrategy: Any  # of one of the namespaces: the classes that are used derive from it as well
else:
    ParallelStrategy = object


class ZeroProcesses(ParallelStrategy):
    """What every ZeRO strategy is, beside a ``ParallelStrategy`` of the namespace whose Trainer or Fabric it is for.

    ``lightning.pytorch``, ``pytorch_lightning``, ``lightning.fabric`` and ``lightning_fabric`` have base classes,
    launchers and exceptions of their own, under the same names. So what is derived from, tested by class or caught is
    looked up in ``lightning``; functions do the same in all of them.

    Arguments:
        base: positional arguments of the ``ParallelStrategy``.
        offload, checkpoint, async_save, process_group_backend, timeout, start_method: see ``ZeroStrategy``.
        engine_options: the engine's.

    Attributes:
        lightning: the namespace's package.
        stage: as a number.

    Raises:
        ValueError: if an argument is not one of the allowed values.
    """

    lightning: ClassVar[ModuleType]
    _checkpoint_io: CheckpointIO | None
    _launcher: Any

    def __init__(
        self,
        *base: Any,
        offload: Any,
        checkpoint: str,
        async_save: bool,
        process_group_backend: str | None,
        timeout: timedelta | None,
        start_method: str,
        **engine_options: Any,
    ) -> None:
        if start_method not in ("popen", "spawn", "fork", "forkserver"):
            raise ValueError(f"start_method={start_method!r} must be 'popen', 'spawn', 'fork' or 'forkserver'.")
        if checkpoint not in ("full", "sharded"):
            raise ValueError(
                f"checkpoint={checkpoint!r} must be 'full', one ordinary file, or 'sharded', a folder of parts."
            )
        self.stage = placements_of(engine_options["stage"]).stage
        self._offload = offload_config(offload)
        if self._offload is not None:
            self._offload.check_stage(self.stage)
        self._saves_in_parts, self._saves_in_background = checkpoint == "sharded", async_save
        self._saver = Saver(async_save)
        self._engine_options = {
            **engine_options,
            "offload": self._offload,
            "reduce_dtype": wire_dtype_of(engine_options["reduce_dtype"]),
        }
        super().__init__(*base)
        self._check_checkpoint_io(self._checkpoint_io)
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._failed = self._has_failed = False
        self._ended_by = ""

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
        self._failed = self._has_failed = False
        self._ended_by = ""
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
            lifelines_over()

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

    def _gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in the order of ranks."""
        if self._is_alone:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size()
        with self._blocked_in("an exchange about a checkpoint"):
            dist.all_gather_object(gathered, value)
        return gathered

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def _written_by(self) -> dict[str, Any]:
        """What a checkpoint says of its origin."""
        return {
            "lightning_zero": lightning_zero.__version__,
            "torch": str(torch.__version__),
            "lightning": self.lightning.__version__,
            "stage": self.stage,
            "world_size": self.world_size,
        }

    @property
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO) -> None:
        self._check_checkpoint_io(checkpoint_io)
        self._checkpoint_io = checkpoint_io

    def _check_checkpoint_io(self, checkpoint_io: Any) -> None:
        own = [
            argument
            for argument, given in (
                ("checkpoint='sharded'", self._saves_in_parts),
                ("async_save=True", self._saves_in_background),
            )
            if given
        ]
        if own and checkpoint_io is not None and type(checkpoint_io) is not self._default_io:
            raise ValueError(
                f"{' and '.join(own)} cannot be had with {type(checkpoint_io).__name__}: the strategy writes such "
                "checkpoints by itself. Leave the plugin out, or these arguments."
            )

    @property
    def _default_io(self) -> type[CheckpointIO]:
        plugins = self.lightning.plugins
        return plugins.TorchCheckpointIO

    @property
    def _has_default_io(self) -> bool:
        return type(self.checkpoint_io) is self._default_io

    def _check_storage_options(self, storage_options: Any) -> None:
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r} have no meaning for a checkpoint in parts: leave them out, or "
                "write checkpoint='full' with a CheckpointIO that takes them."
            )

    def _whole_weights(self, engine: Engine, **options: Any) -> dict[str, Any]:
        state = engine.full_state_dict(**options)
        self._saver.made(state.values())
        return state

    def _whole_optimizer_state(self, engine: Engine, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        state = engine.full_optimizer_state_dict(optimizer, keep=keep)
        self._saver.made(value for of_one in state["state"].values() for value in of_one.values())
        return state

    def _whole_masters(self, engine: Engine, keep: bool) -> dict[str, Tensor]:
        masters = engine.masters_by_name(keep=keep)
        self._saver.made(masters.values())
        return masters

    def _save_whole(self, checkpoint: dict[str, Any], path: Any, communicator: Communicator | None = None) -> None:
        """Write one file on rank 0; what it cannot write, or could not in the background, all raise. Collective.

        Arguments:
            communicator: given, if sharded tensors in the checkpoint are to be put together in the background.
        """
        self._alike(self._saver.finish)
        if communicator is not None:
            self._saver.save_whole_later(checkpoint, path, self.global_rank, communicator.background_group())
            return
        whole: list[dict[str, Any]] = []
        self._alike(lambda: whole.append(without_parts(checkpoint, keep=self.is_global_zero)))
        self._alike(lambda: self._saver.save_whole(whole[0], path) if self.is_global_zero else None)

    def _opened(self, path: Any, weights_only: bool | None) -> OpenedCheckpoint:
        """Open a checkpoint of any form, and verify it; what one rank finds wrong, all raise. Collective."""
        opened: list[OpenedCheckpoint] = []
        self._alike(lambda: opened.append(open_checkpoint(path, weights_only=weights_only)))
        ranks = 1 if self._is_alone else dist.get_world_size()
        self._alike(lambda: opened[0].verify(share=(self.global_rank if ranks > 1 else 0, ranks)))
        if self.num_nodes == 1:  # on several, each may have a copy of its own
            opened[0].trust()
        return opened[0]

    def _alike(self, act: Callable[[], Any]) -> None:
        """Do something on every rank that fails on all of them or on none."""
        error = None
        try:
            act()
        except Exception as raised:
            error = raised
        kinds: list[type[Exception]] = [DamagedCheckpointError, NoCheckpointError, CheckpointNotSavedError]
        kinds += [FileNotFoundError, OSError]
        kind = next((kind for kind in kinds if isinstance(error, kind)), ValueError)
        said = self._gather(None if error is None else (kind, str(error)))
        if error is not None:
            raise error
        for rank, (kind, message) in ((rank, told) for rank, told in enumerate(said) if told is not None):
            raise kind(f"On rank {rank}: {message}")

    def _finish_saving(self) -> None:
        """At the end of a run: all that was saved is written then, or an error says that it is not.

        Raises:
            CheckpointNotSavedError: on every rank; but if an exception has ended the run, that is the one to be seen.
        """
        if not self._has_failed:
            if self._saves_in_background:
                self._alike(self._saver.close)
            return
        try:
            self._saver.close(abandon=self._is_cut_off)
        except Exception as error:
            log.warning("After the exception, and beside it: %s", error)

    def _close(self, engines: Iterable[Engine], error: Exception | None = None, **options: Any) -> None:
        """Close engines, at the end of a run, each of them whatever goes wrong with another.

        Arguments:
            error: what has gone wrong before.

        Raises:
            Exception: what went wrong first; but if an exception has ended the run, that is the one to be seen.
        """
        for engine in engines:
            try:
                # After a failure the other ranks may be anywhere: nothing is asked of them.
                engine.close(communicate=not self._is_cut_off and error is None, **options)
            except Exception as raised:
                error = error or raised
        if error is not None and not self._has_failed:
            raise error
        if error is not None and str(error) != self._ended_by:
            log.warning("After the exception, and beside it: %s", error)

    # -- failures ---------------------------------------------------------------------------------------------------

    @property
    def _shared_exceptions(self) -> tuple[type[BaseException], ...]:
        """Which every rank raises at once, so that none need be told."""
        return ()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, which may wait for this one, and wake them. With one rank none waits."""
        explain(exception)
        self._has_failed, self._ended_by = True, self._ended_by or str(exception)
        if self._failed or self._is_single:
            return
        self._failed = True
        if _distributed_is_initialized() and not isinstance(exception, self._shared_exceptions):
            first, *_ = str(exception).splitlines() or [""]
            fail(f"rank {self.global_rank} failed with {type(exception).__name__}: {first[:500]}")

    # -- names ------------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Give the names ``zero1`` to ``zero3_nvme``, with the start methods that DDP has names for, to a registry."""
        places: dict[str, tuple[str, dict[str, Any]]] = {
            "": ("", {}),
            "_offload": (", optimizer states on the CPU", {"offload": "cpu"}),
            "_nvme": (", optimizer states on a disk", {"offload": "nvme"}),
        }
        launches = {"": {}, "_spawn": {"start_method": "spawn"}, **dict.fromkeys(("_fork", "_notebook"), _FORK)}
        for stage, (place, (where, moved)), (suffix, start) in product((1, 2, 3), places.items(), launches.items()):
            name = f"zero{stage}{place}{suffix}"
            if name not in strategy_registry:
                description = f"ZeRO stage {stage}{where}{f' ({suffix[1:]})' if suffix else ''}"
                strategy_registry.register(name, cls, description=description, stage=stage, **moved, **start)


_FORK = {"start_method": "fork"}


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
