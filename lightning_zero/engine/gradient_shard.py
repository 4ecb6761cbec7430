"""The reduced gradient of a bucket, of which each rank holds a part."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_zero.engine.settling import Work
from lightning_zero.engine.sharded_tensor import local_range_of

if TYPE_CHECKING:
    from lightning_zero.engine.bucket import BucketSlot
    from lightning_zero.engine.bucket_gradients import BucketGradients


class GradientShard:
    """The reduced gradient of a bucket: this rank's part. It lives as long as some ``p.grad`` shows it.

    Args:
        gradients: those of the bucket.
        flat: the shard. Over one rank instead each parameter's own gradient, by index: nothing was to be laid out for a
            reduction, and so nothing was copied.
        arrival: what ends when the values are there; None where they are.

    Attributes:
        shown: the parameters, by index, to which it was given as ``p.grad``.
    """

    def __init__(
        self, gradients: BucketGradients, flat: Tensor | dict[int, Tensor], arrival: Work | None = None
    ) -> None:
        self._flat, self._arrival = flat, arrival
        self.shown: set[int] = set()
        self._gradients = weakref.ref(gradients)
        tensors = flat.values() if isinstance(flat, dict) else [flat]
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        category = "gradients" if arrival is None else "host"
        ledger = gradients.bucket.ledger
        ledger.add(category, nbytes)
        weakref.finalize(self, ledger.add, category, -nbytes)

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
            return {index: gradient.view(-1) for index, gradient in flat.items()}
        parts = flat.split_with_sizes([numel for numel, _, _ in pieces])  # all views in one call
        here = {index: part for part, (_, index, _) in zip(parts, pieces) if index is not None}
        return defaultdict(lambda: flat[:0], here)

    def range_of(self, slots: list[BucketSlot], part: slice) -> Tensor:
        """This rank's range of the gradients of neighbouring parameters, 1-D.

        Args:
            part: of the shard. Over one rank there is one parameter.
        """
        return self.flat[slots[0].index].view(-1) if isinstance(self.flat, dict) else self.flat[part]

    def add(self, total: Tensor | dict[int, Tensor], arrival: Work | None = None) -> None:
        """Add another backward's gradient, as it is given to the constructor."""
        if arrival is not None:
            arrival.wait()
        if not isinstance(self.flat, dict) or not isinstance(total, dict):
            assert isinstance(self.flat, Tensor) and isinstance(total, Tensor)
            self.flat.add_(total)
            return
        for index, gradient in total.items():
            if index in self.flat:
                self.flat[index].add_(gradient.to(self.flat[index].device))
            else:
                self.flat[index] = gradient

    def add_part(self, slot: BucketSlot, gradient: Tensor) -> None:
        """Add a tensor of one parameter's shape, sharded or whole, to its gradient."""
        part = local_range_of(gradient, slot)
        if isinstance(self.flat, dict):
            self.add({slot.index: part.view(slot.shape).clone()})
        else:
            self.flat[slot.local_range].add_(part.to(self.flat.device))  # gradients may be kept on the host

    def accumulate(self, slot: BucketSlot, gradient: Tensor) -> None:
        """Take a local gradient that autograd adds to a parameter's reduced one; it is reduced with the others."""
        gradients = self._gradients()
        assert gradients is not None
        gradients.accumulate(slot.index, gradient.clone())
