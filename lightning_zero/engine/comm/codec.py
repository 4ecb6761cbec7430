"""Codecs: what travels between ranks instead of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Encodes ranges of gradients before they are sent, and adds up what has been received."""

    @property
    def dtype(self) -> torch.dtype:
        """Of what travels."""

    def encode(self, values: Tensor) -> Tensor:
        """What is sent instead of some values (1-D); the values themselves where nothing changes."""

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """The values again, in a dtype; what was encoded itself where nothing changes."""

    def add(self, total: Tensor, encoded: Tensor) -> None:
        """Add encoded values to a total, in the total's dtype."""

    def size(self, numel: int) -> int:
        """Elements that encode so many values."""


@dataclass(frozen=True)
class Cast:
    """Values travel in another dtype; in their own one this is the identity, which copies nothing."""

    dtype: torch.dtype

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        return encoded.to(dtype)

    def add(self, total: Tensor, encoded: Tensor) -> None:
        total.add_(encoded)

    def size(self, numel: int) -> int:
        return numel
