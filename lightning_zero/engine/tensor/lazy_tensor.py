"""Lazy tensors, whose values stay where they are stored, usually in a file, until they are read.

A lazy tensor may also have no values yet. Within ``torch.device("meta")``, it records the operators that write to it,
which are repeated when the module is sharded. Elsewhere, the first write gives it memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lightning_zero.engine.compat import calls_on_stack, is_within_meta_device
from lightning_zero.engine.tensor.identity import like, set_contents
from lightning_zero.engine.tensor.wrapper import WrapperTensor, flat_range, new_wrapper, replay

# -- methods that initialise modules, which are called again when a module on the meta device receives its values ------

OWN = ("reset_parameters", "_reset_parameters")
APPLIED = "_init_weights"
OF_ADAPTERS = "reset_lora_parameters"


def running_initialisers() -> set[str]:
    """The labels of the initialisers on the stack, so that what they write now will be written again.

    The innermost constructor of a model of transformers counts as the model's ``_init_weights``: since version 5 of
    transformers, it calls that method at its end only on other devices.
    """
    labels, model = set(), None
    for name, owner in calls_on_stack((*OWN, APPLIED, OF_ADAPTERS, "__init__")):
        if name != "__init__":
            if _is_called_again(name, owner):
                labels.add(initialiser_label(name, owner))
        elif model is None and _is_of_transformers(owner):
            model = owner
    return labels if model is None else labels | {initialiser_label(APPLIED, model)}


def _is_of_transformers(owner: Any) -> bool:
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(owner).__mro__)


def initialiser_label(name: str, owner: nn.Module) -> str:
    """Identifies a method of a module's class, on all ranks and for copies of the module."""
    return f"{type(owner).__module__}.{type(owner).__qualname__}.{name}"


def _is_called_again(name: str, owner: Any) -> bool:
    if not isinstance(owner, nn.Module):
        return False  # a function of the same name, or a method of another object
    return name == OF_ADAPTERS or takes(getattr(owner, name, None), 1 if name == APPLIED else 0)


def takes(method: Any, count: int) -> TypeGuard[Callable[..., Any]]:
    """Whether a method requires exactly ``count`` positional arguments."""
    if not callable(method):
        return False
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return count == 0
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in by_position) == count


# -- lazy tensors ------------------------------------------------------------------------------------------------------


Write = Callable[[Tensor], None]
"""A function that repeats an operator which has written to a lazy tensor, on another tensor of the same shape."""


@dataclass
class LazyValues:
    """Where a lazy tensor and its aliases read their values; ``use`` switches to values in memory.

    Attributes:
        read: returns elements ``[start, stop)`` of the flattened values, 1-D, in ``dtype``.
        origin: equal on all ranks that read the same stored values; None if only this rank can read them.
        write: writes new values to where they are stored; None if they cannot be replaced there.
        writes: the operators that have written to a tensor without values; None if it has values.
        held: values in memory, to which operators write in place; None if the values are elsewhere.
        may_lack: whether elements of ``held`` were marked as unwritten; see ``unset``.
        initialised_by: the initialisers whose operators were not recorded; see ``initialiser_label``.
    """

    name: str
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    origin: Any
    write: Callable[[Tensor], None] | None = None
    writes: list[Write] | None = None
    held: Tensor | None = None
    may_lack: bool = False
    initialised_by: frozenset[str] = frozenset()

    def use(self, values: Tensor, may_lack: bool = False) -> None:
        self.dtype, self.read, self.origin = values.dtype, partial(flat_range, values), None
        self.writes, self.held, self.may_lack = None, values, may_lack


class LazyTensor(WrapperTensor):
    """A tensor whose values are read from their source at each use: an entry of a checkpoint or a deferred parameter.

    Operators read the full tensor. Making an alias (``detach()``) reads nothing; nor do dtype conversions and deep
    copies, unless ``write`` is given. Written values go to ``write`` if it is given; otherwise they are held in memory.
    Methods that need the tensor's memory (``storage()``) raise an error. A pickle contains the values.

    Args:
        read: returns elements ``[start, stop)`` of the flattened tensor, as a 1-D tensor of the given dtype. The result
            is never written to, so it may share the source's memory.
        origin: a picklable object that is equal on all ranks that read the same stored values; None if only this rank
            can read them.
        write: replaces the stored values with those of a tensor of the same shape; None if the source is read-only.
    """

    lazy_values: LazyValues
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
        return cls._over(LazyValues(name, dtype, read, origin, write), torch.Size(shape), dtype, device)

    @classmethod
    def of(cls, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A lazy tensor of the given dtype over ``values``; over a meta tensor, a lazy tensor without values."""
        if isinstance(values, LazyTensor):
            return values.cast(dtype)
        values = values.detach()
        source = LazyValues("", values.dtype, partial(flat_range, values), None)
        if values.device.type != "meta":
            return cls._over(source, values.shape, dtype, values.device)
        source.writes = []
        return cls._over(source, values.shape, dtype)

    @classmethod
    def _over(
        cls, source: LazyValues, shape: torch.Size, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> LazyTensor:
        self = new_wrapper(cls, shape, dtype=dtype, device=torch.device(device))
        self.lazy_values = source
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The meta device until the tensor has values."""
        return torch.device("meta") if self.records_writes else super().device

    @property
    def lacks_values(self) -> bool:
        """Whether user code has written only some of the values of a tensor that was made without values."""
        source = self.lazy_values
        return source.may_lack and source.held is not None and is_unset(source.held)

    @property
    def records_writes(self) -> bool:
        return self.lazy_values.writes is not None

    def apply(self, steps: list[tuple[Any, Any, Any]], function: Any, args: Any, kwargs: Any) -> None:
        """Run an operator on values in memory; record it if there are no values within ``torch.device("meta")``.

        Operators of initialisers are not recorded: initialisers will run again, and replace all earlier values.

        Args:
            steps: the operators that make the view that ``function`` writes to; see ``RecordedView``.
            args, kwargs: the arguments of ``function`` without the tensor.
        """

        def write(values: Tensor) -> None:
            with torch.no_grad():
                function(replay(values, steps), *args, **kwargs)

        source = self.lazy_values
        if source.writes is not None and is_within_meta_device():
            if running := running_initialisers():
                source.writes.clear()
                source.initialised_by |= running
            else:
                source.writes.append(write)
            return
        values, may_lack = source.held, source.may_lack
        if source.writes is not None:
            values, may_lack = unset(torch.empty(self.shape, dtype=self.dtype, device="cpu")), True
            for each in source.writes:
                each(values)
        elif values is None:
            values = self.whole().clone()
        write(values)
        if values is not source.held:  # only now, since the operator may raise
            source.use(values, may_lack)

    def shown(self, start: int, stop: int) -> Tensor:
        return self.lazy_values.read(start, stop).to(self.dtype)

    def whole(self) -> Tensor:
        return self.shown(0, self.numel()).view(self.shape)

    def write_whole(self, value: Tensor) -> None:
        if self.lazy_values.write is not None:
            self.lazy_values.write(value.detach())
        elif value.device.type != "meta":
            self.lazy_values.use(value.detach())
        elif torch.get_default_device().type != "meta":
            raise RuntimeError(
                "A parameter made with empty_init=True, or on the meta device, has no values that this operator could "
                "change. Write its values first, as in nn.init.normal_(parameter) or parameter.copy_(values)."
            )

    def alias(self) -> Tensor:
        return LazyTensor._over(self.lazy_values, self.shape, self.dtype, super().device)

    def cast(self, dtype: torch.dtype) -> Tensor:
        """A copy in the given dtype. Its values are read when they are used, or now if the source is writable."""
        if self.lazy_values.write is not None:
            return self.whole().to(dtype, copy=True)
        before, source = self.dtype, replace(self.lazy_values)
        # later writes to either tensor must not change the other one
        if source.writes is not None:
            source.writes = list(source.writes)
        elif source.held is not None:
            source.use(self.whole().to(dtype, copy=True), source.may_lack)
            return LazyTensor._over(source, self.shape, dtype, super().device)
        if torch.promote_types(source.dtype, before) != before:  # the copy must round its values as this tensor does
            read = source.read
            source.read, source.dtype = lambda start, stop: read(start, stop).to(before), before
        return LazyTensor._over(source, self.shape, dtype, super().device)

    @WrapperTensor.data.setter  # type: ignore[attr-defined]
    def data(self, value: Tensor) -> None:
        if (grad := self.grad) is not None:  # torch keeps the gradient when ``data`` is replaced
            set_contents(self, like(self, self.whole().clone()))
            self.grad = grad
            self.data = in_memory(value)
        elif value is not self:
            set_contents(self, like(self, value.detach()))

    def untyped_storage(self) -> Any:
        raise RuntimeError(f"{self!r} has no memory of its own: call tensor.clone() to read its values into memory.")

    def data_ptr(self) -> int:
        """No address, but a number by which aliases are known, as of a sharded tensor."""
        return id(self.lazy_values)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyTensor({self.lazy_values.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = like(self, self.cast(self.dtype))
        return memo[id(self)]


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor itself or, for a lazy tensor, an ordinary tensor with its values."""
    return tensor.clone() if isinstance(tensor, LazyTensor) else tensor


def _marked(tensor: Tensor) -> tuple[Tensor, float]:
    """A view of a tensor, and the value in it that marks unwritten elements."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor, float("nan")
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8), 2  # no operator writes this value
    limits = torch.iinfo(tensor.dtype)
    return tensor, limits.min or limits.max - 90  # an unsigned number that hardly fills a whole tensor


def unset(tensor: Tensor) -> Tensor:
    """Mark all elements as unwritten."""
    view, mark = _marked(tensor.detach())
    view.fill_(mark)
    return tensor


def is_unset(tensor: Tensor) -> bool:
    """Whether any element is still unwritten since ``unset``; for integers, whether all elements are."""
    view, mark = _marked(tensor.detach())
    if mark != mark:
        return bool(view.isnan().any())
    return tensor.numel() > 0 and bool((view == mark).all())
