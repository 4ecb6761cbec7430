"""Lazy tensors, whose values stay where they are stored, usually in a file, until they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.tensor.identity import become
from lightning_zero.engine.tensor.wrapper import WrapperTensor, new_wrapper


@dataclass
class _Source:
    """Where a lazy tensor and its aliases read their values; ``use`` switches to values in memory."""

    name: str
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    origin: Any
    write: Callable[[Tensor], None] | None = None

    def use(self, values: Tensor) -> None:
        self.dtype, self.read, self.origin = values.dtype, partial(_range_of, values), values


def _range_of(values: Tensor, start: int, stop: int) -> Tensor:
    return values.reshape(-1)[start:stop]


class LazyTensor(WrapperTensor):
    """A tensor whose values are read from their source at each use: an entry of a checkpoint or a deferred parameter.

    Operators read the full tensor. Making an alias (``detach()``) reads nothing; nor do dtype conversions and deep
    copies, unless ``write`` is given. Written values go to ``write`` if it is given; otherwise they are held in memory.
    Methods that need the tensor's memory (``data_ptr()``, ``set_()``) make it an ordinary tensor, or raise an error if
    ``write`` is given. A pickle contains the values.

    Args:
        name: the stored tensor's name, for errors.
        shape, dtype: the tensor's shape and dtype.
        read: returns elements ``[start, stop)`` of the flattened tensor, as a 1-D tensor of the given dtype. The result
            is never written to, so it may share the source's memory.
        origin: a picklable object that is equal on all ranks that read the same stored values; None if only this rank
            can read them.
        write: replaces the stored values with those of a tensor of the same shape; None if the source is read-only.
        device: the tensor's device.
    """

    _source: _Source
    is_meta = False  # if True, ``load_state_dict`` would skip parameters on the meta device

    @staticmethod
    def __new__(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        read: Callable[[int, int], Tensor],
        origin: Any = None,
        write: Callable[[Tensor], None] | None = None,
        device: torch.device | str = "cpu",
    ) -> LazyTensor:
        return cls._over(_Source(name, dtype, read, origin, write), torch.Size(shape), dtype, device)

    @classmethod
    def of(cls, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A lazy tensor of the given dtype over ``values``; over a meta tensor, a lazy tensor without values."""
        if isinstance(values, LazyTensor):
            return values.cast(dtype)
        values = values.detach()
        source = _Source("", values.dtype, partial(_range_of, values), values)
        return cls._over(source, values.shape, dtype, values.device)

    @classmethod
    def _over(
        cls, source: _Source, shape: torch.Size, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> LazyTensor:
        self = new_wrapper(cls, shape, dtype=dtype, device=torch.device(device))
        self._source = source
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def stored_name(self) -> str:
        return self._source.name

    @property
    def origin(self) -> Any:
        """Equal on all ranks that read the same stored values. For values in memory, the tensor that holds them."""
        return self._source.origin

    def stored(self, start: int, stop: int) -> Tensor:
        """Like ``shown``, but in the source's dtype, before any rounding to the tensor's dtype."""
        return self._source.read(start, stop)

    def shown(self, start: int, stop: int) -> Tensor:
        return self.stored(start, stop).to(self.dtype)

    def whole(self) -> Tensor:
        return self.shown(0, self.numel()).view(self.shape)

    def write_whole(self, value: Tensor) -> None:
        if self._source.write is not None:
            self._source.write(value.detach())
        else:
            self._source.use(value.detach())

    def alias(self) -> Tensor:
        return LazyTensor._over(self._source, self.shape, self.dtype, self.device)

    def cast(self, dtype: torch.dtype) -> Tensor:
        """A copy in the given dtype. Its values are read when they are used, or now if the source is writable."""
        if self._source.write is not None:
            return self.whole().to(dtype, copy=True)
        source, before = replace(self._source), self.dtype
        if torch.promote_types(source.dtype, before) != before:  # the copy must round its values as this tensor does
            read = source.read
            source.read, source.dtype = lambda start, stop: read(start, stop).to(before), before
        return LazyTensor._over(source, self.shape, dtype, self.device)

    @WrapperTensor.data.setter  # type: ignore[attr-defined]
    def data(self, value: Tensor) -> None:
        if self.grad is not None:  # torch keeps the gradient when ``data`` is replaced
            self._made_ordinary().data = in_memory(value)
        elif value is not self:
            self._become(value.detach())

    def _become(self, other: Tensor) -> None:
        become(self, nn.Parameter(other, self.requires_grad) if isinstance(self, nn.Parameter) else other)

    def copy_(self, values: Tensor, non_blocking: bool = False) -> Any:
        if self.device.type != "meta":
            return super().copy_(values, non_blocking)
        self.data = values.detach().to(self.dtype).expand(self.shape).clone()
        return self

    def _made_ordinary(self) -> Any:
        """Turn this into an ordinary tensor, with memory that its aliases share."""
        if self._source.write is not None:  # later writes to memory would not reach the source
            raise RuntimeError(
                f"'{self.stored_name}' is a lazy tensor, whose values stay in a file: it has no memory of its own. "
                "Call tensor.clone() to read the values into an ordinary tensor."
            )
        if self.device.type == "meta":
            return self.whole()
        grad, values = self.grad, self.detach().clone()
        self._source.use(values)  # aliases have the same source
        self._become(values.detach())
        self.grad = grad
        return self

    def storage(self) -> Any:
        return self._made_ordinary().storage()

    def untyped_storage(self) -> Any:
        return self._made_ordinary().untyped_storage()

    def data_ptr(self) -> int:
        return self._made_ordinary().data_ptr()

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        return self._made_ordinary().set_(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyTensor({self.stored_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy, is_parameter = self.cast(self.dtype), isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copy, self.requires_grad) if is_parameter else copy
        return memo[id(self)]


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor itself or, for a lazy tensor, an ordinary tensor with its values."""
    return tensor.clone() if isinstance(tensor, LazyTensor) else tensor
