"""All-gather and reduce-scatter by the fastest way of each backend, and the counters of what they moved.

On NCCL these are the backend's own. On Gloo both are direct exchanges between pairs of ranks, straight between the
slices of the flat buffers, which overlap with computation and are several times as fast as Gloo's own (see
``docs/benchmarks.md``); each owner adds in an order of its own that is always the same, whatever came first.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engine.same_machine import Exchange, Neighbours, Piece, connect
from lightning_zero.engine.small_messages import SMALL, SmallExchange, SmallMessages, bytes_of, fill, tensor_of
from lightning_zero.engine.watch import Watch, explained, failure

_CONTROL_TAG = 7698  # of small messages
_REDUCE_TAG = 7701
_TELL_TAG = 7700
_GATHER_TAG = 7702  # and up, a tag for each bucket: ranks that gather in another order wait, and never mix buckets up

# torch 2.13 renamed the two; the old names warn there
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_MESSAGE_BYTES = 2**25

_communicators = itertools.count()

_WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def wire_dtype_of(reduce_dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that ``reduce_dtype=`` names, in which gradients travel; None for the one in which they are kept.

    Raises:
        ValueError: if it is not one of those offered.
    """
    if reduce_dtype is None:
        return None
    for name, dtype in _WIRE_DTYPES.items():
        if reduce_dtype in (name, dtype):
            return dtype
    raise ValueError(
        f"reduce_dtype={reduce_dtype!r} is not a dtype in which gradients can travel: write 'fp32', 'bf16' or 'fp16', "
        "the torch.dtype itself, or None for the one in which they are kept (fp32; fp64 for fp64)."
    )


def _as_real(tensor: Tensor) -> Tensor:
    """NCCL has no complex dtypes; sums of these are sums of their parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def size_of(group: dist.ProcessGroup | None) -> int:
    """The ranks of a process group, None for the default one; 1 where there is none."""
    return dist.get_world_size(group or dist.group.WORLD) if _is_initialised() else 1


def _is_initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


class Counters:
    """Calls, logical elements and bytes by kind of collective ("all_gather", "reduce_scatter", "control").

    One all-gather of a bucket counts the whole padded bucket once, as the paper counts its communication volume
    (SC20, section 7): the wire carries (N - 1) / N of it each way.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, kind: str, *tensors: Tensor, dtype: torch.dtype | None = None) -> None:
        """Count one call that moves these tensors, in their own dtype or in another."""
        self.calls[kind] += 1
        for tensor in tensors:
            self.count(kind, tensor.numel(), dtype or tensor.dtype)

    def count(self, kind: str, numel: int, dtype: torch.dtype) -> None:
        self.elements[kind] += numel
        self.bytes[kind] += numel * dtype.itemsize


class Pending:
    """A collective in flight.

    Args:
        what: what it is for, in words, for the error that a failure becomes.
        works: the backend's handles.
        buffers: what they read and write, kept until they are done.
        finish: called once after all of them, on the thread that waits; its result is the result.
        watch: told of the wait; needed where there are works.
    """

    def __init__(
        self,
        what: str,
        works: list[Any],
        buffers: list[Tensor],
        finish: Callable[[], Any] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._what, self._works, self._buffers, self._finish = what, works, buffers, finish
        self._watch = watch
        self._ordinal = watch.begin(what) if watch is not None else 0

    def wait(self) -> Any:
        """Wait for it on the current stream (NCCL) or thread (Gloo).

        Raises:
            RuntimeError: if another rank failed, or did not take part within the process group's timeout.
        """
        if self._works:
            assert self._watch is not None
            with self._watch.waiting(self._what, self._ordinal):
                for work in self._works:
                    work.wait()
        result = self._finish() if self._finish is not None else None
        self._buffers = []
        return result

    def let_go(self) -> None:
        """Nobody here needs it any more, but peers may.

        Exchanges through memory go on without anybody who waits. (A garbage collection may call this in their thread.)
        """
        if not all(isinstance(work, (Exchange, SmallExchange)) for work in self._works):
            self.wait()


class Communicator:
    """The data-parallel group. With one rank it communicates nothing and counts nothing.

    Args:
        group: the process group, ``None`` for the default one; ignored where none is initialised.
        device: where the flat buffers live.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.counters = Counters()
        self.device = device
        # The stream of the module's forward, on which gradients are reduced: not those that parts of it may compute on.
        self.home: torch.Stream | None = None
        # In an evaluation loop of uneven length (uneven.py): ranks that only serve gathers, and how they are told.
        self.absent: list[int] = []
        self.before_gather: Callable[[int], None] | None = None
        self._background_group: Any = None
        self._neighbours: Neighbours | None = None  # all others, where each can read their memory
        self.size = size_of(group)
        self.group = (group or dist.group.WORLD) if _is_initialised() else None
        self.rank = dist.get_rank(self.group) if _is_initialised() else 0
        if self.size == 1:
            return
        assert self.group is not None
        self.backend = self.group._get_backend(device).name().lower()
        self._ranks = dist.get_process_group_ranks(self.group)
        # Ranks whose data differ may complete a gradient before or after the next gather starts. Over NCCL the two must
        # not share a queue, in which they would have to come in one order.
        # And what others ask of the group (Lightning once a batch) would wait for all gathers that came before it.
        self._own_groups: list[Any] = []
        is_gloo = self.backend == "gloo"
        self._gather_group, self._reduce_group = (
            self.group if is_gloo else self._new_group(self.backend) for _ in range(2)
        )
        # What ranks tell each other (bitmaps, orders) goes over the CPU, so that no device is synchronised for it.
        has_cpu = "cpu:" in dist.get_backend_config(self.group)
        self.control_group = self.group if has_cpu else self._new_group("gloo")
        # a name for what is kept in the store, which rank 0 gives: a failure may have left the ranks' counts apart
        number = torch.tensor(next(_communicators), device="cpu")
        with explained("setting up the sharded module"):
            dist.broadcast(number, self._ranks[0], self.control_group)
        self.name = f"{self._ranks[0]}/{number.item()}"
        # the modules of a process have engines of their own, which begin to communicate in an order that data decide
        first = int(number) % 2**11 << 20
        self._tell_tag, self._reduce_tag, self._gather_tag = first + _TELL_TAG, first + _REDUCE_TAG, first + _GATHER_TAG
        self._control_tag = first + _CONTROL_TAG
        self.watch = Watch(self.group, self.name, sees_waits=is_gloo)
        if is_gloo and device.type == "cpu" and (timeout := self._timeout) is not None:
            self._neighbours = connect(self.rank, self.size, timeout, self.gather_objects, failure)

    def all_gather(self, full: Tensor, number: int, what: str) -> Pending:
        """Fill a flat buffer of which this rank's slice is already in place.

        Args:
            full: 1-D, contiguous, world_size equal slices in the order of ranks.
            number: the bucket's, the same on every rank.
            what: for the error message.
        """
        if self.size == 1:
            return Pending(what, [], [])
        if self.before_gather is not None:
            self.before_gather(number)
        self.counters.add("all_gather", full)
        works = []
        with explained(what):
            if self.backend != "gloo":
                part = full.numel() // self.size
                own = full[self.rank * part : (self.rank + 1) * part]  # of a thousand ranks not all slices are made
                works.append(_all_gather_single(full, own, group=self._gather_group, async_op=True))
            elif (small := self._small_messages(full.nbytes // self.size)) is not None:
                works.append(self._gather_small(small, self._gather_tag + number, full.chunk(self.size)))
            elif self._neighbours is not None:
                works.append(self._neighbours.gather(self._gather_tag + number, full.chunk(self.size)))
            else:
                slices, tag = full.chunk(self.size), self._gather_tag + number
                for peer, source in self._peers():
                    works.append(dist.irecv(slices[source], self._ranks[source], self.group, tag=tag))
                    works.append(dist.isend(slices[self.rank], self._ranks[peer], self.group, tag=tag))
        return Pending(what, works, [full], watch=self.watch)

    def reduce_scatter(self, flat: Tensor, wire: torch.dtype, what: str) -> Pending:
        """Sum a flat buffer over ranks; ``wait()`` gives this rank's slice of the sum (1-D).

        Args:
            flat: 1-D, contiguous, world_size equal slices in the order of ranks. Its contents are used up.
            wire: the dtype in which slices travel. Over Gloo what comes is added up in the buffer's own dtype, to this
                rank's own slice as it is; NCCL adds in the wire's.
            what: for the error message.
        """
        assert self.size > 1, "a bucket keeps its gradients as they come over one rank"
        self.counters.add("reduce_scatter", flat, dtype=wire)
        dtype = flat.dtype
        if self.backend != "gloo":
            sent = flat.to(wire)
            shard = torch.empty_like(sent[: sent.numel() // self.size])
            mine, all_of_it = _as_real(shard), _as_real(sent)
            with explained(what):
                work = _reduce_scatter_single(mine, all_of_it, group=self._reduce_group, async_op=True)
            # the input is kept until the current stream has waited for its reader
            return Pending(what, [work], [sent], lambda: shard.to(dtype), watch=self.watch)
        slices = flat.chunk(self.size)
        if (small := self._small_messages(slices[0].numel() * wire.itemsize)) is not None:
            return self._reduce_small(small, slices, wire, what)
        if self._neighbours is not None:
            pieces = [[Piece(len(part), part if r == self.rank else part.to(wire))] for r, part in enumerate(slices)]
            return self._add_up(pieces, wire, 1.0, what)
        # a copy, where the others are cast, so that the buffer need not be kept for it
        own = slices[self.rank] if wire == dtype else slices[self.rank].clone()
        sent_parts, received, works = [], [], []
        with explained(what):
            for peer, source in self._peers():
                sent_parts.append(slices[peer].to(wire))
                received.append(torch.empty_like(slices[source], dtype=wire))
                works.append(dist.irecv(received[-1], self._ranks[source], self.group, tag=self._reduce_tag))
                works.append(dist.isend(sent_parts[-1], self._ranks[peer], self.group, tag=self._reduce_tag))

        def add_up() -> Tensor:
            total = received[0].to(dtype)
            for part in (own, *received[1:]):
                total.add_(part)
            return total

        return Pending(what, works, sent_parts, add_up, watch=self.watch)

    def _small_messages(self, nbytes: int) -> SmallMessages | None:
        """What exchanges so many bytes of each rank in messages, if that is the quickest way."""
        return self._neighbours.small if self._neighbours is not None and nbytes <= SMALL else None

    def _gather_small(self, small: SmallMessages, tag: int, slices: Sequence[Tensor]) -> SmallExchange:
        def finish(messages: list[bytes]) -> None:
            for rank, message in zip(small.ranks, messages):
                fill(slices[rank], message)

        return small.begin(tag, [bytes_of(slices[self.rank])] * (self.size - 1), finish)

    def _reduce_small(self, small: SmallMessages, slices: Sequence[Tensor], wire: torch.dtype, what: str) -> Pending:
        total, own = torch.empty_like(slices[self.rank]), slices[self.rank]

        def finish(messages: list[bytes]) -> None:
            came = [tensor_of(message, total, wire) for message in messages]
            torch.add(came[0].to(total.dtype), own, out=total)
            for part in came[1:]:
                total.add_(part)

        messages = [bytes_of(slices[rank].to(wire)) for rank in small.ranks]
        return Pending(what, [small.begin(self._reduce_tag, messages, finish)], [], lambda: total, watch=self.watch)

    @property
    def takes_pieces(self) -> bool:
        """Whether ``reduce_pieces`` is offered: what is reduced need not be in one buffer."""
        return self._neighbours is not None

    def reduce_pieces(self, pieces: list[list[Piece]], dtype: torch.dtype, factor: float, what: str) -> Pending:
        """``reduce_scatter`` of what lies in pieces, which are kept until the end.

        Args:
            pieces: by rank, what its slice is made of; cut alike on every rank.
            dtype: of all of them.
            factor: by which all is multiplied before it is summed.
            what: for the error message.
        """
        self.counters.calls["reduce_scatter"] += 1
        self.counters.count("reduce_scatter", sum(piece.numel for part in pieces for piece in part), dtype)
        return self._add_up(pieces, dtype, factor, what)

    def _add_up(self, pieces: list[list[Piece]], wire: torch.dtype, factor: float, what: str) -> Pending:
        assert self._neighbours is not None
        others = {rank: part for rank, part in enumerate(pieces) if rank != self.rank}
        exchange, total = self._neighbours.reduce(self._reduce_tag, pieces[self.rank], others, wire, factor)
        return Pending(what, [exchange], [], lambda: total, watch=self.watch)

    def reduction_bytes(self, flat: Tensor, wire: torch.dtype) -> int:
        """Bytes held while a flat buffer is reduced: what is sent, what is received, and one's own slice."""
        part = flat.numel() // self.size
        if self.backend != "gloo":
            return part * wire.itemsize * (self.size + 1)
        if self._neighbours is not None:
            copies = 0 if wire == flat.dtype else part * wire.itemsize * (self.size - 1)
            return flat.nbytes + part * flat.element_size() + copies
        return part * (flat.element_size() + 2 * wire.itemsize * (self.size - 1))

    def broadcast_ranges(self, flat: Tensor, ranges: list[tuple[int, int]], what: str) -> None:
        """Fill ``flat`` from its owners, ``ranges[r]`` from rank r: one broadcast each, for what is rare."""
        if self.size == 1:
            return
        works = []
        for source, (start, stop) in enumerate(ranges):
            if stop > start:
                self.counters.add("control", flat[start:stop])
                work = dist.broadcast(flat[start:stop], self._ranks[source], self.group, async_op=True)
                works.append(work)
        Pending(what, works, [flat], watch=self.watch).wait()

    def all_reduce(self, tensor: Tensor, op: Any = None) -> Tensor:
        """Reduce a small tensor in place, on the group's own device: from offloaded state over NCCL too."""
        if self.size == 1:
            return tensor
        on_device = tensor.to(self.device)
        self.counters.add("control", on_device)
        with self.watch.waiting("a sum, norm or extreme over ranks"):
            dist.all_reduce(on_device, op or dist.ReduceOp.SUM, self.group)
        return tensor.copy_(on_device) if on_device is not tensor else tensor

    def agree(self, tensor: Tensor, what: str) -> Tensor:
        """Elementwise maximum over ranks of a small CPU tensor, in place."""
        if self.size > 1:
            self.counters.add("control", tensor)
            small = self._small_messages(tensor.nbytes)
            with self.watch.waiting(what):
                if small is None:
                    dist.all_reduce(tensor, dist.ReduceOp.MAX, self.control_group)
                else:
                    key = small.send(self._control_tag, [bytes_of(tensor)] * (self.size - 1))
                    for message in small.receive(key):
                        torch.maximum(tensor, tensor_of(message, tensor), out=tensor)
        return tensor

    def from_first(self, tensor: Tensor) -> Tensor:
        """Rank 0's value of a tensor, in place: parameters and buffers at the start, and what rank 0 decides."""
        return self.broadcast(tensor, 0)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """One rank's value of a tensor, in place."""
        if self.size > 1:
            self.counters.add("control", tensor)
            group = self.control_group if tensor.device.type == "cpu" else self.group
            with self.watch.waiting(f"a broadcast from rank {source}"):
                dist.broadcast(tensor, self._ranks[source], group)
        return tensor

    def all_from_first(self, tensors: list[Tensor]) -> None:
        """Rank 0's values of several tensors, in place, in few messages."""
        if self.size == 1:
            return
        for group, on_cpu in ((self.control_group, True), (self.group, False)):
            assert group is not None
            chosen = [tensor for tensor in tensors if tensor.numel() and (tensor.device.type == "cpu") is on_cpu]
            if chosen:
                self.counters.add("control", *chosen)
                small = self._small_messages(sum(tensor.nbytes for tensor in chosen)) if on_cpu else None
                with self.watch.waiting("a broadcast of buffers from rank 0"):
                    if small is None:
                        dist._broadcast_coalesced(group, chosen, _MESSAGE_BYTES, 0)
                    else:
                        self._copy_from_first(small, chosen)

    def _copy_from_first(self, small: SmallMessages, tensors: list[Tensor]) -> None:
        if self.rank == 0:
            message = b"".join(bytes_of(tensor.contiguous()) for tensor in tensors)
            small.send(self._control_tag, [message] * (self.size - 1))
            torch.autograd.graph.increment_version(tensors)  # as on the other ranks
            return
        (message,) = small.receive(small.skip(self._control_tag), [small.ranks.index(0)])
        values = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        parts = values.split_with_sizes([tensor.nbytes for tensor in tensors])
        for tensor, part in zip(tensors, parts):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's small picklable value, in the order of ranks."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        with self.watch.waiting("an exchange of what each rank holds"):
            dist.all_gather_object(gathered, value, self.control_group)
        return gathered

    def is_alike(self, text: str) -> bool:
        """Whether every rank has the same text, of any length; in one small message, however many they are."""
        digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8).long()
        extremes = torch.cat([digest, -digest])
        if self.size > 1:
            with self.watch.waiting("a comparison of what each rank holds"):
                dist.all_reduce(extremes, dist.ReduceOp.MAX, self.control_group)
        return torch.equal(extremes[: len(digest)], -extremes[len(digest) :])

    def tell(self, ranks: list[int], message: Tensor) -> list[Any]:
        """Send a small CPU tensor, which is not to change, to some ranks, which ``hear`` it; the backend's handles."""
        self.counters.add("control", message)
        return [dist.isend(message, self._ranks[rank], self.control_group, tag=self._tell_tag) for rank in ranks]

    def hear(self, rank: int, message: Tensor, what: str) -> Tensor:
        """Fill a small CPU tensor with what a rank tells."""
        with self.watch.waiting(what, ordinal=0):
            dist.recv(message, self._ranks[rank], self.control_group, tag=self._tell_tag)
        return message

    def waiting(self, what: str, everyone: bool = True) -> AbstractContextManager[None]:
        """Around a wait for other ranks in something that is none of the engine's own; see ``Watch.waiting``.

        Args:
            what: a name, the same on every rank.
            everyone: whether every rank takes part.
        """
        if self.size == 1:
            return nullcontext()
        return self.watch.waiting(what, None if everyone else 0)

    def close(self) -> None:
        """End the watch over its waits, a turn in which a failure has left it, and the groups that it made."""
        self.absent, self.before_gather = [], None
        if self.size > 1:
            if self._neighbours is not None:
                self._neighbours.close()
            self.watch.close()
            while self._own_groups:
                with suppress(RuntimeError, ValueError):  # they may have failed, or be gone with the default group
                    dist.destroy_process_group(self._own_groups.pop())

    @cached_property
    def copies(self) -> torch.Stream:
        """The device's stream for what comes from the host's memory."""
        return torch.Stream(self.device)

    def background_group(self) -> Any:
        """A group for a thread that communicates beside all else, over the CPU. Collective, the first time."""
        if self.size > 1 and self._background_group is None:
            # Together: from then on each waits in the store, where the end of a rank does not reach it.
            self.agree(torch.zeros(1, device="cpu"), "making a group for the background")
            self._background_group = self._new_group("gloo")
        return self._background_group

    def _new_group(self, backend: str) -> Any:
        with explained("making a group"):
            self._own_groups.append(dist.new_group(self._ranks, timeout=self._timeout, backend=backend))
        return self._own_groups[-1]

    @property
    def _timeout(self) -> timedelta | None:
        """That of the group, which the user has chosen."""
        options = getattr(self.group._get_backend(self.device), "options", None)  # type: ignore[union-attr]
        return getattr(options, "_timeout", None)

    def _peers(self) -> list[tuple[int, int]]:
        """In the order of a ring, so that no rank is everybody's first: (whom to send to, whom to receive from)."""
        return [((self.rank + k) % self.size, (self.rank - k) % self.size) for k in range(1, self.size)]
