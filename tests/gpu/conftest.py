"""Tests that need a GPU: streams, its allocator, copies from the host. Without a GPU all of them are skipped."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def device() -> str:
    """The device of these tests. They would also run on the CPU, which has no streams to get wrong."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch finds none here")
    return "cuda"
