"""Dispatch modes for fake tensors: one tracks memory, the other assumes results of value-dependent operators."""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine import WrapperTensor, compat, tensor_parallel

aten = torch.ops.aten


class MemoryTracker(compat.TorchDispatchMode):
    """Counts the bytes of all live storages that operators have created in the context.

    A storage is counted at its current size, which is zero for a buffer that the engine has resized to zero.

    Args:
        by_category: returns the engine's bytes by category; ``peak`` excludes ``"host"`` bytes.
        on_host: returns whether new storages are in the host's memory; if so, no peak is updated.

    Attributes:
        peak, host_peak: maximum number of bytes on the device, and of ``"host"`` bytes, since the last ``reset``.
        at_peak: the result of ``by_category`` at ``peak``.
    """

    def __init__(self, by_category: Callable[[], Counter[str]], on_host: Callable[[], bool]) -> None:
        super().__init__()
        self._by_category, self._on_host = by_category, on_host
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._total = 0
        self.peak = self.host_peak = 0
        self.at_peak = Counter[str]()

    def reset(self) -> None:
        """Reset the peaks to the bytes in use now."""
        self.peak = self.host_peak = 0
        self._note_peak()

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: Any, nbytes: int) -> Any:
            result = self._resize(storage, nbytes)
            if id(storage) in self._sizes:
                self._count(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]  # resize_ is not dispatched
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tensor_parallel.are_divided(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.count(result if isinstance(result, (tuple, list)) else (result,))
        return result

    def count(self, values: Iterable[Any]) -> None:
        """Count the storages of the tensors among the values."""
        for value in values:
            if isinstance(value, Tensor) and value.is_sparse:
                self.count(compat.parts_of_sparse(value))
            elif isinstance(value, Tensor) and not isinstance(value, WrapperTensor) and value.device.type != "meta":
                storage = value.untyped_storage()
                if id(storage) not in self._sizes:
                    self._references[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage)))
                    self._sizes[id(storage)] = 0
                    self._count(storage)

    def _count(self, storage: Any) -> None:
        nbytes = storage.nbytes()
        self._total += nbytes - self._sizes[id(storage)]
        self._sizes[id(storage)] = nbytes
        if not self._on_host():
            self._note_peak()

    def _note_peak(self) -> None:
        held = self._by_category()
        self.host_peak = max(self.host_peak, held["host"])
        if (on_device := self._total - held["host"]) > self.peak:
            self.peak, self.at_peak = on_device, held

    def _forget(self, identity: int, _: Any) -> None:
        self._total -= self._sizes.pop(identity)
        del self._references[identity]


class Assumptions(compat.TorchDispatchMode):
    """Assumes results for operators that depend on the values of fake tensors, which have none.

    Attributes:
        made: the assumptions, as keys; each includes the line of the project's code that reads the values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tensor_parallel.are_divided(types):
            return NotImplemented
        kwargs = kwargs or {}
        if _are_real(args, kwargs):  # such as a batch's token ids and masks
            with compat.unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except compat.DATA_DEPENDENT:
            answer = self._answer(func, *args)
            if answer is None:
                raise
            assumption, value = answer
            self.made[f"{assumption} ({_line_of_the_project()})"] = None
            return value

    def _answer(self, func: Any, first: Tensor, *args: Any) -> tuple[str, Any] | None:
        if func is aten._local_scalar_dense.default:
            value: Any = first.dtype.is_floating_point and 1.0 or (False if first.dtype == torch.bool else 1)
            return f"a value read from a tensor is {value}", value
        if func is aten.nonzero.default:
            shape = first.numel(), first.dim()
            return "every element is nonzero", torch.empty(shape, dtype=torch.int64, device=first.device)
        if func is aten.masked_select.default:
            return "a mask selects every element", first.broadcast_to(
                torch.broadcast_shapes(first.shape, args[0].shape)
            ).reshape(-1)
        if func is aten.index.Tensor:
            where = [each if each is None or each.dtype != torch.bool else _all_of(each) for each in args[0]]
            flat = [part for each in where for part in (each if isinstance(each, tuple) else (each,))]
            return "a mask selects every element", aten.index.Tensor(first, flat)
        return None


def _are_real(*arguments: Any) -> bool:
    tensors = [leaf for leaf in compat.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(type(tensor) is Tensor and tensor.device.type != "meta" for tensor in tensors)


def _all_of(mask: Tensor) -> tuple[Tensor, ...]:
    """Stand-ins for the indices of all elements of a mask, in the form of ``nonzero(as_tuple=True)``."""
    return tuple(torch.empty(mask.numel(), dtype=torch.int64, device=mask.device) for _ in range(mask.dim()))


def _line_of_the_project() -> str:
    """The innermost line of the stack that is neither in an installed package nor in this package."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if "site-packages" not in frame.filename and "lightning_zero" not in Path(frame.filename).parts
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "in a package"
