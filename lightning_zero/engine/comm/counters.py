"""Counters of the communication between an engine's ranks."""

from __future__ import annotations

from collections import Counter
from typing import Literal

Link = Literal["within", "across"]
"""Whether communication stays within one machine ("within") or may cross between machines ("across")."""


class Counters:
    """Counts of calls, elements and bytes, by kind of collective ("all_gather", "reduce_scatter", ...) and link.

    As in the ZeRO paper's analysis of communication (SC20, section 7), an all-gather counts all elements of the padded
    bucket once, although each rank sends and receives only (N - 1) / N of these elements.

    With ranks on several machines, slices that belong to ranks on this machine count as "within", all others as
    "across". In collectives with two levels, "across" counts only slices that this rank exchanges with other machines.
    """

    def __init__(self) -> None:
        self.link: Link = "across"
        self.calls: Counter[tuple[str, Link]] = Counter()
        self.elements: Counter[tuple[str, Link]] = Counter()
        self.bytes: Counter[tuple[str, Link]] = Counter()

    def add(self, kind: str, numel: int, nbytes: int, link: Link | None = None) -> None:
        """Count one call.

        Args:
            link: the link over which they are sent; by default ``self.link``.
        """
        key = kind, link or self.link
        self.calls[key] += 1
        self.elements[key] += numel
        self.bytes[key] += nbytes

    def clear(self) -> None:
        for counter in (self.calls, self.elements, self.bytes):
            counter.clear()


def summed(counter: Counter[tuple[str, Link]], by: Literal["kind", "link"]) -> dict[str, int]:
    """The counts by kind, summed over links; or by link, summed over kinds."""
    found: Counter[str] = Counter()
    for (kind, link), count in counter.items():
        found[kind if by == "kind" else link] += count
    return dict(found)
