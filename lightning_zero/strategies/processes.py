"""Base class of all strategies: launches a run's processes, and handles collectives, checkpoints and failures."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pickle import PicklingError
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor

from lightning_zero.checkpoint.checksums import DamagedCheckpointError, NoCheckpointError
from lightning_zero.checkpoint.pickles import UnsafeFileError
from lightning_zero.checkpoint.saving import CheckpointNotSavedError
from lightning_zero.engine import Engine
from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.attempts import store_of_attempt
from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.failures import explain, explained, fail, failure, lifelines_over
from lightning_zero.engine.comm.renewal import renew
from lightning_zero.engine.comm.tensor_parallel import DATA, device_mesh
from lightning_zero.engine.config import EngineConfig
from lightning_zero.engine.init.deferred_param import parameters_await_values
from lightning_zero.engine.plan.placement import placements_of
from lightning_zero.strategies import lightning_internals as internals
from lightning_zero.strategies.checkpoint_files import CheckpointFiles
from lightning_zero.strategies.options import StrategyOptions, split_options

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_SECOND_ERROR = "Another error followed the exception that ended the run: %s"

# Precision plugins that store weights as fp8 copies with scales, as quantised blocks or as another strategy's shards.
# Such weights cannot be split into flat shards of plain numbers.
_REFUSED = ("TransformerEngine", "Bitsandbytes", "DeepSpeed", "FSDP", "XLA")

if TYPE_CHECKING:
    from lightning_zero.engine.comm.tensor_parallel import DeviceMesh

    ParallelStrategy: Any  # concrete strategies also derive from their own namespace's class
else:
    ParallelStrategy = object


class ZeroProcesses(ParallelStrategy):
    """Base class of every ZeRO strategy. Concrete strategies also derive from their namespace's ``ParallelStrategy``.

    ``lightning.pytorch``, ``pytorch_lightning``, ``lightning.fabric`` and ``lightning_fabric`` each define their own
    base classes, launchers and exceptions, under the same names. Such classes are therefore looked up in the module
    ``self.lightning``. Functions behave the same in all namespaces.

    Attributes:
        stage: the stage as a number.
        config: the engine's options.
        options: the strategy's own options.
    """

    lightning: ClassVar[ModuleType]
    _arguments_of_base: ClassVar[tuple[str, ...]]
    _options_class: ClassVar[type[StrategyOptions]] = StrategyOptions
    options: StrategyOptions
    _checkpoint_io: Any
    _launcher: Any

    def __init__(self, **options: Any) -> None:
        of_base = {name: options.pop(name) for name in self._arguments_of_base if name in options}
        self.config, self.options = split_options(options, self._options_class, type(self).__name__)
        self.stage = self.config.stage
        self._files = CheckpointFiles(self)
        super().__init__(**of_base)
        self._num_nodes = 1
        self._process_group_backend = self.options.process_group_backend
        self._ended_by: str | None = None
        self._mesh: DeviceMesh | None = None
        self._config_of_run()  # raises if the precision is unsupported

    def __repr__(self) -> str:
        # Lightning shows this text if a strategy is passed to a Trainer or Fabric of another namespace.
        user = "Fabric" if self.lightning.__name__.endswith("fabric") else "Trainer"
        return f"<{type(self).__name__}(stage={self.stage}) for {self.lightning.__name__}.{user}>"

    # -- the processes ----------------------------------------------------------------------------------------------

    root_device = DDPStrategy.root_device
    num_nodes = DDPStrategy.num_nodes
    num_processes = DDPStrategy.num_processes
    process_group_backend = DDPStrategy.process_group_backend
    set_world_ranks = _set_world_ranks = internals.set_world_ranks

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of ranks, with the dimensions ``data_parallel`` and ``tensor_parallel``.

        Raises:
            RuntimeError: before the processes have started, or without ``tensor_parallel_size``.
        """
        if self._mesh is None:
            raise RuntimeError(
                "The device mesh exists only with ZeroStrategy(tensor_parallel_size=...), and only once the processes "
                "have started: read it in configure_model or later, or after fabric.launch()."
            )
        return self._mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._mesh is None:
            return DDPStrategy.distributed_sampler_kwargs.__get__(self)
        along = self._mesh[DATA]
        return {"num_replicas": along.size(), "rank": along.get_local_rank()}

    @property
    def mesh_shape(self) -> tuple[int, int] | None:
        """The numbers of ranks along ``data_parallel`` and ``tensor_parallel``; None if the options need no mesh."""
        tensor, data = self.options.tensor_parallel_size, self.options.data_parallel_size
        if tensor is None:
            return None
        tensor = self.num_processes if tensor == "auto" else tensor
        return self._mesh_ranks // tensor if data == "auto" else data, tensor

    def _make_mesh(self) -> None:
        """Create the mesh of ranks, if the options require one."""
        if self.mesh_shape is not None and self._mesh is None:
            self._check_mesh()
            self._mesh = device_mesh(self.root_device, *self.mesh_shape)

    def _check_mesh(self) -> None:
        """Raise a ValueError if the number of ranks does not fit the requested mesh."""
        size, data = self._mesh_ranks, self.options.data_parallel_size
        if self.mesh_shape is None:
            return
        tensor = self.mesh_shape[1]
        given = "'auto'" if self.options.tensor_parallel_size == "auto" else tensor
        if size == 1:
            raise ValueError(
                f"tensor_parallel_size={given} requires several ranks, but this run has one: leave the option out, "
                "and divide the module in configure_model only if trainer.world_size is above 1."
            )
        if size != self.mesh_shape[0] * tensor:
            wanted = f"tensor_parallel_size={given}" + ("" if data == "auto" else f" and data_parallel_size={data}")
            raise ValueError(
                f"{wanted} cannot be used with {size} ranks (nodes: {self.num_nodes}, each with {self.num_processes}): "
                + (
                    "choose a divisor of the number of ranks."
                    if data == "auto"
                    else "their product must equal the number of ranks."
                )
            )

    @property
    def _mesh_ranks(self) -> int:
        return self.num_nodes * self.num_processes

    @property
    def _is_single(self) -> bool:
        return self.num_nodes * self.num_processes == 1

    def _configure_launcher(self) -> None:
        self._config_of_run()  # raises if the Trainer has set an unsupported precision
        self._check_mesh()
        own = " and ".join(
            ["checkpoint='sharded'"] * (self.options.checkpoint == "sharded")
            + ["async_save=True"] * self.options.async_save
        )
        if own and not self._files.has_default_io:
            raise ValueError(
                f"{own} cannot be combined with the plugin {type(self.checkpoint_io).__name__}: the "
                "strategy writes such checkpoints itself. Remove the plugin, or leave out "
                f"{own}."
            )
        if self._is_single:
            return
        if self.options.start_method == "popen":
            bases = _Telling, internals.subprocess_launcher(self.lightning)
            cls = type("Launcher", bases, {"strategy": weakref.ref(self)})
            self._launcher = cls(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            cls = internals.multiprocessing_launcher(self.lightning)
            self._launcher = cls(self, start_method=self.options.start_method)

    def setup_environment(self) -> None:
        self._ended_by = None
        super().setup_environment()
        self._set_world_ranks()
        self._process_group_backend = internals.get_process_group_backend(self)
        if not self._is_single:
            if internals.distributed_is_initialized() and failure() is not None:
                renew(**self._group_options)
                self._mesh = None  # the mesh's groups have failed, too
            options = self._group_options_at_start
            internals.init_dist_connection(self.cluster_environment, self._process_group_backend, **options)
            lifelines_over()
            self._make_mesh()

    @property
    def _group_options(self) -> dict[str, Any]:
        device_id = self.root_device if self.root_device.type != "cpu" else None
        return {"timeout": self.options.group_timeout, "device_id": device_id}

    @property
    def _group_options_at_start(self) -> dict[str, Any]:
        if internals.distributed_is_initialized():
            return {}
        environment, timeout = self.cluster_environment, self.options.group_timeout or default_pg_timeout
        assert environment is not None
        address = environment.main_address, environment.main_port
        store = store_of_attempt(*address, environment.global_rank(), environment.world_size(), timeout)
        return self._group_options | ({"store": store} if store is not None else {})

    @property
    def _handshake_timeout(self) -> float:
        return (self.options.group_timeout or default_pg_timeout).total_seconds()

    def _config_of_run(self) -> EngineConfig:
        """Return the engine's options, including the two derived from the precision and the timeout."""
        plugin = getattr(self, self._arguments_of_base[-1])  # `precision_plugin` of a Trainer, `precision` of Fabric
        dtype = _compute_dtype_of(plugin, self.lightning)
        return replace(self.config, compute_dtype=dtype, handshake_timeout=self._handshake_timeout)

    # -- setting up -------------------------------------------------------------------------------------------------

    @property
    def _is_sharded(self) -> bool:
        """Whether parameters are sharded; the full module then need not fit on a device."""
        return placements_of(self.stage).parameters.is_sharded

    @contextmanager
    def _making_module(self, empty_init: bool | None) -> Iterator[None]:
        """Context in which new parameters are deferred (``empty_init``), or are created on the device if unsharded."""
        if empty_init:
            with internals.EmptyInit(), parameters_await_values():
                yield
        else:
            device = nullcontext() if self._is_sharded else self.root_device
            with device, nullcontext() if self._mesh is not None else parameters_await_values(only_on_meta=True):
                yield

    # -- collectives ------------------------------------------------------------------------------------------------

    @property
    def _is_alone(self) -> bool:
        """Whether this rank must not communicate: there is no process group, or the run has failed."""
        return self._is_cut_off or not internals.distributed_is_initialized()

    @property
    def _is_cut_off(self) -> bool:
        return self._ended_by is not None and not self._is_single

    @contextmanager
    def _blocked_in(self, what: str, everyone: bool = True) -> Iterator[None]:
        """Context of the operation ``what``, which waits for other ranks. If a rank fails, the error says why."""
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

    def _reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._is_cut_off or not isinstance(tensor, Tensor):
            return tensor
        with self._blocked_in("Strategy.reduce", everyone=process_group.is_default(group)):
            return internals.sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def all_gather_values(self, value: Any) -> list[Any]:
        """All-gather a picklable value, and return the values in the order of ranks."""
        if self._is_alone:
            return [value]
        with self._blocked_in("an exchange of values between ranks"):
            return process_group.all_gather_objects(value)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _alike(self, act: Callable[[], _Result]) -> _Result:
        """Call ``act`` on every rank and return its result. If a call fails, raise on every rank. Collective."""
        error = None
        try:
            result = act()
        except Exception as raised:
            error = raised
        kinds: list[type[Exception]] = [DamagedCheckpointError, NoCheckpointError, UnsafeFileError]
        kinds += [CheckpointNotSavedError, FileNotFoundError, OSError]
        kinds += [RuntimeError, TypeError, AttributeError, PicklingError]
        kind = next((kind for kind in kinds if isinstance(error, kind)), ValueError)
        said = self.all_gather_values(None if error is None else (kind, str(error)))
        if error is not None:
            raise error
        for rank, failed in enumerate(said):
            if failed is not None:
                kind, message = failed
                raise kind(f"On rank {rank}: {message}")
        return result

    def _finish_saving(self) -> None:
        """Wait for background saves. An error is raised on every rank, or only logged if the run has failed."""
        if self._ended_by is None:
            if self.options.async_save:
                self._alike(self._files.saver.close)
            return
        try:
            self._files.saver.close(abandon=self._is_cut_off)
        except Exception as error:
            log.warning(_SECOND_ERROR, error)

    def teardown(self) -> None:
        """Wait for background saves, and close the engines. Collective, except after a failure."""
        try:
            self._finish_saving()
        finally:
            self._teardown()

    def _teardown(self) -> None:
        raise NotImplementedError

    def _close(self, engines: Iterable[Engine], error: Exception | None = None, **options: Any) -> None:
        """Close all engines, even if closing one fails. The first error is raised, or logged if the run has failed."""
        for engine in engines:
            try:
                # After a failure, other ranks may be anywhere in the program, so closing must not communicate.
                engine.close(communicate=not self._is_cut_off and error is None, **options)
            except Exception as raised:
                error = error or raised
        if error is not None and self._ended_by is None:
            raise error
        if error is not None and str(error) != self._ended_by:
            log.warning(_SECOND_ERROR, error)

    # -- failures ---------------------------------------------------------------------------------------------------

    @property
    def _shared_exceptions(self) -> tuple[type[BaseException], ...]:
        """Exceptions that every rank raises at the same time, so ranks need not notify each other."""
        return ()

    def on_exception(self, exception: BaseException) -> None:
        """Record the failure, notify the other ranks, and interrupt ranks that are waiting for this one."""
        explain(exception)
        if self._ended_by is not None:
            return
        self._ended_by = str(exception)
        is_known_to_others = self._is_single or isinstance(exception, self._shared_exceptions)
        if not is_known_to_others and internals.distributed_is_initialized():
            first, *_ = str(exception).splitlines() or [""]
            fail(f"rank {self.global_rank} failed with {type(exception).__name__}: {first[:500]}")

    # -- names ------------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register each name from ``_named``, both alone and with DDP's suffixes for start methods."""
        fork = {"start_method": "fork"}
        launches = {"": {}, "_spawn": {"start_method": "spawn"}, "_fork": fork, "_notebook": fork}
        for (name, chosen), (launch, start) in product(cls._named().items(), launches.items()):
            if name + launch not in strategy_registry:
                options = {**chosen, **start}
                description = f"ZeRO: {', '.join(f'{option}={value!r}' for option, value in options.items())}"
                strategy_registry.register(name + launch, cls, description=description, **options)

    @classmethod
    def _named(cls) -> dict[str, dict[str, Any]]:
        """Options by registered name: ``zero1`` to ``zero3_nvme``, and ``zero3_node``."""
        places = {"": {}, "_offload": {"offload": "cpu"}, "_nvme": {"offload": "nvme"}}
        named: dict[str, dict[str, Any]] = {
            f"zero{stage}{place}": {"stage": stage, **offload}
            for stage, (place, offload) in product((1, 2, 3), places.items())
        }
        return named | {"zero3_node": {"stage": 3, "shard_within": "node"}}


class _Telling:
    """Launcher mixin: calls the strategy's ``on_exception`` before that of callbacks, which may save a checkpoint."""

    strategy: Callable[[], ZeroProcesses | None]

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return super().launch(function, *args, **kwargs)  # type: ignore[misc]
        except BaseException as exception:
            strategy = type(self).strategy()
            if strategy is not None and not isinstance(exception, strategy._shared_exceptions):
                strategy.on_exception(exception)
            raise


def _compute_dtype_of(plugin: Any, lightning: ModuleType) -> torch.dtype | None:
    """Return the dtype for gathering fp32 parameters that autocast casts; None to gather them in their own dtype.

    In mixed precision, parameters of embeddings, norms and custom modules are gathered in fp32, since autocast does not
    cast them. In other precisions, the plugin's conversion sets the dtype. Master weights are fp32 or fp64.
    """
    plugins = lightning.plugins.precision
    if isinstance(plugin, tuple(getattr(plugins, f"{name}Precision") for name in _REFUSED)):
        raise ValueError(
            f"{type(plugin).__name__} cannot be used with ZeroStrategy: set precision to '32-true', '64-true', "
            "'16-true', 'bf16-true', '16-mixed' or 'bf16-mixed', or pass your own Precision plugin."
        )
    if isinstance(plugin, plugins.MixedPrecision):
        return torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16
    return None
