"""The dispatch mode of a fake run: tracks memory, records events, and assumes results of value-dependent operators."""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_zero.engine import Simulation, WrapperTensor, compat, process_group, tensor_parallel
from lightning_zero.planning.timeline import Event

aten = torch.ops.aten

_COLLECTIVES = {"_c10d_functional", "c10d"}
_FREE = {aten.empty.memory_format, aten.detach.default, aten.empty_like.default, aten.empty_strided.default}


class Observer(compat.TorchDispatchMode):
    """Observes the operators of one rank, on fake or on real tensors.

    It counts the bytes of all live storages that operators have created in the context: a storage at its current size,
    which is zero for a buffer that the engine has resized to zero. It records each operator with its floating-point
    operations and bytes, and each collective. It assumes the results of operators that depend on the values of fake
    tensors, which have none.

    Args:
        by_category: returns the engine's bytes by category; ``peak`` excludes ``"host"`` bytes.
        together: number of ranks in each collective that is dispatched as an operator; only modules divided by tensor
            parallelism dispatch such collectives.
        leaving: bytes that all ranks of a machine together send to other machines, per byte that one rank sends in
            these collectives.

    Attributes:
        peak, host_peak: maximum number of bytes on the device, and of ``"host"`` bytes, since the last ``reset``.
        group: the process group of the tensor-parallel ranks, if there are several.
        on_host: whether operators are part of an update in the host's memory, where they update no peak.
        tensor_parallel_bytes: total size of the full buffers in collectives that are dispatched as operators.
        assumptions: the assumptions, as keys; each includes the line of the project's code that reads the values.
    """

    def __init__(
        self, by_category: Callable[[], Counter[str]] = Counter, together: int = 1, leaving: float = 0.0
    ) -> None:
        super().__init__()
        self._by_category, self._together, self._leaving = by_category, together, leaving
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._total = self._collectives = 0
        self.peak = self.host_peak = 0
        self.at_peak = Counter[str]()
        self.events: list[Event] = []
        self.group: process_group.ProcessGroup | None = None
        self.on_host = False
        self.tensor_parallel_bytes = 0
        self.assumptions: dict[str, None] = {}

    def reset(self) -> None:
        """Forget the events, and reset the peaks to the bytes in use now."""
        self.events.clear()
        self.peak = self.host_peak = 0
        self._note_peak()

    def __enter__(self) -> Any:
        resize_ = torch.UntypedStorage.resize_

        def resize(storage: Any, nbytes: int) -> Any:
            result = resize_(storage, nbytes)
            if id(storage) in self._sizes:
                self._count(storage)
            return result

        self._patch = patch.object(torch.UntypedStorage, "resize_", resize)  # it is not dispatched
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._patch.stop()
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tensor_parallel.are_divided(types):
            return NotImplemented  # the operator is dispatched again on the local tensors
        kwargs = kwargs or {}
        result = self._result_of(func, args, kwargs)
        if not func.is_view and func.namespace != "prim" and func not in _FREE:
            self._record(func, args, kwargs, result)
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
        if not self.on_host:
            self._note_peak()

    def _note_peak(self) -> None:
        held = self._by_category()
        self.host_peak = max(self.host_peak, held["host"])
        if (on_device := self._total - held["host"]) > self.peak:
            self.peak, self.at_peak = on_device, held

    def _forget(self, identity: int, _: Any) -> None:
        self._total -= self._sizes.pop(identity)
        del self._references[identity]

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [leaf for leaf in compat.tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if func.namespace not in _COLLECTIVES:
            flops, nbytes = _flops_of(func, args, kwargs, result), sum(map(compat.nbytes_of, tensors))
            is_low = bool(flops) and tensors[0].dtype.itemsize <= 2
            kind = "host" if self.on_host else "compute"
            self.events.append(Event(kind, float(flops), float(nbytes), is_low=is_low))
        elif func.namespace == "c10d" and self.group not in process_group.groups_among(args):
            return  # the engine's own, which its simulation records
        elif not func.__name__.startswith("wait_tensor"):
            nbytes = max((tensor.nbytes for tensor in tensors), default=0)
            self.tensor_parallel_bytes += nbytes
            self.gathers(2 * nbytes if func.__name__.startswith(("all_reduce", "allreduce")) else nbytes)()

    def simulation(self, transport: Any, machines: int) -> Simulation:
        """A simulation of these transports and machines, whose events are recorded."""
        return Simulation(transport, machines, self.sends, self.gathers, self.updating, self.moves)

    def sends(self, sent: float, leaving: float) -> Callable[[], None]:
        """Record a collective; see ``Simulation``."""
        self._collectives += 1
        self.events.append(Event("launch", nbytes=sent, number=self._collectives, leaving=leaving))
        return partial(self.events.append, Event("wait", number=self._collectives))

    def gathers(self, nbytes: int) -> Callable[[], None]:
        """Record a collective of tensor-parallel ranks in which each sends a buffer except its own part."""
        sent = nbytes * (self._together - 1) / self._together
        return self.sends(sent, sent * self._leaving)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context in which operators are recorded as part of an update in the host's memory."""
        self.on_host = True
        try:
            yield
        finally:
            self.on_host = False

    def moves(self, nbytes: int) -> None:
        """Record a read from or a write to a disk."""
        self.events.append(Event("disk", nbytes=float(nbytes)))

    def _result_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator; if it needs values of fake tensors, assume a result."""
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
            self.assumptions[f"{assumption} ({_line_of_the_project()})"] = None
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


# -- floating-point operations -----------------------------------------------------------------------------------------


def _flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations in an operator call; 0 unless it is a matrix product, convolution or attention."""
    operator = func._overloadpacket
    count = _ATTENTION.get(operator) or flop_registry.get(operator)
    return count(*args, **kwargs, out_val=result) if count is not None else 0


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, _repeated(key, query), _repeated(value, query))


def _attention_backward_flops(grad_out: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad_out.shape, query.shape, _repeated(key, query), _repeated(value, query))


def _repeated(tensor: Any, query: Any) -> torch.Size:
    """The shape of keys or values with as many heads as the queries: several query heads may share one."""
    return torch.Size((*tensor.shape[:-3], query.shape[-3], *tensor.shape[-2:]))


# Used instead of torch's formulas, which have none for the CPU's kernel, and before torch 2.12 raise an error if query
# heads share keys.
_ATTENTION = {
    getattr(aten, f"_scaled_dot_product_{kernel}{suffix}"): count
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for suffix, count in (("", _attention_flops), ("_backward", _attention_backward_flops))
}
