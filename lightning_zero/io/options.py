"""Options whose values are the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from lightning_zero.io.annotations import shown
from lightning_zero.io.text import suggestion

Config = TypeVar("Config")


def config_of(option: str, value: Any, kind: type[Config], names: Mapping[str, Mapping[str, Any]]) -> Config | None:
    """Convert an option's value to the dataclass ``kind``.

    Args:
        value: None, a name, an instance of ``kind``, or a mapping of its fields, as from Hydra; an empty one means
            None.
        names: the fields for which each name stands.

    Raises:
        ValueError: for any other value.
    """
    if value is None or isinstance(value, kind):
        return value
    if isinstance(value, str) and value in names:
        return kind(**names[value])
    if not isinstance(value, Mapping):
        allowed = ", ".join(["None", *map(repr, names)])
        a_config = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
        raise ValueError(f"{option}={shown(value)} must be {allowed}, {a_config} or a mapping of its fields.")
    known = names_of_options(kind)
    if unknown := sorted(set(value) - set(known), key=str):
        raise ValueError(f"{option}: {unknown[0]!r} is not an option. The options are {', '.join(known)}.")
    return kind(**value) if value else None


def check_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise a TypeError if an option does not exist; it suggests the nearest name, or lists all names."""
    known = list(known)
    for name in given:
        if name not in known:
            raise TypeError(f"{what} has no option {name!r}: {suggestion(name, known, repr)}")


def names_of_options(config: type) -> list[str]:
    """The names of a dataclass's fields."""
    return [each.name for each in fields(config)]
