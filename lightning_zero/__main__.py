"""`lightning-zero SUBCOMMAND ...`, the same as `python -m lightning_zero SUBCOMMAND ...`."""

import importlib
import sys

from lightning_zero.commands import COMMANDS


def main() -> int:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: lightning-zero {{{','.join(COMMANDS)}}} ...")
        print("lightning-zero train --help says what can be set; lightning-zero checkpoint --help, what can be done;")
        print("lightning-zero bench --help, what can be measured.")
        return 0
    if name not in COMMANDS:
        print(f"lightning-zero: no subcommand {name!r}; there is {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return importlib.import_module(COMMANDS[name]).main(arguments)


if __name__ == "__main__":
    sys.exit(main())
