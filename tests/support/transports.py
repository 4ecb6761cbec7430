"""Choice between the collectives of ``torch.distributed``, on which all tests run, and cross-memory attach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def cross_memory() -> Iterator[None]:
    """Engines made in this context read the memory of other ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_ZERO_CROSS_MEMORY", "1")
        yield
