"""Plain-text tables, printed without rich, since Lightning changes every run's progress bar if rich is installed."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def show(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print rows of cells in aligned columns; ``right`` has the indices of those to align to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [cell.rjust(n) if i in right else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())
