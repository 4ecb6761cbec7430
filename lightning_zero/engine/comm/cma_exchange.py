"""Exchanges between ranks of one machine: each reads what it needs from the memory of the others.

Over Gloo bytes go through the loopback device: into the kernel, out of it, by several threads. Here there is one copy,
by cross-memory attach (``process_memory.py``), and sockets only say what is ready and what has been read. Measured in
``docs/performance.md``.
"""

from __future__ import annotations

import math
import os
import select
import selectors
import socket
import struct
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.comm import process_memory
from lightning_zero.engine.comm.small_messages import SmallMessages
from lightning_zero.engine.comm.transport import Piece

_MESSAGE = struct.Struct("<Bqqq")  # what it says, tag, ordinal, address
_READY, _READ = range(2)
_CHUNK = 2**15  # elements that are added up at a time: they stay in the cache, and the thread takes no more cores

_exchanges_of_process: weakref.WeakSet[CrossMemoryExchanges] = weakref.WeakSet()


class Exchange:
    """An exchange in flight. It ends when this rank has read from all others, and they have read from it.

    Args:
        kept: tensors that the others read, which are kept until the end.
        take: called with (position of the peer, its process, address) in the transport's thread, for one peer after
            another, once the memory at the address is ready.
        timeout: of the wait.
    """

    def __init__(self, kept: Any, take: Callable[[int, int, int], None], timeout: timedelta) -> None:
        self._kept, self._take, self._timeout = kept, take, timeout
        self.taken = 0  # peers, in their order
        self.given: set[int] = set()  # peers that have read
        self._over = threading.Event()
        self._failure: str | None = None

    def take(self, process: int, address: int) -> None:
        """Read from the next peer; it counts once the caller has seen that the peer's connection is still open."""
        self._take(self.taken, process, address)

    def end(self, failure: str | None = None) -> None:
        self._failure = failure
        self._kept, self._take = None, _nothing
        self._over.set()

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            RuntimeError: if it failed, or did not end in time.
        """
        if not self._over.wait(self._timeout.total_seconds()):
            raise RuntimeError(f"no end after {self._timeout}")
        if self._failure is not None:
            raise RuntimeError(self._failure)


def _nothing(*_: Any) -> None:
    """Replaces the function of an exchange that has ended, which holds on to tensors."""


class CrossMemoryExchanges:
    """Exchanges with the other ranks of a group, which are all on this machine.

    Args:
        rank: this one's.
        peers: rank, process and sockets of each other one, in the order in which gradients are added up; the second
            socket is for small messages.
        timeout: of each exchange.

    Attributes:
        small: exchanges that need no reading of memory.
    """

    def __init__(
        self, rank: int, peers: list[tuple[int, int, socket.socket, socket.socket]], timeout: timedelta
    ) -> None:
        self._rank, self._timeout, self._process = rank, timeout, os.getpid()
        self._ranks = [other for other, _, _, _ in peers]
        self._processes = [process for _, process, _, _ in peers]
        self._sockets = [connected for _, _, connected, _ in peers]
        # Of what comes next. Reentrant: a garbage collection may end the transport from inside any allocation.
        self._lock = threading.RLock()
        self._begun: Counter[int] = Counter()  # exchanges, by tag
        # under way, by tag and ordinal; whoever takes one out ends it
        self._exchanges: dict[tuple[int, int], Exchange] = {}
        self._ready: dict[tuple[int, int], dict[int, int]] = {}  # addresses, by position of the peer
        self._failure: str | None = None  # of all that is begun from here on
        self._closing = False
        self._lost: set[int] = set()  # peers that have closed their end
        self._unsent: list[deque[bytes]] = [deque() for _ in peers]
        self._late: deque[tuple[int, int]] = deque()  # begun when others were ready already
        self._ends: list[select.poll] = []  # of each peer: whether it has closed its end, whatever is to be read before
        for connected in self._sockets:
            self._ends.append(select.poll())
            self._ends[-1].register(connected, select.POLLRDHUP)
        self._wake, self._woken = socket.socketpair()
        self.small = SmallMessages([(other, connected) for other, _, _, connected in peers], timeout, self._send_late)
        self._selector = selectors.DefaultSelector()
        _exchanges_of_process.add(self)
        self._thread = threading.Thread(target=self._run, name="lightning_zero-shared-memory", daemon=True)
        self._thread.start()

    def gather(self, tag: int, slices: Sequence[Tensor]) -> Exchange:
        """Fill the slices of the other ranks from theirs; they read this rank's own.

        Args:
            tag: every rank begins the exchanges of one tag in the same order.
            slices: 1-D, one a rank.
        """

        def take(position: int, process: int, address: int) -> None:
            process_memory.read_memory(process, address, slices[self._ranks[position]])

        return self._begin(tag, [slices[self._rank]] * len(self._ranks), take)

    def reduce(
        self,
        tag: int,
        own: Sequence[Piece],
        sent: Mapping[int, Sequence[Piece]],
        wire: torch.dtype,
        factor: float = 1.0,
    ) -> tuple[Exchange, Tensor]:
        """Add what the other ranks have for this one to its own; the sum is there when the exchange has ended.

        Args:
            tag: as of ``gather``.
            own: what the sum is made of, one piece after another, those of other ranks alike.
            sent: by rank, what each is to add to its own.
            wire: the dtype of what travels.
            factor: by which all is multiplied before it is added up; or after it, if it is a power of two, which gives
                the same digits.
        """
        dtype = next((piece.values.dtype for piece in own if piece.values is not None), wire)
        total = torch.empty(sum(piece.numel for piece in own), dtype=dtype, device="cpu")
        addresses_of = {rank: [piece.address for piece in pieces] for rank, pieces in sent.items()}
        tables = {rank: torch.tensor(addresses, device="cpu") for rank, addresses in addresses_of.items()}
        kept = [piece.values for pieces in (own, *sent.values()) for piece in pieces]
        is_exact = math.frexp(factor)[0] == 0.5

        def take(position: int, process: int, address: int) -> None:
            addresses = torch.empty(len(own), dtype=torch.int64, device="cpu")
            process_memory.read_memory(process, address, addresses)
            rest = total
            for piece, there in zip(own, addresses.tolist()):
                for start in range(0, piece.numel, _CHUNK):
                    numel = min(_CHUNK, piece.numel - start)
                    add_up(rest[:numel], piece, start, process, there, position)
                    rest = rest[numel:]

        def add_up(part: Tensor, piece: Piece, start: int, process: int, there: int, position: int) -> None:
            is_first, is_last = position == 0, position == len(self._ranks) - 1
            came = part if is_first and wire == dtype else torch.empty(len(part), dtype=wire, device="cpu")
            if there:
                process_memory.read_memory(process, there + start * came.itemsize, came)
                if not is_exact:
                    came.mul_(factor)
            if not is_first:
                if there:
                    part.add_(came)
            else:
                if not there:
                    part.zero_()
                elif came is not part:
                    part.copy_(came)
                if piece.values is not None:
                    mine = piece.values[start : start + len(part)]
                    part.add_(mine if is_exact else mine * factor)
            if is_last and is_exact and factor != 1.0:
                part.mul_(factor)

        return self._begin(tag, [tables[rank] for rank in self._ranks], take, kept), total

    def _begin(
        self, tag: int, sources: list[Tensor], take: Callable[[int, int, int], None], kept: Any = None
    ) -> Exchange:
        exchange = Exchange((sources, kept), take, self._timeout)
        with self._lock:
            key = tag, self._begun[tag]
            self._begun[tag] += 1
            failure = self._failure
            if failure is None:
                self._exchanges[key] = exchange
            is_late = key in self._ready
        if failure is not None:
            exchange.end(failure)
            return exchange
        try:
            for peer, source in zip(self._sockets, sources):
                peer.send(_MESSAGE.pack(_READY, *key, source.data_ptr()))
            if is_late:
                self._late.append(key)
                self._wake.send(b"x")
        except OSError as error:  # a peer has closed its end, or this one has
            self._end(key, str(error))
        return exchange

    def _end(self, key: tuple[int, int], failure: str | None = None) -> None:
        """End an exchange, unless another thread has."""
        with self._lock:
            exchange = self._exchanges.pop(key, None)
        if exchange is not None:
            exchange.end(failure)

    def sever(self, reason: str) -> None:
        """End all exchanges, here and on the peers: those in flight, and those begun later."""
        if os.getpid() != self._process:
            return  # a copy in a forked process (of a DataLoader), in which the connections are still the other's
        with self._lock:
            self._failure, self._closing = self._failure or reason, True
            unfinished = list(self._exchanges.values())
            self._exchanges.clear()
        self.small.shut(reason)
        # before what is kept for the peers goes: none is to take what it reads then for the right thing
        for each in (*self._sockets, self._wake):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for exchange in unfinished:
            exchange.end(reason)

    def close(self) -> None:
        """Begin nothing more. Exchanges in flight come to their end, here or in the thread, since peers need them."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._failure = self._failure or "the exchange with the other ranks was closed"
            self._closing = True
        with suppress(OSError):
            self._wake.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._selector as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                for position, peer in enumerate(self._sockets):
                    selector.register(peer, selectors.EVENT_READ, position)
                while not self._has_ended():
                    for key, events in selector.select():
                        if key.data is None:
                            self._look_at_late()
                        elif key.data < 0:
                            if self.small.send_unsent(~key.data):
                                selector.unregister(key.fileobj)
                        elif events & selectors.EVENT_READ:
                            self._hear(key.data)
                        else:
                            self._send(key.data)
        except Exception as error:
            self.sever(str(error))
        finally:
            for each in (*self._sockets, *self.small.sockets, self._wake, self._woken):
                each.close()

    def _has_ended(self) -> bool:
        return self._closing and not self._exchanges and not any(self._unsent) and not self.small.unsent_positions()

    def _send_late(self) -> None:
        """Have the thread send small messages that a socket has not taken."""
        with suppress(OSError):
            self._wake.send(b"x")

    def _look_at_late(self) -> None:
        self._woken.recv(4096)
        while self._late:
            self._go_on(self._late.popleft())
        watched = self._selector.get_map()
        for position in self.small.unsent_positions():
            if (peer := self.small.sockets[position]) not in watched:
                self._selector.register(peer, selectors.EVENT_WRITE, ~position)

    def _hear(self, position: int) -> None:
        try:
            message = self._sockets[position].recv(_MESSAGE.size)
        except ConnectionResetError:
            return  # it left something unread; what it has sent before that comes next
        except OSError:
            message = b""
        if not message:
            self._lose(position, f"rank {self._ranks[position]} closed the connection")
            return
        says, tag, ordinal, address = _MESSAGE.unpack(message)
        key = tag, ordinal
        if says == _READY:
            with self._lock:
                self._ready.setdefault(key, {})[position] = address
        elif (exchange := self._exchanges.get(key)) is not None:
            exchange.given.add(position)
        self._go_on(key)

    def _lose(self, position: int, failure: str) -> None:
        """A peer has closed its end, as when it has no more use of it: others may be in what it has left behind."""
        if position in self._lost:
            return
        self._lost.add(position)
        self._unsent[position].clear()
        self._selector.unregister(self._sockets[position])
        with self._lock:
            self._failure = self._failure or failure
            lost = {
                key: exchange
                for key, exchange in self._exchanges.items()
                if exchange.taken <= position or position not in exchange.given
            }
            for key in lost:
                del self._exchanges[key]
        for exchange in lost.values():
            exchange.end(failure)

    def _go_on(self, key: tuple[int, int]) -> None:
        exchange, ready = self._exchanges.get(key), self._ready.get(key, {})
        if exchange is None:
            return
        while exchange.taken in ready:
            position = exchange.taken
            try:
                exchange.take(self._processes[position], ready.pop(position))
                if self._ends[position].poll(0):
                    raise ConnectionResetError(f"rank {self._ranks[position]} closed the connection")
            except OSError as error:
                self._lose(position, str(error))
                return
            exchange.taken += 1
            self._unsent[position].append(_MESSAGE.pack(_READ, *key, 0))
            self._send(position)
        if exchange.taken == len(exchange.given) == len(self._sockets):
            with self._lock:
                self._ready.pop(key, None)
            self._end(key)

    def _send(self, position: int) -> None:
        """Send what has not been sent. Without waiting: the peer's thread may wait for this one to hear it."""
        if position in self._lost:
            return
        peer, unsent = self._sockets[position], self._unsent[position]
        events = selectors.EVENT_READ
        try:
            while unsent:
                peer.send(unsent[0], socket.MSG_DONTWAIT)
                unsent.popleft()
        except BlockingIOError:
            events |= selectors.EVENT_WRITE
        except OSError as error:
            self._lose(position, str(error))
            return
        self._selector.modify(peer, events, position)


def sever_all(reason: str) -> None:
    """End every exchange of this process: the run has failed."""
    for exchanges in list(_exchanges_of_process):
        exchanges.sever(reason)
