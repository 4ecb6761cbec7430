"""Classes that ``torch.load`` makes only if they are allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._utils import _rebuild_nested_tensor
from torch.nested._internal.nested_tensor import NestedTensor, _rebuild_njt


@contextmanager
def nested_allowed() -> Iterator[None]:
    """Context in which nested tensors are loaded; from 2.15 on, torch refuses them otherwise."""
    with torch.serialization.safe_globals([_rebuild_nested_tensor, _rebuild_njt, NestedTensor]):
        yield
