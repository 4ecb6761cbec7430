"""The machines of a job, and the mesh of an engine's ranks, along which tensors are sharded. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import gcd, prod

NODE, LOCAL = "node", "local"
"""Names of the dimensions: machines, and ranks within a machine."""

ALL = (LOCAL, NODE)
"""Both dimensions; the first varies slowest, so ranks with the same local index have adjacent shards."""


@dataclass(frozen=True)
class Topology:
    """The machine of each rank.

    Args:
        machines: an identifier of each rank's machine, in the order of ranks.
    """

    machines: tuple[Hashable, ...]

    @cached_property
    def nodes(self) -> list[list[int]]:
        """The ranks of each machine in ascending order. Machines are in the order of their first ranks."""
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
        """Return a topology with groups of ranks in place of machines. Groups are filled machine by machine.

        Args:
            size: the size of each group; ``"node"`` for all ranks of a machine.

        Raises:
            ValueError: if the ranks cannot be divided into groups of this size.
        """
        ranks, sizes = len(self.machines), [len(node) for node in self.nodes]
        divisors = [number for number in range(2, ranks) if ranks % number == 0]  # of all ranks: plain stage 3
        if size == "node" and len(set(sizes)) > 1:
            choices: list[object] = [number for number in divisors if gcd(*sizes) % number == 0]  # within machines
            choices = choices or [*divisors]
            mend = f"write a number of ranks per group ({_listed(choices, 'or')})" if choices else "leave it out"
            raise ValueError(
                "shard_within='node' needs the same number of ranks on each machine, but the machines run "
                f"{_listed(sizes, 'and')} ranks: {mend}."
            )
        size = sizes[0] if size == "node" else size
        assert isinstance(size, int)
        if ranks % size:
            choices = [*divisors, *(["'node'"] if len(set(sizes)) == 1 else [])]
            mend = f"write {_listed(choices, 'or')}" if choices else "leave it out"
            raise ValueError(f"shard_within={size} does not divide {ranks} ranks: {mend}.")
        number_of = {rank: place // size for place, rank in enumerate(chain.from_iterable(self.nodes))}
        return Topology(tuple(number_of[rank] for rank in range(ranks)))

    def within(self, rank: int) -> list[int]:
        """The ranks on the machine of ``rank``, including ``rank``, in ascending order."""
        return next(ranks for ranks in self.nodes if rank in ranks)

    def across(self, rank: int) -> list[int]:
        """The ranks that have the same local index as ``rank``: one per machine, in the order of machines."""
        local = self.within(rank).index(rank)
        return [ranks[local] for ranks in self.nodes]


def _listed(items: Sequence[object], word: str) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} {word} {last}" if first else last


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid.

    Attributes:
        dimensions: the size of each dimension, by name.
        rank: this process's rank.
        order: by rank, the rank's position along ``ALL``; None if each rank's position is its number.
    """

    dimensions: Mapping[str, int]
    rank: int = 0
    order: tuple[int, ...] | None = None

    @classmethod
    def flat(cls, size: int, rank: int = 0) -> Mesh:
        """A mesh of ranks that are on one machine, or are treated as if they were."""
        return cls({NODE: 1, LOCAL: size}, rank)

    @classmethod
    def of(cls, topology: Topology, rank: int) -> Mesh:
        """A mesh of several machines, each with the same number of ranks."""
        columns = chain.from_iterable(zip(*topology.nodes))  # ranks by position
        positions = {each: position for position, each in enumerate(columns)}
        order = tuple(positions[each] for each in range(len(positions)))
        is_plain = order == tuple(range(len(order)))
        return cls({NODE: len(topology.nodes), LOCAL: len(topology.nodes[0])}, rank, None if is_plain else order)

    def size(self, over: Sequence[str]) -> int:
        """The number of ranks along these dimensions."""
        return prod(self.dimensions[name] for name in over)
