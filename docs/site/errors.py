"""The page of all errors and warnings, made from the source when the site is built."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

AREAS = {
    "engine": "Training",
    "strategies": "Trainer and Fabric",
    "checkpoint": "Checkpoints",
    "convert": "Checkpoints of other libraries",
    "planning": "Plans",
    "callbacks": "Callbacks",
    "reporting": "Reports",
    "commands": "Commands",
}
OTHER_AREAS = "Other"

HEADER = """# Errors

Every error and warning of the library. Paste the beginning of a message into the search field above; CAPITALS and
`...` stand for the parts that vary. A message says what was given, what is allowed and what to write instead. For
problems without a message, see [Troubleshooting](../how-to/troubleshooting.md).
"""

# Calls that take a message besides `raise`: warnings, and functions that raise for their caller.
_WARNINGS = {"warning", "warn", "rank_zero_warn"}
_RAISING = {"fail", "_fail"}
_LEAST_WORDS = 3


class Message(NamedTuple):
    """A message of the library; ``kind`` is the error's class or "warning"."""

    text: str
    kind: str
    path: str


def page(package: Path) -> str:
    """The page's Markdown: a table of messages for each area."""
    by_area: defaultdict[str, set[Message]] = defaultdict(set)
    for message in messages(package):
        by_area[AREAS.get(message.path.split("/")[1], OTHER_AREAS)].add(message)
    parts = [HEADER]
    for area in (*AREAS.values(), OTHER_AREAS):
        rows = dict.fromkeys(f"| `{_in_a_cell(text)}` | {kind} |" for text, kind, _ in sorted(by_area[area]))
        if rows:
            parts.append("\n".join([f"## {area}", "", "| message | kind |", "| --- | --- |", *rows, ""]))
    return "\n".join(parts)


def _in_a_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")


def messages(package: Path) -> Iterator[Message]:
    """Every message in the source of a package that has three literal words or more."""
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for scope in ast.walk(tree):
            if isinstance(scope, (ast.Module, ast.FunctionDef)):
                yield from _messages_in(scope, str(path.relative_to(package.parent)))


def _messages_in(scope: ast.Module | ast.FunctionDef, path: str) -> Iterator[Message]:
    """The messages in a function, without those of functions within it."""
    nodes = list(_own_nodes(scope))
    texts: defaultdict[str, list[ast.expr]] = defaultdict(list)
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts[node.targets[0].id].append(node.value)
    for node in nodes:
        for kind, argument in _arguments(node):
            for value in texts[argument.id] if isinstance(argument, ast.Name) else [argument]:
                text = _text_of(value)
                if sum(word.islower() for word in text.split()) >= _LEAST_WORDS:
                    yield Message(text, kind, path)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from _own_nodes(node)


def _arguments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        kind = ast.unparse(node.exc.func).removesuffix(".of").rpartition(".")[2]
        yield from ((kind, argument) for argument in node.exc.args)
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in _WARNINGS | _RAISING:
            yield from (("warning" if name in _WARNINGS else "error", argument) for argument in node.args)


def _text_of(value: ast.expr) -> str:
    """A message's text; the name of a variable in capitals, and ``...`` for any other expression."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return " ".join(value.value.replace("%s", "...").replace("%d", "...").split(" "))
    if isinstance(value, ast.JoinedStr):
        return "".join(map(_text_of, value.values))
    if isinstance(value, ast.FormattedValue):
        named = isinstance(value.value, (ast.Name, ast.Attribute))
        return ast.unparse(value.value).rpartition(".")[2].strip("_").upper() if named else "..."
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _text_of(value.left) + _text_of(value.right)
    return "..."
