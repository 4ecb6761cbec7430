"""The reduced gradient of a bucket: each rank holds a shard, ranges of which ``p.grad`` shows."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_zero.engine.comm.background_work import BackgroundWork
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor, local_range_of
from lightning_zero.engine.tensor.wrapper import WrapperTensor

if TYPE_CHECKING:
    from lightning_zero.engine.state.ledger import Ledger
    from lightning_zero.engine.state.slot import BucketSlot


class ShownGradient:
    """The values of one ``p.grad``; the tensor and all its aliases hold this object.

    ``local`` is this rank's range of the values, 1-D, in the memory of ``shard``. The tensor object stays the same when
    another reduction moves the values to a new shard, so that aliases follow.
    """

    def __init__(self, slot: BucketSlot, local: Tensor, shard: GradientShard) -> None:
        self.slot, self.local, self.shard = slot, local, shard


class GradientShard:
    """This rank's shard of a bucket's reduced gradient. It lives as long as some ``p.grad`` shows a range of it.

    With one rank each parameter has a shard of its own, so that nothing is laid out for a reduction and nothing copied.
    Only ``p.grad`` says which values are live: ranges that no ``.grad`` shows are never read.

    Args:
        pieces: layout of ``flat``, see ``BucketLayout.pieces_of``.
        start: of ``flat`` within this rank's shard of the bucket.
        arrival: background copy of the values; None if they are there.
    """

    def __init__(
        self,
        flat: Tensor,
        pieces: list[tuple[int, int | None, int]],
        start: int,
        arrival: BackgroundWork | None,
        ledger: Ledger,
    ) -> None:
        self._flat, self._pieces, self._start, self._arrival = flat, pieces, start, arrival
        category, nbytes = "gradients" if arrival is None else "host", flat.numel() * flat.element_size()
        ledger.add(category, nbytes)
        weakref.finalize(self, ledger.add, category, -nbytes)

    @property
    def flat(self) -> Tensor:
        arrival = self._arrival  # another thread may set it to None
        if arrival is not None:
            arrival.wait()
            self._arrival = None
        return self._flat

    def parts(self) -> dict[int, Tensor]:
        """This rank's range of each parameter's gradient, 1-D, by the parameter's index."""
        flat = self.flat
        parts = flat.split_with_sizes([numel for numel, _, _ in self._pieces])  # all views in one call
        here = {index: part for part, (_, index, _) in zip(parts, self._pieces) if index is not None}
        return defaultdict(lambda: flat[:0], here)

    def range_of(self, part: slice) -> Tensor:
        """The gradients of adjacent parameters, 1-D, by their range within this rank's shard of the bucket."""
        return self.flat[part.start - self._start : part.stop - self._start]

    def add(self, total: Tensor, arrival: BackgroundWork | None) -> None:
        """Add another reduction; only valid if a ``.grad`` shows each range of this shard."""
        if arrival is not None:
            arrival.wait()
        self.flat.add_(total)

    def take_over(self, slots: list[BucketSlot]) -> None:
        """Add the sharded gradients in the parameters' ``.grad``; those that show an earlier shard show this one."""
        # An ordinary tensor in ``.grad`` is this rank's own and has been reduced with the gradients.
        held = [(slot, gradient) for slot in slots if isinstance(gradient := slot.parameter.grad, WrapperTensor)]
        parts = self.parts() if held else {}
        for slot, gradient in held:
            part = parts[slot.index]
            part.add_(local_range_of(gradient, slot).to(part.device))
            if (shown := shown_by(gradient, slot)) is not None:
                shown.local.data = part
                shown.shard = self

    def show(self, slot: BucketSlot, part: Tensor, dtype: torch.dtype) -> None:
        """Make ``p.grad`` show a range of this shard; if it is a tensor derived from the parameter, in place."""
        shown = ShownGradient(slot, part, self)
        gradient = slot.parameter.grad
        if isinstance(gradient, ShardedTensor) and gradient.slot is slot and not gradient.is_parameter:
            gradient.show(part, keep=shown)  # as autograd adds in place
        else:
            slot.parameter.grad = ShardedTensor(slot, part, dtype, keep=shown)


def shown_by(gradient: Tensor | None, slot: BucketSlot) -> ShownGradient | None:
    """What a parameter's ``.grad`` shows of a reduction; None if the user has set it to another tensor."""
    shown = gradient.keep if isinstance(gradient, ShardedTensor) else None
    return shown if isinstance(shown, ShownGradient) and shown.slot is slot else None


def shard_of_all(slots: list[BucketSlot]) -> GradientShard | None:
    """The shard that all these parameters' ``.grad`` show; None if they do not show one and the same."""
    shown = [shown_by(slot.parameter.grad, slot) for slot in slots]
    shards = {each.shard if each is not None else None for each in shown}
    return shards.pop() if len(shards) == 1 else None
