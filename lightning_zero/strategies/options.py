"""Options of the strategies: the engine's options, which they inherit from ``EngineConfig``, and their own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_type_hints

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

from lightning_zero.callbacks.restarts import ResilienceConfig
from lightning_zero.engine import EngineConfig
from lightning_zero.io.annotations import check_value
from lightning_zero.io.options import check_names, config_of

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
        object.__setattr__(self, "handshake_timeout", (self.timeout or default_pg_timeout).total_seconds())
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


SET_BY_STRATEGIES = ("compute_dtype", "handshake_timeout")
"""The engine's options that users cannot set, since strategies derive them from the precision and the timeout."""


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
        assert cls.__doc__ is not None
        described = "".join(documented[parameter.name] for parameter in parameters)
        cls.__doc__ = cls.__doc__.replace("        {options}\n", described)
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
    assert config.__doc__ is not None
    _, _, arguments = config.__doc__.partition("Arguments:\n")
    entries = re.finditer(r"^ {8}(\w+):.*\n(?: {12}.*\n)*", arguments, re.MULTILINE)
    return {entry[1]: entry[0] for entry in entries}
