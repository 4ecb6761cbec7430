"""Counters of the communication between an engine's ranks."""

from __future__ import annotations

from collections import Counter
from typing import Literal

Link = Literal["within", "across"]
"""The ranks of a group share a machine ("within"), or are on several machines or unknown machines ("across")."""


class Counters:
    """Calls, logical elements and bytes by kind of collective ("all_gather", "reduce_scatter", "control" ...) and link.

    One all-gather of a bucket counts the whole padded bucket once, as the paper counts its communication volume
    (SC20, section 7): each rank sends and receives (N - 1) / N of it.

    With ranks on several machines, slices of ranks on this machine count as "within", all others as "across"; where
    collectives have two levels, only slices that this rank exchanges with other machines count as "across".

    Attributes:
        link: the link that ``add`` counts for by default.
        calls, elements, bytes: the counts by (kind, link).
    """

    def __init__(self) -> None:
        self.link: Link = "across"
        self.calls: Counter[tuple[str, Link]] = Counter()
        self.elements: Counter[tuple[str, Link]] = Counter()
        self.bytes: Counter[tuple[str, Link]] = Counter()

    def add(self, kind: str, numel: int, nbytes: int, link: Link | None = None) -> None:
        """Count one call.

        Args:
            kind: the kind of collective.
            numel: the number of elements that it moves.
            nbytes: bytes of these elements as they travel.
            link: the link by which they travel.
        """
        key = kind, link or self.link
        self.calls[key] += 1
        self.elements[key] += numel
        self.bytes[key] += nbytes

    def clear(self) -> None:
        for counter in (self.calls, self.elements, self.bytes):
            counter.clear()


def by_kind(counter: Counter[tuple[str, Link]]) -> dict[str, int]:
    """The counts by kind, summed over links."""
    found: Counter[str] = Counter()
    for (kind, _), count in counter.items():
        found[kind] += count
    return dict(found)


def by_link(counter: Counter[tuple[str, Link]]) -> dict[str, int]:
    """The counts by link, summed over kinds, zeros included."""
    found: Counter[str] = Counter(within=0, across=0)
    for (_, link), count in counter.items():
        found[link] += count
    return dict(found)
