"""Assign the parameters of units to buckets, and shard each bucket once its values are available."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.transport import Codec, Quantised
from lightning_zero.engine.config import LOW_PRECISION, EngineConfig
from lightning_zero.engine.init.sources import Source
from lightning_zero.engine.offload import Swap
from lightning_zero.engine.optim.compatibility import check_not_divided, kept_whole
from lightning_zero.engine.plan.layout import BucketLayout, Placements, balanced_owners
from lightning_zero.engine.plan.units import Owner, UnitPlan
from lightning_zero.engine.state.bucket import Bucket, SharedByBuckets, UnshardedBucket
from lightning_zero.engine.state.extensions import Extension
from lightning_zero.engine.state.residency import Medium, ResidencyPlan
from lightning_zero.engine.state.slot import make_sharded
from lightning_zero.engine.tensor.wrapper import flat_range

# Layers that use their weights only in operators that autocast computes in low precision.
_CAST_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.MultiheadAttention),
)
_CAST_FORWARDS = frozenset(layer.forward for layer in _CAST_LAYERS)
_CAST_ATTRIBUTES = frozenset(
    {"weight", "bias", "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
)

_BITS: dict[str, Literal[4, 8]] = {"int8": 8, "int4": 4}
EXEMPT_NUMEL = 65536
"""Gradients of parameters with fewer elements, or fewer than two dimensions, are sent uncompressed."""


def shard(unsharded: UnshardedBucket, sources: list[Source]) -> Bucket:
    """Shard a bucket's parameters: each becomes a sharded tensor. Collective; must be called only once."""
    communicator, plan, full = unsharded.shared.communicator, unsharded.plan, unsharded.full
    layout = plan.layout
    flat = torch.empty(layout.padded_numel, dtype=unsharded.parameters[0].dtype, device=plan.device)
    for gap in flat.split_with_sizes(layout.sizes())[1::2]:
        gap.zero_()
    first, last = (0, len(flat)) if plan.is_replicated else layout.own_part
    for everywhere, group in groupby(zip(layout.segments, sources), lambda member: member[1].everywhere):
        run = list(group)
        for segment, source in run:
            begin, end = segment.start, segment.stop
            if everywhere:  # copy only the range that this rank keeps
                begin = min(max(begin, first), end)
                end = max(min(end, last), begin)
            if source.values is not None and (everywhere or communicator.rank == 0):
                values = source.values.detach()
                flat[begin:end].copy_(flat_range(values, begin - segment.start, end - segment.start))
        if not everywhere:
            communicator.control.broadcast(flat[run[0][0].start : run[-1][0].stop])
            for segment in (segment for segment, _ in run if not segment.share.is_divided):
                communicator.tensor.control.broadcast(flat[segment.start : segment.stop])
    if plan.masters is Medium.BUFFER:
        unsharded.full = flat
    elif plan.is_replicated:
        full.untyped_storage().resize_(full.numel() * full.element_size())
        if not unsharded.extensions:  # otherwise, the first gather fills it
            full.copy_(flat)
    bucket = Bucket(unsharded, flat)
    make_sharded(bucket, unsharded.parameters)
    return bucket


def assign_to_buckets(
    config: EngineConfig,
    placements: Placements,
    plans: Sequence[UnitPlan],
    most_numel: int,
    optimizers: Sequence[Optimizer],
    shared: SharedByBuckets,
    extension_of: Mapping[nn.Parameter, Extension],
) -> list[list[UnshardedBucket]]:
    """Make each unit's buckets, each for parameters of one kind, such as one dtype and one optimizer.

    A unit's parameters of one kind are split into several buckets if together they have more than
    ``config.bucket_numel`` or ``most_numel`` elements.
    """
    tensor, mesh, device = shared.communicator.tensor, shared.communicator.mesh, shared.communicator.device
    shares = {name: tensor.placed(name, p).share for plan in plans for name, p in plan.parameters.items()}
    check_not_divided(
        optimizers, config, ((name, p, shares[name]) for plan in plans for name, p in plan.parameters.items())
    )
    # element counts of the largest shares, so that tensor-parallel ranks make the same decisions
    numels = {name: share.shape_of(0).numel() for name, share in shares.items()}
    numel_that_stay = _numel_that_stays(config, plans, numels)
    over = placements.optimizer.over
    ranks = mesh.size(over)
    nodes = ranks // mesh.size(placements.parameters.over) if placements.parameters.is_sharded else 1
    compression = config.compression if shared.communicator.may_compress else None
    # On CPUs, torch's fused encoder layer ignores autocast.
    may_fuse = not placements.parameters.is_sharded and device.type == "cpu"
    is_kept_whole = kept_whole(optimizers, config, ranks=ranks)
    kind_of = partial(_kind_of, config, is_kept_whole, compression, may_fuse, extension_of)
    parts = list(_parts(plans, optimizers, kind_of, numels, min(config.bucket_numel, most_numel)))
    owners = _owners_in(parts, ranks)
    units: list[list[UnshardedBucket]] = [[] for _ in plans]
    for number, (of_unit, kind, part) in enumerate(parts):
        named = [(name, shares[name]) for name, _ in part]
        layout = BucketLayout.of(named, ranks, owners.get(number), rank=mesh.rank, order=mesh.order, nodes=nodes)
        numel = sum(numels[name] for name, _ in part)
        stays = kind.trains and numel_that_stay >= numel
        numel_that_stay -= numel if stays else 0
        residency = ResidencyPlan.of(
            layout,
            placements,
            None if stays else config.offload,
            device=device,
            dtype=kind.dtype,
            compute_dtype=kind.compute_dtype,
            extension_dtype=kind.extension_dtype,
            trains=kind.trains,
            config=config,
        )
        parameters = [p for _, p in part]
        name, codec = plans[of_unit].name or "root", kind.gradient_codec
        extensions = [extension_of[p] for p in parameters if p in extension_of]
        units[of_unit].append(UnshardedBucket(parameters, residency, number, name, shared, codec, extensions))
    return units


def _owners_in(parts: Sequence[tuple[int, _Kind, Any]], ranks: int) -> dict[int, list[int]]:
    """The owner of each parameter in the buckets whose parameters stay whole, by the bucket's number."""
    whole = [number for number, (_, kind, _) in enumerate(parts) if kind.is_whole]
    numels = [[p.numel() for _, p in parts[number][2]] for number in whole]
    return dict(zip(whole, balanced_owners(numels, ranks))) if whole else {}


def _numel_that_stays(config: EngineConfig, plans: Sequence[UnitPlan], numels: Mapping[str, int]) -> int:
    """The number of trained elements that the offload option leaves on the device; 0 without this option."""
    if config.offload is None:
        return 0
    trained = sum(numels[name] for plan in plans for name, p in plan.parameters.items() if p.requires_grad)
    return round((1 - config.offload.fraction) * trained)


class _Kind(NamedTuple):
    """What the parameters of a bucket have in common."""

    compute_dtype: torch.dtype
    dtype: torch.dtype
    trains: bool
    gradient_codec: Codec | None
    is_whole: bool
    extended: type | None = None  # the tensor subclass of extended parameters
    extension_dtype: torch.dtype | None = None


def _kind_of(
    config: EngineConfig,
    is_kept_whole: Callable[[str, Tensor], bool],
    compression: str | None,
    may_fuse: bool,
    extension_of: Mapping[nn.Parameter, Extension],
    name: str,
    parameter: nn.Parameter,
    owners: Sequence[Owner],
) -> _Kind:
    codec, is_whole = _gradient_codec_of(parameter, compression), is_kept_whole(name, parameter)
    of_all = parameter.dtype, parameter.requires_grad, codec, is_whole
    if (extension := extension_of.get(parameter)) is not None:
        return _Kind(parameter.dtype, *of_all, extension.kind, extension.dtype)
    return _Kind(_compute_dtype_of(parameter, owners, config.compute_dtype, may_fuse), *of_all)


def _parts(
    plans: Sequence[UnitPlan],
    optimizers: Sequence[Optimizer],
    kind_of: Callable[[str, nn.Parameter, Sequence[Owner]], _Kind],
    numels: Mapping[str, int],
    most_numel: int,
) -> Iterator[tuple[int, _Kind, list[tuple[str, nn.Parameter]]]]:
    """The parameters of each future bucket with their names, after the number of their unit and their kind."""
    groups = [(number, group) for number, optimizer in enumerate(optimizers) for group in optimizer.param_groups]
    # each parameter's optimizer and group; the latter's number increases from one optimizer to the next
    place_of = {id(p): (of, number) for number, (of, group) in enumerate(groups) for p in group["params"]}
    for of_unit, plan in enumerate(plans):
        alike: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in plan.parameters.items():
            optimizer, _ = place_of.get(id(parameter), (-1, -1))
            # One optimizer a bucket: autograd would take an update of some parameters for a change of all.
            alike.setdefault((kind_of(name, parameter, plan.owners[name]), optimizer), []).append((name, parameter))
        for (kind, _), members in alike.items():
            # Make the parameters of one param group adjacent, so that a bucket has one master tensor for them.
            members.sort(key=lambda member: place_of.get(id(member[1]), (-1, -1)))
            for part in _split(members, numels, most_numel):
                yield of_unit, kind, part


def _gradient_codec_of(parameter: nn.Parameter, compression: str | None) -> Codec | None:
    """The codec for sending a parameter's gradient between machines; None for a cast to ``reduce_dtype``."""
    is_exempt = parameter.dim() < 2 or parameter.numel() < EXEMPT_NUMEL
    if compression is None or is_exempt or parameter.dtype not in (torch.float32, *LOW_PRECISION):
        return None
    return Quantised(_BITS[compression])


def check_compression(
    config: EngineConfig, units: Sequence[Sequence[UnshardedBucket]], communicator: Communicator
) -> None:
    """Warn on rank 0 if nothing is compressed because all ranks are on one machine.

    Raises:
        ValueError: if nothing can be compressed although there are several machines.
    """
    if config.compression is None:
        return
    given = f"compression={config.compression!r}"
    if communicator.is_on_one_machine:
        if communicator.everyone.rank == 0:
            said = f"{given} has no effect: all {communicator.size} ranks are on one machine."
            warnings.warn(said, stacklevel=3)
    elif not communicator.may_compress:
        raise ValueError(
            f"{given} works over NCCL only with shard_within: leave it out, or write reduce_dtype='bf16' to send "
            "gradients in 16 bits."
        )
    elif not any(bucket.gradient_codec for bucket in chain.from_iterable(units) if bucket.parameters[0].requires_grad):
        raise ValueError(
            f"{given} has no effect: every trained parameter has fewer than two dimensions, or fewer than "
            f"{EXEMPT_NUMEL:,} elements."
        )


def _compute_dtype_of(
    parameter: nn.Parameter, owners: Sequence[Owner], wanted: torch.dtype | None, may_fuse: bool
) -> torch.dtype:
    is_cast = parameter.dtype == torch.float32 and all(map(_is_cast_by_autocast, owners))
    if wanted is None or not is_cast or (may_fuse and any(owner.may_be_fused for owner in owners)):
        return parameter.dtype
    return wanted


def _is_cast_by_autocast(owner: Owner) -> bool:
    """Whether autocast casts a parameter at each use, so that gathering it in autocast's dtype gives the same numbers.

    For other layers this is unknown, or casting early is wrong: an embedding would sum the gradients of a row in low
    precision, kernels of normalisation and ``nn.Bilinear`` would reject low-precision weights, and sums over weights
    could overflow in fp16.
    """
    forward = getattr(owner.module.forward, "__func__", None)
    if type(owner.module).__name__ == "Conv1D" and type(owner.module).__module__ == "transformers.pytorch_utils":
        return True
    return forward in _CAST_FORWARDS and owner.attribute in _CAST_ATTRIBUTES


def _split(
    members: list[tuple[str, nn.Parameter]], numels: Mapping[str, int], bucket_numel: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Split a list of parameters wherever a bucket would exceed ``bucket_numel`` elements."""
    part: list[tuple[str, nn.Parameter]] = []
    numel = 0
    for member in members:
        of_member = numels[member[0]]
        if part and numel + of_member > bucket_numel:
            yield part
            part, numel = [], 0
        part.append(member)
        numel += of_member
    yield part


def reserve_disk(swap: Swap, units: Sequence[Sequence[UnshardedBucket]], communicator: Communicator) -> None:
    """Reserve disk space for master weights; raise an OSError on every rank if a disk lacks space. Collective."""
    error = None
    try:
        for bucket in chain.from_iterable(units):
            if bucket.plan.masters is Medium.DISK:
                bucket.states = bucket.plan.reserve(swap, f"{bucket.unit_name} {bucket.number}")
    except OSError as raised:
        error = raised
    errors = communicator.everyone.gather_objects(error and (error.errno, error.strerror, error.filename))
    for rank, found in enumerate(errors):
        if found is not None:
            number, reason, path = found
            raise error or OSError(number, f"on rank {rank}: {reason}", path)
