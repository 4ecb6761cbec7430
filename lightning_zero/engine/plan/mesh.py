"""The mesh of an engine's ranks: a grid with named dimensions, over which placements shard. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

DATA = "data"
"""The dimension along which ranks have different batches; today there is no other."""


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid, numbered so that the last dimension varies fastest.

    Attributes:
        dimensions: the size of each dimension, by name.
        rank: this rank's number.
    """

    dimensions: Mapping[str, int]
    rank: int = 0

    def size(self, over: Sequence[str]) -> int:
        """How many ranks differ in their place along these dimensions only."""
        return prod(self.dimensions[name] for name in over)

    def rank_over(self, over: Sequence[str]) -> int:
        """This rank's number among them, with the last of the given dimensions varying fastest."""
        places, rest = {}, self.rank
        for name, size in reversed(list(self.dimensions.items())):
            rest, places[name] = divmod(rest, size)
        number = 0
        for name in over:
            number = number * self.dimensions[name] + places[name]
        return number
