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
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.engine.compat import hooks_on_top, pop_hooks, push_hooks
from lightning_zero.engine.config import OffloadConfig
from lightning_zero.engine.offload.scratch import Disk, HostMemory
from lightning_zero.engine.runtime.compile_hooks import untraced
from lightning_zero.engine.runtime.saved_tensors import Saved, changed_in_place

LEAST = 2**16
"""Smallest size in bytes of a tensor that is moved: below it the copy costs more than the memory is worth."""

Place = str | os.PathLike[str]
"""Where activations are kept: ``"cpu"``, or a folder on a local disk."""


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
        place: ``"cpu"``, or a folder on a local disk, which is made if it does not exist.

    Raises:
        OSError: if no file can be created in the folder.
    """

    def __init__(self, device: torch.device, place: Place) -> None:
        self.device = device
        self._copies = _Copies(device)
        is_pinned = device.type != "cpu"
        self._place = HostMemory(is_pinned) if isinstance(place, str) else Disk(os.fspath(place), is_pinned)
        self._kept: weakref.WeakValueDictionary[tuple[Any, ...], Kept] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Region] | None = None

    def take_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, list[Tensor]]:
        """Split a module's arguments: a call with gaps in place of the tensors to move, and these tensors."""
        taken: dict[int, tuple[_Gap, Tensor]] = {}

        def leave_gap(value: Any) -> Any:
            if not isinstance(value, Tensor) or not self._is_worth_moving(value):
                return value
            return taken.setdefault(id(value), (_Gap(len(taken)), value))[0]

        args, kwargs = _mapped((args, kwargs), leave_gap)
        return Call(args, kwargs), [tensor for _, tensor in taken.values()]

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
    def moving(self, tensors: list[Tensor]) -> Iterator[None]:
        """Context in which autograd's saving of the given tensors moves them; checkpointing saves its inputs that way.

        Autograd restores the graph of a saved tensor, so a moved input has its graph when it is unpacked.
        """
        before = self._last() if self._last is not None else None
        if before is not None:
            before.let_go()
        region = _Region(self._last)
        moved = {id(tensor) for tensor in tensors}
        outer = hooks_on_top()

        @untraced
        def pack(tensor: Tensor) -> Any:
            if id(tensor) in moved:
                return self._keep(tensor, region)
            return Saved.of(tensor) if outer is None else outer[0](tensor)

        @untraced
        def unpack(packed: Any) -> Tensor:
            if type(packed) is Kept:
                return packed.value()
            return packed.unpack() if outer is None else outer[1](packed)

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


class Call(NamedTuple):
    """Arguments of a module with gaps in place of the moved tensors, which are passed as extra positional arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, module: nn.Module, *given: Any, **kwargs: Any) -> Any:
        """Call the module, filling the gaps with the tensors that follow the positional arguments."""
        args, tensors = given[: len(self.args)], given[len(self.args) :]
        args, kwargs = _mapped((args, kwargs), lambda value: tensors[value.index] if type(value) is _Gap else value)
        return module(*args, **kwargs)


class _Gap:
    def __init__(self, index: int) -> None:
        self.index = index


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of nested lists, tuples and dicts; containers without a change are not copied."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        items = {key: _mapped(item, change) for key, item in value.items()}
        return value if all(items[key] is item for key, item in value.items()) else kind(items)
    if kind in (list, tuple) or isinstance(value, tuple) and hasattr(value, "_fields"):
        changed = [_mapped(item, change) for item in value]
        if all(new is old for new, old in zip(changed, value)):
            return value
        return kind(*changed) if hasattr(value, "_fields") else kind(changed)
    return change(value)


class _Region:
    """Tensors moved in one forward of a checkpointed module. Holds weak references, and is held by the tensors.

    Args:
        previous: the region of the module that ran before, which is next in backward.
    """

    def __init__(self, previous: weakref.ref[_Region] | None) -> None:
        self.kept: list[weakref.ref[Kept]] = []
        self.previous = previous

    def fetch(self) -> None:
        for kept in self._alive():
            kept.fetch()

    def let_go(self) -> None:
        for kept in self._alive():
            kept.let_go()

    def _alive(self) -> Iterator[Kept]:
        return (kept for reference in self.kept if (kept := reference()) is not None)


class Kept:
    """One moved tensor; it lives as long as the graph that saved it.

    Args:
        tensor: its present values are kept.
        region: the region that it belongs to.
        copies: copies it from the device and back.
        place: stores its values.
    """

    _where: Any = None
    _arriving: tuple[Tensor, Future[Any]] | None = None
    _original: Saved | None = None  # held until the copy is made; if `stay` was called, for longer
    _copied: Any = None

    def __init__(self, tensor: Tensor, region: _Region, copies: _Copies, place: HostMemory | Disk) -> None:
        self.region = region
        self._copies, self._place = copies, place
        self._form = _Form.of(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._original = Saved.of(tensor)
        self._version = tensor._version
        self._changed_to: int | None = None  # the original's version, if it may have changed before the copy was made
        self._stays = False
        host = place.memory(self._form.nbytes)
        self._copied = copies.out(self._original.tensor, self._form.on_host(host))
        self._where = place.put(host, self._copied)
        region.kept.append(weakref.ref(self))

    def let_go(self) -> None:
        """Release the original, so that later computation may reuse its memory."""
        if self._original is None or self._stays:
            return
        if self._copied is not None:
            # In this order: the version counter has seen all writes before the wait; later writes come after the copy.
            self._copies.wait(self._copied)
            if not self._original.is_unchanged:
                self._changed_to = self._original.tensor._version
        self._original = None

    def stay(self, tensor: Tensor) -> None:
        """Keep the original on the device, because another module has the same input."""
        if not self._stays:
            self._stays, self._original = True, Saved.of(tensor)
            self._forget()

    def fetch(self) -> None:
        """Start to copy the values back to the device, unless they are there or on their way."""
        if self._original is not None or self._arriving is not None or self._changed_to is not None:
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
        """The tensor as it was, on the device and ready for the current stream. Also prefetches the next.

        Raises:
            RuntimeError: if the original was changed in place before its copy was made.
            OSError: if the tensor cannot be written to the disk or read from it.
        """
        if self._stays:
            assert self._original is not None
            return self._original.unpack()
        original = self._original
        self.let_go()
        if self._changed_to is not None:
            raise changed_in_place(self._form.size, self._changed_to, self._version)
        is_here = original is not None and original.is_unchanged
        if not is_here and self._arriving is None:
            self.region.fetch()
        before = self.region.previous() if self.region.previous is not None else None
        if before is not None:
            before.fetch()
        if is_here:
            assert original is not None
            return original.tensor
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


class _Form(NamedTuple):
    """Memory layout of a tensor, including the alignment of its first element, which may affect kernels' order of sums.

    Attributes:
        size, stride, dtype, device: the tensor's own.
        dense: strides in the same order of dimensions, without gaps between elements.
        lead: elements between a multiple of 64 bytes and the first element.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    dense: tuple[int, ...]
    lead: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        dense = torch.empty_like(tensor, device="meta").stride()
        lead = tensor.data_ptr() % 64 // tensor.element_size()
        return cls(tensor.size(), tensor.stride(), tensor.dtype, tensor.device, dense, lead)

    @property
    def nbytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def on_host(self, memory: Tensor) -> Tensor:
        """View bytes in host memory as the tensor's elements, without gaps."""
        return memory[: self.nbytes].view(self.dtype).as_strided(self.size, self.dense)

    def empty(self) -> Tensor:
        """New memory on the device with the same layout."""
        span = 1 + sum((count - 1) * step for count, step in zip(self.size, self.stride))
        memory = torch.empty(self.lead + span, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.size, self.stride, self.lead)


class _Copies:
    """Copies between device and host, on streams of their own where the device has streams; on a CPU plain copies.

    Device memory is allocated and freed on the current stream. Events order copies and computation; an event is None
    where there is nothing to wait for.
    """

    _leaving: torch.Stream | None = None
    _coming: torch.Stream | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type != "cpu":
            self._leaving, self._coming = torch.Stream(device), torch.Stream(device)

    def now(self) -> torch.Event | None:
        """An event after all work queued on the device so far."""
        return None if self._leaving is None else torch.accelerator.current_stream(self._device).record_event()

    def wait(self, event: torch.Event | None) -> None:
        """Make the current stream wait for an event."""
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

    def out(self, source: Tensor, target: Tensor) -> torch.Event | None:
        """Copy from the device to the host."""
        return self._copy(self._leaving, source, target, self.now())

    def into(self, target: Tensor, source: Tensor, after: torch.Event | None) -> torch.Event | None:
        """Copy from the host to the device after an event, in any thread."""
        return self._copy(self._coming, source, target, after)

    def _copy(
        self, stream: torch.Stream | None, source: Tensor, target: Tensor, after: torch.Event | None
    ) -> torch.Event | None:
        if stream is None or after is None:
            target.copy_(source)
            return None
        stream.wait_event(after)
        with stream:
            target.copy_(source, non_blocking=True)
        return stream.record_event()


def activation_store(offload: OffloadConfig | None, device: torch.device) -> ActivationStore | None:
    """The store for offloaded activations by the option ``offload``; None if they stay on the device.

    Args:
        offload: the option's value.
        device: of the engine.

    Raises:
        ValueError: if no file can be created in the folder.
    """
    if offload is None or offload.activations is None:
        return None
    if offload.activations == "cpu":
        return ActivationStore(device, "cpu")
    assert offload.path is not None
    try:
        return ActivationStore(device, Path(offload.path))
    except OSError as error:
        raise ValueError(
            f"offload: path={str(offload.path)!r}: no file can be made there ({error.strerror}). Choose a folder on a "
            "local disk that this process may write to."
        ) from error
