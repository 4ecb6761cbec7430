"""What an engine needs to run as one rank of a process group of torch's backend ``fake``, which has no other rank.

All ranks are assumed to hold the same values, and to be at the same point of the program. Only the shapes of results
are correct.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_zero.engine.comm.codec import Quantised
from lightning_zero.engine.comm.gloo_transport import GlooTransport
from lightning_zero.engine.comm.process_group import ProcessGroup
from lightning_zero.engine.comm.shared_memory_transport import SharedMemoryTransport
from lightning_zero.engine.comm.transport import Ranges, Span, Started, Transport, slices_of


@dataclass(frozen=True)
class Simulation:
    """What a fake process group does not tell about its ranks, and what is called when they would communicate.

    Updates and reads in the background run in the calling thread, and no files are created.

    Attributes:
        transport: the transport whose buffers are allocated.
        machines: number of machines; the ranks are split evenly among them.
        sends: called when a collective begins, with the bytes that this rank sends, and the bytes that all ranks of its
            machine send to other machines; returns a function that is called when this rank waits for the collective.
        gathers: the same for a gather over tensor-parallel ranks; called with the bytes of the whole buffer.
        on_host: context of an update in the host's memory.
        moves: called with the number of bytes that are read from or written to a disk.
    """

    transport: Literal["nccl", "gloo", "shared memory"] = "nccl"
    machines: int = 1
    sends: Callable[[float, float], Callable[[], None]] = lambda sent, leaving: lambda: None
    gathers: Callable[[int], Callable[[], None]] = lambda nbytes: lambda: None
    on_host: Callable[[], AbstractContextManager[None]] = nullcontext
    moves: Callable[[int], None] = lambda nbytes: None


class SimulatedFile:
    """A file with a size but no content. See ``SwapFile`` for the methods."""

    def __init__(self, nbytes: int, moves: Callable[[int], None]) -> None:
        self.nbytes, self._moves = nbytes, moves

    def read(self, into: memoryview, position: int) -> None:
        self._moves(len(into))

    def write(self, data: memoryview, position: int) -> None:
        self._moves(len(data))

    def close(self) -> None:
        pass


class _Exchanges:
    """``CrossMemoryExchanges`` without peers. Sent values stay in memory until the exchange is awaited."""

    small = None

    def gather(self, tag: int, slices: Sequence[Tensor]) -> _Exchange:
        return _Exchange(slices)

    def reduce(
        self, tag: int, own: Sequence[Span], sent: Mapping[int, Sequence[Span]], wire: torch.dtype, factor: float = 1.0
    ) -> tuple[_Exchange, Tensor]:
        dtype = next((span.values.dtype for span in own if span.values is not None), wire)
        total = torch.empty(sum(span.numel for span in own), dtype=dtype, device="cpu")
        return _Exchange((own, sent)), total


class _Exchange:
    def __init__(self, kept: Any) -> None:
        self._kept = kept

    def wait(self) -> None:
        pass


_CHANGES = Quantised(4, 128)
"""Simulates encoded parameter changes. Their real length depends on values, which fake tensors lack: with AdamW, it is
2.5 to 9 bits per element for learning rates from 1e-5 to 1e-3. Real encoding takes about as long."""


class _Changes(Transport):
    """Mixin that exchanges changes of parameters in messages whose length does not depend on values."""

    _rank: int

    def encode_changes(self, own: Tensor, new: Tensor) -> Tensor:
        message = _CHANGES.encode(new.float() - own)
        own.copy_(new)
        return message

    def exchange_changes(self, full: Tensor, ranges: Ranges, number: int, message: Tensor) -> Started:
        slices = slices_of(full, ranges)
        for part in (*slices[: self._rank], *slices[self._rank + 1 :]):
            _CHANGES.decode(message.new_zeros(_CHANGES.size(len(part))), len(part), torch.float32).add_(part)
        return Started([], [full])


class _Gloo(_Changes, GlooTransport):
    pass


class _SharedMemory(_Changes, SharedMemoryTransport):
    pass


def simulated_transport(kind: str, group: ProcessGroup, members: Sequence[int], place: int) -> Transport:
    """Make a transport on CPUs.

    Args:
        kind: ``"gloo"`` or ``"shared memory"``.
        group: a fake process group.
        members: the ranks of the group that take part.
        place: this rank's index in ``members``.
    """
    if kind == "gloo":
        return _Gloo(group, 0, 0, members)
    return _SharedMemory(_Exchanges(), place, 0, 0)  # type: ignore[arg-type]
