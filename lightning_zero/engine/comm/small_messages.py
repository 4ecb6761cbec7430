"""Small exchanges between ranks of one machine: the values themselves are the message.

A large exchange wakes a thread, which reads the other process's memory and says so: some hundred microseconds whatever
is in it, and Gloo's collectives take more. A message of some KiB is in the kernel as soon as it is sent, and the thread
that waits for it receives it from there: some ten microseconds.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

SMALL = 2**16
"""Bytes for one rank up to which an exchange is small. A socket's buffer holds some of these."""

_HEAD = struct.Struct("<qq")  # tag, ordinal
_SLICE = 20  # milliseconds after which a wait looks whether another thread has received its message


class SmallExchange:
    """An exchange in flight. It ends in ``wait``, when the message of every other rank has come."""

    def __init__(self, messages: SmallMessages, key: tuple[int, int], finish: Callable[[list[bytes]], None]) -> None:
        self._messages, self._key, self._finish = messages, key, finish

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            RuntimeError: if another rank closed its end, or its message did not come in time.
        """
        self._finish(self._messages.receive(self._key))


class SmallMessages:
    """Messages of a few KiB to and from the other ranks of a group, all on this machine.

    A socket takes no more while the other rank has not received earlier messages. Another thread sends the rest later,
    so that a rank may begin any number of exchanges before it waits for one.

    Args:
        peers: rank and socket (SOCK_SEQPACKET) of each other one; the messages of an exchange come in that order.
        timeout: of each exchange.
        send_late: called when some are left unsent; a thread then calls ``send_unsent`` when a socket may take more.
    """

    def __init__(
        self, peers: list[tuple[int, socket.socket]], timeout: timedelta, send_late: Callable[[], None]
    ) -> None:
        self.ranks, self.sockets = [rank for rank, _ in peers], [connected for _, connected in peers]
        self._timeout, self._send_late = timeout.total_seconds(), send_late
        # Reentrant: a garbage collection may end an engine, and so begin or end exchanges, in any allocation.
        self._lock = threading.RLock()
        self._begun: Counter[int] = Counter()  # exchanges, by tag
        self._received: dict[tuple[int, int], dict[int, bytes]] = {}  # by tag and ordinal, and position of the peer
        self._unsent: list[deque[bytes]] = [deque() for _ in peers]
        self._lost: set[int] = set()  # positions of peers that have closed their end
        self._failure: str | None = None
        for connected in self.sockets:
            connected.setblocking(False)

    def begin(self, tag: int, messages: list[bytes], finish: Callable[[list[bytes]], None]) -> SmallExchange:
        """Send a message to each other rank, in the order of peers; ``finish`` is called with theirs in the wait.

        Args:
            tag: every rank begins the exchanges of one tag in the same order.
        """
        return SmallExchange(self, self.send(tag, messages), finish)

    def send(self, tag: int, messages: list[bytes]) -> tuple[int, int]:
        """Send a message to each other rank; what ``receive`` needs to give theirs."""
        with self._lock:
            key = tag, self._begun[tag]
            self._begun[tag] += 1
            head = _HEAD.pack(*key)
            for position, message in enumerate(messages):
                self._unsent[position].append(head + message)
            is_all_sent = all([self._send(position) for position in range(len(messages))])
        if not is_all_sent:
            self._send_late()
        return key

    def skip(self, tag: int) -> tuple[int, int]:
        """As ``send`` with no message to anybody: this rank only receives."""
        with self._lock:
            key = tag, self._begun[tag]
            self._begun[tag] += 1
        return key

    def _send(self, position: int) -> bool:
        """Send what a peer's socket takes at once; whether that was all."""
        unsent = self._unsent[position]
        try:
            while unsent:
                self.sockets[position].send(unsent[0])
                unsent.popleft()
        except BlockingIOError:
            return False
        except OSError:  # it has closed its end; whoever waits for it has an error
            unsent.clear()
        return True

    def send_unsent(self, position: int) -> bool:
        """Send what a peer's socket takes at once; whether that was all. Called in another thread."""
        with self._lock:
            return self._send(position)

    def unsent_positions(self) -> list[int]:
        """The peers for which something is left unsent."""
        return [position for position, unsent in enumerate(self._unsent) if unsent]

    def receive(self, key: tuple[int, int], positions: list[int] | None = None) -> list[bytes]:
        """Wait for the messages of an exchange.

        Args:
            positions: of the peers that have sent some, all by default.

        Raises:
            RuntimeError: as ``SmallExchange.wait``.
        """
        wanted = range(len(self.ranks)) if positions is None else positions
        deadline, arrivals = 0.0, None
        while True:
            with self._lock:
                self._take_in()
                found = self._received.get(key, {})
                if len(found) >= len(wanted):
                    self._received.pop(key, None)
                    return [found[position] for position in wanted]
                missing = self._lost.difference(found).intersection(wanted)
            if missing:
                raise RuntimeError(self._failure or f"rank {self.ranks[min(missing)]} closed the connection")
            if arrivals is None:
                # one a wait: threads may not share any
                deadline, arrivals = time.monotonic() + self._timeout, self._arrivals()
            elif time.monotonic() > deadline:
                raise RuntimeError(f"no end after {self._timeout:.0f} s")
            arrivals.poll(_SLICE)  # another thread may take in what it announces

    def _arrivals(self) -> select.poll:
        arrivals = select.poll()
        for position, connected in enumerate(self.sockets):
            if position not in self._lost:
                arrivals.register(connected, select.POLLIN)
        return arrivals

    def _take_in(self) -> None:
        for position, connected in enumerate(self.sockets):
            while position not in self._lost:
                try:
                    message = connected.recv(SMALL + _HEAD.size)
                except BlockingIOError:
                    break
                except ConnectionResetError:
                    continue  # it left something unread; what it has sent before that comes next
                except OSError:
                    message = b""
                if not message:
                    self._lost.add(position)
                    break
                key = _HEAD.unpack_from(message)
                self._received.setdefault(key, {})[position] = message[_HEAD.size :]

    def shut(self, reason: str) -> None:
        """End all waits, here and on the peers: the run has failed."""
        self._failure = self._failure or reason
        for connected in self.sockets:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a contiguous CPU tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def fill(tensor: Tensor, message: bytes) -> None:
    """Fill a contiguous CPU tensor, without a new version of it: autograd may have saved views of the same values."""
    assert len(message) == tensor.nbytes, f"another rank sent {len(message)} bytes where {tensor.nbytes} were expected"
    ctypes.memmove(tensor.data_ptr(), message, len(message))


def tensor_of(message: bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor whose bytes a message holds."""
    made = torch.empty(shape, dtype=dtype, device="cpu")
    fill(made, message)
    return made
