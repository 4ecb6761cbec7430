"""Communication with ranks that do not exist: for running the engine as one rank of many on fake tensors.

Only the shapes of results are right. Every rank is taken to hold what this one holds, and to be where this one is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_zero.engine import Engine
from lightning_zero.engine.comm.codec import Codec
from lightning_zero.engine.comm.collectives import Pending
from lightning_zero.engine.comm.counters import Counters
from lightning_zero.engine.comm.rendezvous import Absence
from lightning_zero.engine.comm.transport import Ranges, Started
from lightning_zero.engine.config import EngineConfig
from lightning_zero.engine.offload.updates import Updates
from lightning_zero.planning.timeline import Recorder

T = TypeVar("T")


class PretendControlPlane:
    """Answers at once, as if every rank had said what this one says. See ``ControlPlane`` for the methods."""

    small = None

    def __init__(self, size: int) -> None:
        self._size = size

    def any_rank(self, flags: Sequence[bool], what: str) -> list[bool]:
        return list(flags)

    def gather_numbers(self, number: int, what: str) -> list[int]:
        return [number] * self._size

    def numbers_of_first(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def copy_from_first(self, tensors: list[Tensor]) -> None:
        pass

    def gather_objects(self, value: T) -> list[T]:
        return [value] * self._size

    def is_alike(self, text: str) -> bool:
        return True


class PretendWatch:
    """Watches over no waits."""

    ended: frozenset[int] = frozenset()

    def begin(self, what: str) -> int:
        return 0

    def waiting(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()


class PretendCommunicator:
    """Rank 0 of so many ranks. See ``Communicator`` for the methods.

    Buffers are allocated as the backend's own reduce-scatter needs them (NCCL): the result's shard, and the encoded
    gradients where they are encoded.

    Args:
        size: the number of ranks.
        device: where the flat buffers live.
        recorder: notes the collectives.
    """

    takes_pieces = False
    rank = 0
    name = "pretend"

    def __init__(self, size: int, device: torch.device, recorder: Recorder) -> None:
        self.size, self.device, self._recorder = size, device, recorder
        self.counters, self.watch, self.control = Counters(), PretendWatch(), PretendControlPlane(size)

    def all_gather(self, full: Tensor, ranges: Ranges, number: int, what: str, own: Tensor | None = None) -> Pending:
        if self.size == 1:
            return Pending(what)
        self.counters.add("all_gather", full.numel(), full.nbytes)
        return Pending(what, Started([self._sent_of(full.nbytes)], [full]), self.watch)  # type: ignore[arg-type]

    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec, what: str) -> Pending:
        sent = codec.encode(flat)
        self.counters.add("reduce_scatter", flat.numel(), sent.nbytes)
        shard = torch.empty_like(sent[: sent.numel() // self.size])
        started = Started([self._sent_of(sent.nbytes)], [sent], lambda: codec.decode(shard, flat.dtype))
        return Pending(what, started, self.watch)  # type: ignore[arg-type]

    def _sent_of(self, nbytes: int) -> Callable[[], None]:
        """Note a collective over a full buffer, of which a rank sends all but its own part; returns the wait for it."""
        return partial(self._recorder.wait, self._recorder.launch(nbytes * (self.size - 1) / self.size))

    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        return codec.size(flat.numel() // self.size) * codec.dtype.itemsize * (self.size + 1)

    def broadcast_ranges(self, flat: Tensor, ranges: list[tuple[int, int]], what: str) -> None:
        pass

    def all_reduce(self, tensor: Tensor, op: Any = None) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def copy_from_first(self, tensors: list[Tensor]) -> None:
        pass

    def waiting(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class PretendRendezvous:
    """Every rank comes at once. See ``Rendezvous`` for the methods."""

    is_closed = False
    meetings = 0

    def __init__(self) -> None:
        self.absence = Absence()

    def meet(self, what: str) -> None:
        self.meetings += 1

    def met(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def require_all(self, what: str) -> None:
        pass

    def close(self) -> None:
        pass


class InlineUpdates(Updates):
    """Updates where they are submitted: fake tensors are made in the thread that has entered the fake mode.

    Args:
        recorder: notes their operators as the host's.
        gradients: as for ``Updates``.
    """

    def __init__(self, recorder: Recorder, gradients: bool) -> None:
        super().__init__(False, gradients)
        self._recorder = recorder

    def _put(self, run: Callable[[], None]) -> None:
        self._recorder.on_host = True
        try:
            run()
        finally:
            self._recorder.on_host = False


def pretending(ranks: int, recorder: Recorder) -> type[Engine]:
    """A class of engines that run as rank 0 of so many ranks, none of which exists."""

    class PretendingEngine(Engine):
        _check_room = staticmethod(lambda *_: None)  # type: ignore[assignment]  # these ranks run on other hosts

        def _world_size(self, group: Any) -> int:
            return ranks

        def _connect(self, group: Any, device: torch.device) -> None:
            self.communicator = PretendCommunicator(ranks, device, recorder)  # type: ignore[assignment]
            self.rendezvous = PretendRendezvous()  # type: ignore[assignment]

        def _updates_thread(self, config: EngineConfig) -> Updates:
            return InlineUpdates(recorder, config.offloads is not None and config.offloads.gradients is not None)

    return PretendingEngine
