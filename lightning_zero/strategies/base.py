"""Base class of all strategies: Lightning's hooks that the Trainer's and Fabric's strategies share."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor

from lightning_zero.engine import Engine, EngineConfig, deferred_param, placement, process_group, tensor_parallel
from lightning_zero.io.options import names_of_options
from lightning_zero.strategies import lightning_internals as internals
from lightning_zero.strategies.checkpoint_files import CheckpointFiles
from lightning_zero.strategies.options import StrategyOptions, options_of
from lightning_zero.strategies.rank_group import RankGroup

log = logging.getLogger(__name__)

# Precision plugins that store weights as fp8 copies with scales, as quantised blocks or as another strategy's shards.
# Such weights cannot be split into flat shards of plain numbers.
_REFUSED = ("TransformerEngine", "Bitsandbytes", "DeepSpeed", "FSDP", "XLA")

if TYPE_CHECKING:
    ParallelStrategy: Any  # concrete strategies also derive from their own namespace's class
else:
    ParallelStrategy = object


class BaseStrategy(ParallelStrategy):
    """Base class of every ZeRO strategy. Concrete strategies also derive from their namespace's ``ParallelStrategy``.

    ``lightning.pytorch``, ``pytorch_lightning``, ``lightning.fabric`` and ``lightning_fabric`` each define their own
    base classes, launchers and exceptions, under the same names. Such classes are therefore looked up in the module
    ``self.lightning``. Functions behave the same in all namespaces.
    """

    lightning: ClassVar[ModuleType]
    _arguments_of_base: ClassVar[tuple[str, ...]]
    _options_class: ClassVar[type[StrategyOptions]]
    options: StrategyOptions
    _checkpoint_io: Any
    _launcher: Any

    def __init__(self, **options: Any) -> None:
        of_base = {name: options.pop(name) for name in self._arguments_of_base if name in options}
        self.options = options_of(self._options_class, options, type(self).__name__)
        # the engine's options alone
        self.config = EngineConfig(**{name: getattr(self.options, name) for name in names_of_options(EngineConfig)})
        self.ranks = RankGroup(self)
        self._files = CheckpointFiles(self)
        super().__init__(**of_base)
        self._num_nodes = 1
        self._process_group_backend = self.options.process_group_backend
        self._config_of_run()  # raises if the precision is unsupported

    def __repr__(self) -> str:
        # Lightning shows this text if a strategy is passed to a Trainer or Fabric of another namespace.
        user = "Fabric" if self.lightning.__name__.endswith("fabric") else "Trainer"
        return f"<{type(self).__name__}(stage={self.stage}) for {self.lightning.__name__}.{user}>"

    @property
    def stage(self) -> int:
        """The stage as a number."""
        return self.config.stage

    # -- the processes ----------------------------------------------------------------------------------------------

    root_device = DDPStrategy.root_device
    num_nodes = DDPStrategy.num_nodes
    num_processes = DDPStrategy.num_processes
    process_group_backend = DDPStrategy.process_group_backend
    set_world_ranks = _set_world_ranks = internals.set_world_ranks

    @property
    def device_mesh(self) -> tensor_parallel.DeviceMesh:
        """The mesh of ranks, with the dimensions ``data_parallel`` and ``tensor_parallel``.

        Raises:
            RuntimeError: before the processes have started, or without ``tensor_parallel_size``.
        """
        if self.ranks.mesh is None:
            raise RuntimeError(
                "The device mesh exists only with ZeroStrategy(tensor_parallel_size=...), and only once the processes "
                "have started: read it in configure_model or later, or after fabric.launch()."
            )
        return self.ranks.mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self.ranks.mesh is None:
            return DDPStrategy.distributed_sampler_kwargs.__get__(self)
        along = self.ranks.mesh[tensor_parallel.DATA]
        return {"num_replicas": along.size(), "rank": along.get_local_rank()}

    def _configure_launcher(self) -> None:
        self._config_of_run()  # raises if the Trainer has set an unsupported precision
        _ = self.ranks.mesh_shape  # raises if the number of ranks does not fit it
        is_written_here = self.options.checkpoint == "sharded" or self.options.async_save
        if is_written_here and not self._files.has_default_io:
            raise ValueError(
                "With checkpoint='sharded' or async_save=True, the strategy writes checkpoints itself: remove the "
                f"plugin {type(self.checkpoint_io).__name__}, or leave these options out."
            )
        if self.ranks.is_single:
            return
        if self.options.start_method == "popen":
            bases = _Telling, internals.subprocess_launcher(self.lightning)
            cls = type("Launcher", bases, {"strategy": weakref.ref(self)})
            self._launcher = cls(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            cls = internals.multiprocessing_launcher(self.lightning)
            self._launcher = cls(self, start_method=self.options.start_method)

    def setup_environment(self) -> None:
        self.ranks.begin_run()
        super().setup_environment()
        self._set_world_ranks()
        self._process_group_backend = internals.get_process_group_backend(self)
        self.ranks.connect()

    def _config_of_run(self) -> EngineConfig:
        """Return the engine's options, including the dtype derived from the precision."""
        plugin = getattr(self, self._arguments_of_base[-1])  # `precision_plugin` of a Trainer, `precision` of Fabric
        return replace(self.config, compute_dtype=_compute_dtype_of(plugin, self.lightning))

    # -- setting up -------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> list[Engine]:
        """The engines of the modules that have been set up, in order of set-up, without engines that were closed."""
        raise NotImplementedError

    @property
    def _is_sharded(self) -> bool:
        """Whether parameters are sharded; the full module then need not fit on a device."""
        return placement.placements_of(self.stage).parameters.is_sharded

    @contextmanager
    def _making_module(self, empty_init: bool | None) -> Iterator[None]:
        """Context in which new parameters are deferred (``empty_init``), or are created on the device if unsharded."""
        if empty_init:
            with internals.EmptyInit(), deferred_param.parameters_await_values():
                yield
        else:
            device: Any = nullcontext() if self._is_sharded else self.root_device
            waiting: Any = nullcontext()
            if self.ranks.mesh is None:
                waiting = deferred_param.parameters_await_values(only_on_meta=True)
            with device, waiting:
                yield

    # -- collectives ------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        if not self.ranks.is_alone:
            with self.ranks.blocked_in(f"the barrier {name or ''}".strip()):
                process_group.barrier(self.root_device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.ranks.is_alone:
            return obj
        with self.ranks.blocked_in("Strategy.broadcast"):
            return process_group.broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self.ranks.is_cut_off or not isinstance(tensor, Tensor):
            return tensor
        with self.ranks.blocked_in("Strategy.reduce", everyone=process_group.is_default(group)):
            return internals.sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    all_reduce = reduce  # Fabric's name for it

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        with self.ranks.blocked_in("Strategy.all_gather", everyone=process_group.is_default(group)):
            return super().all_gather(tensor, group, sync_grads)

    # -- the end ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Wait for background saves, and close the engines. Collective, except after a failure."""
        try:
            self._files.close()
        except Exception as error:
            self._report(error)
        finally:
            self._teardown()

    def _report(self, error: Exception) -> None:
        """Raise an error, or log it if an exception has ended the run before."""
        if self.ranks.ended_by is None:
            raise error
        if str(error) != self.ranks.ended_by:
            log.warning("Another error followed the exception that ended the run: %s", error)

    def _teardown(self) -> None:
        raise NotImplementedError

    def _close(self, engines: Iterable[Engine], error: Exception | None = None, **options: Any) -> None:
        """Close all engines, even if closing one fails. The first error is raised, or logged if the run has failed."""
        for engine in engines:
            try:
                # After a failure, other ranks may be anywhere in the program, so closing must not communicate.
                engine.close(communicate=not self.ranks.is_cut_off and error is None, **options)
            except Exception as raised:
                error = error or raised
        if error is not None:
            self._report(error)

    # -- failures ---------------------------------------------------------------------------------------------------

    @property
    def _shared_exceptions(self) -> tuple[type[BaseException], ...]:
        """Exceptions that every rank raises at the same time, so ranks need not notify each other."""
        return ()

    def on_exception(self, exception: BaseException) -> None:
        """Record the failure, notify the other ranks, and interrupt ranks that are waiting for this one."""
        self.ranks.end_by(exception, is_shared=isinstance(exception, self._shared_exceptions))

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

    strategy: Callable[[], BaseStrategy | None]

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
            "'16-true', 'bf16-true', '16-mixed' or 'bf16-mixed', or pass your own Precision plugin. To quantise a "
            "model, call lightning_zero.load_weights(model, path, quantize='nf4') in configure_model."
        )
    if isinstance(plugin, plugins.MixedPrecision):
        return torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16
    return None
