"""Shortens the time that ranks wait for each other, for tests in which the length of the wait does not matter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PATIENCE = 0.8  # seconds, instead of 3


@contextmanager
def little_patience() -> Iterator[None]:
    """Decorator `@little_patience()` of a case's function, effective on every rank."""
    from lightning_zero.engine.comm import failures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "PATIENCE", PATIENCE)
        yield
