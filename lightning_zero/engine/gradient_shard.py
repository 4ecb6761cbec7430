"""The reduced gradient of a bucket, of which each rank holds a part, and the values that ``p.grad`` shows of it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_zero.engine.settling import Work
from lightning_zero.engine.sharded_tensor import Handle, ShardedTensor, local_range_of

if TYPE_CHECKING:
    from lightning_zero.engine.bucket import BucketSlot, Ledger


class ShownGradient:
    """The values of one ``p.grad``: what the tensor, and every alias of it, keeps.

    Attributes:
        slot: the parameter's.
        local: this rank's range of the values, 1-D. The tensor object stays the same when a reduction puts the values
            into a new shard, so that aliases follow.
        shard: whose memory that is; None over one rank, where each gradient has its own.
    """

    def __init__(self, slot: BucketSlot, local: Tensor, shard: GradientShard | None) -> None:
        self.slot, self.local, self.shard = slot, local, shard


class GradientShard:
    """What one reduction gave: this rank's part of a bucket's gradient. It lives while a ``p.grad`` shows some of it.

    Which values are live is stated nowhere but in ``p.grad``: a range counts if the parameter's ``.grad`` shows it, and
    the others hold nothing that is ever read.

    Args:
        flat: the shard. Over one rank instead each parameter's own gradient, 1-D, by index: nothing was to be laid out
            for a reduction, and so nothing was copied.
        arrival: what ends when the values are there; None where they are.
    """

    def __init__(self, flat: Tensor | dict[int, Tensor], arrival: Work | None, ledger: Ledger) -> None:
        self._flat, self._arrival = flat, arrival
        category = "gradients" if arrival is None else "host"
        holders = flat.values() if isinstance(flat, dict) else [self]
        for holder, tensor in zip(holders, flat.values() if isinstance(flat, dict) else [flat]):
            nbytes = tensor.numel() * tensor.element_size()
            ledger.add(category, nbytes)
            weakref.finalize(holder, ledger.add, category, -nbytes)

    @property
    def flat(self) -> Tensor | dict[int, Tensor]:
        arrival = self._arrival  # another thread may ask at the same time
        if arrival is not None:
            arrival.wait()
            self._arrival = None
        return self._flat

    def parts(self, pieces: list[tuple[int, int | None, int]]) -> dict[int, Tensor]:
        """This rank's range of each parameter's gradient, 1-D, by the parameter's index.

        Args:
            pieces: what the shard is made of, see ``BucketLayout.pieces_of``.
        """
        flat = self.flat
        if isinstance(flat, dict):
            return flat
        parts = flat.split_with_sizes([numel for numel, _, _ in pieces])  # all views in one call
        here = {index: part for part, (_, index, _) in zip(parts, pieces) if index is not None}
        return defaultdict(lambda: flat[:0], here)

    def range_of(self, slots: list[BucketSlot], part: slice) -> Tensor:
        """This rank's range of the gradients of neighbouring parameters, 1-D.

        Args:
            part: of the shard. Over one rank there is one parameter.
        """
        return self.flat[slots[0].index] if isinstance(self.flat, dict) else self.flat[part]

    def add(self, total: Tensor | dict[int, Tensor], arrival: Work | None) -> None:
        """Add another reduction, as it is given to the constructor, where a ``.grad`` shows each range of this one."""
        if arrival is not None:
            arrival.wait()
        assert isinstance(self.flat, Tensor) and isinstance(total, Tensor)
        self.flat.add_(total)

    def take_over(self, slots: list[BucketSlot], pieces: list[tuple[int, int | None, int]]) -> None:
        """Add what the parameters' ``.grad`` hold, and let those that show an earlier reduction show this one.

        An ordinary tensor, which is this rank's own, has been reduced with the gradients.
        """
        held = [(slot, gradient) for slot in slots if isinstance(gradient := slot.parameter.grad, Handle)]
        if not held:
            return
        parts, flat = self.parts(pieces), self.flat
        for slot, gradient in held:
            shown = shown_by(gradient, slot)
            if isinstance(flat, dict):
                if slot.index not in flat:
                    continue
                if shown is not None:
                    flat[slot.index] = shown.local.add_(flat[slot.index].to(shown.local.device))
                else:
                    flat[slot.index].add_(local_range_of(gradient, slot).to(flat[slot.index].device))
                continue
            part = parts[slot.index]
            part.add_(local_range_of(gradient, slot).to(part.device))
            if shown is not None:
                shown.local.data = part
                shown.shard = self

    def show(self, slot: BucketSlot, part: Tensor, dtype: torch.dtype) -> None:
        """Make a range of this shard ``p.grad``, which does not show one; a tensor made of the parameter is kept."""
        shown = ShownGradient(slot, part, None if isinstance(self._flat, dict) else self)
        gradient = slot.parameter.grad
        if isinstance(gradient, ShardedTensor) and gradient.slot is slot and not gradient.is_parameter:
            gradient.show(part, keep=shown)  # as autograd adds in place
        else:
            slot.parameter.grad = ShardedTensor(slot, part, dtype, keep=shown)


def shown_by(gradient: Tensor | None, slot: BucketSlot) -> ShownGradient | None:
    """What a parameter's ``.grad`` shows of a reduction; None for anything else that the user has put there."""
    shown = gradient.keep if isinstance(gradient, ShardedTensor) else None
    return shown if isinstance(shown, ShownGradient) and shown.slot is slot else None


def shard_of_all(slots: list[BucketSlot]) -> GradientShard | None:
    """The shard that the ``.grad`` of all these parameters show, if it is one."""
    shown = [shown_by(slot.parameter.grad, slot) for slot in slots]
    shard = shown[0].shard if shown[0] is not None else None
    return shard if all(each is not None and each.shard is shard for each in shown) else None
