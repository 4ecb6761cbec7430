"""All options of the engine, with their checks; strategies, Fabric and Hydra take their options from this file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_zero.io.annotations import check_fields, matches, shown
from lightning_zero.io.disk import is_in_memory
from lightning_zero.io.options import config_of

Modules = str | type | Iterable[type] | Callable[[str, nn.Module], bool]
"""How an option specifies modules: a keyword, one or several classes, or a predicate of (qualified name, module)."""

OffloadTarget = Literal["cpu", "nvme"]

# The paper's names (P_os, P_os+g, P_os+g+p), and names from other texts that say what each stage shards in addition
# to the previous stage: ZeRO-O(ptimizer), ZeRO-D (gra*d*ients), ZeRO-P(arameters).
_STAGES = {"1": 1, "os": 1, "o": 1, "2": 2, "os+g": 2, "d": 2, "3": 3, "os+g+p": 3, "p": 3}

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Dtypes of parameters whose master weights and gradients are in fp32, unless ``masters=False``."""


def full_precision(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a parameter's dtype are accumulated and updated: fp32 for low precision."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The values of ``reduce_dtype``."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of an engine. Options that can be written in several forms are converted to one form.

    A field's annotation is that form; ``"given"`` in its metadata has the others.

    Arguments:
        stage: 1 shards the optimizer state, 2 the gradients too, 3 the parameters too (SC20, section 5). The paper's
            names ``"os"``, ``"os+g"``, ``"os+g+p"`` are accepted as well.
        offload: model states to keep outside device memory: ``"cpu"`` keeps master weights and optimizer states in
            host memory, ``"nvme"`` in files on a local disk. An ``OffloadConfig``, or a mapping of its fields,
            sets more options. ``None`` keeps all model states on the device.
        shard_within: at stage 3, the ranks over which parameters and accumulated gradients are sharded: ``"node"`` for
            the ranks of each machine, or a number of adjacent ranks. Parameters are then sent between machines only
            once per step. Master weights and optimizer state are always sharded over all ranks; with ``None``,
            parameters and gradients are as well.
        compression: ``"int8"`` or ``"int4"`` sends gradients of matrices between machines in 8 or 4 bits, to their
            owning rank, which adds them up in fp32. ``None`` compresses nothing.
        units: which modules are gathered and released together: ``"auto"``, module classes, or a predicate of
            (qualified name, module).
        unit_numel: neighbouring blocks are merged into units of at most this many elements. ``None``, with automatic
            units, means ``2**20``, or less if that would leave fewer than four units of a larger model; otherwise,
            each block is a unit.
        prefetch: number of units that are gathered ahead of need at stage 3.
        overlap: ``False`` waits for each collective right after starting it; for debugging.
        reduction_buffers: number of gradient buffers that may be reduced at the same time.
        reduce_dtype: dtype of gradients in collectives, ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``None`` for the dtype in
            which gradients are accumulated: fp32 for low-precision parameters.
        bucket_numel: largest number of elements in a bucket. Larger units are split into several buckets, each with its
            own collectives. The limit is lowered to a quarter of the model, unless the model is tiny.
        activation_checkpointing: ``"units"`` recomputes the forward of each unit in backward; module classes or a
            predicate choose other modules, as for ``units``. ``None`` adds no checkpointing.
        partition_activations: ``True``: if a checkpointed module's inputs are the same on all tensor-parallel ranks,
            each rank keeps only an equal part, on the device or where ``offload`` puts activations.
        state_dtype: ``"bf16"`` keeps the floating-point states of elementwise optimizers, such as Adam's moments, in
            bf16. They are updated in fp32 and rounded stochastically. ``None`` keeps them in the dtype of the update.
        masters: ``False`` keeps no fp32 master weights of bf16 parameters, and their reduced gradients in bf16 unless
            micro-batches are accumulated. The parameters are updated in fp32 and rounded stochastically.
        whole_parameters: whether optimizers of unknown classes need whole parameters. ``True``: yes, so each
            parameter is updated by one rank; ``False``: no, they are elementwise; or a predicate of (name, parameter).
            ``None`` accepts only known classes.
        compute_dtype: dtype in which the fp32 parameters of linear, convolution and attention layers are gathered;
            autocast would cast them anyway. ``None`` gathers them in their own dtype, like all other parameters.

    Raises:
        TypeError, ValueError: if a value is not allowed.
    """

    stage: int = field(default=3, metadata={"given": str})
    offload: OffloadConfig | None = field(default=None, metadata={"given": OffloadTarget | Mapping[str, Any]})
    shard_within: Literal["node"] | int | None = field(default=None, metadata={"least": 2})
    compression: Literal["int8", "int4"] | None = None
    units: Modules = "auto"
    unit_numel: int | None = field(default=None, metadata={"least": 0})
    prefetch: int = field(default=1, metadata={"least": 0})
    overlap: bool = True
    reduction_buffers: int = field(default=2, metadata={"least": 1})
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    bucket_numel: int = field(default=2**25, metadata={"least": 1})
    activation_checkpointing: Modules | None = None
    partition_activations: bool = False
    state_dtype: Literal["bf16"] | None = None
    masters: bool = True
    whole_parameters: bool | Callable[[str, torch.Tensor], bool] | None = None
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        resolved = {
            "stage": stage_number(self.stage),
            "offload": config_of("offload", self.offload, OffloadConfig, _OFFLOADS),
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        _check_modules("units", self.units, "auto")
        if self.activation_checkpointing is not None:
            _check_modules("activation_checkpointing", self.activation_checkpointing, "units")
        check_fields(self)
        self._check_together(self.offload or OffloadConfig(optimizer=None))

    def _check_together(self, offload: OffloadConfig) -> None:
        """Raise a ValueError if options contradict each other."""
        within, parameters, activations = self.shard_within, offload.parameters, offload.activations
        for prefix, option, value in (("offload: ", "parameters", parameters), ("", "shard_within", within)):
            if value is not None and self.stage != 3:
                raise ValueError(
                    f"{prefix}{option}={value!r} requires stage 3: at stage {self.stage} every rank keeps all "
                    f"parameters gathered. Write stage=3, or leave {option}= out."
                )
        if within is not None and parameters is not None:
            raise ValueError(
                f"shard_within={within!r} keeps parameters on the device, but the offload option "
                f"parameters={parameters!r} would offload them. Leave one of the two out."
            )
        if self.compression is not None and self.reduce_dtype is not None:
            raise ValueError(
                f"compression={self.compression!r} and reduce_dtype={self.reduce_dtype!r} both determine how "
                "gradients are sent. Leave one of the two out."
            )
        for option, is_set in (
            (f"offload: activations={activations!r} offloads", activations is not None),
            ("partition_activations=True divides", self.partition_activations),
        ):
            if is_set and self.activation_checkpointing is None:
                raise ValueError(
                    f"{option} the inputs of checkpointed modules, but no module is checkpointed: write "
                    "activation_checkpointing='units' to checkpoint all units."
                )

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload is not None and self.offload.optimizer is not None

    @property
    def rounding_options(self) -> str | None:
        """The options by which results of updates are rounded stochastically; None if they are not rounded."""
        options = {"state_dtype='bf16'": self.state_dtype is not None, "masters=False": not self.masters}
        return " and ".join(option for option, is_set in options.items() if is_set) or None

    def check_mesh(self, tensor_parallel_size: int | str | None) -> None:
        """Raise a ValueError if the options do not allow this number of tensor-parallel ranks (None: no mesh)."""
        if self.partition_activations and tensor_parallel_size in (None, 1):
            raise ValueError(
                "partition_activations=True divides inputs that tensor-parallel ranks share, but there is only one "
                "such rank: set tensor_parallel_size above 1, or leave partition_activations out. To offload "
                "activations instead, write offload={'optimizer': None, 'activations': 'cpu'}."
            )
        if self.shard_within is not None and tensor_parallel_size is not None:
            raise ValueError(
                f"shard_within={self.shard_within!r} cannot be combined with "
                f"tensor_parallel_size={tensor_parallel_size}: either one alone reduces the traffic between "
                "machines, and both together are not supported. Leave one of them out."
            )


@dataclass(frozen=True)
class OffloadConfig:
    """Which model states and activations are offloaded, and where to.

    (Ren et al., "ZeRO-Offload", ATC 2021; Rajbhandari et al., "ZeRO-Infinity", SC 2021.)

    Args:
        optimizer: optimizer states and master weights: ``"cpu"`` keeps and updates them in host memory; ``"nvme"``
            keeps them in files on a local disk and updates them in host memory, bucket by bucket; None keeps them on
            the device.
        gradients: each rank's shard of the reduced gradients of parameters with offloaded optimizer states: ``"cpu"``,
            or None to leave it on the device until the update.
        parameters: each rank's shard of the parameters while they are not gathered (stage 3): ``"cpu"``, ``"nvme"`` or
            None.
        activations: inputs of the modules that ``activation_checkpointing`` recomputes: ``"cpu"`` or None.
        path: a folder on a fast local disk, for ``"nvme"``; None for ``default_folder()``.
        fraction: share of the optimizer states and master weights to offload, starting with the last modules.
        overlap: False does all work synchronously instead of in the background; for debugging.

    Raises:
        ValueError: if an argument is not one of the allowed values.

    Example:
        >>> offload = lightning_zero.OffloadConfig(optimizer="nvme", parameters="cpu", path="/local/disk")
        >>> strategy = lightning_zero.ZeroStrategy(stage=3, offload=offload)
    """

    optimizer: OffloadTarget | None = "cpu"
    gradients: Literal["cpu"] | None = None
    parameters: OffloadTarget | None = None
    activations: Literal["cpu"] | None = None
    path: str | Path | None = None
    fraction: float = field(default=1.0, metadata={"least": 0})
    overlap: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "offload: ")
        if self.fraction > 1:
            raise ValueError(f"offload: fraction={self.fraction!r} must be a number from 0 to 1.")
        for name in ("gradients", "parameters"):
            if getattr(self, name) is not None and self.optimizer is None:
                raise ValueError(
                    f"offload: {name}={getattr(self, name)!r} requires optimizer='cpu' or optimizer='nvme': {name} "
                    "can be offloaded only together with optimizer states."
                )
        if self.parameters == "nvme" and self.optimizer != "nvme":
            raise ValueError(
                "offload: parameters='nvme' requires optimizer='nvme', since parameters and master weights share a "
                "file. Write optimizer='nvme' as well, or parameters='cpu'."
            )
        if self.optimizer == "nvme" and self.path is None:
            object.__setattr__(self, "path", default_folder())


_OFFLOADS = {"cpu": {"optimizer": "cpu"}, "nvme": {"optimizer": "nvme"}}


def default_folder() -> str:
    """The default folder for offloaded files: that for temporary files (``$TMPDIR``).

    Raises:
        ValueError: if the folder is on an in-memory file system.
    """
    folder = tempfile.gettempdir()
    if is_in_memory(folder):
        raise ValueError(
            f"offload: optimizer='nvme' would write to {folder}, which is on an in-memory file system: write "
            "OffloadConfig(optimizer='nvme', path=...) with a folder on a local disk, or set TMPDIR to one."
        )
    return folder


def stage_number(stage: int | str) -> int:
    """Convert a stage's number, or its name in the literature, to the number.

    Raises:
        ValueError: if there is no such stage.
    """
    name = str(stage).lower().strip() if isinstance(stage, (int, str)) else ""
    if name not in _STAGES:
        raise ValueError(
            f"stage={shown(stage)} is not a ZeRO stage: write 1, 2 or 3, or the paper's name 'os', 'os+g' or "
            "'os+g+p'. For stage 0, use Lightning's strategy='ddp'."
        )
    return _STAGES[name]


def _check_modules(option: str, wanted: Any, word: str) -> None:
    is_classes = isinstance(wanted, Collection) and matches(wanted, Iterable[type]) and len(wanted) > 0
    if is_classes or callable(wanted) or matches(wanted, Literal[word]):
        return
    raise TypeError(
        f"{option}={shown(wanted)} must be {word!r}, a module class or a list of classes ({option}=[Block]), or a "
        f"predicate ({option}=lambda name, module: ...)."
    )
