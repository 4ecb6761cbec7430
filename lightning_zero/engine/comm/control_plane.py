"""Exchange Python values and small tensors between ranks; parameters and gradients are sent by transports instead.

Python values travel over the CPU, so that exchanging them does not synchronise with a device.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engine.comm.counters import Counters
from lightning_zero.engine.comm.cross_memory.small_messages import CONTROL_TAG, SmallMessages, bytes_of
from lightning_zero.engine.comm.failures import Notices
from lightning_zero.engine.comm.process_group import ProcessGroup, all_gather_objects, broadcast_coalesced

MESSAGE_BYTES = 2**25
_MESSAGE = 2**12  # bytes of each message that carries flags or numbers


class ControlPlane:
    """The ranks of a group, and their exchanges of Python values and small tensors.

    Without a process group, nothing is communicated, and all ranks are assumed to have this rank's values.

    Args:
        ranks: the group's ranks, as numbered in the default group.
        rank: this rank's number in the group.
        group: a process group of these ranks that communicates over the CPU.
        on_device: a process group of these ranks that communicates tensors on the device.

    Attributes:
        size: the number of ranks.
        counters: count what is sent.
        notices: turns failures and deadlocks during waits into errors; None if no other process exists.
        name: the engine's name, the same on every rank and new for each engine; empty if no other process exists.
        small: a faster channel for ``any_rank`` and ``gather_numbers`` between ranks of one machine, or None.
    """

    def __init__(
        self,
        counters: Counters,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        group: ProcessGroup | None = None,
        on_device: ProcessGroup | None = None,
        notices: Notices | None = None,
        name: str = "",
    ) -> None:
        self.ranks, self.rank, self.size = ranks, rank, len(ranks)
        self.notices, self.name, self.counters = notices, name, counters
        self.small: SmallMessages | None = None
        self._group, self._on_device = group, on_device

    def waiting(
        self, what: str, members: Sequence[int] | None = None, *, everyone: bool = True
    ) -> AbstractContextManager[None]:
        """Context in which this rank waits for other ranks of the group; see ``Notices.waiting``.

        Args:
            members: the ranks among which the collective takes place, as numbered in the default group; by default all.
        """
        if self.notices is None:
            return nullcontext()
        return self.notices.waiting(self.name, what, members or self.ranks, everyone=everyone)

    @property
    def gone(self) -> list[int]:
        """The ranks, as numbered in the group, whose processes have ended."""
        ended = self.notices.gone if self.notices is not None else ()
        return [place for place, rank in enumerate(self.ranks) if rank in ended]

    @property
    def _is_alone(self) -> bool:
        return self._group is None

    def any_rank(self, flags: Sequence[bool], what: str) -> list[bool]:
        """Return, for each flag, whether any rank has set it. Collective; every rank passes as many flags."""
        if self._is_alone:
            return list(flags)
        return list(map(bool, self._maximum(torch.tensor(flags, dtype=torch.uint8, device="cpu"), what).tolist()))

    def gather_numbers(self, number: int, what: str) -> list[int]:
        """Gather one number (0 or more) from each rank, in the order of ranks. Collective."""
        if self._is_alone:
            return [number] * self.size
        numbers = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        numbers[self.rank] = number
        return self._maximum(numbers, what).tolist()

    def _maximum(self, tensor: Tensor, what: str) -> Tensor:
        """Replace a tensor with its maximum over ranks, byte by byte, and return it.

        Each message names ``what``, and has the same length: where lengths differ, Gloo aborts the process.
        """
        self.counters.add("control", tensor.numel(), tensor.nbytes)
        crc32 = zlib.crc32(what.encode())
        label = torch.tensor([*struct.pack("<LL", crc32, crc32 ^ 0xFFFFFFFF)], dtype=torch.uint8, device="cpu")
        with self.waiting(what):
            for part in tensor.view(torch.uint8).split(_MESSAGE - len(label)):
                message = torch.cat([label, part, part.new_zeros(_MESSAGE - len(label) - len(part))])
                if self.small is None:
                    dist.all_reduce(message, dist.ReduceOp.MAX, self._group)
                else:
                    key = self.small.send(CONTROL_TAG, [bytes_of(message)] * len(self.small.ranks))
                    for other in self.small.receive(key):
                        torch.maximum(message, torch.frombuffer(bytearray(other), dtype=torch.uint8), out=message)
                if not torch.equal(message[: len(label)], label):
                    raise RuntimeError("another rank is at another exchange")
                part.copy_(message[len(label) :][: len(part)])
        return tensor

    def numbers_of(self, source: int, numbers: Sequence[int], what: str) -> list[int]:
        """Broadcast a rank's numbers, and return them. Collective; every rank passes the same count of numbers."""
        if self._is_alone:  # perhaps among fake tensors, whose values cannot be read
            return list(numbers)
        return self.broadcast(torch.tensor(numbers, dtype=torch.int64, device="cpu"), source, what).tolist()

    def _group_of(self, tensor: Tensor) -> ProcessGroup | None:
        """The process group that communicates tensors on this tensor's device."""
        return self._group if tensor.device.type == "cpu" else self._on_device

    def broadcast(self, tensor: Tensor, source: int = 0, what: str | None = None) -> Tensor:
        """Broadcast one rank's value of a tensor on any device, in place. Collective."""
        if self._is_alone:
            return tensor
        self.counters.add("control", tensor.numel(), tensor.nbytes)
        values = tensor.detach().resolve_conj().resolve_neg().contiguous()
        with self.waiting(what or f"a broadcast from rank {source}"):
            sent = values.view(-1).view(torch.uint8)  # Gloo lacks some dtypes
            dist.broadcast(sent, self.ranks[source], self._group_of(tensor))
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():  # ``values`` are a copy
            with torch.no_grad():
                tensor.copy_(values)
        return tensor

    def all_reduce(self, tensor: Tensor, op: Any = None) -> None:
        """Reduce a small tensor on the device over ranks, in place. Collective."""
        if not self._is_alone:
            self.counters.add("control", tensor.numel(), tensor.nbytes)
            with self.waiting("an all-reduce of values over ranks"):
                dist.all_reduce(tensor, op or dist.ReduceOp.SUM, self._group_of(tensor))

    def copy_from_first(self, tensors: list[Tensor]) -> None:
        """Broadcast rank 0's values of several tensors, such as buffers, in place and in a few messages. Collective."""
        if self._is_alone:
            return
        tensors = [tensor for tensor in tensors if tensor.numel()]
        for on_cpu in (True, False):
            alike = [tensor for tensor in tensors if (tensor.device.type == "cpu") == on_cpu]
            if alike:
                group = self._group_of(alike[0])
                assert group is not None, "this control plane sends no tensors on the device"
                numel, nbytes = sum(tensor.numel() for tensor in alike), sum(tensor.nbytes for tensor in alike)
                self.counters.add("control", numel, nbytes)
                with self.waiting("a broadcast of buffers from rank 0"):
                    broadcast_coalesced(group, alike, MESSAGE_BYTES)

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather a small picklable value from each rank, in the order of ranks. Collective."""
        if self._is_alone:
            return [value] * self.size
        with self.waiting("an exchange of values between ranks"):
            return all_gather_objects(value, self._group)

    def is_alike(self, text: str) -> bool:
        """Whether every rank passes the same text. Collective. Texts may be long: ranks exchange only a digest."""
        if self._is_alone:  # perhaps among fake tensors, whose values cannot be compared
            return True
        digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8).long()
        extremes = torch.cat([digest, -digest])
        self.all_reduce(extremes, dist.ReduceOp.MAX)
        return torch.equal(extremes[: len(digest)], -extremes[len(digest) :])
