"""`lightning-zero bench`: run the repository's benchmarks, and compare their results."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from lightning_zero.commands.parsing import Menu

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"

BENCHMARKS = {
    "peers": "time, memory and traffic compared with DDP, FSDP and DeepSpeed",
    "ratios": "whether a stage has become slower relative to DDP",
    "plans": "predicted step times compared with measured ones",
    "growth": "the engine's overhead as tensors, units and ranks increase",
    "compare": "whether one result or run takes more time or memory than another",
}


def parser() -> Menu:
    return Menu(
        "lightning-zero bench",
        BENCHMARKS,
        _load,
        description="Run a benchmark of the repository; docs/development/benchmarks.md explains the results.",
        epilog="lightning-zero bench COMMAND --help lists the benchmark's options.",
    )


def main(arguments: list[str]) -> int:
    if arguments[:1] and arguments[0] in BENCHMARKS:
        sys.argv = [str(SCRIPTS / f"{arguments[0]}.py"), *arguments[1:]]  # results record this command
    return parser().run(arguments)


def _load(name: str) -> Any:
    """Import a benchmark's script, which does not import torch: torch would take CPU time from measured processes."""
    if name == "compare":
        return importlib.import_module("lightning_zero.commands.bench_compare")  # works without the repository
    if not (SCRIPTS / f"{name}.py").exists():
        parser().error(
            "benchmarks are part of the repository, not of the installed package. Clone the repository and run "
            f"`python -m lightning_zero bench {name}` in it."
        )
    if importlib.util.find_spec("psutil") is None:
        parser().error("the package psutil, which benchmarks require, is missing: pip install 'lightning_zero[bench]'")
    sys.path.insert(0, str(SCRIPTS))  # the scripts import each other
    return importlib.import_module(name)
