"""Names in messages: suggestions for misspelt names, and lists of many names."""

import difflib
from collections.abc import Callable, Iterable, Sequence


def suggestion(name: str, known: Sequence[str], spell: Callable[[str], str] = str) -> str:
    """For an unknown name, suggest a similar known name, formatted by ``spell``; otherwise list all known names."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {spell(near[0])}?" if near else f"there are {', '.join(known)}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first names and the number of others, for an error message: a large model may have thousands of names."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
