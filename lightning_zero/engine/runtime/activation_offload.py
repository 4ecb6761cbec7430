"""Activation offload: keep the inputs of checkpointed modules outside of the device between forward and backward.

(P_a+cpu in Rajbhandari et al., "ZeRO", SC20, section 6.1; "ZeRO-Infinity", SC21, section 5.1.2.) Checkpointing keeps
one input per module; offload moves that input as well, while other modules compute:

    forward     | unit 1     | unit 2     | unit 3         copies:  | out: input 1 | out: input 2 |
    backward    | unit 3     | unit 2     | unit 1         copies:  | in: input 2  | in: input 1  |

The device's memory of an input is released when the next unit begins, so the last unit's input is still there when
backward begins. In backward an input is copied back while the unit that ran after its own is recomputed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.engine.comm.streams import current_stream
from lightning_zero.engine.compat import (
    hooks_on_top,
    pop_hooks,
    push_hooks,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from lightning_zero.engine.config import OffloadConfig
from lightning_zero.engine.offload.scratch import Disk, HostMemory
from lightning_zero.engine.runtime.compile_hooks import untraced
from lightning_zero.engine.runtime.saved_tensors import Saved

LEAST = 2**16
"""Smallest size in bytes of a tensor that is moved: below it the copy costs more than the memory is worth."""


class ActivationStore:
    """Moves inputs of checkpointed modules out of the device's memory, and back ahead of their backward.

    Dense floating-point tensors of at least ``LEAST`` bytes are moved, each once. Not moved are

    - tensors that are saved under the user's saved-tensor hooks (an enclosing region, ``save_on_cpu``), which keep or
      drop them in their own way;
    - leaves that require gradients, including parameters: their gradient accumulation node keeps them in any case;
    - inputs of several modules (an attention mask, rotary embeddings): the caller keeps them alive meanwhile, so
      nothing would be gained, and backward would fetch them once for each module.

    Args:
        device: the device whose memory is relieved.
        folder: on a local disk; created if it does not exist. None moves tensors to the host's memory.
    """

    def __init__(self, device: torch.device, folder: str | None) -> None:
        self.device = device
        self._copies = _Copies(device)
        is_pinned = device.type != "cpu"
        self._place = HostMemory(is_pinned) if folder is None else Disk(folder, is_pinned)
        self._kept: weakref.WeakValueDictionary[tuple[Any, ...], Kept] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Region] | None = None

    def take_out(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], AbstractContextManager[None]]:
        """Prepare a module's arguments for checkpointing, which saves tensors that are positional arguments.

        Returns:
            A function that calls the module; its arguments, with the tensors to move among the positional ones; and a
            context in which autograd's saving of these moves them.
        """
        leaves, spec = tree_flatten((args, kwargs))
        positional = len(tree_leaves(args))
        moved = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor) and self._is_worth_moving(leaf)}
        if not moved:
            return module, args, kwargs, nullcontext()
        saved: dict[int, Tensor] = {}  # by ``id``: a tensor may be several arguments
        for number, leaf in enumerate(leaves):
            if id(leaf) in moved or number < positional and isinstance(leaf, Tensor):
                saved[id(leaf)] = leaf
        position_of = {key: position for position, key in enumerate(saved)}
        places = [(position_of.get(id(leaf)), None if id(leaf) in saved else leaf) for leaf in leaves]

        def run(*tensors: Tensor) -> Any:
            given = [other if position is None else tensors[position] for position, other in places]
            args, kwargs = tree_unflatten(given, spec)
            return module(*args, **kwargs)

        return run, tuple(saved.values()), {}, self._moving(moved)

    def _is_worth_moving(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device.type == self.device.type
            and tensor.layout is torch.strided
            and tensor.is_floating_point()
            and not (tensor.is_leaf and tensor.requires_grad)
            and LEAST <= tensor.nbytes <= tensor.untyped_storage().nbytes()  # larger ones are expanded
        )

    @contextmanager
    def _moving(self, moved: set[int]) -> Iterator[None]:
        """Context in which tensors that autograd saves are moved if their ``id`` is among the given ones.

        Autograd restores the graph of a saved tensor, so a moved input has its graph when it is unpacked.
        """
        before = self._last() if self._last is not None else None
        if before is not None:
            before.let_go()
        region = _Region(self._last)
        outer = hooks_on_top() or (Saved.of, Saved.unpack)

        @untraced
        def pack(tensor: Tensor) -> Any:
            return self._keep(tensor, region) if id(tensor) in moved else outer[0](tensor)

        @untraced
        def unpack(packed: Any) -> Tensor:
            return packed.value() if type(packed) is Kept else outer[1](packed)

        push_hooks(pack, unpack)
        try:
            yield
        finally:
            pop_hooks()

    def _keep(self, tensor: Tensor, region: _Region) -> Kept:
        # The address is not reused as long as ``Kept`` lives, so an equal key means the same memory.
        address = tensor.untyped_storage()._cdata
        shape = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        key = (address, shape, tensor._version)
        kept = self._kept.get(key)
        if kept is not None:
            kept.stay(tensor)
        else:
            kept = self._kept[key] = Kept(tensor, region, self._copies, self._place)
            self._last = weakref.ref(region)
        return kept


class _Region:
    """Tensors moved in one forward of a checkpointed module. Holds weak references, and is held by the tensors."""

    def __init__(self, previous: weakref.ref[_Region] | None) -> None:
        self.kept: weakref.WeakSet[Kept] = weakref.WeakSet()
        self.previous = previous  # of the module that ran before, which is next in backward

    def fetch(self) -> None:
        for kept in self.kept:
            kept.fetch()

    def let_go(self) -> None:
        for kept in self.kept:
            kept.let_go()


class Kept:
    """One moved tensor; it lives as long as the graph that saved it."""

    _where: Any = None
    _arriving: tuple[Tensor, Future[Any]] | None = None
    _original: Saved | None = None  # until `let_go`
    _copied: Any = None

    def __init__(self, tensor: Tensor, region: _Region, copies: _Copies, place: HostMemory | Disk) -> None:
        self.region = region
        self._copies, self._place = copies, place
        self._form = _Form(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._original = Saved.of(tensor)
        self._stays = False
        host = place.memory(self._form.nbytes)
        self._copied = copies.out(self._original.tensor, self._form.on_host(host))
        self._where = place.put(host, self._copied)
        region.kept.add(self)

    def let_go(self) -> None:
        """Release the original, so that later computation may reuse its memory."""
        if self._original is not None and not self._stays:
            # In this order: the version counter has seen all writes before the wait; later writes come after the copy.
            self._copies.wait(self._copied)
            if self._copied is None or self._original.is_unchanged:
                self._original = None
            else:
                self._stays = True  # the copy may have the written values, so ``value`` is autograd's error

    def stay(self, tensor: Tensor) -> None:
        """Keep the original on the device, because another module has the same input."""
        if not self._stays:
            self._stays, self._original = True, Saved.of(tensor)
            self._forget()

    def fetch(self) -> None:
        """Start to copy the values back to the device, unless they are there or on their way."""
        if self._original is not None or self._arriving is not None:
            return
        target = self._form.empty()
        # The previous use of this memory has ended by then, and so has the copy out, for which `let_go` has waited.
        ready = self._copies.now()
        copies, form = self._copies, self._form  # without `self`, which a read in progress must not keep alive

        def deliver(host: Tensor) -> Any:
            return copies.into(target, form.on_host(host), after=ready)

        self._arriving = target, self._place.get(self._where, deliver)

    @torch.no_grad()
    def value(self) -> Tensor:
        """The tensor as it was, on the device and ready for the current stream. Also prefetches the next."""
        if self._original is not None and not self._original.is_unchanged:
            self.let_go()
        if self._original is None and self._arriving is None:
            self.region.fetch()
        before = self.region.previous() if self.region.previous is not None else None
        if before is not None:
            before.fetch()
        if self._original is not None:  # of the module that backward begins with, or of several modules
            return self._original.unpack()
        assert self._arriving is not None
        (target, arrival), self._arriving = self._arriving, None
        try:
            self._copies.wait(arrival.result())
        finally:
            del arrival  # holds an exception whose traceback holds this frame
        return target

    def _forget(self) -> None:
        if self._arriving is not None:
            (_, arrival), self._arriving = self._arriving, None
            if arrival.exception() is None:  # otherwise the value could not be read, and is not needed
                self._copies.wait(arrival.result())  # the memory is about to be reused
        if self._where is not None:
            where, self._where = self._where, None
            self._place.free(where)

    def __del__(self) -> None:
        if self._original is not None and self._copied is not None:  # neither another module nor backward followed
            self._copies.wait(self._copied)  # the copy reads memory that is about to be reused
        self._forget()


class _Form:
    """Memory layout of a tensor, with the alignment of its first element, which may affect kernels' order of sums."""

    def __init__(self, tensor: Tensor) -> None:
        self._size, self._stride, self.nbytes = tensor.size(), tensor.stride(), tensor.nbytes
        self._dtype, self._device = tensor.dtype, tensor.device
        self._dense = torch.empty_like(tensor, device="meta").stride()  # the same order of dimensions, without gaps
        self._lead = tensor.data_ptr() % 64 // tensor.element_size()  # elements after a multiple of 64 bytes

    def on_host(self, memory: Tensor) -> Tensor:
        """View bytes in host memory as the tensor's elements, without gaps."""
        return memory[: self.nbytes].view(self._dtype).as_strided(self._size, self._dense)

    def empty(self) -> Tensor:
        """New memory on the device with the same layout."""
        span = 1 + sum((count - 1) * step for count, step in zip(self._size, self._stride))
        memory = torch.empty(self._lead + span, dtype=self._dtype, device=self._device)
        return memory.as_strided(self._size, self._stride, self._lead)


class _Copies:
    """Copies between device and host, on streams of their own where the device has streams; on a CPU plain copies.

    Device memory is allocated and freed on the current stream. Events order copies and computation; an event is None
    where there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        has_streams = device.type != "cpu"
        self._leaving, self._coming = (torch.Stream(device) if has_streams else None for _ in range(2))

    def now(self) -> torch.Event | None:
        """An event after all work queued on the device so far."""
        stream = current_stream(self._device)
        return None if stream is None else stream.record_event()

    def wait(self, event: torch.Event | None) -> None:
        """Make the current stream wait for an event."""
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

    def out(self, source: Tensor, target: Tensor) -> torch.Event | None:
        """Copy from the device to the host."""
        return self._copy(self._leaving, target, source, self.now())

    def into(self, target: Tensor, source: Tensor, after: torch.Event | None) -> torch.Event | None:
        """Copy from the host to the device after an event, in any thread."""
        return self._copy(self._coming, target, source, after)

    @staticmethod
    def _copy(stream: torch.Stream | None, target: Tensor, source: Tensor, after: Any) -> torch.Event | None:
        if stream is None or after is None:
            target.copy_(source)
            return None
        stream.wait_event(after)
        with stream:
            target.copy_(source, non_blocking=True)
        return stream.record_event()


def activation_store(offload: OffloadConfig | None, device: torch.device) -> ActivationStore | None:
    """The store for offloaded activations by the option ``offload``; None if they stay on the device."""
    if offload is None or offload.activations is None:
        return None
    return ActivationStore(device, None if offload.activations == "cpu" else os.fspath(offload.path or ""))
