"""Exchanges between ranks of one machine, which read each other's memory where the system permits it.

Gloo copies bytes into the kernel and out of it again (the loopback device), in several threads. Here, bytes are copied
once, by cross-memory attach (``process_memory.py``), and sockets only carry signals that memory is ready or has been
read. Small slices are sent as messages.
"""

from __future__ import annotations

import os
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.comm.cross_memory import process_memory
from lightning_zero.engine.comm.cross_memory.small_messages import (
    GATHER_TAG,
    REDUCE_TAG,
    SMALL,
    SmallMessages,
    bytes_of,
    fill,
)
from lightning_zero.engine.comm.transport import Bounds, Chain, Codec, Pending, Transport, slices_of

_ADDRESS = struct.Struct("<q")
_PATIENCE = 30.0  # timeout for connecting, in seconds
_CHUNK = 2**15  # elements added up at a time: they fit into the cache, and torch adds them on one core

_Reader = Callable[
    [Tensor, int], None
]  # fills a tensor from what another rank gives, which begins at an offset in bytes

_transports_of_process: weakref.WeakSet[CrossMemoryTransport] = weakref.WeakSet()


class CrossMemoryTransport(Transport):
    """Copies each large slice only once. Gives the same sums as ``BackendTransport``.

    Codecs must be casts, since large slices are added up in parts.

    Args:
        peers: rank, process ID and socket of each other rank, in ascending order of ranks.

    Attributes:
        small: exchanges of small messages over the sockets; those of large slices contain a memory address, and are
            answered, with ~tag, when this memory was read.
    """

    def __init__(self, rank: int, peers: list[tuple[int, int, socket.socket]], timeout: timedelta) -> None:
        self._rank, self._process = rank, os.getpid()
        self._processes = [process for _, process, _ in peers]
        self.small = SmallMessages([(other, line) for other, _, line in peers], timeout)
        # Gathers may not wait for reductions, since ranks may begin the two in different orders.
        self._gathers, self._reductions = Chain("gathers"), Chain("reductions")
        _transports_of_process.add(self)

    def all_gather(self, full: Tensor, bounds: Bounds) -> Pending:
        slices = slices_of(full, bounds)
        return self.gather(slices, max(map(len, slices)) * full.itemsize <= SMALL)

    def reduce_scatter(self, flat: Tensor, bounds: Bounds, codec: Codec) -> Pending:
        sent = slices_of(codec.encode(flat), bounds)
        own = flat[bounds[self._rank] : bounds[self._rank + 1]]
        return self.reduce(own, sent, max(map(len, sent)) * codec.dtype.itemsize <= SMALL)

    def gather(self, slices: Sequence[Tensor], is_small: bool = False) -> Pending:
        """Fill ``slices`` with those of the other ranks, while the other ranks read this rank's slice."""

        def take(position: int, read: _Reader) -> None:
            read(slices[self.small.ranks[position]], 0)

        sources = [slices[self._rank]] * len(self.small.ranks)
        return self._exchange(GATHER_TAG, self._gathers, sources, take, list(slices), is_small)

    def reduce(self, own: Tensor, sent: Sequence[Tensor], is_small: bool = False) -> Pending:
        """Add up all ranks' contributions, in the order of ranks.

        Args:
            own: this rank's own contribution, 1-D.
            sent: for each rank, the values that it adds to its own; they may have another dtype than ``own``. This
                rank's element is ignored.
        """
        total, wire = torch.empty_like(own), sent[0].dtype
        # The first two terms may be swapped: rank 0 adds its own values after those of rank 1.
        own_follows = max(self._rank - 1, 0)

        def take(position: int, read: _Reader) -> None:
            for start in range(0, len(own), _CHUNK):
                part, mine = total[start : start + _CHUNK], own[start : start + _CHUNK]
                is_first = position == 0
                term = part if is_first and wire == own.dtype else torch.empty_like(part, dtype=wire)
                read(term, start * term.itemsize)
                if not is_first:
                    part.add_(term)
                elif term is not part:
                    part.copy_(term)
                if position == own_follows:
                    part.add_(mine)

        sources = [sent[rank] for rank in self.small.ranks]
        return self._exchange(REDUCE_TAG, self._reductions, sources, take, [total, own, *sent], is_small)

    def _exchange(
        self,
        tag: int,
        chain: Chain,
        sources: list[Tensor],
        take: Callable[[int, _Reader], None],
        buffers: list[Tensor],
        is_small: bool,
    ) -> Pending:
        """Start an exchange. Small values are sent; for large ones, the other ranks are told where they can read.

        Args:
            sources: the values for each other rank.
            take: reads from one peer; called with the peer's position, and a function to read with.
            buffers: the result, and what is needed only until all ranks have read.
        """
        result = buffers[0]
        messages = [bytes_of(each) if is_small else _ADDRESS.pack(each.data_ptr()) for each in sources]
        key = self.small.send(tag, messages)

        def exchange() -> None:
            for position, message in enumerate(self.small.receive(key)):
                if is_small:
                    take(position, partial(_copy, message))
                    continue
                try:
                    take(position, partial(_read, self._processes[position], *_ADDRESS.unpack(message)))
                except OSError as error:
                    raise RuntimeError(str(error)) from error
                if self.small.has_ended(position):  # what was read may be invalid
                    raise RuntimeError(f"rank {self.small.ranks[position]} closed the connection")
                self.small.post((~tag, key[1]), position)
            if not is_small:
                self.small.receive((~tag, key[1]))
            del buffers[1:]  # all ranks have read

        return Pending([exchange if is_small else chain.submit(exchange).result], buffers, lambda: result)

    def sever(self, reason: str) -> None:
        """Make all exchanges in flight and all new exchanges fail, here and on the peers."""
        # In a forked process, such as a DataLoader's, the connections are the parent's.
        if os.getpid() == self._process:
            self.small.shut(reason)

    def close(self) -> None:
        """Refuse new exchanges. Those in flight are finished, since peers need them."""
        self._gathers.close(lambda: self._reductions.close(self.small.close))


def _copy(message: bytes, target: Tensor, offset: int) -> None:
    fill(target, message[offset : offset + target.nbytes])


def _read(process: int, address: int, target: Tensor, offset: int) -> None:
    process_memory.read_memory(process, address + offset, target)


def sever_all(reason: str) -> None:
    """Make every exchange of this process fail, because the run has failed."""
    for transport in list(_transports_of_process):
        transport.sever(reason)


# -- connecting ---------------------------------------------------------------------------------------------------


def connect(
    here: Sequence[int], rank: int, timeout: timedelta, exchange_objects: Callable[[Any], list[Any]]
) -> CrossMemoryTransport | None:
    """Connect the ranks of a machine, or of a part of it. Collective over all ranks of all groups.

    Args:
        here: the ranks to connect, including this one; a rank's number in the transport is its position.
        exchange_objects: all-gathers a small object over all ranks of all groups.

    Returns:
        The transport; None on every rank if any rank cannot, or may not, read the memory of another rank in its group.
    """
    probe = torch.randint(2**62, (8,), generator=torch.Generator().manual_seed(os.getpid()), device="cpu")
    with ExitStack() as stack:
        said = None
        with suppress(OSError):
            # asked only here, where ranks whose environments differ still exchange what they can
            if os.environ.get("LIGHTNING_ZERO_CROSS_MEMORY") != "0" and process_memory.is_supported():
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                listener.bind("")  # the system chooses a name, without a file
                listener.listen(socket.SOMAXCONN)
                process_memory.let_read(os.getppid())
                said = os.getpid(), listener.getsockname(), probe.data_ptr(), probe.tolist()
        every = exchange_objects(said)
        told, place, size = [every[each] for each in here], here.index(rank), len(here)
        lines, is_connected = {}, False
        with suppress(OSError):
            if None not in every and _are_readable(probe, told):
                lines = _connect_to([name for _, name, _, _ in told[:place]], place, stack)
                is_connected = True
        if not all(exchange_objects(is_connected)):
            if said is not None:
                process_memory.let_read(0)
            return None
        processes = [process for process, _, _, _ in told]
        while len(lines) < size - 1:  # all ranks have connected, so accepting does not block
            line, _ = listener.accept()
            process, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if process in processes:  # other processes may connect, too
                lines[int(line.recv(32))] = line
        stack.pop_all()
        listener.close()
    others = [other for other in range(size) if other != place]
    return CrossMemoryTransport(place, [(other, processes[other], lines[other]) for other in others], timeout)


def _are_readable(probe: Tensor, told: list[Any]) -> bool:
    """Whether the memory of each process has the values that the process has sent."""
    for process, _, address, expected in told:
        process_memory.read_memory(process, address, found := torch.empty_like(probe))
        if found.tolist() != expected:
            return False
    return True


def _connect_to(names: list[bytes], rank: int, stack: ExitStack) -> dict[int, socket.socket]:
    """Connect a socket to each lower rank."""
    lines = {}
    for other, name in enumerate(names):
        lines[other] = line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(line).settimeout(_PATIENCE)
        line.connect(name)
        line.send(f"{rank}".encode())
    return lines
