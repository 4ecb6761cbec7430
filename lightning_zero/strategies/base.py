"""Base class of all strategies: Lightning's hooks that the Trainer's and Fabric's strategies share."""

from __future__ import annotations

import inspect
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_type_hints

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor

from lightning_zero.callbacks.restarts import ResilienceConfig
from lightning_zero.engine import Engine, EngineConfig, deferred_param, layout, process_group, tensor_parallel
from lightning_zero.io.annotations import check_value
from lightning_zero.io.options import check_names, config_of, names_of_options
from lightning_zero.strategies import lightning_internals as internals
from lightning_zero.strategies.checkpoint_files import CheckpointFiles
from lightning_zero.strategies.rank_group import RankGroup

_Class = TypeVar("_Class", bound=type)
_Options = TypeVar("_Options", bound="StrategyOptions")


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(EngineConfig):
    """Options of every strategy, in addition to the engine's options.

    Arguments:
        checkpoint: ``"full"`` saves one ordinary file, written by rank 0; ``"sharded"`` saves a folder in the format of
            ``torch.distributed.checkpoint``, to which each rank writes its shards. Both can always be loaded.
        async_save: write checkpoints in the background; training waits only while the values are copied.
        process_group_backend: a backend such as ``"nccl"`` or ``"gloo"``; None selects one for the device.
        timeout: the process group's timeout, as a ``timedelta`` or in seconds; None for torch's default.
        tensor_parallel_size: number of consecutive ranks that share each forward pass. The project's
            ``configure_model`` must divide parameters over the dimension ``tensor_parallel`` of ``device_mesh``; ZeRO
            shards each rank's share over the other dimension. ``"auto"`` takes all ranks of a machine, as Lightning's
            ``ModelParallelStrategy`` does; None creates no mesh.
        data_parallel_size: size of the mesh's dimension ``data_parallel``; ``"auto"`` is the number of ranks divided by
            ``tensor_parallel_size``.
        start_method: how the other processes are started: ``"popen"`` runs the script again; ``"spawn"``, ``"fork"``
            and ``"forkserver"`` are the start methods of ``torch.multiprocessing``.
    """

    checkpoint: Literal["full", "sharded"] = "full"
    async_save: bool = False
    process_group_backend: str | None = None
    timeout: timedelta | None = field(default=default_pg_timeout, metadata={"given": float})
    tensor_parallel_size: Literal["auto"] | int | None = field(default=None, metadata={"least": 1})
    data_parallel_size: Literal["auto"] | int = field(default="auto", metadata={"least": 1})
    start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen"

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", _timedelta_of(self.timeout))
        super().__post_init__()
        self.check_mesh(self.tensor_parallel_size)
        if self.tensor_parallel_size is None and self.data_parallel_size != "auto":
            raise ValueError(
                f"data_parallel_size={self.data_parallel_size!r} has no effect without tensor_parallel_size: set both, "
                "or leave both out."
            )


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(StrategyOptions):
    """Options of the Trainer's strategy in addition to ``StrategyOptions``.

    Arguments:
        after_fit: what happens to the module when a run ends. ``"full"`` makes it an ordinary, unsharded module on the
            CPU of every rank. ``"sharded"`` leaves it sharded: every rank must then take part in every use of the
            module, and the next run with the same options reuses it. ``"auto"`` means ``"full"`` if nine tenths of each
            host's available memory suffice for all its ranks, otherwise ``"sharded"``, with a warning. Processes that
            are spawned or forked end after a run; there, all three mean ``"full"``.
        exclude_frozen_parameters: leave parameters with ``requires_grad=False`` out of checkpoints, and accept
            checkpoints without them. This suits adapters of a large model that is stored separately.
        resilience: ``"memory"`` keeps the state of a fit in shared memory every 20 steps. If processes are killed and
            the job is started again (by torchrun, SLURM or Ray), it continues from there. A ``ResilienceConfig``, or a
            mapping of its fields, sets more options. ``None`` keeps no state.
    """

    after_fit: Literal["auto", "full", "sharded"] = "auto"
    exclude_frozen_parameters: bool = False
    resilience: ResilienceConfig | None = field(default=None, metadata={"given": Literal["memory"] | Mapping[str, Any]})

    def __post_init__(self) -> None:
        resilience = config_of("resilience", self.resilience, ResilienceConfig, {"memory": {}})
        object.__setattr__(self, "resilience", resilience)
        super().__post_init__()


SET_BY_STRATEGIES = ("compute_dtype",)
"""The engine's options that users cannot set, since strategies derive them from the precision."""


def options_of(kind: type[_Options], given: Mapping[str, Any], what: str) -> _Options:
    """Return the options of the strategy ``what``."""
    check_names(given, [each.name for each in fields(kind) if each.name not in SET_BY_STRATEGIES], what)
    return kind(**given)


def _timedelta_of(timeout: Any) -> timedelta | None:
    """Convert the option ``timeout``. Raises a ValueError for a value that is not allowed."""
    check_value("timeout", timeout, timedelta | float | None)
    with suppress(ValueError, OverflowError):  # from timedelta, for NaN and too large a number
        converted = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        if converted is None or converted > timedelta(0):
            return converted
    raise ValueError(f"timeout={timeout!r} must be None, or a timedelta or number of seconds above 0.")


def takes_options(strategy_options: type[StrategyOptions], base: Any) -> Callable[[_Class], _Class]:
    """Class decorator: show options in signature and docstring, for ``help()``, editors, LightningCLI and Hydra.

    The class must take ``(stage, **options)``. Its options include the arguments of ``base``, Lightning's
    ``ParallelStrategy``. ``{options}`` in its docstring is replaced with the descriptions of the options.
    """

    def decorate(cls: _Class) -> _Class:
        types = get_type_hints(strategy_options)
        parameters = []
        for each in fields(strategy_options):
            if each.name not in SET_BY_STRATEGIES:
                by = inspect.Parameter.POSITIONAL_OR_KEYWORD if each.name == "stage" else inspect.Parameter.KEYWORD_ONLY
                kind = types[each.name] | each.metadata["given"] if "given" in each.metadata else types[each.name]
                parameters.append(inspect.Parameter(each.name, by, default=each.default, annotation=kind))
        documented = _documented(EngineConfig) | _documented(StrategyOptions) | _documented(strategy_options)
        described = "\n".join(documented[parameter.name] for parameter in parameters)
        cls.__doc__ = str(inspect.getdoc(cls)).replace("    {options}", described)
        of_base = {name: kind for name, kind in get_type_hints(base.__init__).items() if name != "return"}
        for name, kind in of_base.items():
            by = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, by, default=None, annotation=kind))
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        cls._arguments_of_base, cls._options_class = tuple(of_base), strategy_options  # type: ignore[attr-defined]
        cls.__init__.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[misc]
        return cls

    return decorate


def _documented(config: type) -> dict[str, str]:
    """Return the entries under "Arguments:" in a dataclass's docstring, verbatim, by option name."""
    _, _, arguments = str(inspect.getdoc(config)).partition("Arguments:\n")
    entries = re.finditer(r"^ {4}(\w+):.*(?:\n {8}.*)*", arguments, re.MULTILINE)
    return {entry[1]: entry[0] for entry in entries}


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
        self._files.has_run_ended = False
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
        return layout.placements_of(self.stage).parameters.is_sharded

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
