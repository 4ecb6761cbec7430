"""Choice between the collectives of ``torch.distributed``, on which all tests run, and cross-memory attach."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest


@contextmanager
def cross_memory() -> Iterator[None]:
    """Engines made in this context read the memory of other ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_ZERO_CROSS_MEMORY", "1")
        yield


def in_use() -> Literal["gloo", "shared memory"]:
    """The transport of this run's ranks on CPUs, as a plan calls it; see ``tests/conftest.py``."""
    return "gloo" if os.environ["LIGHTNING_ZERO_CROSS_MEMORY"] == "0" else "shared memory"
