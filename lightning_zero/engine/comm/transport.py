"""The interface of transports: two operations on flat buffers, each started on all ranks in the same order.

Beside it are the codecs, in which gradients are sent, and the chains, in which a background thread does later steps.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from lightning_zero.engine.compat import address_of

# -- codecs ------------------------------------------------------------------------------------------------------------


class Codec(Protocol):
    """Encodes gradients before they are sent, and decodes received gradients."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of encoded values."""

    def encode(self, values: Tensor) -> Tensor:
        """Encode 1-D values to be sent; return ``values`` itself if nothing changes."""

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Decode ``numel`` values to ``dtype``; return ``encoded`` itself if nothing changes."""

    def size(self, numel: int) -> int:
        """The number of encoded elements for ``numel`` values."""


def encoded_bytes(codec: Codec, numel: int) -> int:
    """The bytes of ``numel`` values once they are encoded."""
    return codec.size(numel) * codec.dtype.itemsize


@dataclass(frozen=True)
class Cast:
    """Sends values in a given dtype; values that already have this dtype are not copied."""

    dtype: torch.dtype

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return encoded.to(dtype)

    def size(self, numel: int) -> int:
        return numel


@dataclass(frozen=True)
class Quantised:
    """Sends fp32 values as low-bit integers, with one fp32 scale for each block of neighbouring values.

    The largest magnitude of a block becomes the largest integer. (Dettmers et al., "8-bit Optimizers via Block-wise
    Quantization", ICLR 2022, section 2.1; Wang et al., "ZeRO++", ICLR 2024, section 3.3.) A non-finite
    value makes all values of its block non-finite, so overflows are still found.

    Args:
        bits: the number of bits of an integer.
        block: the number of values that share a scale; must be even.
    """

    bits: Literal[4, 8]
    block: int = 128
    dtype: ClassVar[torch.dtype] = torch.uint8

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def size(self, numel: int) -> int:
        return self._blocks(numel) * (4 + self.block * self.bits // 8)

    def encode(self, values: Tensor) -> Tensor:
        blocks = self._blocks(len(values))
        padded = torch.nn.functional.pad(values.float(), (0, blocks * self.block - len(values)))
        padded = padded.view(blocks, self.block)
        scales = padded.abs().amax(1, keepdim=True).div_(2 ** (self.bits - 1) - 1)
        scales.clamp_(min=torch.finfo(torch.float32).tiny)  # prevents division by 0 in blocks of zeros
        integers = (padded / scales).round_().to(torch.int8).view(-1)
        encoded = integers.view(torch.uint8) if self.bits == 8 else _packed(integers.add_(8).view(torch.uint8))
        return torch.cat([scales.view(-1).view(torch.uint8), encoded])

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        blocks = self._blocks(numel)
        # a copy, since a view as fp32 requires aligned memory
        scales, integers = encoded[: 4 * blocks].clone().view(torch.float32), encoded[4 * blocks :]
        if self.bits == 8:
            values = integers.view(torch.int8).to(torch.float32)
        else:
            values = _unpacked(integers).to(torch.float32).sub_(8)
        return values.view(blocks, self.block).mul_(scales[:, None]).view(-1)[:numel].to(dtype)


def _packed(codes: Tensor) -> Tensor:
    """Pack an even number of codes of 4 bits into bytes. Each byte has a code from each half of ``codes``."""
    low, high = codes.tensor_split(2)
    return low | high << 4


def _unpacked(packed: Tensor) -> Tensor:
    return torch.cat([packed & 15, packed >> 4])


# -- transports --------------------------------------------------------------------------------------------------------


Bounds = Sequence[int]
"""The start of each rank's slice in a flat buffer, in the order of positions along the dimensions, and the last end."""


def are_equal(bounds: Bounds) -> bool:
    """Whether all slices have the same length."""
    return isinstance(bounds, range) or len({stop - start for start, stop in pairwise(bounds)}) == 1


def slices_of(flat: Tensor, bounds: Bounds) -> list[Tensor]:
    return [flat[start:stop] for start, stop in pairwise(bounds)]


class Pending:
    """A collective in flight, which completes even if this rank never waits for it.

    Args:
        waits: functions that block the current stream (NCCL) or the thread until the collective is complete.
        buffers: the tensors that the transport reads and writes, kept alive until the collective is complete.
        finish: called once after all waits; returns the collective's result.

    Attributes:
        waiting: the context of the waits, in which errors say why they ended.
    """

    def __init__(
        self, waits: list[Callable[[], Any]], buffers: list[Tensor], finish: Callable[[], Any] = lambda: None
    ) -> None:
        self.waits, self.buffers, self._finish = waits, buffers, finish
        self.waiting: AbstractContextManager[None] = nullcontext()

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the collective's buffers when this is first read; a later step may make others (``Levels``)."""
        storages = (buffer.untyped_storage() for buffer in self.buffers)
        return sum({address_of(storage): storage.nbytes() for storage in storages}.values())

    def wait(self) -> Any:
        """Make the current stream (NCCL) or thread (Gloo) wait for the collective, and return its result.

        Raises:
            RuntimeError: if another rank failed, or did not take part within the process group's timeout.
        """
        if self.waits:
            with self.waiting:
                self.block()
        return self.finish()

    def block(self) -> None:
        """The first part of ``wait``: block the current stream or thread."""
        for wait in self.waits:
            wait()

    def finish(self) -> Any:
        """The last part of ``wait``: return the result."""
        self.waits, self.buffers = [], []  # first, since ``_finish`` may need memory, and works may keep their buffers
        return self._finish()


class Transport(ABC):
    """Moves flat buffers, which are 1-D and contiguous.

    All ranks must start gathers in the same order, and reductions in the same order. Implementations give the same
    results, bit for bit, since they all add up values in the order of ranks.

    Attributes:
        encodes_within: whether gradients are also encoded when sent between ranks of one machine.
    """

    encodes_within: bool = True

    @abstractmethod
    def all_gather(self, full: Tensor, bounds: Bounds) -> Pending:
        """Fill a flat buffer with the slices of all ranks.

        Args:
            full: the buffer, which already holds this rank's slice.
            bounds: where each rank's slice begins and ends.
        """

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, bounds: Bounds, codec: Codec) -> Pending:
        """Sum a flat buffer over ranks; the result is this rank's slice of the sum, in the buffer's dtype."""

    def close(self) -> None:  # noqa: B027 - most transports have nothing to close
        """Start no more collectives. Those in flight are still completed, since other ranks wait for them."""


# -- later steps of collectives ----------------------------------------------------------------------------------------


class Chain:
    """Calls functions in a background thread, in the order of ``submit``, which all ranks share.

    The thread is a daemon, not an executor's thread: it waits for other ranks, and must not keep the interpreter from
    exiting.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._queue,), name=f"lightning_zero-{name}", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._queue.put, None)
        self._end.atexit = False

    def submit(self, act: Callable[[], Any]) -> Future[Any]:
        """Let the thread call a function, such as a later step of a collective."""
        done: Future[Any] = Future()

        def go_on() -> None:
            nonlocal act
            try:
                result = act()
                del act  # with the tensors that it refers to, before another thread goes on
                done.set_result(result)
            except BaseException as error:
                done.set_exception(error)

        if self._end.alive:
            self._queue.put(go_on)
        else:
            done.set_exception(RuntimeError("the transport was closed"))
        return done

    def close(self, then: Callable[[], None]) -> None:
        """End the thread, once all that was started has been done or failed, and ``then`` was called.

        A second call adds nothing to the queue: what no thread takes from it would keep the process groups alive.
        """
        if self._end.alive:
            self._queue.put(then)
            self._end()
        if threading.current_thread() is not self._thread:
            # This thread must not drop the last reference to a process group: destroying one at exit ends in an abort.
            self._thread.join(timeout=2)


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (go_on := queue.get()) is not None:
        go_on()
        del go_on  # with the tensors that it refers to
