"""Activation offload and partitioning: how inputs of checkpointed modules are kept until backward.

(P_a and P_a+cpu in Rajbhandari et al., "ZeRO", SC20, section 6.1; "ZeRO-Infinity", SC21, section 5.1.2.) Checkpointing
keeps only the inputs of each module. Offload moves these inputs off the device while other modules compute.
Partitioning divides an input that is equal on all tensor-parallel ranks: each rank keeps one part, and the parts are
gathered in backward. Copies overlap with computation:

    forward     | module 1   | module 2   | module 3       copies:  | out: input 1 | out: input 2 |
    backward    | module 3   | module 2   | module 1       copies:  | in: input 2  | in: input 1  |

The device memory of a module's input is released when the next module begins, so the last module's input is still on
the device when backward begins. In backward, each input is copied back while the following module is recomputed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.streams import current_stream
from lightning_zero.engine.comm.tensor_parallel import ActivationParts, mark_of
from lightning_zero.engine.compat import (
    FakeTensor,
    address_of,
    hooks_on_top,
    pop_hooks,
    push_hooks,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from lightning_zero.engine.config import EngineConfig
from lightning_zero.engine.runtime.compile_hooks import untraced
from lightning_zero.engine.runtime.saved_tensors import Saved
from lightning_zero.engine.state.ledger import Ledger

LEAST = 2**16
"""Minimum size in bytes of the tensors that are moved: for smaller tensors, the copy costs more than it saves."""


_PLAIN = (Tensor, FakeTensor)  # other subclasses may have state besides their storage


class ActivationStore:
    """Moves the inputs of checkpointed modules, or this rank's part of them, to another place until backward.

    Dense floating-point tensors of at least ``LEAST`` bytes are moved, each once. The following are not moved:

    - tensors that are saved under saved-tensor hooks of user code (an enclosing checkpointed region, ``save_on_cpu``),
      which keep or drop them in their own way;
    - leaves that require gradients, including parameters: their gradient accumulation node keeps them alive anyway;
    - inputs of several modules (an attention mask, rotary embeddings): the caller keeps them alive anyway, so
      nothing would be gained, and backward would fetch them once for each module.

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
        self.device, self._to_host, self._parts = device, to_host, parts
        self._copies = _Copies(device)
        self._ledger = ledger
        self._alike: weakref.WeakKeyDictionary[nn.Module, dict[str, frozenset[int]]] = weakref.WeakKeyDictionary()
        self._has_warned = False
        self._forwards = 0
        self._kept: weakref.WeakValueDictionary[tuple[Any, ...], Kept] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Region] | None = None

    def begin_forward(self) -> None:
        """Record that a forward of the root module begins.

        Some ranks may still have earlier graphs that other ranks have freed, so collectives must not depend on the
        inputs of earlier graphs.
        """
        self._last = None
        self._forwards += 1

    def take_out(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], AbstractContextManager[None]]:
        """Prepare a module's arguments for checkpointing, which saves only tensors that are positional arguments.

        Returns:
            A function that calls the module; its positional arguments, which include the tensors to move; its keyword
            arguments; and a context in which these tensors are moved when autograd saves them.
        """
        leaves, spec = tree_flatten((args, kwargs))
        positional = len(tree_leaves(args))
        moved = self._to_move(module, leaves, repr(spec))
        if not moved:
            return module, args, kwargs, nullcontext()
        saved: dict[int, Tensor] = {}  # by ``id``, since one tensor may be passed as several arguments
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

    def _to_move(self, module: nn.Module, leaves: list[Any], call: str) -> dict[int, ActivationParts | None]:
        """By the ``id`` of each argument to move: the ranks that divide it; None to move it undivided.

        May be collective: see ``_alike_in``.

        Args:
            call: describes the structure of the arguments; the same on every rank.
        """
        worth = {number: leaf for number, leaf in enumerate(leaves) if self._is_worth_moving(leaf)}
        moved: dict[int, ActivationParts | None] = dict.fromkeys(map(id, worth.values())) if self._to_host else {}
        if self._parts is not None:
            alike = self._alike_in(self._parts, module, leaves, call, worth)
            shared = (leaf for number, leaf in worth.items() if number in alike and _Form(leaf).is_dense)
            moved |= {id(leaf): self._parts for leaf in shared}
        return moved

    def _alike_in(
        self,
        parts: ActivationParts,
        module: nn.Module,
        leaves: list[Any],
        call: str,
        worth: Mapping[int, Tensor],
    ) -> frozenset[int]:
        """Indices of arguments that are equal on all tensor-parallel ranks. Collective until a result is cached."""
        known = self._alike.setdefault(module, {})
        if call not in known:
            # tensors of all sizes are compared, since later calls with other sizes reuse the result
            values = {number: leaf for number, leaf in enumerate(leaves) if type(leaf) in _PLAIN}
            alike = parts.agree(values)
            if alike is None:
                return frozenset()
            known[call] = alike
            if worth and alike.isdisjoint(worth) and parts.is_first and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"partition_activations: the inputs of {type(module).__name__} differ between tensor-parallel "
                    "ranks, perhaps because sequence parallelism has already divided them. These inputs are not "
                    "partitioned.",
                    stacklevel=2,
                )
        return known[call]

    def _is_worth_moving(self, tensor: Any) -> bool:
        return (
            type(tensor) in _PLAIN
            and tensor.device.type == self.device.type
            and tensor.layout is torch.strided
            and tensor.is_floating_point()
            and not (tensor.is_leaf and tensor.requires_grad)
            and LEAST <= tensor.nbytes <= tensor.untyped_storage().nbytes()  # the upper bound excludes expanded tensors
        )

    @contextmanager
    def _moving(self, moved: dict[int, ActivationParts | None]) -> Iterator[None]:
        """Context in which tensors that autograd saves are moved if their ``id`` is in ``moved``.

        Only values are moved: autograd reconnects an unpacked tensor to the graph.
        """
        before = self._last() if self._last is not None else None
        if before is not None:
            before.let_go()
        region = _Region(self._last)
        outer = hooks_on_top() or (Saved.of, Saved.unpack)

        @untraced
        def pack(tensor: Tensor) -> Any:
            key = id(tensor)
            return self._keep(tensor, moved[key], region) if key in moved else outer[0](tensor)

        @untraced
        def unpack(packed: Any) -> Tensor:
            return packed.value() if type(packed) is Kept else outer[1](packed)

        push_hooks(pack, unpack)
        try:
            yield
        finally:
            pop_hooks()

    def _keep(self, tensor: Tensor, parts: ActivationParts | None, region: _Region) -> Kept:
        # A storage's address is not reused as long as ``Kept`` lives, so equal keys mean the same storage.
        address = address_of(tensor.untyped_storage())
        shape = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        key = (address, shape, tensor._version, self._forwards if parts is not None else 0)
        kept = self._kept.get(key)
        if kept is not None:
            kept.stay(tensor)
        else:
            form = _Form(tensor, parts)
            count = partial(self._ledger.add, "host" if self._to_host else "activations")
            count(form.nbytes)
            kept = self._kept[key] = Kept(tensor, form, region, self._copies, self._room(form.nbytes))
            weakref.finalize(kept, count, -form.nbytes).atexit = False
            self._last = weakref.ref(region)
        return kept

    def _room(self, nbytes: int) -> Tensor:
        """Memory to keep values in; pinned host memory, so that copies to and from an accelerator run on their own."""
        if not self._to_host:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type != "cpu", device="cpu")


class _Region:
    """Weak references to the tensors moved in one forward of a checkpointed module. Each ``Kept`` holds its region."""

    def __init__(self, previous: weakref.ref[_Region] | None) -> None:
        self._kept: list[weakref.ref[Kept]] = []  # in the same order on every rank
        self.previous = previous  # the region of the previous module, which comes next in backward

    def add(self, kept: Kept) -> None:
        self._kept.append(weakref.ref(kept))

    def fetch(self) -> None:
        for kept in self._alive():
            kept.fetch()

    def let_go(self) -> None:
        for kept in self._alive():
            kept.let_go()

    def _alive(self) -> list[Kept]:
        return [kept for reference in self._kept if (kept := reference()) is not None]


class Kept:
    """One moved tensor; it lives as long as the graph that saved it."""

    _arriving: tuple[Tensor, _Copied] | None = None
    _original: Saved | None = None  # the tensor on the device; None once released
    _copied: _Copied | None = None
    _room: Tensor | None = None

    def __init__(self, tensor: Tensor, form: _Form, region: _Region, copies: _Copies, room: Tensor) -> None:
        self.region = region
        self._copies, self._form, self._room = copies, form, room
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._original = Saved.of(tensor)
        self._stays = False
        self._copied = copies.out(self._original.tensor, room, form)
        region.add(self)

    def let_go(self) -> None:
        """Release the original, so that later computation may reuse its memory."""
        if self._original is not None and not self._stays:
            # First wait, then compare: earlier writes have changed the version, and later writes run after the copy.
            assert self._copied is not None
            self._copies.wait(self._copied)
            if self._copied.event is None or self._original.is_unchanged:
                self._original = None
            else:
                self._stays = True  # the copy may contain newer values, so ``value`` raises autograd's error

    def stay(self, tensor: Tensor) -> None:
        """Keep the original on the device, because another module has the same input."""
        if not self._stays:
            self._stays, self._original = True, Saved.of(tensor)
            self._forget()

    def fetch(self) -> None:
        """Start to copy the values back to the device, unless they are already there or on their way."""
        if self._original is not None or self._arriving is not None:
            return
        assert self._room is not None
        target = self._form.empty()
        # Once this event occurs, earlier work on the new tensor's memory has ended, and so has the copy to ``_room``.
        self._arriving = target, self._copies.into(target, self._room, self._form, after=self._copies.now())

    @torch.no_grad()
    def value(self) -> Tensor:
        """Return the values on the device, ready for the current stream. Also prefetch the next region's values."""
        if self._original is not None and not self._original.is_unchanged:
            self.let_go()
        if self._original is None and self._arriving is None:
            self.region.fetch()
        before = self.region.previous() if self.region.previous is not None else None
        if before is not None:
            before.fetch()
        if self._original is not None:  # the last module's input, an input of several modules, or a changed input
            return self._original.unpack()
        assert self._arriving is not None
        (target, copied), self._arriving = self._arriving, None
        self._copies.wait(copied)
        return target

    def _forget(self) -> None:
        if self._arriving is not None:
            (_, copied), self._arriving = self._arriving, None
            self._copies.wait(copied)  # the memory is about to be reused
        self._room = None

    def __del__(self) -> None:
        if self._original is not None and self._copied is not None:  # perhaps nothing has waited for the copy
            self._copies.wait(self._copied)  # the copy reads memory that is about to be reused
        self._forget()


class _Form:
    """Memory layout of a kept tensor, including its alignment, which may affect the order in which kernels sum.

    Args:
        parts: the ranks of which each keeps one range of the memory; None to keep all of it. The tensor must then be
            dense, and equal on all of them.
    """

    def __init__(self, tensor: Tensor, parts: ActivationParts | None = None) -> None:
        self._size, self._stride = tensor.size(), tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        # elements from the first to the last in memory: where there are gaps, they are kept, too
        self._span = 1 + sum((count - 1) * step for count, step in zip(self._size, self._stride))
        self.is_dense = self._span == tensor.numel()
        self._lead = tensor.data_ptr() % 64 // tensor.element_size()  # offset in elements from a 64-byte boundary
        self._gather = partial(parts.gather, mark=mark_of(tensor)) if parts is not None else None
        rank, count = (parts.rank, parts.size) if parts is not None else (0, 1)
        length = -(-self._span // count)
        self._padded = length * count
        self._own = slice(rank * length, min((rank + 1) * length, self._span))
        self.nbytes = length * tensor.element_size()

    def kept_of(self, tensor: Tensor) -> Tensor:
        """The part of ``tensor`` that this rank keeps, as a 1-D view. ``tensor`` may be a result of ``empty``."""
        return tensor.as_strided((self._span,), (1,), tensor.storage_offset())[self._own]

    def in_place(self, memory: Tensor) -> Tensor:
        """View ``memory``, a tensor of bytes, as the kept elements."""
        return memory[: self.nbytes].view(self._dtype)[: max(self._own.stop - self._own.start, 0)]

    def completes(self, target: Tensor) -> Callable[[], Any] | None:
        """Return a function that starts to fetch the elements kept by other ranks; None if this rank keeps all."""
        if self._gather is None:
            return None
        return partial(self._gather, target.as_strided((self._padded,), (1,), target.storage_offset()))

    def empty(self) -> Tensor:
        """Allocate a tensor with the same layout on the device."""
        memory = torch.empty(self._lead + self._padded, dtype=self._dtype, device=self._device)
        return memory.as_strided(self._size, self._stride, self._lead)


class _Copied(NamedTuple):
    """A copy that has been started, and the operation after the copy, if there is one.

    Attributes:
        event: recorded on the copy's stream after the copy and the operation; None without a stream.
        wait: a function that waits for the operation; None if there is nothing to wait for.
    """

    event: torch.Event | None
    wait: Callable[[], Any] | None = None


class _Copies:
    """Copies between device and host, on dedicated streams if the device has streams; plain copies on a CPU.

    Device memory is allocated and freed on the current stream. Events order copies and computation; an event is None
    if there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        has_streams = device.type != "cpu"
        self._leaving, self._coming = (torch.Stream(device) if has_streams else None for _ in range(2))

    def now(self) -> torch.Event | None:
        """Record an event after all work queued on the current stream so far."""
        stream = current_stream(self._device)
        return None if stream is None else stream.record_event()

    def wait(self, copied: _Copied) -> None:
        """Make the current stream wait for a copy and the operation after it."""
        if copied.event is not None:
            torch.accelerator.current_stream(self._device).wait_event(copied.event)
        if copied.wait is not None:
            copied.wait()

    def out(self, tensor: Tensor, room: Tensor, form: _Form) -> _Copied:
        """Start to copy what this rank keeps of a tensor to ``room``."""
        return self._copy(self._leaving, form.in_place(room), form.kept_of(tensor), self.now())

    def into(self, tensor: Tensor, room: Tensor, form: _Form, after: torch.Event | None) -> _Copied:
        """Start to copy back to the device after an event, then to fetch the rest."""
        return self._copy(self._coming, form.kept_of(tensor), form.in_place(room), after, form.completes(tensor))

    @staticmethod
    def _copy(
        stream: torch.Stream | None, target: Tensor, source: Tensor, after: Any, then: Callable[[], Any] | None = None
    ) -> _Copied:
        if stream is None or after is None:
            target.copy_(source)
            return _Copied(None, then() if then is not None else None)
        stream.wait_event(after)
        with stream:
            target.copy_(source, non_blocking=True)
            if then is not None:
                then()()
        return _Copied(stream.record_event())


def activation_store(config: EngineConfig, communicator: Communicator, ledger: Ledger) -> ActivationStore | None:
    """Make the store for inputs of checkpointed modules, as configured; None if inputs are not moved."""
    to_host = config.offload is not None and config.offload.activations is not None
    if not to_host and not config.partition_activations:
        return None
    parts = communicator.activation_parts() if config.partition_activations else None
    return ActivationStore(communicator.device, to_host=to_host, parts=parts, ledger=ledger)
