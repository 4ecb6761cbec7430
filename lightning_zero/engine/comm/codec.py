"""Encodings in which gradients and parameter changes are sent between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Encodes gradients before they are sent, and decodes or adds up received gradients."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of encoded values."""

    def encode(self, values: Tensor) -> Tensor:
        """Encode 1-D values to be sent; return ``values`` itself if nothing changes."""

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Decode ``numel`` values to ``dtype``; return ``encoded`` itself if nothing changes."""

    def add(self, total: Tensor, encoded: Tensor) -> None:
        """Add encoded values to ``total`` in place, in the dtype of ``total``."""

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

    def add(self, total: Tensor, encoded: Tensor) -> None:
        total.add_(encoded)

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
        encoded = integers.view(torch.uint8) if self.bits == 8 else _packed(integers.add_(8).view(torch.uint8), 4)
        return torch.cat([scales.view(-1).view(torch.uint8), encoded])

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        blocks = self._blocks(numel)
        scales, integers = encoded[: 4 * blocks].view(torch.float32), encoded[4 * blocks :]
        if self.bits == 8:
            values = integers.view(torch.int8).to(torch.float32)
        else:
            values = _unpacked(integers, 4).to(torch.float32).sub_(8)
        return values.view(blocks, self.block).mul_(scales[:, None]).view(-1)[:numel].to(dtype)

    def add(self, total: Tensor, encoded: Tensor) -> None:
        total.add_(self.decode(encoded, len(total), torch.float32))


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 2 or 4 bits into bytes. Each byte has a code from each of ``8 / bits`` equal parts of ``codes``."""
    many = 8 // bits
    parts = torch.nn.functional.pad(codes, (0, -len(codes) % many)).tensor_split(many)
    packed = parts[0].clone()
    for place in range(1, many):
        packed |= parts[place] << bits * place
    return packed


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes from ``_packed``. The result includes the padding."""
    return torch.cat([packed >> bits * place & 2**bits - 1 for place in range(8 // bits)])


# Changes to 16-bit floats are sent as differences between bit patterns, most of which are small. A message has a header
# with the width of a code; then, in 16 bits each, differences that are too large for a code (escapes); then a code of
# 2, 4 or 8 bits for each element. The width with the shortest message is used, or plain values if they are shorter.

_HEADER = 8  # bytes; the first is the width of a code in bits, or 0 for plain values
_LARGEST = {2: 1, 4: 7, 8: 126}
"""By code width, the largest absolute difference that has a code. One further code marks escapes."""


def encode_changes(values: Tensor, new: Tensor) -> Tensor:
    """Encode the difference between new and former values as bytes, and set ``values`` to the new values.

    Args:
        values: the former values, which the receivers also have; a 1-D tensor of 16-bit floats.
        new: the new values, in any dtype.
    """
    new = new.to(values.dtype)
    difference = new.view(torch.int16) - values.view(torch.int16)
    values.copy_(new)
    numel = len(values)
    small = difference.clamp(-128, 127).to(torch.int8)
    escapes_of = {bits: small.clamp(-largest, largest) != small for bits, largest in _LARGEST.items()}
    sizes = {bits: -(-numel * bits // 8) + 2 * int(escapes.sum()) for bits, escapes in escapes_of.items()}
    bits = min(sizes, key=sizes.__getitem__)
    header = torch.zeros(_HEADER, dtype=torch.uint8, device="cpu")
    if sizes[bits] >= 2 * numel:
        return torch.cat([header, new.view(torch.uint8)])
    header[0] = bits
    escapes = escapes_of[bits]
    codes = small.add_(_LARGEST[bits]).masked_fill_(escapes, 2**bits - 1 if bits < 8 else -1).view(torch.uint8)
    rest = difference[escapes].view(torch.uint8)
    return torch.cat([header, rest, codes if bits == 8 else _packed(codes, bits)])


def apply_changes(values: Tensor, message: Tensor) -> None:
    """Update ``values`` in place with the result of ``encode_changes`` for the same former values."""
    bits, message = int(message[0]), message[_HEADER:]
    if not bits:
        values.view(torch.uint8).copy_(message)
        return
    packed = -(-len(values) * bits // 8)
    rest, codes = message[: len(message) - packed].view(torch.int16), message[len(message) - packed :]
    codes = (codes if bits == 8 else _unpacked(codes, bits))[: len(values)]
    difference = codes.to(torch.int16).sub_(_LARGEST[bits])
    if len(rest):
        difference.masked_scatter_(codes == 2**bits - 1, rest)
    values.view(torch.int16).add_(difference)
