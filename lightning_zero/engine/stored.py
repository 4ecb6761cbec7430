"""A tensor whose values lie elsewhere, in a checkpoint as a rule, until somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.sharded_tensor import Handle, made

aten = torch.ops.aten
_OF_THE_SHAPE = {
    aten.empty_like.default,
    aten.full_like.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.zeros_like.default,
}
"""Operators that ask for no values."""


@dataclass
class _Held:
    """What a tensor and its aliases share.

    Attributes:
        value: what it holds since it was written to; None while its values are the stored ones.
    """

    name: str
    read: Callable[[int, int], Tensor]
    origin: Any
    write: Callable[[Tensor], None] | None
    value: Tensor | None = None


class StoredTensor(Handle):
    """A CPU tensor whose values lie elsewhere, read when, and as far as, somebody asks.

    Any operator reads the whole, each time anew; ``range`` reads a part. Aliases (``detach()``) read nothing. What is
    written to it is kept, and from then on it holds its own value; unless it can be written to where it is stored. A
    deep copy shares what is stored and never written to; a pickle has the values.

    Args:
        name: what it is called where it is stored, for errors.
        shape, dtype: of the tensor.
        read: gives the elements ``[start, stop)`` of the flattened tensor: 1-D, of the dtype. It may be memory that
            others read too; nobody writes to it.
        origin: what ranks compare to know that each of them reads the same: anything that pickles. None where nobody
            else can.
        write: puts another value, in the tensor's shape, in the place of the stored one; None where nobody may.
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
        self = made(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
        self._held = held
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _OF_THE_SHAPE:
            args = (torch.empty((), dtype=args[0].dtype, device="cpu").expand(args[0].shape), *args[1:])
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def stored_name(self) -> str:
        return self._held.name

    @property
    def origin(self) -> Any:
        """What is equal on ranks that would read the same; None where it is this rank's own."""
        return self._held.origin if self._held.value is None else None

    def range(self, start: int, stop: int) -> Tensor:
        """The elements ``[start, stop)`` of the flattened tensor, 1-D, in memory of its own."""
        return self.shown(start, stop).clone()

    def shown(self, start: int, stop: int) -> Tensor:
        """As ``range``, but to be read only, and at once: it may be the memory where it is stored."""
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

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    def storage(self) -> Any:
        raise RuntimeError(
            f"'{self.stored_name}' lies elsewhere and has no memory of its own: tensor.clone() reads it into "
            "an ordinary tensor."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredTensor({self.stored_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            held, value = self._held, self._held.value
            if held.write is None:
                own = replace(held, value=None if value is None else value.clone())
                memo[id(self)] = StoredTensor._over(own, self.shape, self.dtype)
            else:
                memo[id(self)] = self.clone()
        return memo[id(self)]


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor as one that has memory of its own: itself, unless it is stored elsewhere."""
    return tensor.clone() if isinstance(tensor, StoredTensor) else tensor
