"""Base class of wrapper subclasses (tensors with a shape but no data of their own), and views of such tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partialmethod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from lightning_zero.engine.compat import ask_before_set_data, disabled_torch_function, make_wrapper
from lightning_zero.engine.tensor.identity import with_attributes


class Reader(Protocol):
    """Provides values of sharded tensors while user code on one rank reads them without the other ranks."""

    def whole(self, tensor: Any) -> Tensor:
        """The full value of a sharded tensor, in memory that all reads of the tensor share."""

    def states(self, states: Any) -> dict[Any, dict[str, Any]]:
        """An optimizer's state by parameter, given its ``MasterStates``."""


reader: ContextVar[Reader | None] = ContextVar("reader", default=None)
"""The reader in effect in this thread; None in ordinary code, which reads on every rank."""


@contextmanager
def read_by(reading: Reader | None) -> Iterator[None]:
    """Context in which ``reading`` provides the values of sharded tensors that are read in this thread."""
    token = reader.set(reading)
    try:
        yield
    finally:
        reader.reset(token)


class WrapperTensor(torch.Tensor):
    """Base class of tensor subclasses without data of their own: operators that read data get the full value.

    Attributes:
        act: a function that runs an operator whose arguments include wrapper tensors; set by ``dispatch``.
    """

    act: ClassVar[Callable[[Any, Any, Any], Any]]

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]
    # A project's own class of parameters, which has its own, would make a parameter over memory from the result.
    to, cpu, cuda, xpu = torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.xpu

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # ``__new__`` has used the arguments

    def whole(self) -> Tensor:
        """The full value. Collective unless ``whole_at_hand`` returns it."""
        raise NotImplementedError

    def whole_at_hand(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """The full value, in ``dtype`` (by default the tensor's); None if communication would be necessary."""
        return None

    def write_whole(self, value: Tensor) -> None:
        """Write a full value to the tensor."""
        raise NotImplementedError

    def alias(self) -> Tensor:
        """The result of ``detach()``."""
        raise NotImplementedError

    def shown(self, start: int, stop: int) -> Tensor:
        """The elements ``[start, stop)`` of the flattened value, 1-D, for immediate reading only."""
        return self.whole().reshape(-1)[start:stop]

    @property
    def data(self) -> Tensor:
        return self.alias()

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # in inference mode, torch does not decompose composite operators
            out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return WrapperTensor.act(func, args, kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        array = self.whole().detach().clone().numpy(force=force)
        array.flags.writeable = False  # the array is a copy, so writes to it would be silently lost
        return array

    def __dlpack__(self, **options: Any) -> Any:
        return self.whole().detach().clone().__dlpack__(**options)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:  # called by torch's parametrizations
            self.data = args[0]
            return self
        raise RuntimeError(
            "set_() replaces a tensor's memory, but a sharded tensor has no memory of its own: write the new values "
            "with parameter.data.copy_(values)."
        )

    def _in_memory(self, name: str, *args: Any) -> Tensor:
        """Call a method that writes without asking any operator, and would write to a null pointer, on full values."""
        value = self.whole().detach().clone()
        getattr(value, name)(*(arg.whole() if isinstance(arg, WrapperTensor) else arg for arg in args))
        with torch.no_grad():
            return self.copy_(value)

    apply_ = partialmethod(_in_memory, "apply_")
    map_ = partialmethod(_in_memory, "map_")
    map2_ = partialmethod(_in_memory, "map2_")

    def data_ptr(self) -> Any:
        return self.untyped_storage().refuse()

    def storage(self) -> Any:  # called by safetensors, and by save_pretrained() of transformers and PEFT
        return self.untyped_storage().refuse()

    def untyped_storage(self) -> Any:
        storage: Any = super().untyped_storage()
        storage.__class__, storage.shape = NoMemory, tuple(self.shape)
        return storage

    def tolist(self) -> Any:
        return self.whole().tolist()

    def __format__(self, format_spec: str) -> str:
        return self.whole().__format__(format_spec) if self.dim() == 0 else object.__format__(self, format_spec)

    def ordinary(self) -> Tensor:
        """An ordinary tensor or parameter with the same values and attributes, for pickles."""
        shared = self.whole_at_hand() if reader.get() is not None else None
        value = self.whole().detach().clone() if shared is None else shared.detach()
        ordinary: Tensor = with_attributes(self, value)
        return ordinary

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.ordinary().__reduce_ex__(protocol)


class NoMemory(torch.UntypedStorage):
    """The storage of a wrapper tensor. It identifies the tensor; methods that need memory raise an error.

    Without these errors, some of the methods would read from a null pointer, which ends the process.
    """

    shape: tuple[int, ...]

    def refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"A sharded tensor of shape {self.shape} has no memory of its own that could be read, saved or shared "
            "between processes: do this after the run, or enter 'with lightning_zero.full_parameters(module):' on "
            "every rank and read, save or share the parameters there."
        )

    def share_memory_(self) -> Any:
        return super().share_memory_() if self.is_cuda else self.refuse()  # a GPU's memory is shared already

    data_ptr = clone = copy_ = fill_ = resize_ = byteswap = tolist = cpu = pin_memory = refuse
    __getitem__ = __setitem__ = __reduce_ex__ = _to = _share_fd_cpu_ = _share_filename_cpu_ = _write_file = refuse


def _refuse_null_memory(tensor: Tensor, value: Tensor) -> None:
    if isinstance(value, WrapperTensor) and not isinstance(tensor, WrapperTensor):
        raise RuntimeError(
            f"tensor.data = value: the value, of shape {tuple(value.shape)}, is a sharded tensor, which has no memory "
            "of its own that an ordinary tensor could share: write tensor.data.copy_(value)."
        )


ask_before_set_data(_refuse_null_memory)


def flat_range(value: Tensor, start: int, stop: int) -> Tensor:
    """Return the elements ``[start, stop)`` of the flattened tensor as a 1-D tensor, for immediate reading only."""
    return value.shown(start, stop) if isinstance(value, WrapperTensor) else value.reshape(-1)[start:stop]


class RecordedView(WrapperTensor):
    """A recorded view of a sharded or lazy tensor: reads and writes go to the viewed tensor.

    Attributes:
        _viewed: the viewed tensor, which is not a recorded view itself.
        _view_steps: the view operators to replay on the full value.
    """

    _viewed: WrapperTensor
    _view_steps: list[tuple[Any, Any, Any]]

    @staticmethod
    def __new__(cls, base: Any, steps: list[tuple[Any, Any, Any]]) -> RecordedView:
        if isinstance(base, RecordedView):
            base, steps = base._viewed, base._view_steps + steps
        meta = replay(torch.empty(base.shape, dtype=base.dtype, device="meta"), steps)
        device = torch.Tensor.device.__get__(base)  # ``base.device`` is meta while it has no values
        options = {"strides": meta.stride(), "storage_offset": 0, "dtype": meta.dtype, "device": device}
        self = new_wrapper(cls, meta.shape, **options)
        self._viewed, self._view_steps = base, steps
        return self

    def whole(self) -> Tensor:
        base = self._viewed
        return replay(base.whole() if isinstance(base, WrapperTensor) else base.detach(), self._view_steps)

    def whole_at_hand(self, dtype: torch.dtype | None = None) -> Tensor | None:
        base = self._viewed
        # a view with another dtype reinterprets bits, which a cast would change
        if not isinstance(base, WrapperTensor) or self.dtype != base.dtype:
            return None
        at_hand = base.whole_at_hand(dtype)
        return None if at_hand is None else replay(at_hand, self._view_steps)

    def alias(self) -> Tensor:
        return RecordedView(self, [])

    @WrapperTensor.data.setter  # type: ignore[attr-defined]
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f".data of a sharded tensor's view, {self.dtype} of shape {tuple(self.shape)}, cannot be replaced by "
                f"{value.dtype} of shape {tuple(value.shape)}: replace the .data of a clone instead."
            )
        other = RecordedView(value, [])
        self._viewed, self._view_steps = other._viewed, other._view_steps

    def write_whole(self, value: Tensor) -> None:
        base = self._viewed
        is_sharded = isinstance(base, WrapperTensor)  # False if the engine was closed after the view was taken
        whole = base.whole().clone() if is_sharded else base.detach()
        replay(whole, self._view_steps).copy_(value)
        if is_sharded:
            base.write_whole(whole)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"view of {self._viewed!r}, shape={tuple(self.shape)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.whole().detach().clone()


def new_wrapper(cls: Any, shape: torch.Size, **options: Any) -> Any:
    """Create a wrapper tensor. Like views of normal tensors, it is never an inference tensor."""
    if not torch.is_inference_mode_enabled():
        return make_wrapper(cls, shape, **options)
    with torch.inference_mode(False):
        return make_wrapper(cls, shape, **options)


def replay(value: Tensor, steps: list[tuple[Any, Any, Any]]) -> Tensor:
    """Apply recorded view operators to a tensor."""
    for func, args, kwargs in steps:
        value = func(value, *args, **kwargs)
    return value
