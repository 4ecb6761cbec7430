"""Values as text: lists of names, sizes in bytes, and plain tables."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence


def suggestion(name: str, known: Sequence[str], spell: Callable[[str], str] = str) -> str:
    """For an unknown name, suggest a similar known name, formatted by ``spell``; otherwise list all known names."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {spell(near[0])}?" if near else f"there are {', '.join(known)}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first names and the number of others, for an error message: a large model may have thousands of names."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def in_gb(nbytes: float) -> str:
    """Format a number of bytes, always in GB, so that a reader can compare sizes."""
    return f"{nbytes / 1e9:.3g} GB"


def in_bytes(number: float) -> str:
    """Format a number of bytes in a suitable decimal unit, from B to TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def print_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print rows of cells in aligned columns, without rich: if that is installed, Lightning changes its progress bar.

    Args:
        right: indices of the columns to align to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [cell.rjust(n) if i in right else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())
