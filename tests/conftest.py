"""Fixtures for all tests; `tests/support/__init__.py` explains how a test runs on several ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import WorkerPools

# Without bytecode files, each of the many processes that import the package would compile it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest_plugins = ["pytester", "tests.support.alone", "tests.support.compatibility", "tests.support.selection"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--programs", type=int, help="random programs of tests/search (default: 60, with --all 300)")
    parser.addoption("--programs-seed", type=int, default=0, help="seed by which they are drawn (default: 0)")


@pytest.fixture(scope="session")
def worker_pools() -> Iterator[WorkerPools]:
    pools = WorkerPools()
    yield pools
    pools.close()


@pytest.fixture
def run_on(worker_pools: WorkerPools) -> Callable[..., list[Any]]:
    """`run_on(world_size, fn, timeout=60, seed=0, **kwargs)`: the return values of `fn(**kwargs)`, by rank."""
    return worker_pools.run_on
