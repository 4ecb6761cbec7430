"""List the tensors of a checkpoint without reading their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_zero.checkpoint.form import CHECKPOINT_KEY
from lightning_zero.checkpoint.reading import OpenedCheckpoint
from lightning_zero.checkpoint.trees import identity
from lightning_zero.engine.compat import nbytes_of


@dataclass
class Row:
    """One tensor in a checkpoint.

    Attributes:
        name: dotted path in Lightning's dictionary.
        shape: sizes by dimension; -1 for those of a nested tensor, in which they vary.
        bytes: size of the values, and for a sparse tensor also of its indices.
        tied_to: name of the first tensor with the same memory; None if this tensor is the first.
    """

    name: str
    shape: list[int]
    dtype: str
    bytes: int
    tied_to: str | None

    @property
    def part(self) -> str:
        """The entry with the tensor, such as ``state_dict``, ``optimizer_states.0`` or ``lightning_zero.masters``."""
        first, _, rest = self.name.partition(".")
        return f"{first}.{rest.partition('.')[0]}" if first in ("optimizer_states", CHECKPOINT_KEY) else first


def rows_of(opened: OpenedCheckpoint) -> list[Row]:
    """Return a row for each tensor, in the checkpoint's order."""
    seen: dict[Any, str] = {}
    rows = []
    for name, tensor in opened.tensors.items():
        first = seen.setdefault(identity(tensor), name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        tied_to = first if first != name else None
        shape = [tensor.size(0)] + [-1] * (tensor.dim() - 1) if tensor.is_nested else list(tensor.shape)
        rows.append(Row(name, shape, dtype, nbytes_of(tensor), tied_to))
    return rows
