"""Lazy tensors: values that stay in storage, usually a checkpoint, until they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.tensor.wrapper import WrapperTensor, new_wrapper


@dataclass
class _Held:
    """State shared by a lazy tensor and its aliases."""

    name: str
    read: Callable[[int, int], Tensor]
    origin: Any
    write: Callable[[Tensor], None] | None
    value: Tensor | None = None  # the values since a write; None while the stored ones are valid


class StoredTensor(WrapperTensor):
    """A lazy CPU tensor: each use reads its values from storage.

    Operators read the full tensor, again at each call; ``range`` reads a part. Aliases (``detach()``) read nothing.
    After a write the tensor holds its own values in memory, unless ``write`` is given. A deep copy shares the storage,
    but never writes to it; a pickle contains the values.

    Args:
        name: of the stored tensor, for errors.
        shape, dtype: of the tensor.
        read: returns the elements ``[start, stop)`` of the flattened tensor, 1-D and in its dtype. The result may be
            shared memory and is never written to.
        origin: any picklable object by which ranks compare the stored values; None if other ranks cannot read them.
        write: replaces the stored values by a tensor of the same shape; None if they are read-only.
    """

    _held: _Held

    @staticmethod
    def __new__(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        read: Callable[[int, int], Tensor],
        origin: Any = None,
        write: Callable[[Tensor], None] | None = None,
    ) -> StoredTensor:
        return cls._over(_Held(name, read, origin, write), shape, dtype)

    @classmethod
    def _over(cls, held: _Held, shape: Sequence[int], dtype: torch.dtype) -> StoredTensor:
        self = new_wrapper(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
        self._held = held
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def stored_name(self) -> str:
        return self._held.name

    @property
    def origin(self) -> Any:
        """Equal on all ranks that would read the same stored values; None for values that only this rank has."""
        return self._held.origin if self._held.value is None else None

    def range(self, start: int, stop: int) -> Tensor:
        """The elements ``[start, stop)`` of the flattened tensor, 1-D, in new memory."""
        return self.shown(start, stop).clone()

    def shown(self, start: int, stop: int) -> Tensor:
        value = self._held.value
        return self._held.read(start, stop) if value is None else value.reshape(-1)[start:stop]

    def whole(self) -> Tensor:
        value = self._held.value
        return self.shown(0, self.numel()).view(self.shape) if value is None else value

    def write_whole(self, value: Tensor) -> None:
        if self._held.write is not None:
            self._held.write(value.detach())
        else:
            self._held.value = value.detach()

    def alias(self) -> Tensor:
        return StoredTensor._over(self._held, self.shape, self.dtype)

    def storage(self) -> Any:
        raise RuntimeError(
            f"'{self.stored_name}' is a lazy tensor, whose values stay in a file: it has no memory of its own. "
            "tensor.clone() reads the values into an ordinary tensor."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredTensor({self.stored_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            held, value = self._held, self._held.value
            own = replace(held, value=None if value is None else value.clone())
            is_shared = held.write is None  # stored values that nothing can change
            memo[id(self)] = StoredTensor._over(own, self.shape, self.dtype) if is_shared else self.clone()
        return memo[id(self)]


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy in memory of a lazy tensor."""
    return tensor.clone() if isinstance(tensor, StoredTensor) else tensor
