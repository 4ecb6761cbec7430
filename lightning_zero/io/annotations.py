"""Checks of values against type annotations: for options, and for values read from files."""

from __future__ import annotations

import collections.abc
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS = {int: "an integer", float: "a number", bool: "True or False", str: "a string", NoneType: "None"}
_LONGEST = 100


def matches(value: Any, annotation: Any) -> bool:
    """Whether a value has an annotated type. As for type checkers, an integer is a float, but a bool is not a number.

    The annotation is a class, ``Any``, ``Callable[...]``, or a union, ``Literal``, mapping, sequence, tuple of one
    repeated type, or ``type`` of these.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin in (Union, UnionType):
        return any(matches(value, each) for each in arguments)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin is type:
        return isinstance(value, type) and issubclass(value, arguments[0])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = arguments
        is_mapping = isinstance(value, origin)
        return is_mapping and all(matches(name, key) and matches(each, item) for name, each in value.items())
    if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
        if not isinstance(value, origin) or isinstance(value, str):
            return False
        if not isinstance(value, collections.abc.Collection):  # an iterator would be used up
            return True
        try:
            return all(matches(each, arguments[0]) for each in value)
        except TypeError:  # from a tensor without dimensions
            return False
    if origin is not None:
        return isinstance(value, origin)
    if annotation in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if annotation is float else annotation)


def described(annotation: Any, least: float | None = None) -> str:
    """An annotation in words, such as "an integer of at least 1 or None"."""
    words: list[str] = []
    for kind in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else [annotation]:
        if get_origin(kind) is Literal:
            words += map(repr, get_args(kind))
        else:
            words.append(_word(kind) + (f" of at least {least}" if least is not None and kind in (int, float) else ""))
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _word(kind: Any) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    name = (get_origin(kind) or kind).__name__
    if name == "Callable":
        return "a function"
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def shown(value: Any) -> str:
    """The ``repr`` of a value, on one line and shortened."""
    text = " ".join(line.strip() for line in repr(value).splitlines())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def check_value(name: str, value: Any, annotation: Any, least: float | None = None) -> None:
    """Check an option's value; its name begins the message.

    Raises:
        ValueError: if the value has another type, or is a number below ``least``; None also allows NaN.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_in_range = least is None or not is_number or value >= least  # False for NaN
    if not (matches(value, annotation) and is_in_range):
        raise ValueError(f"{name}={shown(value)} must be {described(annotation, least)}.")


def check_fields(config: Any, prefix: str = "") -> None:
    """Check each field of a dataclass against its annotation, and against ``least`` in the field's metadata.

    Raises:
        ValueError: for the first field with a wrong value; the message begins with ``prefix`` and the field's name.
    """
    kinds = get_type_hints(type(config))
    for each in fields(config):
        check_value(f"{prefix}{each.name}", getattr(config, each.name), kinds[each.name], each.metadata.get("least"))
