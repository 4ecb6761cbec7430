"""The reduced gradient of a bucket: each rank holds a shard, and each ``p.grad`` refers to a range of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor, local_range_of
from lightning_zero.engine.tensor.wrapper import WrapperTensor

if TYPE_CHECKING:
    from lightning_zero.engine.comm.counters import Ledger
    from lightning_zero.engine.state.slot import BucketSlot


class ShownGradient:
    """The values of one ``p.grad``: a range of a gradient shard.

    The ``p.grad`` tensor and all its aliases refer to this object, so that they have the values of the latest shard.
    """

    def __init__(self, slot: BucketSlot, shard: GradientShard) -> None:
        self.slot, self.shard, self._range = slot, shard, slot.local_range

    def local(self) -> Tensor:
        """A view of this rank's range of the values, 1-D. Collective if the sum over machines is not complete yet."""
        return self.shard.range_of(self._range)


class Accumulated(NamedTuple):
    """Gradients of this rank's part of a bucket, summed within a machine, and the function that completes the sum."""

    part: Tensor
    sum_over_machines: Callable[[Tensor], Tensor]


class GradientShard:
    """This rank's shard of a bucket's reduced gradient. It lives as long as some ``p.grad`` refers to it.

    Ranges to which no ``p.grad`` refers are never read, so their values do not matter.

    If each machine has all parameters, gradients of micro-batches that are not synchronised are summed only within a
    machine, in ``accumulated``. If a gradient is read before the next synchronised backward, the read completes the sum
    over machines.

    Args:
        arrival: background copy that fills ``flat``; None if ``flat`` is already filled.
        accumulated: sums within this machine, of which ``flat`` is a range; None if there are none.
    """

    def __init__(
        self,
        flat: Tensor,
        arrival: Future[None] | None,
        ledger: Ledger,
        accumulated: Accumulated | None = None,
    ) -> None:
        self._flat, self._arrival, self._ledger, self.accumulated = flat, arrival, ledger, accumulated
        held = flat if accumulated is None else accumulated.part
        self._category = "gradients" if arrival is None else "host"
        ledger.hold(held, self._category)

    @property
    def flat(self) -> Tensor:
        self.complete()
        return self._arrived()

    def _arrived(self) -> Tensor:
        arrival = self._arrival  # another thread may set the attribute to None
        if arrival is not None:
            arrival.result()
            self._arrival = None
        return self._flat

    def range_of(self, part: slice) -> Tensor:
        """Return the gradients in a range of this rank's shard of the bucket, 1-D."""
        return self.flat[part]

    def complete(self) -> None:
        """Sum ``accumulated`` over machines, unless it is None. Collective if it is summed."""
        if self.accumulated is not None:
            total = self.accumulated.sum_over_machines(self.accumulated.part)
            self.accumulated = None  # only after the sum, which may raise
            self._flat = self._ledger.hold(total, self._category)

    def take_over(self, slots: list[BucketSlot], included: Collection[int] = ()) -> None:
        """Add sharded ``.grad`` values that this shard lacks; make gradients of earlier shards refer to this one.

        Args:
            included: indices of the parameters whose earlier gradients are already in this shard.
        """
        for slot in slots:
            # An ordinary tensor in ``.grad`` was local to this rank; the reduction has already included it.
            if isinstance(gradient := slot.parameter.grad, WrapperTensor):
                if slot.index not in included:
                    flat = self._arrived()
                    flat[slot.local_range].add_(local_range_of(gradient, slot).to(flat.device))
                if (shown := shown_by(gradient, slot)) is not None:
                    shown.shard = self

    def show(self, slot: BucketSlot, dtype: torch.dtype) -> None:
        """Make ``p.grad`` refer to a range of this shard; keep the tensor object if derived from the parameter."""
        shown, gradient = ShownGradient(slot, self), slot.parameter.grad
        if isinstance(gradient, ShardedTensor) and gradient.slot is slot and not gradient.is_parameter:
            gradient.show(None, keep=shown)  # the same object, as when autograd adds in place
        else:
            slot.parameter.grad = ShardedTensor(slot, dtype=dtype, keep=shown)


def shown_by(gradient: Tensor | None, slot: BucketSlot) -> ShownGradient | None:
    """The ``ShownGradient`` of a parameter's ``.grad``; None if ``.grad`` is None or set by the user."""
    shown = gradient.kept_object if isinstance(gradient, ShardedTensor) else None
    return shown if isinstance(shown, ShownGradient) and shown.slot is slot else None


def shard_of_all(slots: list[BucketSlot]) -> GradientShard | None:
    """The shard to which the ``.grad`` of all these parameters refer; None if they do not share one."""
    shown = [shown_by(slot.parameter.grad, slot) for slot in slots]
    shards = {each.shard if each is not None else None for each in shown}
    return shards.pop() if len(shards) == 1 else None
