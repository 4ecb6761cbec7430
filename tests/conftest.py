"""Fixtures for all tests; `tests/support/__init__.py` explains how a test runs on several ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.support import WorkerPools

# Without bytecode files, each of the many processes that import the package would compile it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tests run on the collectives of torch.distributed, as GPUs do; with 1 in the environment, on cross-memory attach.
os.environ.setdefault("LIGHTNING_ZERO_CROSS_MEMORY", "0")

pytest_plugins = ["pytester", "tests.support.alone", "tests.support.compatibility", "tests.support.selection"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--programs", type=int, help="random programs of tests/search (default: 60, with --all 300)")
    parser.addoption("--programs-seed", type=int, default=0, help="seed by which they are drawn (default: 0)")


@pytest.fixture(scope="session")
def worker_pools() -> Iterator[WorkerPools]:
    pools = WorkerPools()
    yield pools
    pools.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run whole programs with the units of a small model, as their users do; exhaustively also with a large model's."""
    if "run_on" in metafunc.fixturenames and metafunc.definition.path.parent.name in ("trainer", "fabric"):
        metafunc.fixturenames.append("units")
        units = ["merged", pytest.param("single", marks=pytest.mark.exhaustive)]
        metafunc.parametrize("units", units, indirect=True)


@pytest.fixture
def units(request: pytest.FixtureRequest) -> str:
    """How blocks become units: "merged" as by default, or "single", as in a large model."""
    return getattr(request, "param", "single")


@pytest.fixture
def run_on(worker_pools: WorkerPools, units: str) -> Callable[..., list[Any]]:
    """`run_on(world_size, fn, timeout=60, seed=0, **kwargs)`: the return values of `fn(**kwargs)`, by rank."""
    return partial(worker_pools.run_on, merges_units=units == "merged")
