"""Entry point of `lightning-zero COMMAND ...`, which is the same as `python -m lightning_zero COMMAND ...`."""

import contextlib
import importlib
import itertools
import sys

from lightning_zero.commands.showing import Parser, optional_stdout, stdout_for_json
from lightning_zero.version import __version__

COMMANDS = {
    "train": "train a model, or a sweep of models, configured by Hydra",
    "plan": "predict memory, traffic and time without training",
    "parity": "train a few steps under DDP and ZeRO, and compare every bit",
    "doctor": "measure this machine, and report what works on it",
    "report": "write a report page and a model card for a run or a sweep",
    "drift": "compare data with a saved reference",
    "checkpoint": "inspect, verify, export, convert or import checkpoints",
}


def main() -> int:
    ours = list(itertools.takewhile("--".__ne__, sys.argv[1:]))  # arguments after -- belong to a script
    wants_json = any(len(word) > 2 and "--json".startswith(word) for word in ours)
    try:
        with stdout_for_json() if wants_json else contextlib.nullcontext():
            with contextlib.redirect_stdout(optional_stdout()):
                return run(sys.argv[1:])
    except KeyboardInterrupt:
        return 130  # the exit code that shells use after Ctrl-C


def run(arguments: list[str]) -> int:
    """Run the command that the first argument names, and return its exit code."""
    parser = Parser(
        "lightning-zero",
        description="ZeRO for PyTorch Lightning: train, plan, measure, and work with checkpoints.",
        epilog="lightning-zero COMMAND --help lists the command's arguments.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"lightning-zero {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, does in COMMANDS.items():
        commands.add_parser(name, help=does)
    command = parser.parse_args(arguments[:1] or ["--help"]).command
    if command is None:
        parser.error("the first argument must be a command")
    return importlib.import_module(f"lightning_zero.commands.{command}").main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
