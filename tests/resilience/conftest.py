"""Fixtures for tests of jobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.resilience.jobs import Ended, run


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Callable[..., Ended]:
    """`uninterrupted(options, ranks=2)`: the outcome of the same job without faults."""
    known: dict[str, Ended] = {}

    def without_faults(options: dict[str, Any], ranks: int = 2) -> Ended:
        key = json.dumps([options, ranks], sort_keys=True)
        if key not in known:
            known[key] = run(tmp_path_factory.mktemp("uninterrupted"), options, ranks)
            assert known[key].code == 0, known[key].output
        return known[key]

    return without_faults
