"""Terminal output of commands: tables, and progress of long operations in bytes."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERVAL = 5.0
"""Seconds between two lines of progress."""


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Context that shows progress; yields a function to call with the number of bytes done since its last call."""
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield _Lines(what, total).advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


class _Lines:
    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done, self._said = what, total, 0, time.monotonic()

    def advance(self, done: int) -> None:
        self._done += done
        if time.monotonic() - self._said >= INTERVAL:
            self._said = time.monotonic()
            print(f"{self._what}: {in_bytes(self._done)} of {in_bytes(self._total)}", file=sys.stderr, flush=True)


def in_bytes(number: float) -> str:
    """Format a number of bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def show(table: list[tuple[str, ...]], right: tuple[int, ...]) -> None:
    """Print a table whose first row is the heading; uses rich if it is installed.

    Args:
        right: indices of right-aligned columns.
    """
    if importlib.util.find_spec("rich") is None:
        widths = [max(map(len, column)) for column in zip(*table)]
        for row in table:
            cells = [cell.rjust(n) if i in right else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths))]
            print("  ".join(cells).rstrip())
        return
    from rich.table import Table
    from rich.text import Text

    from lightning_zero.monitoring.report import make_console

    shown = Table()
    for i, heading in enumerate(table[0]):
        shown.add_column(heading, justify="right" if i in right else "left", overflow="fold")
    for row in table[1:]:
        shown.add_row(*map(Text, row))  # Text: names must not be parsed as markup
    make_console().print(shown)
