"""Command-line parsers: errors are one line and suggest the nearest name; subcommands are imported when chosen."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from lightning_zero.io.names import suggestion


class Parser(argparse.ArgumentParser):
    """Parser that reports errors in one line without the usage, and suggests names for misspelt values or options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser: argparse.ArgumentParser = self
            for word in args:
                parser = chosen(parser, word) or parser
            wrong = unknown[0].partition("=")[0]
            if wrong.startswith("-"):
                options = [name for action in visible(parser) for name in action.option_strings]
                parser.error(f"no option {wrong}; {suggestion(wrong, options)}")
            parser.error(f"unexpected argument {unknown[0]!r}")
        return given

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check a value against the choices, and suggest the nearest one, as argparse does only since Python 3.14."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = suggestion(str(value), known)
            listed = "" if near.startswith("there are") else f" The choices are {', '.join(known)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {near}{listed}")


class Menu(Parser):
    """Parser of a command whose subcommands are modules with ``parser()`` and ``main(arguments)``.

    Args:
        does: a one-line description of each subcommand, by name.
        load: function that imports a subcommand's module by name.
    """

    def __init__(self, prog: str, does: Mapping[str, str], load: Callable[[str], Any], **more: Any) -> None:
        super().__init__(prog, **more)
        self.load = load
        self.commands = self.add_subparsers(metavar="COMMAND", title="commands", parser_class=Parser)
        for name, line in does.items():
            self.commands.add_parser(name, help=line)

    def run(self, arguments: Sequence[str]) -> int:
        """Run the subcommand that the first argument names, and return its exit code."""
        name, *rest = arguments or ["--help"]
        if name not in self.commands.choices:
            self.parse_args([name])
            self.error(f"{name}: the first argument must be a command")
        return self.load(name).main(rest)


def visible(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments shown in a parser's help."""
    return [action for action in parser._actions if action.help is not argparse.SUPPRESS]


def chosen(parser: argparse.ArgumentParser, word: str) -> argparse.ArgumentParser | None:
    """The parser of the subcommand that ``word`` names, or None."""
    for action in visible(parser):
        if isinstance(action, argparse._SubParsersAction) and word in action.choices:
            return parser.load(word).parser() if isinstance(parser, Menu) else action.choices[word]
    return None
