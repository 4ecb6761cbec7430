"""`lightning-zero completion`: shell completion of subcommands, options and values, with Hydra's shell functions.

When Tab is pressed, these functions run `lightning-zero -sc query=SHELL`, with the line so far in COMP_LINE.
"""

from __future__ import annotations

import argparse
import contextlib
import os

from lightning_zero.commands import train
from lightning_zero.commands.parsing import Parser, chosen, visible

EPILOG = """\
bash: add  eval "$(lightning-zero completion bash)"  to ~/.bashrc
zsh:  add  autoload -Uz compinit bashcompinit && compinit && bashcompinit
      and    eval "$(lightning-zero completion zsh)"  to ~/.zshrc
fish: add  lightning-zero completion fish | source  to ~/.config/fish/config.fish
"""


def parser() -> Parser:
    made = Parser(
        "lightning-zero completion",
        description="Print shell code that completes subcommands, options and the values of lightning-zero train.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("shell", choices=("bash", "zsh", "fish"))
    return made


def main(arguments: list[str]) -> int:
    return train.main(["-sc", f"install={parser().parse_args(arguments).shell}"])


def answer(menu: Parser, request: list[str]) -> int:
    """Print the completions of the line in COMP_LINE; ``request`` is ``["-sc", "query=SHELL"]``."""
    line = os.environ["COMP_LINE"]
    _, *before, current = f"{line}|".split()  # with |, split() keeps an empty last word
    current = current[:-1]
    if before[:1] == ["train"] and not current.startswith("-"):
        overrides = [word for word in before[1:] if word != "--json"]
        os.environ["COMP_LINE"] = " ".join(["lightning-zero", *overrides, current])
        return train.main(request)
    # Nothing is completed for a subcommand that cannot be loaded, such as bench outside a clone of the repository.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.suppress(SystemExit):
        print("\n".join(candidates(menu, before, current)))
    return 0


def candidates(parser: argparse.ArgumentParser, before: list[str], current: str) -> list[str]:
    """Completions of the word ``current`` after the words ``before``; empty where any text is allowed, as for paths."""
    positionals, options = _arguments(parser)
    pending = None  # the last option, if it takes further values
    for word in before:
        if word in options:
            pending = options[word] if options[word].nargs != 0 else None
        elif pending is not None:
            pending = pending if pending.nargs == "+" else None
        elif (inner := chosen(parser, word)) is not None:
            parser = inner
            positionals, options = _arguments(parser)
        elif positionals:
            del positionals[0]
    expected = pending or next(iter(positionals), None)
    if current.startswith("-") or expected is None:
        found = list(options)
    else:
        found = [str(choice) for choice in expected.choices or ()]
    return [name for name in found if name.startswith(current)]


def _arguments(parser: argparse.ArgumentParser) -> tuple[list[argparse.Action], dict[str, argparse.Action]]:
    actions = visible(parser)
    options = {name: action for action in actions for name in action.option_strings}
    return [action for action in actions if not action.option_strings], options
