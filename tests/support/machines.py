"""Functions run on the ranks of two simulated machines (`benchmarks/machines.py`)."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
TIMEOUT = 150.0  # seconds

sys.path.append(str(REPOSITORY / "benchmarks"))  # its modules import each other as scripts do

from machines import Machines, bytes_sent_by_all  # noqa: E402

__all__ = ["bytes_sent_by_all", "on_two", "run_on_two"]


@contextmanager
def on_two() -> Iterator[Machines]:
    """Two simulated machines; skips where they cannot be created."""
    machines = Machines()
    try:
        machines.__enter__()
    except RuntimeError as error:
        pytest.skip(str(error))
    try:
        yield machines
    finally:
        machines.__exit__()


def run_on_two(function: Any, ranks_each: int = 2, **arguments: Any) -> list[Any]:
    """Call a module's function on every rank, with ``ranks_each`` ranks a machine, and return the results by rank.

    The function is called after ``init_process_group("gloo")``. Arguments and results are JSON. Skips like ``on_two``.
    """
    call = [sys.executable, "-m", "tests.support.machines", f"{function.__module__}:{function.__name__}"]
    processes: list[subprocess.Popen[str]] = []
    with on_two() as machines:
        try:
            for inside, environment in machines.places(2 * ranks_each):
                processes.append(
                    subprocess.Popen(
                        [*inside, *call, json.dumps(arguments)],
                        env=os.environ | environment | {"PYTHONPATH": str(REPOSITORY)},
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                        cwd=REPOSITORY,
                    )
                )
            found = [process.communicate(timeout=TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
    wrong = [f"rank {rank}: {said[-3000:]}" for rank, (_, said) in enumerate(found) if processes[rank].returncode]
    assert not wrong, "\n".join(wrong)
    return [json.loads(output.splitlines()[-1]) for output, _ in found]


if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, _, name = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
    dist.barrier()
    print(json.dumps(result), flush=True)
    dist.destroy_process_group()
