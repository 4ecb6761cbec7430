"""`@pytest.mark.alone`: a test that measures time, so no other test runs meanwhile, whatever the number of workers.

The workers of pytest-xdist share a file lock, which such a test takes exclusively. A second lock in front of it (the
gate) keeps new tests from starting; without the gate they could keep such a test waiting forever.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest


class Alone:
    """pytest plug-in for a worker of pytest-xdist.

    Arguments:
        folder: for the lock files; the same for all workers.
    """

    def __init__(self, folder: Path) -> None:
        self._gate, self._room = folder / "gate", folder / "room"

    # Outside of pytest-timeout's wrapper, which would include the waiting time.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        is_alone = item.get_closest_marker("alone") is not None
        with ExitStack() as stack:
            with _locked(self._gate, fcntl.LOCK_EX):
                stack.enter_context(_locked(self._room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH))
            return (yield)


@contextmanager
def _locked(file: Path, how: int) -> Iterator[None]:
    with open(file, "a") as opened:
        fcntl.flock(opened, how)
        try:
            yield
        finally:
            fcntl.flock(opened, fcntl.LOCK_UN)  # closing does not unlock while a forked process has the file open


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: measures time; no other test runs beside it")


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        folder = session.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]
        session.config.pluginmanager.register(Alone(folder))
