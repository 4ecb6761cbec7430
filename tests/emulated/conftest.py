"""Pools of workers with the emulated device. Without a compiler all of these tests are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.emulated import device
from tests.support.workers import WorkerKind, WorkerPools


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(500))  # the first test compiles the device: minutes on a busy machine


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if missing := device.missing():
        pytest.skip(f"needs {missing} to compile the device with")
    cache = getattr(pytestconfig, "cache", None)  # not with -p no:cacheprovider
    return device.build(cache.mkdir("emulated") if cache is not None else tmp_path_factory.mktemp("emulated"))


def pools_of(library: Path) -> Iterator[WorkerPools]:
    pools = WorkerPools(WorkerKind(device.BACKENDS, partial(device.load, library)))
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def device_pools(library: Path) -> Iterator[WorkerPools]:
    yield from pools_of(library)


@pytest.fixture
def run_on_device(device_pools: WorkerPools) -> Callable[..., list[Any]]:
    """Like `run_on`, in processes with the emulated device."""
    return device_pools.run_on
