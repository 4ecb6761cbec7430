"""Tests that need a GPU: streams, its allocator, copies from the host. Without a GPU all of them are skipped."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def device() -> str:
    """The device of these tests. With ``GPU_TESTS_ON=cpu`` in the environment, the tests themselves can be tried."""
    if (other := os.environ.get("GPU_TESTS_ON")) is not None:
        return other
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch finds none here")
    return "cuda"
