"""The interface between a sharded tensor and its slot in a bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero.engine.plan.share import Share


class Deferred(ABC):
    """Provider of tensor values that are complete only after an exchange between ranks."""

    @abstractmethod
    def complete(self) -> None:
        """Complete the values, unless they are complete already. Collective."""


class Slot(Protocol):
    """A parameter's range of a bucket. The parameter, its gradient and copies of them refer to the same slot object.

    Attributes:
        name, shape, dtype, device: those of the parameter.
        share: this rank's share of the parameter; the full parameter unless tensor parallelism divides it.
        offset, local_numel: start and length of this rank's range of the flattened share.
        hooks_after_reduction: hooks that users registered with ``register_post_accumulate_grad_hook``, by id.
        group: identifies the ranks that the parameter is sharded over; equal for parameters with the same ranks.
        background: the owner of background work on the parameter and its optimizer state (see ``BackgroundWork``).
        view: the ordinary tensor that modules compute with instead of the parameter.
        is_written_by_modules: whether ``local_parameter`` returns memory that modules compute with and may write to.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    share: Share
    offset: int
    local_numel: int
    hooks_after_reduction: dict[int, Callable[[Tensor], Any]]

    @property
    def group(self) -> Any: ...

    @property
    def background(self) -> Any: ...

    @property
    def view(self) -> Tensor: ...

    @property
    def is_written_by_modules(self) -> bool: ...

    def is_of(self, tensor: Any) -> bool:
        """Whether a tensor is the parameter itself, which is trained; its copies and aliases have the same slot."""

    def remember(self, tensor: Any) -> None:
        """Register a tensor derived from the parameter, which becomes an ordinary tensor when the engine is closed."""

    def local_parameter(self) -> Tensor:
        """This rank's range of the parameter, 1-D, in the dtype of the master weights."""

    def parameter_at_rest(self) -> Tensor:
        """Like ``local_parameter``, but for reading only; a lazy tensor if the range is on a disk."""

    def whole_parameter(self, dtype: torch.dtype) -> Tensor | None:
        """The full parameter in the given dtype, for immediate use; None if communication would be necessary."""

    def write_parameter(self, value: Tensor) -> None:
        """Write a full (unsharded) value to the parameter."""

    def written_locally(self, values: Tensor) -> None:
        """After ``values`` were written to this rank's range of the parameter, update all copies of the range."""

    def collect(self, local: Tensor) -> Tensor:
        """Gather the full tensor of which ``local`` is this rank's range. Collective."""

    def ranges(self) -> list[tuple[int, int]]:
        """The range of the flattened share that each rank holds, in the order of ranks."""

    def accumulate(self, gradient: Tensor) -> bool:
        """Take over a local gradient that autograd adds to ``.grad``; return False if the slot reduces no gradients."""

    def reduce(self, value: Tensor, op: Any, what: str | None = None) -> Tensor:
        """Reduce a small tensor over all ranks, in place. Collective. Error messages call the reduction ``what``."""
