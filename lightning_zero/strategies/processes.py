"""Processes of a run: launch, collectives, checkpoints and failures. Base class for both Trainers and for Fabric."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
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

from lightning_zero.checkpoint.checksums import DamagedCheckpointError, NoCheckpointError
from lightning_zero.checkpoint.reading import OpenedCheckpoint, open_checkpoint
from lightning_zero.checkpoint.saver import Saver
from lightning_zero.checkpoint.saving import CheckpointNotSavedError
from lightning_zero.engine import Engine
from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.failures import explain, explained, fail, failure, lifelines_over
from lightning_zero.engine.comm.renewal import renew
from lightning_zero.engine.config import EngineConfig
from lightning_zero.engine.init.deferred_param import parameters_await_values
from lightning_zero.engine.plan.placement import Placement, placements_of
from lightning_zero.engine.tensor.sharded_tree import Leaf, in_parts, is_in_parts, on_cpu, on_meta, walk
from lightning_zero.strategies.options import StrategyOptions, split_options
from lightning_zero.version import __version__

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    ParallelStrategy: Any  # each namespace's own class: concrete strategies derive from that class as well
else:
    ParallelStrategy = object


class ZeroProcesses(ParallelStrategy):
    """Base class of every ZeRO strategy, combined with the ``ParallelStrategy`` of its Trainer's or Fabric's namespace.

    ``lightning.pytorch``, ``pytorch_lightning``, ``lightning.fabric`` and ``lightning_fabric`` each define their own
    base classes, launchers and exceptions, under the same names. So classes to derive from, test for or catch are
    looked up in ``lightning``; functions are the same in all of them.

    Arguments:
        base: positional arguments of the ``ParallelStrategy``.
        options: fields of ``EngineConfig`` and of the class's own options.

    Attributes:
            lightning: the namespace's package.
            stage: the stage as a number.
            config: the engine's options, as an ``EngineConfig``.
            options: the strategy's own options, as a ``StrategyOptions``.

    Raises:
        TypeError, ValueError: if an option does not exist, or its value is not allowed.
    """

    lightning: ClassVar[ModuleType]
    _options_class: ClassVar[type[StrategyOptions]] = StrategyOptions
    options: StrategyOptions
    _checkpoint_io: CheckpointIO | None
    _launcher: Any

    def __init__(
        self,
        *base: Any,
        **options: Any,
    ) -> None:
        self.config, self.options = split_options(options, self._options_class, type(self).__name__)
        self.stage = placements_of(self.config.stage).stage
        self._saves_in_parts = self.options.checkpoint == "sharded"
        self._saves_in_background = self.options.async_save
        self._saver = Saver(self.options.async_save)
        super().__init__(*base)
        self._check_checkpoint_io(self._checkpoint_io)
        self._num_nodes = 1
        self._process_group_backend = self.options.process_group_backend
        self._failed = self._has_failed = False
        self._ended_by = ""

    def __repr__(self) -> str:
        # Lightning shows this in its error if a strategy is passed to a Trainer or Fabric of another namespace.
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
        """Number of processes on this node."""
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
        if self.options.start_method == "popen":
            cls = type("_Launcher", (_Telling, launchers._SubprocessScriptLauncher), {"strategy": weakref.ref(self)})
            self._launcher = cls(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = launchers._MultiProcessingLauncher(self, start_method=self.options.start_method)

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
        return {"timeout": self.options.group_timeout, "device_id": device_id}

    @property
    def _handshake_timeout(self) -> float:
        return (self.options.group_timeout or default_pg_timeout).total_seconds()

    def _config_with(self, compute_dtype: torch.dtype | None) -> EngineConfig:
        """The engine's options, completed by the two that are derived from the precision and the timeout."""
        return replace(self.config, compute_dtype=compute_dtype, handshake_timeout=self._handshake_timeout)

    def set_world_ranks(self) -> None:
        """Set this process's rank in the cluster environment and in Lightning's rank-zero utilities."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # -- setting up -------------------------------------------------------------------------------------------------

    @property
    def _is_sharded(self) -> bool:
        """Whether parameters are sharded, so that a device need not have room for the whole module."""
        return placements_of(self.stage).parameters is Placement.SHARDED

    @contextmanager
    def _making_module(self, empty_init: bool | None) -> Iterator[None]:
        """Context for creating a module: with ``empty_init`` without memory; otherwise on the device, if unsharded."""
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
        """Whether this rank must not communicate; also after a failure, when callbacks may still save and log."""
        return self._is_cut_off or not _distributed_is_initialized()

    @property
    def _is_cut_off(self) -> bool:
        return self._failed

    @contextmanager
    def _blocked_in(self, what: str, everyone: bool = True) -> Iterator[None]:
        """Announce to the other ranks in which operation this rank waits, and explain its error if a rank failed."""
        communicator = self._communicator
        with communicator.waiting(what, everyone) if communicator is not None else explained(what):
            yield

    @property
    def _communicator(self) -> Communicator | None:
        """The communicator of an engine, or None if there is no engine."""
        raise NotImplementedError

    def barrier(self, name: str | None = None) -> None:
        if not self._is_alone:
            with self._blocked_in(f"the barrier {name or ''}".strip()):
                process_group.barrier(self.root_device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._is_alone:
            return obj
        with self._blocked_in("Strategy.broadcast"):
            return process_group.broadcast_object(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        with self._blocked_in("Strategy.all_gather", everyone=process_group.is_default(group)):
            return super().all_gather(tensor, group, sync_grads)

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        if self._is_cut_off or not isinstance(tensor, Tensor):
            return tensor
        with self._blocked_in("Strategy.reduce", everyone=process_group.is_default(group)):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def _gather(self, value: Any) -> list[Any]:
        """All-gather a picklable value; returns the values in the order of ranks."""
        if self._is_alone:
            return [value]
        with self._blocked_in("an exchange about a checkpoint"):
            return process_group.all_gather_objects(value)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def _written_by(self) -> dict[str, Any]:
        """Versions, stage and world size, which a checkpoint records."""
        return {
            "lightning_zero": __version__,
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

    def _leaf(self, *, parts: bool, keeps: bool) -> Leaf:
        """What each tensor becomes that an engine gives to a checkpoint.

        Arguments:
            parts: sharded tensors stay so: all ranks write them, or one puts them together later.
            keeps: this rank needs the values.
        """
        if parts:
            return in_parts

        def own(tensor: Tensor) -> Tensor:
            value = on_cpu(tensor) if keeps else on_meta(tensor)
            self._saver.made(value)
            return value

        return own

    def _save_whole(self, checkpoint: dict[str, Any], path: Any, communicator: Communicator | None = None) -> None:
        """Write one file on rank 0. Collective: every rank raises if this save, or an earlier background save, failed.

        Arguments:
            communicator: if given, the sharded tensors in the checkpoint are assembled in the background.
        """
        self._alike(self._saver.finish)
        if communicator is not None:
            self._saver.save_whole_later(checkpoint, path, self.global_rank, communicator.background_group())
            return
        whole: list[dict[str, Any]] = []
        # hooks may have put values of sharded parameters there
        leaf = self._leaf(parts=False, keeps=self.is_global_zero)
        self._alike(lambda: whole.append(walk(checkpoint, leaf, is_in_parts)))
        self._alike(lambda: self._saver.save_whole(whole[0], path) if self.is_global_zero else None)

    def _opened(self, path: Any, weights_only: bool | None) -> OpenedCheckpoint:
        """Open and verify a checkpoint in any format. Collective: an error on one rank is raised on every rank."""
        opened: list[OpenedCheckpoint] = []
        self._alike(lambda: opened.append(open_checkpoint(path, weights_only=weights_only)))
        ranks = 1 if self._is_alone else process_group.world_size()
        self._alike(lambda: opened[0].verify(share=(self.global_rank if ranks > 1 else 0, ranks)))
        if self.num_nodes == 1:  # with several nodes each may have its own copy of the file
            opened[0].trust()
        return opened[0]

    def _alike(self, act: Callable[[], Any]) -> None:
        """Run ``act`` on every rank; if it fails on one rank, raise on all. Collective."""
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
        """Wait at the end of a run for background saves, or raise if one failed.

        Raises:
                CheckpointNotSavedError: on every rank; only logged if an exception has ended the run, to keep that
                visible.
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
        """Close all engines at the end of a run, even if closing one of them fails.

        Arguments:
            error: an earlier error of the teardown.

        Raises:
            Exception: the first error; only logged if an exception has ended the run, to keep that one visible.
        """
        for engine in engines:
            try:
                # After a failure the other ranks may be at any point, so closing must not communicate.
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
        """Exceptions that every rank raises at the same time, so ranks need not notify each other."""
        return ()

    def on_exception(self, exception: BaseException) -> None:
        """Notify the other ranks of the failure, and interrupt those that wait for this rank. No-op with one rank."""
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
        """Register the names ``zero1`` to ``zero3_nvme``, each also with DDP's suffixes for start methods."""
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
    """Launcher mixin that notifies the strategy of an exception first, since callbacks may then save a checkpoint."""

    strategy: Callable[[], ZeroProcesses | None]

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return super().launch(function, *args, **kwargs)  # type: ignore[misc]
        except BaseException as exception:
            strategy = type(self).strategy()
            if strategy is not None and not isinstance(exception, strategy._shared_exceptions):
                strategy.on_exception(exception)
            raise
