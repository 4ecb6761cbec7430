"""How model states are divided over ranks: the placements of a stage, and the layout of each bucket. Pure arithmetic.

A layout says which ranges of the bucket's flat buffer belong to which parameters and ranks::

    bucket   |  weight (segment 0)      |gap| bias |gap|  weight2 (segment 2)       | padding |
    shards   |        rank 0        |        rank 1        |        rank 2        | rank 3    |

Segments start at multiples of ``ALIGNMENT`` elements, so that views of segments are aligned like ordinary tensors
(for vector loads and cuBLAS). Shards have equal lengths, with padding at the end, so that one collective moves them.

A *whole* bucket is for optimizers that need whole matrices: each segment has one owner, and a rank's shard is a run of
segments, which may be empty (see ``balanced_owners``)::

    bucket   |  weight (segment 0)      |gap| bias |gap|  weight2 (segment 2)       |
    shards   |        rank 0            .   |        rank 2                         |
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from lightning_zero.engine.config import stage_number
from lightning_zero.engine.plan.mesh import ALL, LOCAL, Mesh
from lightning_zero.engine.plan.share import Share


@dataclass(frozen=True)
class Placement:
    """The mesh dimensions over which one kind of model state is sharded; other dimensions hold replicas."""

    over: tuple[str, ...] = ()

    @property
    def is_sharded(self) -> bool:
        return bool(self.over)


@dataclass(frozen=True)
class Placements:
    """The placements that define a stage (Rajbhandari et al., SC20, section 5, figure 1)."""

    stage: int
    parameters: Placement
    gradients: Placement  # at stage 1, full-size gradients accumulate under ``no_sync``
    optimizer: Placement

    def model_state_bytes(
        self,
        numel: int,
        mesh: Mesh,
        *,
        parameter_bytes: int,
        master_bytes: int = 4,
        state_bytes: int | None = None,
        trains: bool = True,
    ) -> int:
        """Return the bytes of model states per rank, by the paper's formula for Adam, with this engine's dtypes.

        If master weights have as many bytes as parameters, they *are* the rank's slice of the parameters, so they are
        counted once. If parameters are sharded like master weights, only master weights are counted: low-precision
        parameters exist only while gathered.

        Args:
            numel: Psi, the number of parameter elements.
            mesh: the mesh of ranks; the paper's N is the number of ranks along the sharded dimensions.
            parameter_bytes: bytes per parameter element in computation: 4 for fp32, 2 for bf16 and fp16, 8 for fp64.
            master_bytes: bytes per element of master weights and gradients: 4, 8 for fp64, or 2 for bf16 parameters
                without master weights. Gradients that are not sharded have at least 4.
            state_bytes: bytes per element of each of Adam's moments; None for ``master_bytes``.
            trains: whether the parameters have gradients and moments.
        """
        kinds = (self.parameters, self.gradients, self.optimizer)
        parameters, gradients, optimizer = (-(-numel // mesh.size(kind.over)) for kind in kinds)
        total = master_bytes * optimizer
        if self.parameters != self.optimizer:
            total = parameter_bytes * parameters + (master_bytes * optimizer if parameter_bytes != master_bytes else 0)
        if trains:
            gradient_bytes = master_bytes if self.gradients.is_sharded else max(master_bytes, 4)
            total += gradient_bytes * gradients + 2 * (state_bytes or master_bytes) * optimizer
        return total

    def communicated_psi(self, accumulate: int, ranks: int, within: int | None = None) -> float:
        """Return the elements that a rank communicates per optimizer step, divided by Psi (SC20, section 7).

        Gradients are reduced once per step, or once per micro-batch if they are sharded. Parameters are gathered once
        per step, or twice per micro-batch if they are sharded. If they are sharded within groups of ``within`` ranks,
        groups also exchange shards once per step.
        """
        if ranks == 1:
            return 0
        reductions = accumulate if self.gradients.is_sharded else 1
        gathers = 2 * accumulate if self.parameters.is_sharded else 1
        between_groups = 2 / within if within is not None and 1 < within < ranks else 0
        return reductions + gathers + between_groups


def replicated_bytes(numel: int, parameter_bytes: int, *, trains: bool) -> int:
    """Bytes per rank if nothing is sharded, as under DDP: parameters and, if they train, gradients and Adam's two
    moments, all in the parameters' dtype."""
    return (4 if trains else 1) * numel * parameter_bytes


_R, _S = Placement(), Placement(ALL)
_STAGES = {
    1: Placements(1, parameters=_R, gradients=_R, optimizer=_S),
    2: Placements(2, parameters=_R, gradients=_S, optimizer=_S),
    3: Placements(3, parameters=_S, gradients=_S, optimizer=_S),
}


def placements_of(stage: int | str, *, shards_within: bool = False) -> Placements:
    """Return the placements of a stage. Raises a ValueError if there is no such stage.

    Args:
        stage: a number, or a name from the literature.
        shards_within: whether parameters are sharded only within machines, so that each machine has all of them
            (stage 3 only).
    """
    placements = _STAGES[stage_number(stage)]
    return replace(placements, parameters=Placement((LOCAL,))) if shards_within else placements


# In elements: this is a multiple of 16 bytes in every dtype, and of the stride of vectorised CPU kernels (two 512-bit
# vectors in fp32). These kernels may round the elements after the last full stride differently. Since shards consist of
# full strides, each element is computed as in the full parameter.
ALIGNMENT = 32


@dataclass(frozen=True)
class Segment:
    """The range ``[start, stop)`` of a bucket for one flattened parameter, or for its tensor-parallel share."""

    name: str
    share: Share
    start: int

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter, or of this rank's tensor-parallel share."""
        return self.share.own_shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class BucketLayout:
    """The positions of parameters and of ranks' shards in a flat buffer.

    Attributes:
        segments: the ranges of the parameters, ascending.
        world_size: the number of ranks, each of which has one shard.
        owners: in a whole bucket, each segment's owner as a position (see ``order``), ascending; None in other buckets.
        padded_to: the length of the flat buffer; None for the smallest length that holds all shards.
        rank: this rank.
        order: the position of each rank's shard among the shards; None if positions equal ranks.
        nodes: the number of machines, if each holds all parameters at rest; 1 if all ranks shard them. At rest, a rank
            holds its *part*: its own shard and, with several nodes, the adjacent shards of the ranks with the same
            local index on the other machines.
    """

    segments: tuple[Segment, ...]
    world_size: int
    owners: tuple[int, ...] | None = None
    padded_to: int | None = None
    rank: int = 0
    order: tuple[int, ...] | None = None
    nodes: int = 1

    @classmethod
    def of(
        cls,
        named: Sequence[tuple[str, torch.Size | Share]],
        world_size: int,
        owners: Sequence[int] | None = None,
        *,
        rank: int = 0,
        order: tuple[int, ...] | None = None,
        nodes: int = 1,
    ) -> BucketLayout:
        """Lay out parameters, given as (name, shape) or (name, share), one after another."""
        segments, position = [], 0
        for name, shape in named:
            share = shape if isinstance(shape, Share) else Share(torch.Size(shape))
            segments.append(Segment(name, share, position))
            position = _align(segments[-1].stop)
        owned = tuple(owners) if owners is not None else None
        return cls(tuple(segments), world_size, owned, rank=rank, order=order, nodes=nodes)

    def with_owners(self, owners: Sequence[int]) -> BucketLayout:
        """The layout of the same buffer as a whole bucket, with the given owner of each segment."""
        return replace(self, owners=tuple(owners), padded_to=self.padded_numel)

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks share the bucket."""
        return self.world_size > 1

    @property
    def is_whole(self) -> bool:
        """Whether each segment has one owner."""
        return self.owners is not None

    @property
    def numel(self) -> int:
        """The number of elements of all segments, without gaps and padding."""
        return sum(segment.numel for segment in self.segments)

    def shard_numel(self, rank: int) -> int:
        """The number of elements of a rank's shard, including gaps and padding."""
        start, stop = self.shard_range(rank)
        return stop - start

    @property
    def own_range(self) -> tuple[int, int]:
        """``shard_range`` of this rank."""
        return self.shard_range(self.rank)

    @property
    def padded_numel(self) -> int:
        return self._bounds[-1]

    def owner(self, index: int) -> int:
        """The rank that owns a segment of a whole bucket."""
        assert self.owners is not None
        return self.owners[index] if self.order is None else self.order.index(self.owners[index])

    def shard_range(self, rank: int) -> tuple[int, int]:
        """``[start, stop)`` of a rank's shard in the bucket."""
        position = self.position(rank)
        return self._bounds[position], self._bounds[position + 1]

    @property
    def shard_ranges(self) -> list[tuple[int, int]]:
        """``shard_range`` of each rank."""
        return list(map(self.shard_range, range(self.world_size)))

    @property
    def own_part(self) -> tuple[int, int]:
        """``[start, stop)`` of this rank's part in the bucket."""
        return self._bounds[self._first_in_part], self._bounds[self._first_in_part + self.nodes]

    @cached_property
    def part_bounds(self) -> Sequence[int]:
        """The start of each part of the bucket, and the end of the last part."""
        return self._bounds[:: self.nodes]

    @property
    def bounds_in_part(self) -> list[int]:
        """The start of each shard in this rank's part, and the end of the last, relative to the start of the part."""
        return from_0(self._bounds[self._first_in_part : self._first_in_part + self.nodes + 1])

    @property
    def _first_in_part(self) -> int:
        """The position of the first shard in this rank's part."""
        return self.position(self.rank) // self.nodes * self.nodes

    def position(self, rank: int) -> int:
        """The position of a rank's shard among the shards."""
        return rank if self.order is None else self.order[rank]

    @cached_property
    def _bounds(self) -> Sequence[int]:
        """The start of the shard at each position, and the end of the last one."""
        positions, end = range(self.world_size + 1), self.segments[-1].stop if self.segments else 0
        if self.owners is None:
            length = _align(-(-end // self.world_size))
            return range(0, (self.world_size + 1) * length, length) if length else [0] * (self.world_size + 1)
        starts = [*(segment.start for segment in self.segments), self.padded_to or _align(end)]
        return [starts[bisect_left(self.owners, position)] for position in positions]

    def owned_range(self, index: int, rank: int) -> tuple[int, int]:
        """``[start, stop)`` of a rank's elements in a segment; may be empty."""
        return self._range_within(index, *self.shard_range(rank))

    def range_in_part(self, index: int) -> tuple[int, int]:
        """``[start, stop)`` of a segment's elements in this rank's part; may be empty."""
        return self._range_within(index, *self.own_part)

    def _range_within(self, index: int, low: int, high: int) -> tuple[int, int]:
        segment = self.segments[index]
        start = min(max(segment.start, low), segment.stop)
        return start, max(start, min(segment.stop, high))

    def sizes(self) -> list[int]:
        """The number of elements of each segment and of the gap after it, alternating, for the entire bucket."""
        sizes = []
        for segment, end in zip(self.segments, [*(other.start for other in self.segments[1:]), self.padded_numel]):
            sizes += [segment.numel, end - segment.stop]
        return sizes


def from_0(bounds: Sequence[int]) -> list[int]:
    """Bounds of adjacent slices, relative to the first of them."""
    return [bound - bounds[0] for bound in bounds]


def _align(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


# -- owners of segments ------------------------------------------------------------------------------------------------


def balanced_owners(
    buckets: Sequence[Sequence[int]], ranks: int, loads: Sequence[int] | None = None
) -> list[list[int]]:
    """Choose the owner of each segment, as a position in the order of shards. Owners ascend in each bucket.

    Thus a rank's shard of a bucket is one run of consecutive segments, and segments keep their places. Buckets are
    assigned one after another, those with the largest segments first, so that the largest load is as small as possible
    after each bucket.

    Args:
        buckets: number of elements in each segment, by bucket.
        ranks: the number of ranks.
        loads: number of elements that each rank already owns in other buckets.

    Returns:
        The owner of each segment, by bucket.
    """
    loads = list(loads or [0] * ranks)
    owners: list[list[int]] = [[] for _ in buckets]
    for number in sorted(range(len(buckets)), key=lambda number: -max(buckets[number], default=0)):
        numels = buckets[number]
        limits = range(max(loads) + sum(numels) + 1)
        limit = bisect_left(limits, len(numels), key=lambda limit: len(_filled(numels, loads, limit)))
        owners[number] = _filled(numels, loads, limit)
        for rank, numel in zip(owners[number], numels):
            loads[rank] += numel
    return owners


def _filled(numels: Sequence[int], loads: Sequence[int], limit: int) -> list[int]:
    """Assign as many segments as possible, in order, to ascending ranks whose loads may not exceed a limit."""
    owners: list[int] = []
    rank, load = 0, loads[0]
    for numel in numels:
        while load + numel > limit:
            rank += 1
            if rank == len(loads):
                return owners
            load = loads[rank]
        load += numel
        owners.append(rank)
    return owners
