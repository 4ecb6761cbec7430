"""Ranks that lose patience with each other sooner, for tests that wait for it and are not about how long it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PATIENCE = 0.8  # seconds, instead of 3


@contextmanager
def little_patience() -> Iterator[None]:
    """On every rank of a case: `@little_patience()` before the function that they run."""
    from lightning_zero.engine import agreement, watch

    with pytest.MonkeyPatch.context() as patch:
        for module in (agreement, watch):
            patch.setattr(module, "PATIENCE", PATIENCE)
        yield
