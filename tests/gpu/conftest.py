"""What is about a GPU: streams, its allocator, copies from the host. Without one all of it is skipped."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def device() -> str:
    """Where the functions of these tests run; they would on the CPU too, which has no streams to get wrong."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch finds none here")
    return "cuda"
