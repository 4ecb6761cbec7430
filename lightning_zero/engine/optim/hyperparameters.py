"""Detect hyperparameters of parameter groups that differ between ranks, without an additional collective."""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.comm.collectives import Communicator

_BITS = 32
_PLAIN = {int, float, bool, str, type(None)}


class Hyperparameters:
    """Compares the hyperparameters of optimizers between ranks, as part of an exchange that takes place anyway.

    Each rank contributes the bits of a digest and their complements: if a rank sets a bit, and another rank
    sets its complement, digests differ. Only then do ranks exchange the hyperparameters, for one warning.

    Args:
        optimizers: the optimizers; only weak references are kept.
        communicator: between the ranks.
    """

    def __init__(self, optimizers: Iterable[Optimizer], communicator: Communicator) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._communicator = communicator
        self._digested: list[Any] = []
        self._bits: list[bool] = []
        self._is_over = not self._optimizers or communicator.size == 1

    def flags(self) -> list[bool]:
        """Return the flags to exchange. Every rank returns the same number of flags."""
        if self._is_over:
            return []
        values = [_values_of(group) for optimizer in self._living() for group in optimizer.param_groups]
        if not self._bits or values != self._digested:
            digest = zlib.crc32(repr(_as_floats(values)).encode())
            bits = [bool(digest >> bit & 1) for bit in range(_BITS)]
            self._digested, self._bits = values, [*bits, *(not bit for bit in bits)]
        return self._bits

    def check(self, agreed: Sequence[bool]) -> None:
        """Warn on rank 0, at most once, if the ranks' digests differ. Collective.

        Args:
            agreed: for each of ``flags``, whether any rank has set it.
        """
        if not any(map(min, agreed[:_BITS], agreed[_BITS:])):
            return
        mine = [
            (type(optimizer).__name__, [_named_values_of(group) for group in optimizer.param_groups])
            for optimizer in self._living()
        ]
        ranks = self._communicator.control.gather_objects(mine)
        differing = _first_difference(ranks)
        if differing is None:  # for example, an optimizer that is deleted on some ranks has not been deleted on others
            return
        self._is_over = True
        if self._communicator.everyone.rank == 0:
            name, number, values = differing
            warnings.warn(
                f"Parameter group {number} of {name} has different hyperparameters on different ranks: {values}. Each "
                "rank updates its shards with its own values: set the same values on every rank, and let schedulers "
                "such as ReduceLROnPlateau monitor a value that is reduced over ranks (self.log(..., sync_dist=True)).",
                stacklevel=2,
            )

    def _living(self) -> list[Optimizer]:
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]


def _values_of(group: dict[str, Any]) -> list[Any]:
    """The hyperparameters of a group that can be compared, and None for others."""
    return [value if type(value) in _PLAIN else _comparable(value) for value in group.values()]


def _named_values_of(group: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(group, _values_of(group)))


def _comparable(value: Any) -> Any:
    """A number; a tuple of numbers, such as ``betas``; None for anything else, such as the group's parameters."""
    if isinstance(value, Tensor):  # reading a device's tensor would wait for the device
        return value.item() if value.dim() == 0 and value.device.type == "cpu" else None
    if isinstance(value, tuple):
        return tuple(_comparable(each) for each in value)
    return value if isinstance(value, (int, float)) else None


def _as_floats(value: Any) -> Any:
    """Nested lists and tuples with all numbers as floats, since 1 and 1.0 are equal."""
    if isinstance(value, (list, tuple)):
        return list(map(_as_floats, value))
    return float(value) if isinstance(value, (int, float)) else value


def _first_difference(ranks: list[Any]) -> tuple[str, int, str] | None:
    """The first group that differs: its optimizer, its number, and the values of each rank as text."""
    for optimizers in zip(*ranks):
        name, _ = optimizers[0]
        for number, groups in enumerate(zip(*(groups for _, groups in optimizers))):
            keys = [key for key in groups[0] if any(group.get(key) != groups[0][key] for group in groups)]
            if keys:
                texts = (
                    f"{', '.join(f'{key}={group.get(key)!r}' for key in keys)} on rank {rank}"
                    for rank, group in enumerate(groups)
                )
                return name, number, "; ".join(texts)
    return None
