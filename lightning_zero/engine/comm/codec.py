"""Codecs: the encoding in which gradients are sent between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Encodes ranges of gradients before they are sent, and adds up what has been received."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of encoded values."""

    def encode(self, values: Tensor) -> Tensor:
        """Encode 1-D values to be sent; returns the same tensor if the encoding changes nothing."""

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode to values of a dtype; returns the same tensor if the encoding changes nothing."""

    def add(self, total: Tensor, encoded: Tensor) -> None:
        """Add encoded values to a total, in the total's dtype."""

    def size(self, numel: int) -> int:
        """The number of encoded elements for ``numel`` values."""


@dataclass(frozen=True)
class Cast:
    """Sends values in another dtype; if it is their own dtype, this is the identity, which copies nothing."""

    dtype: torch.dtype

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        return encoded.to(dtype)

    def add(self, total: Tensor, encoded: Tensor) -> None:
        total.add_(encoded)

    def size(self, numel: int) -> int:
        return numel
