"""Plain-text tables, printed without rich: if rich is installed, Lightning changes every run's progress bar."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def show(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print rows of cells in columns as wide as their longest cell.

    Args:
        rows: rows with the same number of cells each; the first may be a heading.
        right: indices of the columns to align to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [cell.rjust(n) if i in right else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())
