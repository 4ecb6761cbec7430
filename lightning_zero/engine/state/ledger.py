"""Memory accounting: the bytes that an engine holds, by category."""

from __future__ import annotations

from collections import Counter


class Ledger:
    """Bytes that the engine holds, by category: those held now, and those held when their total was highest."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: dict[str, int] = {}

    def add(self, category: str, nbytes: int) -> None:
        self.now[category] += nbytes
        if nbytes > 0 and self.now.total() > sum(self.peak.values()):
            self.peak = dict(self.now)

    def reset_peak(self) -> None:
        self.peak = dict(self.now)
