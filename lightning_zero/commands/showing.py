"""Terminal output of commands: tables, progress of long operations, and sizes in bytes as text."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from lightning_zero.io.sizes import in_bytes as in_bytes


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Context that shows progress; yields a function to call with the number of bytes done since its last call."""
    with tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False, delay=1) as bar:
        yield bar.update


def size_of(text: str) -> int:
    """Bytes of a size such as 500MB, 5GB or 4GiB; a type for argparse."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    size = 0
    if found is not None:
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 500MB, 5GB or 4GiB")
    return size


def show(table: list[tuple[str, ...]], right: tuple[int, ...]) -> None:
    """Print a table whose first row is the heading, with the columns ``right`` right-aligned."""
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        cells = [cell.rjust(n) if i in right else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())
