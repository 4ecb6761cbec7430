"""Encodings in which gradients are sent between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Encodes gradients before they are sent, and decodes received gradients."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of encoded values."""

    def encode(self, values: Tensor) -> Tensor:
        """Encode 1-D values to be sent; return ``values`` itself if nothing changes."""

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Decode ``numel`` values to ``dtype``; return ``encoded`` itself if nothing changes."""

    def size(self, numel: int) -> int:
        """The number of encoded elements for ``numel`` values."""


@dataclass(frozen=True)
class Cast:
    """Sends values in a given dtype; values that already have this dtype are not copied."""

    dtype: torch.dtype

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return encoded.to(dtype)

    def size(self, numel: int) -> int:
        return numel


@dataclass(frozen=True)
class Quantised:
    """Sends fp32 values as low-bit integers, with one fp32 scale for each block of neighbouring values.

    The largest magnitude of a block becomes the largest integer. (Dettmers et al., "8-bit Optimizers via Block-wise
    Quantization", ICLR 2022, section 2.1; Wang et al., "ZeRO++", ICLR 2024, section 3.3.) A non-finite
    value makes all values of its block non-finite, so overflows are still found.

    Args:
        bits: the number of bits of an integer.
        block: the number of values that share a scale; must be even.
    """

    bits: Literal[4, 8]
    block: int
    dtype: ClassVar[torch.dtype] = torch.uint8

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def size(self, numel: int) -> int:
        return self._blocks(numel) * (4 + self.block * self.bits // 8)

    def encode(self, values: Tensor) -> Tensor:
        blocks = self._blocks(len(values))
        padded = torch.nn.functional.pad(values.float(), (0, blocks * self.block - len(values)))
        padded = padded.view(blocks, self.block)
        scales = padded.abs().amax(1, keepdim=True).div_(2 ** (self.bits - 1) - 1)
        scales.clamp_(min=torch.finfo(torch.float32).tiny)  # prevents division by 0 in blocks of zeros
        integers = (padded / scales).round_().to(torch.int8).view(-1)
        encoded = integers.view(torch.uint8) if self.bits == 8 else _packed(integers.add_(8).view(torch.uint8))
        return torch.cat([scales.view(-1).view(torch.uint8), encoded])

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        blocks = self._blocks(numel)
        # a copy, since a view as fp32 requires aligned memory
        scales, integers = encoded[: 4 * blocks].clone().view(torch.float32), encoded[4 * blocks :]
        if self.bits == 8:
            values = integers.view(torch.int8).to(torch.float32)
        else:
            values = _unpacked(integers).to(torch.float32).sub_(8)
        return values.view(blocks, self.block).mul_(scales[:, None]).view(-1)[:numel].to(dtype)


def _packed(codes: Tensor) -> Tensor:
    """Pack an even number of codes of 4 bits into bytes. Each byte has a code from each half of ``codes``."""
    low, high = codes.tensor_split(2)
    return low | high << 4


def _unpacked(packed: Tensor) -> Tensor:
    return torch.cat([packed & 15, packed >> 4])
