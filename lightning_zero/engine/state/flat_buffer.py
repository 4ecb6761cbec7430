"""Fill the flat buffer in which the gradients of a bucket are reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_zero.engine.compat import foreach_copy, foreach_zero


def fill(flat: Tensor, sizes: Sequence[int], waiting: Mapping[int, Tensor], filled: Sequence[bool]) -> None:
    """Copy waiting gradients into the buffer, and zeros where there is no gradient.

    Args:
        sizes: the lengths of each segment and of the gap after it, in turn.
        waiting: gradients by the number of their segment, in the buffer's dtype.
        filled: by segment, whether there is a gradient, in ``waiting`` or in the buffer.
    """
    if len(waiting) == len(filled) and flat.numel():  # the fastest way
        gaps = flat.new_zeros(max(sizes[1::2]))
        torch.cat([gaps[:n] if i % 2 else waiting[i // 2].view(-1) for i, n in enumerate(sizes) if n], out=flat)
        return
    parts = flat.split_with_sizes(list(sizes))
    if waiting:
        foreach_copy([parts[2 * index] for index in waiting], [gradient.view(-1) for gradient in waiting.values()])
    blank = [part for part, is_filled in zip(parts[::2], filled) if not is_filled]
    blank += [part for part in parts[1::2] if part.numel()]
    if blank:
        foreach_zero(blank)
