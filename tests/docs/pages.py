"""Finds the code blocks of the pages in docs/."""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple

from tests.examples.running import REPOSITORY

_FENCED = re.compile(r"^( *)```(\w+)( notest)?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, its text without the indentation of a list, and where it begins."""

    language: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    """The blocks of docs/`page`, without those marked ``notest``, which need things that tests lack."""
    text = (REPOSITORY / "docs" / page).read_text()
    return [
        Block(found[2], textwrap.dedent(found[4]), text[: found.start()].count("\n") + 2)
        for found in _FENCED.finditer(text)
        if not found[3]
    ]
