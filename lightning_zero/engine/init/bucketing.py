"""Assign the parameters of units to buckets, before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.config import EngineConfig
from lightning_zero.engine.init.uncut_bucket import UncutBucket
from lightning_zero.engine.offload.states import Swap
from lightning_zero.engine.offload.updates import fields_by_parameter
from lightning_zero.engine.plan.autocast import is_cast_by_autocast
from lightning_zero.engine.plan.layout import BucketLayout
from lightning_zero.engine.plan.placement import Placements
from lightning_zero.engine.plan.units import UnitPlan
from lightning_zero.engine.state.bucket import SharedByBuckets
from lightning_zero.engine.state.residency import ResidencyPlan


class Bucketing:
    """Assigns the parameters of units to buckets, in the order of the plan.

    Args:
        config: the engine's options.
        placements: of the stage.
        plans: of all units.
        bucket_numel: elements above which a unit is split into several buckets.
        optimizers: over the parameters.
        shared: what the buckets of an engine have in common.
    """

    def __init__(
        self,
        config: EngineConfig,
        placements: Placements,
        plans: Sequence[UnitPlan],
        bucket_numel: int,
        optimizers: Sequence[Optimizer],
        shared: SharedByBuckets,
    ) -> None:
        self._config, self._placements, self._bucket_numel = config, placements, bucket_numel
        self._communicator, self._shared = shared.communicator, shared
        self._number = self._numel_that_stay = 0
        if config.offloads is not None:
            trained = [p.numel() for plan in plans for p in plan.parameters.values() if p.requires_grad]
            self._numel_that_stay = round((1 - config.offloads.fraction) * sum(trained))
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        self._rank_in_groups = {id(parameter): number for number, group in enumerate(groups) for parameter in group}

    def of_unit(self, plan: UnitPlan) -> list[UncutBucket]:
        """The buckets of a unit, each with parameters of one (compute dtype, dtype, requires_grad)."""
        kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in plan.parameters.items():
            compute = self._compute_dtype_of(parameter, plan, name)
            kinds.setdefault((compute, parameter.dtype, parameter.requires_grad), []).append((name, parameter))
        buckets: list[UncutBucket] = []
        for (compute, dtype, trains), members in kinds.items():
            # Parameters of one optimizer group are adjacent, so that a bucket has one master tensor for them.
            members.sort(key=lambda member: self._rank_in_groups.get(id(member[1]), -1))
            for part in _cut(members, self._bucket_numel):
                layout = BucketLayout.of([(name, p.shape) for name, p in part], self._communicator.size)
                stays = trains and self._numel_that_stay >= layout.numel
                self._numel_that_stay -= layout.numel if stays else 0
                residency = ResidencyPlan.of(
                    layout,
                    self._placements,
                    None if stays else self._config.offloads,
                    device=self._communicator.device,
                    dtype=dtype,
                    compute_dtype=compute,
                    trains=trains,
                )
                buckets.append(
                    UncutBucket(
                        [p for _, p in part],
                        residency,
                        number=self._number,
                        unit_name=plan.name or "root",
                        shared=self._shared,
                    )
                )
                self._number += 1
        return buckets

    def _compute_dtype_of(self, parameter: nn.Parameter, plan: UnitPlan, name: str) -> torch.dtype:
        if self._config.compute_dtype is None or parameter.dtype != torch.float32:
            return parameter.dtype
        return self._config.compute_dtype if all(map(is_cast_by_autocast, plan.owners[name])) else parameter.dtype


def _cut(members: list[tuple[str, nn.Parameter]], bucket_numel: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Split a list of parameters wherever a bucket would exceed ``bucket_numel`` elements."""
    part: list[tuple[str, nn.Parameter]] = []
    numel = 0
    for member in members:
        if part and numel + member[1].numel() > bucket_numel:
            yield part
            part, numel = [], 0
        part.append(member)
        numel += member[1].numel()
    yield part


def reserve_disk(
    swap: Swap, buckets: list[UncutBucket], optimizers: Sequence[Optimizer], communicator: Communicator
) -> None:
    """Reserve disk space for all offloaded states. Collective.

    Raises:
        OSError: on every rank, if one rank's disk lacks space.
    """
    fields_of, error = fields_by_parameter(optimizers), None
    try:
        for bucket in buckets:
            members, dtype = bucket.parameters, bucket.plan.master_dtype
            bucket.reserve(swap, fields_of(members, dtype) if members[0].requires_grad else {})
    except OSError as raised:
        error = raised
    told = communicator.control.gather_objects(error and (error.errno, error.strerror, error.filename))
    if error is not None:
        raise error
    for rank, (number, reason, path) in ((rank, said) for rank, said in enumerate(told) if said is not None):
        raise OSError(number, f"on rank {rank}: {reason}", path)
