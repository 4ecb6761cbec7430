"""`lightning-zero SUBCOMMAND ...`, the same as `python -m lightning_zero SUBCOMMAND ...`."""

import argparse
import importlib
import sys


def main() -> int:
    parser = argparse.ArgumentParser("lightning-zero", epilog="lightning-zero SUBCOMMAND --help lists its arguments.")
    parser.add_argument("subcommand", choices=("train", "plan", "doctor", "checkpoint", "drift", "bench"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(sys.argv[1:] or ["--help"])
    return importlib.import_module(f"lightning_zero.commands.{given.subcommand}").main(given.arguments)


if __name__ == "__main__":
    sys.exit(main())
