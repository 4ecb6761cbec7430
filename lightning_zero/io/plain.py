"""Convert values to JSON types without passwords and keys, and to text that is escaped for Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from lightning_zero.io.annotations import shown

_SECRET = re.compile(
    r"(?:^|[._-])(?:password|passwd|secret|(?:api|access|private|secret)[_-]?key|(?:access|auth|hf)[_-]?token)$",
    re.IGNORECASE,
)
_MASK = "***"


def plain(value: Any) -> Any:
    """Convert a value to JSON types; objects other than numbers, texts and collections become short texts.

    Passwords, tokens and API keys, which must not appear in a report, are replaced by ``"***"``. They are recognised by
    the names of settings, and in words of a command: ``api_key=abc``, ``--api-key=abc``, and ``--api-key`` before
    ``abc``.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {
            str(key): _MASK if each is not None and _SECRET.search(str(key)) else plain(each)
            for key, each in value.items()
        }
    if isinstance(value, str):
        name, equals, _ = value.partition("=")
        value = f"{name}={_MASK}" if equals and _SECRET.search(name) else value
        return re.sub(r"(?<=://)[^/@\s]+@", f"{_MASK}@", value)  # user and password in a URL
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, bytes):
        values = list(value)
        return [
            _MASK if _is_secret_option(before, each) else plain(each) for before, each in zip([None, *values], values)
        ]
    if isinstance(value, (int, float, NoneType)):
        return value
    if isinstance(value, type):
        return name_of(value)
    return str(value) if isinstance(value, Path) else shown(value)


def name_of(kind: type) -> str:
    """The full name of a class, as "module:Class"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_secret_option(word: Any, following: Any) -> bool:
    """Whether two words of a command are an option such as ``--api-key`` and its value."""
    if not isinstance(word, str) or not isinstance(following, str) or following.startswith("-"):
        return False
    return word.startswith("-") and _SECRET.search(word) is not None


def on_one_line(value: Any) -> str:
    """A value as text without line breaks and other control characters, and with five significant digits."""
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return "".join(each if each.isprintable() else " " for each in text)


def as_markdown(value: Any) -> str:
    """A value as Markdown text: characters with a meaning in Markdown or HTML become character references."""
    special = r"[^\w .,=/%+-]|_(?![^\W_])|(?<![^\W_])_|(?<=www)\."
    return re.sub(special, lambda found: f"&#{ord(found[0])};", on_one_line(value))
