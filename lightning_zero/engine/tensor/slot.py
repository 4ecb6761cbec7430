"""The interface between a sharded tensor and its slot in a bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero.engine.plan.share import Share


class Deferred(ABC):
    """Holder of tensor values that are complete only after an exchange between ranks."""

    @abstractmethod
    def complete(self) -> None:
        """Complete the values, unless they are complete already. Collective."""


class Slot(Protocol):
    """A parameter's range of a bucket. Tensors with the same sharding have the same slot object.

    Attributes:
        name, shape, dtype, device: those of the parameter.
        share: this rank's share of the parameter under tensor parallelism.
        offset, local_numel: this rank's range of the flattened parameter, or of the share of a divided parameter.
        hooks_after_reduction: hooks that users registered with ``register_post_accumulate_grad_hook``, by id.
        group: identifies the ranks; it is equal for all tensors that are sharded over the same ranks.
        background: owner of background work on the parameter and its optimizer state.
        view: the ordinary tensor that modules compute with instead of the parameter.
        is_written_by_modules: whether ``local_parameter`` is memory that modules compute with, and may write to.
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

    def remember(self, tensor: Any) -> None:
        """Register a tensor derived from the parameter, which will become an ordinary tensor when the engine closes."""

    def local_parameter(self) -> Tensor:
        """This rank's range of the parameter, 1-D, in the dtype of the master weights."""

    def parameter_at_rest(self) -> Tensor:
        """Like ``local_parameter``, but read-only; a range on a disk is a lazy tensor."""

    def whole_parameter(self, dtype: torch.dtype) -> Tensor | None:
        """The full parameter in a dtype, for immediate use; None where that needs communication."""

    def write_parameter(self, value: Tensor) -> None:
        """Set the parameter to a full value."""

    def written_locally(self, values: Tensor) -> None:
        """Propagate a write to this rank's range of the parameter to all copies of it."""

    def collect(self, local: Tensor) -> Tensor:
        """The full value of a tensor with this sharding. Collective."""

    def ranges(self) -> list[tuple[int, int]]:
        """The range of the flattened share that each rank holds, in the order of ranks."""

    def accumulate(self, gradient: Tensor) -> bool:
        """Accumulate a local gradient that autograd adds to ``.grad``; False if the slot does not reduce gradients."""

    def reduce(self, value: Tensor, op: Any, what: str | None = None) -> Tensor:
        """Reduce a small tensor over all ranks, in place. Collective; ``what`` describes it in errors."""
