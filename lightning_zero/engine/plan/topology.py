"""Which ranks share a machine. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import gcd


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

    def groups(self, size: int | str) -> Topology:
        """Ranks in groups, machine by machine, which take the place of machines.

        Args:
            size: of each group; ``"node"`` for that of a machine.

        Raises:
            ValueError: if groups of this size are not possible.
        """
        ranks, sizes = len(self.machines), [len(node) for node in self.nodes]
        if size == "node" and len(set(sizes)) > 1:
            raise ValueError(
                "shard_within='node' needs the same number of ranks on each machine, and the machines run "
                f"{_listed(sizes, 'and')} ranks: write the number of ranks of a group, {_divisors_of(*sizes)}."
            )
        size = sizes[0] if size == "node" else size
        assert isinstance(size, int)
        if ranks % size:
            raise ValueError(f"shard_within={size} does not divide {ranks} ranks: write {_divisors_of(ranks)}.")
        number_of = {rank: place // size for place, rank in enumerate(chain.from_iterable(self.nodes))}
        return Topology(tuple(number_of[rank] for rank in range(ranks)))

    def within(self, rank: int) -> list[int]:
        """The ranks of a rank's machine, in ascending order."""
        return next(ranks for ranks in self.nodes if rank in ranks)

    def across(self, rank: int) -> list[int]:
        """The rank with the same local index on each machine, in the order of machines."""
        local = self.within(rank).index(rank)
        return [ranks[local] for ranks in self.nodes]


def _divisors_of(*numbers: int) -> str:
    """What divides all numbers, or else their sum."""
    whole = gcd(*numbers) if gcd(*numbers) > 1 else sum(numbers)
    return _listed([each for each in range(2, whole + 1) if whole % each == 0], "or")


def _listed(items: list[int], word: str) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} {word} {last}" if first else last
