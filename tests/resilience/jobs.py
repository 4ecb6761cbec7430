"""Run jobs under torchrun, and see which steps each attempt did."""

from __future__ import annotations

import json
import os
import re
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tests.examples.running import REPOSITORY
from tests.support.training import same_tensors
from tests.support.warm import warm_python

SCRIPT = Path(__file__).with_name("job.py")


def fault(
    attempt: int,
    step: int,
    ranks: Sequence[int],
    where: str,
    what: str = "kill",
    fit: int = 0,
    until: int | None = None,  # the last step in which it is due; by default the first
) -> dict[str, Any]:
    until = step if until is None else until
    about = {"attempt": attempt, "fit": fit, "step": step, "until": until}
    return about | {"ranks": list(ranks), "where": where, "what": what}


@dataclass
class Ended:
    """The outcome of a job."""

    code: int
    output: str
    weights: dict[str, torch.Tensor] | None
    folder: Path

    def same_as(self, other: Ended) -> None:
        assert self.code == other.code == 0, self.output
        assert self.weights is not None and other.weights is not None
        same_tensors(other.weights, self.weights, bound=0)

    @property
    def memory(self) -> Path:
        return memory_of(self.folder)

    @property
    def attempts(self) -> int:
        return len(set(re.findall(r"attempt (\d+) begins", self.output)))

    @property
    def begun(self) -> list[list[int]]:
        """The steps that rank 0 has begun, by attempt."""
        found: dict[int, list[int]] = {}
        for attempt, step in re.findall(r"attempt (\d+) rank 0 begins step (\d+)", self.output):
            found.setdefault(int(attempt), []).append(int(step))
        return [found[number] for number in sorted(found)]

    @property
    def continued(self) -> list[int]:
        """The steps after which the job was continued."""
        return [int(step) for step in re.findall(r"continuing after step (\d+)", self.output)]

    def repeats_at_most(self, steps: int) -> None:
        """At most `steps` completed steps are repeated; the step in which an attempt died does not count."""
        for before, after in zip(self.begun, self.begun[1:]):
            assert before[-1] - steps <= after[0] <= before[-1] + 1, self.begun


TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def command(
    folder: Path,
    options: dict[str, Any],
    ranks: int = 2,
    restarts: int = 20,
    launcher: Sequence[str] = TORCHRUN,
    python: str = "",
) -> list[str]:
    """The command line of a job."""
    how = [*launcher, "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    return [python or warm_python(), *how, str(SCRIPT), options_of(folder, options)]


def options_of(folder: Path, options: dict[str, Any]) -> str:
    """The script's argument. Each step is kept, and the job's name belongs to the folder."""
    options = {"out": str(folder / "weights.pt"), **options}
    if (given := options.get("resilience", {})) is not None:
        options["resilience"] = {"every_n_steps": 1, "job": memory_of(folder).name, **given}
    return json.dumps(options)


def memory_of(folder: Path) -> Path:
    """The folder in memory of the job in a folder."""
    return Path(f"/dev/shm/lightning_zero-{os.geteuid()}", f"test-{zlib.crc32(str(folder).encode()):08x}")


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def run(
    folder: Path,
    options: dict[str, Any],
    ranks: int = 2,
    restarts: int = 20,
    launcher: Sequence[str] = TORCHRUN,
    python: str = "",
    timeout: float = 240,
    more: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """Run a job to its end, with the environment variables `more` in addition."""
    folder.mkdir(exist_ok=True)
    with open(folder / "output", "w") as output:
        done = subprocess.run(
            command(folder, options, ranks, restarts, launcher, python),
            cwd=folder,
            env={**environment(), **more},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
    return ended(folder, done.returncode)


def ended(folder: Path, code: int) -> Ended:
    weights = folder / "weights.pt"
    return Ended(code, (folder / "output").read_text(), torch.load(weights) if weights.exists() else None, folder)
