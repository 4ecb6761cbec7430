"""Stochastic rounding to bf16, with random bits that do not depend on the stage, the ranks or restarts.

An update by less than half of bf16's spacing would be lost in rounding to nearest: with ``betas=(0.9, 0.999)``, Adam's
second moment would hardly ever decrease. A value is therefore rounded up or down at random, such that the expected
result is the value itself. The bits are a hash of the seed, the number of updates so far, the parameter's name, the
rounded entry's name and the element's index in the parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.compat import FakeTensor
from lightning_zero.engine.plan.layout import BucketLayout

GROUP_KEY = "stochastic_rounding"
"""The entry of param groups with the seed and the number of updates, so that checkpoints contain both."""

CHUNK_NUMEL, CHUNK_NUMEL_ON_DEVICE = 2**18, 2**22
"""Sizes of a chunk in elements, multiples of ``ALIGNMENT``. In fp32, each tensor of a chunk takes 1 MiB, or 16 MiB on
devices other than the CPU, which need large kernels."""


def chunks(tensor: Tensor) -> list[slice]:
    """The chunks of a flattened tensor that are updated one after another; one empty chunk for an empty tensor."""
    is_on_cpu = tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)  # plans are for devices
    size = CHUNK_NUMEL if is_on_cpu else CHUNK_NUMEL_ON_DEVICE
    return [slice(start, min(start + size, tensor.numel())) for start in range(0, max(tensor.numel(), 1), size)]


def count_update(groups: Sequence[dict[str, Any]], seed: int) -> None:
    """Count an update of all param groups. ``seed`` is kept in the groups, unless loaded ones have another seed."""
    known = [group[GROUP_KEY] for group in groups if GROUP_KEY in group]
    first, updates = max(known, key=itemgetter(1), default=(seed, 0))
    for group in groups:
        group[GROUP_KEY] = first, updates + 1


def random_bits(
    key: tuple[int, int], layout: BucketLayout, part: slice, what: str, device: torch.device | str
) -> Tensor:
    """Return one number from 0 to 2**16 - 1 for each element in a range of this rank's shard of a bucket, as int32.

    Args:
        key: (seed, number of updates).
        what: the name of what is rounded, such as an optimizer state.
    """
    pieces, position = [torch.empty(0, dtype=torch.int32, device=device)], 0
    for numel, index, first in layout.own_spans:
        start, stop = max(position, part.start), min(position + numel, part.stop)
        if start < stop:
            segment = layout.segments[index or 0]  # in a gap, bits do not matter
            share = segment.share.index if segment.share.is_divided else None  # shares have different elements
            text = repr((*key, segment.name, share, what))
            pieces.append(_hashed(text, first + start - position, stop - start, device))
        position += numel
    return pieces[-1] if len(pieces) <= 2 else torch.cat(pieces)


def _hashed(key: str, first: int, numel: int, device: torch.device | str) -> Tensor:
    """Hash the numbers from ``first`` on by the rounds of "triple32" (C. Wellons), with a key at two places.

    With one multiplication fewer, bits of elements at a distance of 64 would depend on each other.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    before, within = (int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:]))
    x = torch.arange(numel, dtype=torch.int32, device=device)
    x += (first + before + 2**31) % 2**32 - 2**31  # as int32, which wraps around
    x ^= (x >> 17).bitwise_and_(2**15 - 1)  # shifted without the sign
    x *= 0xED5AD4BB - 2**32
    x ^= (x >> 11).bitwise_and_(2**21 - 1)
    x += within
    x *= 0xAC4C1B51 - 2**32
    x ^= (x >> 15).bitwise_and_(2**17 - 1)
    x *= 0x31848BAB
    return x.bitwise_right_shift_(16).bitwise_and_(2**16 - 1)


def round_stochastically(values: Tensor, target: Tensor, bits: Tensor) -> None:
    """Write fp32 values to a bf16 tensor, with the random bits of ``random_bits``.

    A bf16 number is the upper half of an fp32 number. Adding a random number of 16 bits carries into the upper half
    with the probability that makes the mean equal the value.
    """
    rounded = values.view(torch.int32).add(bits).bitwise_and_(-(2**16)).view(torch.float32)
    nan = values.clamp(max=-float("inf"))  # minus infinity, or NaN, which the carry may have turned into a number
    target.copy_(torch.maximum(rounded, nan, out=rounded))
