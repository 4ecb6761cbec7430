"""Which rows of a parameter have a gradient, for an optimizer that takes sparse gradients. Over one rank."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lightning_zero.engine.state.slot import BucketSlot


class SparseRows:
    """The rows of one parameter that backward has given a sparse gradient since ``p.grad`` was reset.

    Gradients are kept dense, which does not tell a row of zeros from one that was not used.
    """

    def __init__(self, slot: BucketSlot) -> None:
        self._slot = weakref.ref(slot)
        self._rows: Tensor | None = None
        self._handle = slot.view.register_hook(self._note)

    def _note(self, gradient: Tensor) -> Tensor | None:
        slot = self._slot()
        if slot is None or gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
            self._rows = None
            return None
        gradient = gradient.coalesce()  # which adds the parts of a row in the order in which the optimizer would
        (rows,) = gradient.detach().indices()
        if self._rows is not None and slot.parameter.grad is not None:
            rows = torch.cat([self._rows, rows]).unique()
        self._rows = rows
        return gradient

    def of(self, gradient: Tensor) -> Tensor:
        """The gradient with these rows alone; as it is, if it did not come as a sparse one."""
        if self._rows is None:
            return gradient
        return torch.sparse_coo_tensor(
            self._rows[None], gradient[self._rows], gradient.shape, is_coalesced=True, check_invariants=False
        )

    def close(self) -> None:
        self._handle.remove()
