"""Input and output of commands: errors, JSON, sizes such as 5GB, and closed pipes."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, TextIO

from lightning_zero.io.annotations import described


class Parser(argparse.ArgumentParser):
    """Parser that reports errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def size_of(text: str) -> int:
    """Convert a size such as 500MB, 5GB or 4GiB to bytes; a ``type`` for argparse."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    size = 0
    if found is not None:
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB, 5GB or 4GiB")
    return size


def _at_least(least: int, kind: type, text: str) -> Any:
    with suppress(ValueError):
        if (value := kind(text)) >= least:  # False for NaN
            return value
    raise argparse.ArgumentTypeError(f"{text!r} must be {described(kind, least)}")


positive, not_negative = partial(_at_least, 1, int), partial(_at_least, 0, float)
"""Each a ``type`` for argparse."""


_stdout_for_json: TextIO | None = None


@contextmanager
def stdout_for_json() -> Iterator[None]:
    """Context in which only ``print_json`` writes to stdout. Other output, even of child processes, goes to stderr."""
    global _stdout_for_json
    sys.stdout.flush()
    with optional_stdout(os.dup(1), closefd=True) as _stdout_for_json:
        os.dup2(2, 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(_stdout_for_json.fileno(), 1)
    _stdout_for_json = None


def print_json(document: Any) -> None:
    """Print a document as JSON, with null for NaN and infinities, which JSON cannot represent."""
    finite = json.loads(json.dumps(document), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=1, allow_nan=False), file=_stdout_for_json, flush=True)


class _OptionalFile(io.FileIO):
    """A file that discards data after its reader has closed the pipe."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def optional_stdout(descriptor: int = 1, closefd: bool = False) -> TextIO:
    """A standard output for commands, which continue when their output is no longer read."""
    binary = io.BufferedWriter(_OptionalFile(descriptor, "w", closefd=closefd))
    return io.TextIOWrapper(binary, sys.stdout.encoding, sys.stdout.errors, line_buffering=True)
