"""Activation checkpointing of selected modules by hooks, and how their inputs are kept until backward.

Checkpointing keeps only the inputs of each module, whose forward is computed again in backward (Chen et al., "Training
Deep Nets with Sublinear Memory Cost", 2016). Offload moves these inputs off the device while other modules compute.
Partitioning divides an input that is equal on all tensor-parallel ranks: each rank keeps one part, and the parts are
gathered in backward (P_a and P_a+cpu in Rajbhandari et al., "ZeRO", SC20, section 6.1; "ZeRO-Infinity", SC21, section
5.1.2). Copies overlap with computation:

    forward     | module 1   | module 2   | module 3       copies:  | out: input 1 | out: input 2 |
    backward    | module 3   | module 2   | module 1       copies:  | in: input 2  | in: input 1  |

The device memory of a module's input is released when the next module begins, so the last module's input is still on
the device when backward begins. In backward, each input is copied back while the following module is recomputed.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.engine.comm.asynchronous import at, current_stream, wait_for
from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.counters import Ledger
from lightning_zero.engine.comm.tensor_parallel import ActivationParts, mark_of
from lightning_zero.engine.compat import (
    FakeTensor,
    OwnHook,
    checkpoint_generator,
    is_compiled,
    peek_interpreter_stack,
    tree_flatten,
    tree_unflatten,
)
from lightning_zero.engine.config import EngineConfig, Modules
from lightning_zero.engine.plan.units import UnitPlan, select_modules
from lightning_zero.engine.runtime.saved_tensors import Saved, is_watched_by_others

LEAST = 2**16
"""Minimum size in bytes of the tensors that are moved: for smaller tensors, the copy costs more than it saves."""


_PLAIN = (Tensor, FakeTensor)  # other subclasses may have state besides their storage


class ActivationStore:
    """Moves the inputs of checkpointed modules, or this rank's part of them, to another place until backward.

    Floating-point tensors of at least ``LEAST`` bytes are moved. The following are not moved:

    - leaves that require gradients, including parameters: their gradient accumulation node keeps them alive anyway;
    - inputs of earlier modules in the same forward (an attention mask, rotary embeddings): the caller keeps them alive
      anyway, so nothing would be gained, and backward would fetch them once for each module.

    Args:
        device: the device whose memory is freed.
        to_host: whether tensors are moved to host memory, also, undivided, those that differ between tensor-parallel
            ranks; otherwise parts stay on the device.
        parts: divides tensors that are equal on all tensor-parallel ranks; None to move all tensors undivided.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        to_host: bool,
        parts: ActivationParts | None,
        ledger: Ledger,
    ) -> None:
        self.device, self.to_host, self._parts, self.ledger = device, to_host, parts, ledger
        # for copies from and to the device's memory, which is allocated and freed on the current stream
        self.copies = torch.Stream(device) if device.type != "cpu" else None
        self._alike: weakref.WeakKeyDictionary[nn.Module, dict[str, frozenset[int]]] = weakref.WeakKeyDictionary()
        self.begin_forward()

    def begin_forward(self) -> None:
        """Record that a forward of the root module begins.

        Some ranks may still have earlier graphs that other ranks have freed, so collectives must not depend on the
        inputs of earlier graphs.
        """
        self._moved: list[weakref.ref[Kept]] = []  # by the last module that had inputs to move
        self._seen = WeakIdKeyDictionary()

    def take_out(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Move a module's inputs. Return a function to recompute the module with, and the function's arguments.

        The arguments have a ``Kept`` in place of each moved tensor.
        """
        leaves, spec = tree_flatten((args, kwargs))
        moved = self._to_move(module, leaves, repr(spec))
        if not moved:
            return module, args, kwargs
        before, self._moved = self._moved, []
        for kept in _alive(before):
            kept.let_go()
        replaced: dict[int, Kept] = {}  # by ``id``, since one tensor may be passed as several arguments
        for number, parts in moved.items():
            leaf = leaves[number]
            if id(leaf) not in replaced:
                replaced[id(leaf)] = Kept(leaf, parts, self)
                self._moved.append(weakref.ref(replaced[id(leaf)]))
                self._seen[leaf] = None
        args, kwargs = tree_unflatten([replaced.get(id(leaf), leaf) for leaf in leaves], spec)
        # Checkpointing preserves the random states of the devices that its tensor arguments are on.
        return partial(_recompute, module, before), (leaf.new_empty(0), *args), kwargs

    def _to_move(self, module: nn.Module, leaves: list[Any], form: str) -> dict[int, ActivationParts | None]:
        """By the index of each argument to move: the ranks that divide it; None to move it undivided.

        May be collective: see ``_alike_in``.
        """
        worth = {number: leaf for number, leaf in enumerate(leaves) if self._is_worth_moving(leaf)}
        moved: dict[int, ActivationParts | None] = dict.fromkeys(worth) if self.to_host else {}
        if self._parts is not None:
            alike = self._alike_in(self._parts, module, form, leaves, worth)
            dense = [number for number, leaf in worth.items() if _span(leaf) == leaf.numel()]
            moved |= dict.fromkeys(alike.intersection(dense), self._parts)
        return dict(sorted(moved.items()))

    def _alike_in(
        self, parts: ActivationParts, module: nn.Module, form: str, leaves: list[Any], worth: Mapping[int, Tensor]
    ) -> frozenset[int]:
        """Indices of arguments that are equal on all tensor-parallel ranks. Collective until a result is cached.

        Args:
            form: the structure of the arguments, such as names of keyword arguments; each has its own result.
        """
        cached = self._alike.setdefault(module, {})
        if form not in cached:
            # tensors of all sizes are compared, since later calls with other sizes reuse the result
            values = {number: leaf for number, leaf in enumerate(leaves) if type(leaf) in _PLAIN}
            alike = parts.agree(values)
            if alike is None:
                return frozenset()
            cached[form] = alike
            if worth and alike.isdisjoint(worth) and parts.is_first:
                warnings.warn(
                    f"partition_activations: the inputs of {type(module).__name__} differ between tensor-parallel "
                    "ranks, perhaps because sequence parallelism has already divided them. These inputs are not "
                    "partitioned.",
                    stacklevel=2,
                )
        return cached[form]

    def _is_worth_moving(self, tensor: Any) -> bool:
        return (
            type(tensor) in _PLAIN
            and tensor.device.type == self.device.type
            and tensor.layout is torch.strided
            and tensor.is_floating_point()
            and not (tensor.is_leaf and tensor.requires_grad)
            and LEAST <= tensor.nbytes <= tensor.untyped_storage().nbytes()  # the upper bound excludes expanded tensors
            and tensor not in self._seen
        )


def _recompute(module: nn.Module, before: list[weakref.ref[Kept]], _: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its inputs, while the inputs of the module before it, which comes next, are fetched."""
    leaves, spec = tree_flatten((args, kwargs))
    args, kwargs = tree_unflatten([leaf.value() if type(leaf) is Kept else leaf for leaf in leaves], spec)
    for kept in _alive(before):
        kept.fetch()
    return module(*args, **kwargs)


def _alive(references: list[weakref.ref[Kept]]) -> list[Kept]:
    return [kept for reference in references if (kept := reference()) is not None]


class Kept:
    """One moved tensor; it lives as long as the graph that needs it.

    Args:
        parts: the ranks of which each keeps one range of the memory; None to keep all of it. The tensor must then be
            dense, and equal on all of them.
    """

    _arriving: tuple[Tensor, Callable[[], Any] | None] | None = None
    _original: Saved | None = None  # the tensor on the device; None once released

    def __init__(self, tensor: Tensor, parts: ActivationParts | None, store: ActivationStore) -> None:
        self._store, self._requires_grad, self._form = store, tensor.requires_grad, _Form(tensor, parts)
        self._original = Saved(tensor.detach(), tensor._version, None)
        place = torch.device("cpu") if store.to_host else store.device
        is_pinned = store.to_host and store.device.type != "cpu"  # required for copies that run on their own
        self._room = torch.empty(self._form.numel, dtype=tensor.dtype, device=place, pin_memory=is_pinned)
        store.ledger.hold(self._room, "host" if store.to_host else "activations")
        with at(store.copies):
            kept = self._form.kept_of(self._original.tensor)
            self._room[: len(kept)].copy_(kept, non_blocking=True)

    def let_go(self) -> None:
        """Release the original, so that later computation may reuse its memory."""
        # First wait, then compare: earlier writes have changed the version, and later writes run after the copy.
        if self._original is not None:
            self._wait_for_copies()
            if self._original.is_unchanged:
                self._original = None

    def fetch(self) -> None:
        """Start to copy the values back to the device, unless they are already there or on their way."""
        if self._original is not None or self._arriving is not None:
            return
        target = self._form.empty()
        with at(self._store.copies):
            kept = self._form.kept_of(target)
            kept.copy_(self._room[: len(kept)], non_blocking=True)
            wait = self._form.gather_rest(target)
            if wait is not None and self._store.copies is not None:
                wait()  # on the stream that has allocated the buffers of the gather
                wait = None
        self._arriving = target, wait

    def value(self) -> Tensor:
        """Return the values on the device, ready for the current stream.

        Raises:
            RuntimeError: autograd's usual error, if the tensor has been written to since it was moved.
        """
        self.fetch()
        # the original of the last module's input, or of one that has been written to
        value = self._arrive() if self._original is None else self._original.unpack().detach()
        return value.requires_grad_(self._requires_grad)

    def _arrive(self) -> Tensor:
        assert self._arriving is not None
        (target, wait), self._arriving = self._arriving, None
        self._wait_for_copies()
        if wait is not None:
            wait()
        return target

    def _wait_for_copies(self) -> None:
        wait_for([self._store.copies], current_stream(self._store.device))

    def __del__(self) -> None:
        # memory that copies use is about to be reused
        if self._arriving is not None:
            self._arrive()
        elif self._original is not None:
            self._wait_for_copies()


def _span(tensor: Tensor) -> int:
    """The number of elements from the first to the last in memory, including gaps between elements."""
    return 1 + sum((count - 1) * step for count, step in zip(tensor.size(), tensor.stride()))


class _Form:
    """Memory layout of a kept tensor, including its alignment, which may affect the order in which kernels sum.

    Attributes:
        numel: the number of elements that each rank keeps, including padding.
    """

    def __init__(self, tensor: Tensor, parts: ActivationParts | None = None) -> None:
        self._size, self._stride = tensor.size(), tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._lead = tensor.data_ptr() % 64 // tensor.element_size()  # offset in elements from a 64-byte boundary
        self._gather = partial(parts.gather, mark=mark_of(tensor)) if parts is not None else None
        rank, count = (parts.rank, parts.size) if parts is not None else (0, 1)
        self._span = _span(tensor)
        self.numel = -(-self._span // count)
        self._padded = self.numel * count
        self._own = slice(rank * self.numel, min((rank + 1) * self.numel, self._span))

    def kept_of(self, tensor: Tensor) -> Tensor:
        """The part of ``tensor`` that this rank keeps, as a 1-D view. ``tensor`` may be a result of ``empty``."""
        return tensor.as_strided((self._span,), (1,), tensor.storage_offset())[self._own]

    def gather_rest(self, target: Tensor) -> Callable[[], Any] | None:
        """Start to fetch the elements kept by other ranks; return a function that waits for them. None if unneeded."""
        if self._gather is None:
            return None
        return self._gather(target.as_strided((self._padded,), (1,), target.storage_offset()))

    def empty(self) -> Tensor:
        """Allocate a tensor with the same layout on the device."""
        memory = torch.empty(self._lead + self._padded, dtype=self._dtype, device=self._device)
        return memory.as_strided(self._size, self._stride, self._lead)


def activation_store(config: EngineConfig, communicator: Communicator, ledger: Ledger) -> ActivationStore | None:
    """Make the store for inputs of checkpointed modules, as configured; None if inputs are not moved."""
    to_host = config.offload is not None and config.offload.activations is not None
    if not to_host and not config.partition_activations:
        return None
    parts = communicator.activation_parts() if config.partition_activations else None
    return ActivationStore(communicator.device, to_host=to_host, parts=parts, ledger=ledger)


# Hooks can advance ``checkpoint_generator``. Options are passed to it by position; newer torch versions add options.
_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(checkpoint_generator).parameters.items()
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
}


class CheckpointedModule:
    """Hooks that apply activation checkpointing to one module until they are removed.

    The schedule's hooks run outside these hooks: a unit is gathered before its checkpointed region begins, and again
    when the region is recomputed. ``store`` keeps the module's inputs until recomputation.
    """

    def __init__(self, module: nn.Module, store: ActivationStore | None = None) -> None:
        self._store = store
        self._recomputing = 0  # number of nested recomputations in progress
        self._regions: list[Generator[None, None, None]] = []
        self._handles = [
            module.register_forward_pre_hook(OwnHook(self._before), with_kwargs=True),
            module.register_forward_hook(OwnHook(self._after), prepend=True, always_call=True),
        ]

    def recover(self) -> None:
        """End regions whose forward was interrupted by Ctrl-C or ``sys.exit``: torch then calls no forward hooks."""
        while self._regions:
            self._regions.pop().close()

    def remove(self) -> None:
        self.recover()
        for handle in self._handles:
            handle.remove()
        self._store = None

    def _before(self, from_compiled: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._recomputing:
            if from_compiled and not is_compiled(module):
                # the recomputation would run uncompiled, and would save different tensors
                raise RuntimeError(
                    f"activation_checkpointing: {type(module).__name__} cannot be checkpointed inside compiled "
                    "code. Compile the checkpointed modules themselves (block.compile()) instead of the modules "
                    "that contain them."
                )
            region = self._region(module, args, kwargs)
            next(region)
            self._regions.append(region)

    def _region(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[None, None, None]:
        # An outer region or ``save_on_cpu`` stores inputs in its own way. Under ``torch.func``, inputs have no storage.
        are_inputs_kept = torch.is_grad_enabled() and not is_watched_by_others() and peek_interpreter_stack() is None
        if self._store is not None and are_inputs_kept:
            function, args, kwargs = self._store.take_out(function, args, kwargs)
        options = {**_OPTIONS, "fn": function, "context_fn": lambda: (nullcontext(), self)}
        return checkpoint_generator(*options.values(), *args, **kwargs)

    def _after(self, *_: Any) -> None:
        if not self._recomputing and self._regions:
            next(self._regions.pop(), None)

    # Torch enters this object as a context manager (``context_fn``) around each recomputation of a region.

    def __enter__(self) -> None:
        self._recomputing += 1

    def __exit__(self, *_: object) -> None:
        self._recomputing -= 1


def modules_to_checkpoint(module: nn.Module, plans: list[UnitPlan], wanted: Modules | None) -> list[nn.Module]:
    """The modules that the option ``activation_checkpointing`` selects."""
    if wanted is None:
        return []
    if wanted != "units":
        return [inner for _, inner in select_modules(module, wanted, option="activation_checkpointing")]
    blocks = [block for plan in plans for block in plan.blocks]
    if not blocks:
        raise ValueError(
            "activation_checkpointing='units': the module's only unit is the root unit, so nothing would be "
            "checkpointed. Name classes of modules instead, for example activation_checkpointing=[Block]."
        )
    return blocks
