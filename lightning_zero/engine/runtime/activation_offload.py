"""Activation offload and partitioning: move inputs of checkpointed modules off the device until backward.

(P_a and P_a+cpu in Rajbhandari et al., "ZeRO", SC20, section 6.1; "ZeRO-Infinity", SC21, section 5.1.2.) Checkpointing
keeps one input per module; offload moves this input too, while other modules compute. Where tensor-parallel ranks
have the same input, each rank keeps one part, and the parts are gathered in backward:

    forward     | unit 1     | unit 2     | unit 3         copies:  | out: input 1 | out: input 2 |
    backward    | unit 3     | unit 2     | unit 1         copies:  | in: input 2  | in: input 1  |

An input's device memory is released when the next unit begins, so the last unit's input is still on the device when
backward begins. In backward each input is copied back while the unit that came next in forward is recomputed.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
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
from lightning_zero.engine.offload.scratch import Disk, Memory
from lightning_zero.engine.runtime.compile_hooks import untraced
from lightning_zero.engine.runtime.saved_tensors import Saved
from lightning_zero.engine.state.ledger import Ledger

LEAST = 2**16
"""Minimum size in bytes of a tensor to move: below this, the copy costs more than the memory is worth."""


_PLAIN = (Tensor, FakeTensor)  # no other subclasses, which may have state besides their memory


class ActivationStore:
    """Moves inputs of checkpointed modules, or all but this rank's part of them, off the device until backward.

    Dense floating-point tensors of at least ``LEAST`` bytes are moved, each once. The following are not moved:

    - tensors that are saved under the user's saved-tensor hooks (an enclosing region, ``save_on_cpu``), which keep or
      drop them in their own way;
    - leaves that require gradients, including parameters: their gradient accumulation node keeps them in any case;
    - inputs of several modules (an attention mask, rotary embeddings): the caller keeps them alive anyway, so
      nothing would be gained, and backward would fetch them once for each module.

    Args:
        device: the device whose memory is freed.
        place: where tensors are moved to.
        moves_whole: whether tensors that ranks do not share are moved too.
        parts: divides tensors that all tensor-parallel ranks share; None to move these tensors whole.
        ledger: counts the memory of kept tensors.
    """

    def __init__(
        self,
        device: torch.device,
        place: Memory | Disk,
        *,
        moves_whole: bool,
        parts: ActivationParts | None,
        ledger: Ledger,
    ) -> None:
        self.device, self._place, self._moves_whole, self._parts = device, place, moves_whole, parts
        self._copies = _Copies(device)
        self._ledger = ledger
        self._alike: weakref.WeakKeyDictionary[nn.Module, dict[str, frozenset[int]]] = weakref.WeakKeyDictionary()
        self._has_warned = False
        self._forwards = 0
        self._kept: weakref.WeakValueDictionary[tuple[Any, ...], Kept] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Region] | None = None

    def begin_forward(self) -> None:
        """Record that a forward of the root module begins.

        Earlier graphs may be kept on some ranks only, so collectives must not depend on inputs kept for these graphs.
        """
        self._last = None
        self._forwards += 1

    def take_out(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], AbstractContextManager[None]]:
        """Prepare a module's arguments for checkpointing, which saves tensors that are positional arguments.

        Returns:
            A function that calls the module; its arguments, with the tensors to move among the positional ones; and a
            context in which these tensors are moved when autograd saves them.
        """
        leaves, spec = tree_flatten((args, kwargs))
        positional = len(tree_leaves(args))
        moved = self._forms_of(module, leaves, repr(spec))
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

    def _forms_of(self, module: nn.Module, leaves: list[Any], call: str) -> dict[int, type[_Form]]:
        """Map the ``id`` of each argument to move to its form. Collective on the first call if inputs are partitioned.

        Args:
            call: describes the structure of the arguments, the same on every rank.
        """
        worth = {number: leaf for number, leaf in enumerate(leaves) if self._is_worth_moving(leaf)}
        if self._parts is None:
            return {id(leaf): _Form for leaf in worth.values()}
        forms: dict[int, type[_Form]] = {id(leaf): _Form for leaf in worth.values()} if self._moves_whole else {}
        alike = self._alike_in(module, leaves, call, worth)
        shared = (leaf for number, leaf in worth.items() if number in alike and _Form(leaf).is_dense)
        return forms | {id(leaf): _SharedForm for leaf in shared}

    def _alike_in(self, module: nn.Module, leaves: list[Any], call: str, worth: Mapping[int, Tensor]) -> frozenset[int]:
        """Indices of the arguments that are the same on all tensor-parallel ranks; the first call compares them."""
        known = self._alike.setdefault(module, {})
        if call not in known:
            assert self._parts is not None
            # tensors of any size are compared, so that every rank takes part
            values = {number: leaf for number, leaf in enumerate(leaves) if type(leaf) in _PLAIN}
            alike = self._parts.agree(values)
            if alike is None:
                return frozenset()
            known[call] = alike
            if worth and alike.isdisjoint(worth) and self._parts.is_first and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"partition_activations: the inputs of {type(module).__name__} differ between tensor-parallel "
                    "ranks, for example because sequence parallelism has already divided them. They are not "
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
            and LEAST <= tensor.nbytes <= tensor.untyped_storage().nbytes()  # false for expanded tensors
        )

    @contextmanager
    def _moving(self, moved: dict[int, type[_Form]]) -> Iterator[None]:
        """Context in which tensors that autograd saves are moved if their ``id`` is in ``moved``.

        Autograd restores the graph of a saved tensor, so a moved input has its graph when it is unpacked.
        """
        before = self._last() if self._last is not None else None
        if before is not None:
            before.let_go()
        region = _Region(self._last)
        outer = hooks_on_top() or (Saved.of, Saved.unpack)

        @untraced
        def pack(tensor: Tensor) -> Any:
            form = moved.get(id(tensor))
            return self._keep(tensor, form, region) if form is not None else outer[0](tensor)

        @untraced
        def unpack(packed: Any) -> Tensor:
            return packed.value() if type(packed) is Kept else outer[1](packed)

        push_hooks(pack, unpack)
        try:
            yield
        finally:
            pop_hooks()

    def _keep(self, tensor: Tensor, form: type[_Form], region: _Region) -> Kept:
        # The address is not reused as long as ``Kept`` lives, so an equal key means the same memory.
        address = address_of(tensor.untyped_storage())
        shape = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        key = (address, shape, tensor._version, self._forwards if form is _SharedForm else 0)
        kept = self._kept.get(key)
        if kept is not None:
            kept.stay(tensor)
        else:
            layout, in_memory = form(tensor, self._parts), isinstance(self._place, Memory)
            count = partial(self._ledger.add, "host" if self._moves_whole else "activations")
            if in_memory:
                count(layout.nbytes)
            kept = self._kept[key] = Kept(tensor, layout, region, self._copies, self._place)
            if in_memory:
                weakref.finalize(kept, count, -layout.nbytes).atexit = False
            self._last = weakref.ref(region)
        return kept


class _Region:
    """Tensors moved in one forward of a checkpointed module, as weak references; each ``Kept`` holds its region."""

    def __init__(self, previous: weakref.ref[_Region] | None) -> None:
        self._kept: list[weakref.ref[Kept]] = []  # in the same order on every rank
        self.previous = previous  # the region of the previous module, which is the next in backward

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

    _where: Any = None
    _arriving: tuple[Tensor, Future[_Copied]] | None = None
    _original: Saved | None = None  # set until ``let_go``
    _copied: _Copied | None = None

    def __init__(self, tensor: Tensor, form: _Form, region: _Region, copies: _Copies, place: Memory | Disk) -> None:
        self.region = region
        self._copies, self._place, self._form, self.nbytes = copies, place, form, form.nbytes
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._original = Saved.of(tensor)
        self._stays = False
        room = place.memory(form.nbytes)
        self._copied = copies.out(form.kept_of(self._original.tensor), form.in_place(room))
        self._where = place.put(room, self._copied.event)
        region.add(self)

    def let_go(self) -> None:
        """Release the original, so that later computation may reuse its memory."""
        if self._original is not None and not self._stays:
            # First wait, then compare: writes before the wait have changed the version; later ones come after the copy.
            assert self._copied is not None
            self._copies.wait(self._copied)
            if self._copied.event is None or self._original.is_unchanged:
                self._original = None
            else:
                self._stays = True  # the copy may contain written values, so ``value`` raises autograd's error

    def stay(self, tensor: Tensor) -> None:
        """Keep the original on the device, because another module has the same input."""
        if not self._stays:
            self._stays, self._original = True, Saved.of(tensor)
            self._forget()

    def fetch(self) -> None:
        """Start to copy the values back to the device, unless they are already there or on their way."""
        if self._original is not None or self._arriving is not None:
            return
        target = self._form.empty()
        # When this event occurs, the previous use of the memory has ended, and so has the copy out (see ``let_go``).
        ready = self._copies.now()
        copies, form = self._copies, self._form  # not ``self``, which a running read must not keep alive

        def deliver(room: Tensor) -> _Copied:
            return copies.into(form.kept_of(target), form.in_place(room), after=ready, then=form.completes(target))

        self._arriving = target, self._place.get(self._where, deliver)

    @torch.no_grad()
    def value(self) -> Tensor:
        """Return the original values on the device, ready for the current stream. Also prefetches the next region."""
        if self._original is not None and not self._original.is_unchanged:
            self.let_go()
        if self._original is None and self._arriving is None:
            self.region.fetch()
        before = self.region.previous() if self.region.previous is not None else None
        if before is not None:
            before.fetch()
        if self._original is not None:  # the first module in backward, or an input of several modules
            return self._original.unpack()
        assert self._arriving is not None
        (target, arrival), self._arriving = self._arriving, None
        try:
            self._copies.wait(arrival.result())
        finally:
            del arrival  # its exception, if any, has a traceback that refers to this frame
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
    """Memory layout of a tensor, with the alignment of its first element, which may affect the order of kernels' sums.

    Attributes:
        nbytes: the number of kept bytes.
    """

    def __init__(self, tensor: Tensor, parts: ActivationParts | None = None) -> None:
        self._size, self._stride, self.nbytes = tensor.size(), tensor.stride(), tensor.nbytes
        self._dtype, self._device = tensor.dtype, tensor.device
        self._dense = torch.empty_like(tensor, device="meta").stride()  # the same order of dimensions, without gaps
        self._lead = tensor.data_ptr() % 64 // tensor.element_size()  # elements past a multiple of 64 bytes

    @property
    def is_dense(self) -> bool:
        return self._stride == self._dense

    def kept_of(self, tensor: Tensor) -> Tensor:
        """Return the kept part of the tensor, or of a tensor made by ``empty``."""
        return tensor

    def in_place(self, memory: Tensor) -> Tensor:
        """View bytes as the kept elements, without gaps."""
        return memory[: self.nbytes].view(self._dtype).as_strided(self._size, self._dense)

    def completes(self, target: Tensor) -> Callable[[], Any] | None:
        """Return a function that starts to fetch the elements kept by other ranks; None if all elements are kept."""
        return None

    def empty(self) -> Tensor:
        """Allocate a tensor with the same layout on the device."""
        span = 1 + sum((count - 1) * step for count, step in zip(self._size, self._stride))
        return self._empty(span)

    def _empty(self, span: int) -> Tensor:
        memory = torch.empty(self._lead + span, dtype=self._dtype, device=self._device)
        return memory.as_strided(self._size, self._stride, self._lead)


class _SharedForm(_Form):
    """A dense tensor identical on all tensor-parallel ranks: each rank keeps an equal range, the last ranks less."""

    def __init__(self, tensor: Tensor, parts: ActivationParts | None) -> None:
        super().__init__(tensor)
        assert parts is not None and self.is_dense
        self._parts, self._mark, numel = parts, mark_of(tensor), tensor.numel()
        self._length = -(-numel // parts.size)
        start = min(parts.rank * self._length, numel)
        self._own = slice(start, min(start + self._length, numel))
        self.nbytes = self._length * tensor.element_size()

    def kept_of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())[self._own]

    def in_place(self, memory: Tensor) -> Tensor:
        return memory[: self.nbytes].view(self._dtype)[: self._own.stop - self._own.start]

    def completes(self, target: Tensor) -> Callable[[], Any] | None:
        padded = target.as_strided((self._length * self._parts.size,), (1,), target.storage_offset())
        return partial(self._parts.gather, padded, self._mark)

    def empty(self) -> Tensor:
        return self._empty(self._length * self._parts.size)


class _Copied(NamedTuple):
    """A copy that has begun, and the operation that follows the copy, if any.

    Attributes:
        event: an event on a stream, after the copy and the operation; None if there is no stream.
        wait: waits for the operation, in any thread; None if there is nothing to wait for.
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
        """Record an event after all work queued on the device so far."""
        stream = current_stream(self._device)
        return None if stream is None else stream.record_event()

    def wait(self, copied: _Copied) -> None:
        """Make the current stream wait for a copy and the operation after it."""
        if copied.event is not None:
            torch.accelerator.current_stream(self._device).wait_event(copied.event)
        if copied.wait is not None:
            copied.wait()

    def out(self, source: Tensor, target: Tensor) -> _Copied:
        """Copy from the device to the memory that the tensor is kept in."""
        return self._copy(self._leaving, target, source, self.now())

    def into(
        self, target: Tensor, source: Tensor, after: torch.Event | None, then: Callable[[], Any] | None
    ) -> _Copied:
        """Copy to the device after an event, in any thread, and start the operation ``then``."""
        return self._copy(self._coming, target, source, after, then)

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
    """Make the store for inputs of checkpointed modules, as the options require; None if inputs are not moved."""
    offload, device = config.offloads, communicator.device
    target = offload.activations if offload is not None else None
    if target is None and not config.partition_activations:
        return None
    is_pinned = device.type != "cpu"
    place: Memory | Disk = Memory(device)
    if target == "cpu":
        place = Memory(torch.device("cpu"), is_pinned=is_pinned)
    elif offload is not None and target is not None:
        place = Disk(os.fspath(offload.path or ""), is_pinned)
    parts = communicator.activation_parts() if config.partition_activations else None
    return ActivationStore(device, place, moves_whole=target is not None, parts=parts, ledger=ledger)
