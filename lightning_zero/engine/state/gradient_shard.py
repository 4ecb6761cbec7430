"""The reduced gradient of a bucket: each rank holds a shard, and each ``p.grad`` refers to a range of it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.comm.asynchronous import BackgroundWork
from lightning_zero.engine.plan.layout import Spans
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor, local_range_of
from lightning_zero.engine.tensor.wrapper import WrapperTensor

if TYPE_CHECKING:
    from lightning_zero.engine.comm.counters import Ledger
    from lightning_zero.engine.state.slot import BucketSlot


class ShownGradient:
    """The values of one ``p.grad``. The ``p.grad`` tensor and all its aliases refer to this object.

    ``local`` is this rank's range of the values, 1-D, a view of ``shard``. ``local`` stays the same tensor object when
    another reduction moves the values to a new shard, so that aliases have the new values.
    """

    def __init__(self, slot: BucketSlot, local: Tensor, shard: GradientShard) -> None:
        self.slot, self.local, self.shard = slot, local, shard

    def complete(self) -> None:
        """Complete the values, unless they are complete already. Collective."""
        self.shard.complete()


class _Count:
    """One object's bytes in a category of a ledger; ``set`` changes the number."""

    def __init__(self, ledger: Ledger, category: str) -> None:
        self.ledger, self._category, self._nbytes = ledger, category, 0

    def set(self, nbytes: int) -> None:
        self.ledger.add(self._category, nbytes - self._nbytes)
        self._nbytes = nbytes


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
        spans: layout of ``flat``, see ``BucketLayout.own_spans``.
        arrival: background copy that fills ``flat``; None if ``flat`` is already filled.

    Attributes:
        accumulated: sums within this machine, of which ``flat`` is a range; None if there are none.
        is_taken: whether ``take`` has returned ``accumulated``, which a running reduction then includes.
    """

    def __init__(
        self,
        flat: Tensor,
        spans: Spans,
        arrival: BackgroundWork | None,
        ledger: Ledger,
    ) -> None:
        self._flat, self._spans, self._arrival = flat, spans, arrival
        self._shown: weakref.WeakSet[ShownGradient] = weakref.WeakSet()
        self.accumulated: Accumulated | None = None
        self.is_taken = False
        self._count = _Count(ledger, "gradients" if arrival is None else "host")
        self._count.set(flat.nbytes)
        weakref.finalize(self, self._count.set, 0)

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

    def parts(self) -> dict[int, Tensor]:
        """This rank's range of each parameter's gradient, 1-D, by the parameter's index."""
        flat = self._arrived()
        parts = flat.split_with_sizes([numel for numel, _, _ in self._spans])  # all views in one call
        here = {index: part for part, (_, index, _) in zip(parts, self._spans) if index is not None}
        return defaultdict(lambda: flat[:0], here)

    def range_of(self, part: slice) -> Tensor:
        """Return the gradients in a range of this rank's shard of the bucket, 1-D."""
        return self.flat[part]

    def add(self, total: Tensor, arrival: BackgroundWork | None) -> None:
        """Add the result of another reduction. Valid only if a ``.grad`` refers to each range of this shard."""
        if arrival is not None:
            arrival.result()
        if self.flat.dtype != total.dtype:  # in bf16 until now (``masters=False``)
            self._move(self.flat.to(total.dtype))
        self.flat.add_(total)

    # -- sums within a machine --------------------------------------------------------------------------------------

    def accumulate(self, part: Tensor, own: slice, sum_over_machines: Callable[[Tensor], Tensor]) -> None:
        """Add a sum within this machine.

        Args:
            part: the sum for this rank's part of the bucket.
            own: the range of ``part`` that is this rank's shard.
            sum_over_machines: a function that completes the sum and returns this rank's shard of it.
        """
        if self.accumulated is not None:
            self.accumulated.part.add_(part)
            return
        before, mine = self.flat, part[own]
        if before.data_ptr() != mine.data_ptr():  # ``before`` is already summed over machines; no other rank adds it
            mine.add_(before.to(mine.device))
        self._move(mine)
        self._count.set(part.nbytes)
        self.accumulated = Accumulated(part, sum_over_machines)

    def clear(self, ranges: Mapping[BucketSlot, slice]) -> None:
        """Set the gradients of parameters to zero. Tensors that still refer to them keep their values.

        Args:
            ranges: the parameters, each with its range within this rank's part of the bucket.
        """
        if kept := [shown for shown in self._shown if shown.slot in ranges]:
            twin = GradientShard(self._arrived().clone(), self._spans, None, self._count.ledger)
            if self.accumulated is not None:
                part, sum_over_machines = self.accumulated
                twin.accumulated = Accumulated(part.clone(), sum_over_machines)
            parts = twin.parts()
            for shown in kept:
                self._shown.remove(shown)
                twin._shown.add(shown)
                shown.shard, shown.local.data = twin, parts[shown.slot.index]
        parts = self.parts()
        for slot, in_part in ranges.items():
            parts[slot.index].zero_()
            if self.accumulated is not None:
                self.accumulated.part[in_part].zero_()

    def take(self) -> Tensor | None:
        """Return the sums within this machine, for a reduction whose result replaces this shard; None if none exist."""
        if self.accumulated is None:
            return None
        self.is_taken = True
        return self.accumulated.part

    def complete(self) -> None:
        """Sum ``accumulated`` over machines, unless it is None or was taken. Collective if it is summed."""
        if self.accumulated is not None and not self.is_taken:
            total = self.accumulated.sum_over_machines(self.accumulated.part)
            self.accumulated = None  # only after the sum, which may raise
            self._move(total)

    def _move(self, flat: Tensor) -> None:
        """Replace the values of this shard, and of all gradients that refer to a range of it."""
        self._flat = flat
        self._count.set(flat.nbytes)
        parts = self.parts()
        for shown in self._shown:
            shown.local.data = parts[shown.slot.index]

    def take_over(self, slots: list[BucketSlot]) -> None:
        """Add sharded ``.grad`` values that this shard lacks; make gradients of an earlier shard refer to this one."""
        # An ordinary tensor in ``.grad`` was local to this rank; the reduction has already included it.
        held = [(slot, gradient) for slot in slots if isinstance(gradient := slot.parameter.grad, WrapperTensor)]
        parts = self.parts() if held else {}
        for slot, gradient in held:
            part, shown = parts[slot.index], shown_by(gradient, slot)
            if shown is None or not shown.shard.is_taken:
                part.add_(local_range_of(gradient, slot).to(part.device))
            if shown is not None:
                shown.local.data = part
                shown.shard = self
                self._shown.add(shown)

    def show(self, slot: BucketSlot, part: Tensor, dtype: torch.dtype) -> None:
        """Make ``p.grad`` refer to a range of this shard; keep the tensor object if derived from the parameter."""
        part = part.detach()  # a view would keep this shard's memory even after its ``data`` was replaced
        shown = ShownGradient(slot, part, self)
        self._shown.add(shown)
        gradient = slot.parameter.grad
        if isinstance(gradient, ShardedTensor) and gradient.slot is slot and not gradient.is_parameter:
            gradient.show(part, keep=shown)  # the same object, as when autograd adds in place
        else:
            slot.parameter.grad = ShardedTensor(slot, part, dtype, keep=shown)


def shown_by(gradient: Tensor | None, slot: BucketSlot) -> ShownGradient | None:
    """The ``ShownGradient`` of a parameter's ``.grad``; None if ``.grad`` is None or set by the user."""
    shown = gradient.keep if isinstance(gradient, ShardedTensor) else None
    return shown if isinstance(shown, ShownGradient) and shown.slot is slot else None


def shard_of_all(slots: list[BucketSlot]) -> GradientShard | None:
    """The shard to which the ``.grad`` of all these parameters refer; None if they do not share one."""
    shown = [shown_by(slot.parameter.grad, slot) for slot in slots]
    shards = {each.shard if each is not None else None for each in shown}
    return shards.pop() if len(shards) == 1 else None
