"""Source of the values of one parameter or buffer when a module is sharded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Source:
    """Source of the values of one parameter or buffer.

    Attributes:
        values: this rank's values; None if it has none.
        everywhere: whether every rank has the same values, and takes its part of them; otherwise rank 0 broadcasts.
        is_new: whether no rank has values, so that the module has to initialise them.
    """

    values: Tensor | None
    everywhere: bool = False
    is_new: bool = False
