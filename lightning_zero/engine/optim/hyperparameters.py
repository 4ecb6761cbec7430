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


class Hyperparameters:
    """Compares the hyperparameters of optimizers between ranks, as part of an exchange that takes place anyway.

    Each rank contributes the bits of a digest and their complements: if a rank sets a bit, and another rank
    sets its complement, digests differ. Only then do ranks exchange the hyperparameters, for one warning.
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
        values = self._values()
        if not self._bits or values != self._digested:
            digest = zlib.crc32(repr(values).encode())
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
        for groups in zip(*self._communicator.control.gather_objects(self._values())):
            name, number, first = groups[0]
            keys = [key for key, value in first.items() if any(group.get(key) != value for *_, group in groups)]
            if keys:
                self._is_over = True
                if self._communicator.everyone.rank == 0:
                    self._warn(name, number, [{key: group.get(key) for key in keys} for *_, group in groups])
                return

    @staticmethod
    def _warn(name: str, number: int, ranks: list[dict[str, Any]]) -> None:
        values = (
            f"{', '.join(f'{key}={value!r}' for key, value in group.items())} on rank {rank}"
            for rank, group in enumerate(ranks)
        )
        warnings.warn(
            f"Parameter group {number} of {name} has different hyperparameters on different ranks: "
            f"{'; '.join(values)}. Each rank updates its shards with its own values: set the same values on every "
            "rank, and let schedulers such as ReduceLROnPlateau monitor a value that is reduced over ranks "
            "(self.log(..., sync_dist=True)).",
            stacklevel=2,
        )

    def _values(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Each group's optimizer, its number in that optimizer, and its hyperparameters by name."""
        living = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        return [
            (type(optimizer).__name__, number, {key: _comparable(value) for key, value in group.items()})
            for optimizer in living
            for number, group in enumerate(optimizer.param_groups)
        ]


def _comparable(value: Any) -> Any:
    """A number or string; a tuple of them, such as ``betas``; None for anything else, such as parameters."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return float(value)  # 1 and 1.0 are equal
    if isinstance(value, Tensor):  # reading a device's tensor would wait for the device
        return float(value) if value.dim() == 0 and value.device.type == "cpu" else None
    return tuple(map(_comparable, value)) if isinstance(value, tuple) else None
