"""Finds the library's error and warning messages in its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "lightning_zero"

# Calls that take a message besides `raise`: warnings, and functions that raise for their caller.
_CALLS = {"warning", "warn", "rank_zero_warn", "fail", "_fail"}
_LEAST, _WORDS = 3, 5


class Message(NamedTuple):
    """A message's opening: the first five words of its first literal part that has three or more."""

    opening: str
    where: str


def messages(package: Path = PACKAGE) -> list[Message]:
    """Every message in the source of a package, except those without three literal words in a row."""
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for argument in _arguments(node):
                opening = opening_of(argument)
                if opening:
                    found.append(Message(opening, f"{path.relative_to(package.parent)}:{node.lineno}"))
    return found


def opening_of(message: ast.expr) -> str | None:
    """The opening of a string, an f-string or a format; None for an expression that is neither."""
    values = message.values if isinstance(message, ast.JoinedStr) else [message]
    texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    for part in (part for text in texts for part in re.split(r"%[sdrf]", text)):
        words = part.split()
        if len(words) >= _LEAST:
            return " ".join(words[:_WORDS]).rstrip(".:;,")
    return None


def _arguments(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield from node.exc.args
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if name in _CALLS:
            yield from node.args
