"""The interface between a sharded tensor and its slot in a bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Slot(Protocol):
    """A parameter's range of a bucket. Tensors with the same sharding have the same slot object."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    offset: int
    local_numel: int
    hooks_after_reduction: dict[int, Callable[[Tensor], Any]]
    """Hooks that users registered with ``register_post_accumulate_grad_hook``, by id."""
    take_gradient: Callable[[Tensor], None] | None
    """Takes the gradient of another leaf that user code computed with instead of the parameter."""

    @property
    def group(self) -> Any:
        """Identifies the ranks: equal for all tensors that are sharded over the same ranks."""

    @property
    def background(self) -> Any:
        """Owner of background work on the parameter and its optimizer state; see ``background_work.synchronize``."""

    @property
    def view(self) -> Tensor:
        """The ordinary tensor that modules compute with instead of the parameter."""

    def remember(self, tensor: Any) -> None:
        """Register a tensor derived from the parameter, which will become an ordinary tensor when the engine closes."""

    def local_parameter(self) -> Tensor:
        """This rank's range of the parameter, 1-D, in the dtype of the master weights."""

    def parameter_at_rest(self) -> Tensor:
        """As ``local_parameter``, but read-only; a range on a disk is a lazy tensor."""

    @property
    def is_written_by_modules(self) -> bool:
        """Whether ``local_parameter`` is memory that modules compute with, and may write to without notice."""

    def whole_parameter(self, dtype: torch.dtype) -> Tensor | None:
        """The full parameter in a given dtype; None where that needs communication.

        Not to be stored: the buffer may be released.
        """

    def write_parameter(self, value: Tensor) -> None:
        """Set the parameter to a full value."""

    def may_be_written_whole(self, value: Tensor) -> bool:
        """Whether ``write_parameter`` is exact: the parameter is gathered, and shares no memory with the value."""

    def written_locally(self, values: Tensor) -> None:
        """Propagate a write to this rank's range of the parameter to all copies of it."""

    def collect(self, local: Tensor) -> Tensor:
        """The full value of a tensor with this sharding. Collective."""

    def ranges(self) -> list[tuple[int, int]]:
        """The range of the flattened parameter that each rank holds, in the order of ranks."""

    def accumulate(self, target: Tensor, gradient: Tensor) -> bool:
        """Accumulate a local gradient that autograd adds to a tensor; False if it is not the parameter's ``.grad``."""

    def reduce(self, value: Tensor, op: Any, what: str | None = None) -> Tensor:
        """Reduce a small tensor over ranks, in place. Collective.

        Args:
            what: describes the operation in errors; by default a sum or norm over shards of this parameter.
        """
