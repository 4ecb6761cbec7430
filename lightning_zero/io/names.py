"""Suggestions for misspelt names."""

import difflib
from collections.abc import Callable, Sequence


def suggestion(name: str, known: Sequence[str], spell: Callable[[str], str] = str) -> str:
    """For an unknown name, suggest a similar known name, formatted by ``spell``; otherwise list all known names."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {spell(near[0])}?" if near else f"there are {', '.join(known)}"
