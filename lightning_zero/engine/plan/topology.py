"""Which ranks share a machine. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The machine of each rank.

    Args:
        machines: what identifies each rank's machine, in the order of ranks.
    """

    machines: tuple[Hashable, ...]

    @cached_property
    def nodes(self) -> list[list[int]]:
        """The ranks of each machine, ascending; machines in the order of their first ranks."""
        found: dict[Hashable, list[int]] = {}
        for rank, machine in enumerate(self.machines):
            found.setdefault(machine, []).append(rank)
        return list(found.values())

    @property
    def has_two_levels(self) -> bool:
        """Whether there are several machines, all with the same number of ranks, at least two."""
        sizes = {len(ranks) for ranks in self.nodes}
        return len(self.nodes) > 1 and len(sizes) == 1 and sizes != {1}

    def within(self, rank: int) -> list[int]:
        """The ranks of a rank's machine, in ascending order."""
        return next(ranks for ranks in self.nodes if rank in ranks)

    def across(self, rank: int) -> list[int]:
        """The rank with the same local index on each machine, in the order of machines."""
        local = self.within(rank).index(rank)
        return [ranks[local] for ranks in self.nodes]
