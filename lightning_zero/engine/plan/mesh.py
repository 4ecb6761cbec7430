"""The mesh of an engine's ranks: a grid with named dimensions, along which tensors are sharded. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from lightning_zero.engine.plan.topology import Topology

NODE, LOCAL = "node", "local"
"""Names of the dimensions: machines, and ranks within a machine."""

ALL = (LOCAL, NODE)
"""Both dimensions; the first varies slowest, so ranks with the same local index have adjacent shards."""


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid.

    Attributes:
        dimensions: the size of each dimension, by name.
        rank: this process's rank.
        places: by rank, the rank's index along each dimension; None if all ranks are on one machine.
    """

    dimensions: Mapping[str, int]
    rank: int = 0
    places: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def flat(cls, size: int, rank: int = 0) -> Mesh:
        """A mesh of ranks that are on one machine, or are treated as if they were."""
        return cls({NODE: 1, LOCAL: size}, rank)

    @classmethod
    def of(cls, topology: Topology, rank: int) -> Mesh:
        """A mesh of several machines, each with the same number of ranks."""
        nodes = topology.nodes
        places = {each: (node, local) for node, ranks in enumerate(nodes) for local, each in enumerate(ranks)}
        return cls({NODE: len(nodes), LOCAL: len(nodes[0])}, rank, tuple(places[each] for each in sorted(places)))

    def size(self, over: Sequence[str]) -> int:
        """The number of ranks along these dimensions."""
        return prod(self.dimensions[name] for name in over)

    def position(self, rank: int, over: Sequence[str]) -> int:
        """A rank's position along these dimensions; the last dimension varies fastest."""
        place = dict(zip(self.dimensions, (0, rank) if self.places is None else self.places[rank]))
        number = 0
        for name in over:
            number = number * self.dimensions[name] + place[name]
        return number

    def order(self, over: Sequence[str]) -> tuple[int, ...] | None:
        """Each rank's position along the dimensions in ``over``; None if each rank's position is its number."""
        positions = tuple(self.position(rank, over) for rank in range(len(self.places or ())))
        return None if positions == tuple(range(len(positions))) else positions
