"""Messages of up to 64 KiB between ranks of one machine: small values, and the signals of large exchanges.

A large exchange wakes a thread that reads the other process's memory, which takes about a hundred microseconds or
more. Gloo's collectives take longer. A small message is copied to the kernel when it is sent, and the waiting
thread itself receives it from there, which takes about ten microseconds.
"""

from __future__ import annotations

import ctypes
import itertools
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

SMALL = 2**16
"""An exchange of up to this many bytes per rank is small. A socket's buffer holds a few messages of this size."""

GATHER_TAG, REDUCE_TAG, CONTROL_TAG = 1, 2, 3
"""The tags of exchanges: parameters, gradients, and the control plane's values."""

Key = tuple[int, int]
"""An exchange's key: its tag, and the number of earlier exchanges with this tag; the same on all ranks."""

_HEAD = struct.Struct("<qq")  # a key
_SLICE = 20  # milliseconds after which a wait checks whether another thread has received its message


class SmallMessages:
    """Messages between this rank and the other ranks of a group; all of these ranks run on this machine.

    While a socket's buffer is full, messages stay unsent, and another thread sends them later. So a rank may begin any
    number of exchanges before it waits for one.

    Args:
        peers: rank and socket (SOCK_SEQPACKET) of each other rank; an exchange's messages are listed in this order.
        wake: called when messages are left unsent; another thread must then call ``register`` and ``send_unsent``.

    Attributes:
        received: received messages, by the exchange's key and the peer's position in ``peers``.
        lost: positions of peers that have closed the connection.
    """

    def __init__(self, peers: list[tuple[int, socket.socket]], timeout: timedelta, wake: Callable[[], None]) -> None:
        self.ranks, self.sockets = [rank for rank, _ in peers], [connected for _, connected in peers]
        self.received: dict[Key, dict[int, bytes]] = {}
        self.lost: set[int] = set()
        self._timeout, self._wake = timeout.total_seconds(), wake
        # Reentrant: garbage collection may close an engine, and so begin or end exchanges, during any allocation.
        self._lock = threading.RLock()  # guards received messages, for which several threads may wait
        self._begun: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)  # counts exchanges by tag
        self._unsent: list[deque[bytes]] = [deque() for _ in peers]
        self._failure: str | None = None
        for connected in self.sockets:
            connected.setblocking(False)

    def begin(self, tag: int) -> Key:
        """Begin an exchange with a tag, and return the exchange's key."""
        return tag, next(self._begun[tag])

    def send(self, tag: int, messages: Sequence[bytes]) -> Key:
        """Begin an exchange, and send a message to each other rank in the order of peers."""
        key = self.begin(tag)
        self.post(key, enumerate(messages))
        return key

    def post(self, key: Key, messages: Iterable[tuple[int, bytes]]) -> None:
        """Send an exchange's messages: (peer's position, message). They may overtake other exchanges' messages."""
        head, are_unsent = _HEAD.pack(*key), False
        for position, message in messages:
            try:
                self.sockets[position].send(head + message)
            except BlockingIOError:
                self._unsent[position].append(head + message)
                are_unsent = True
            except OSError:
                pass  # the peer has closed the connection; a wait for its messages fails
        if are_unsent:
            self._wake()

    @property
    def has_unsent(self) -> bool:
        return any(self._unsent)

    def send_unsent(self) -> None:
        """Send as many unsent messages as the sockets accept without blocking. Only one thread may call this."""
        for unsent, connected in zip(self._unsent, self.sockets):
            try:
                while unsent:
                    connected.send(unsent[0])
                    unsent.popleft()
            except BlockingIOError:
                pass
            except OSError:
                unsent.clear()

    def register(self, poll: select.poll, receives: bool) -> None:
        """Register the sockets with a poll: to send unsent messages and, if ``receives``, to receive messages."""
        for position, connected in enumerate(self.sockets):
            events = select.POLLOUT if self._unsent[position] else 0
            if position not in self.lost and (events := events | (select.POLLIN if receives else 0)):
                poll.register(connected, events)

    def receive(self, key: Key) -> list[bytes]:
        """Wait for the messages of an exchange, one from each peer.

        Raises:
            RuntimeError: if a peer closed the connection, or a message did not arrive in time.
        """
        deadline, poll = 0.0, None
        while True:
            with self._lock:
                self.take_in()
                found = self.received.get(key, {})
                if len(found) == len(self.ranks):
                    del self.received[key]
                    return [found[position] for position in range(len(self.ranks))]
                missing = self.lost.difference(found)
            if missing:
                raise RuntimeError(self._failure or f"rank {self.ranks[min(missing)]} closed the connection")
            if poll is None:  # one poll per wait, since threads must not share a poll
                deadline, poll = time.monotonic() + self._timeout, select.poll()
                self.register(poll, receives=True)
            elif time.monotonic() > deadline:
                raise RuntimeError(f"not finished after {self._timeout:.0f} s")
            poll.poll(_SLICE)  # not longer, since another thread may receive the message instead

    def take_in(self, ready: Container[int] | None = None) -> list[Key]:
        """Receive the messages that have arrived, and return the keys of their exchanges.

        Args:
            ready: descriptors of the sockets that have a message; one message is received from each. None: receive all
                messages of all sockets.
        """
        keys = []
        for position, connected in enumerate(self.sockets):
            while position not in self.lost and (ready is None or connected.fileno() in ready):
                try:
                    message = connected.recv(SMALL + _HEAD.size)
                except BlockingIOError:
                    break
                except ConnectionResetError:
                    continue  # the peer closed before reading all messages; the messages that it sent can still be read
                except OSError:
                    message = b""
                if not message:
                    self.lost.add(position)
                    break
                keys.append(_HEAD.unpack_from(message))
                self.received.setdefault(keys[-1], {})[position] = message[_HEAD.size :]
                if ready is not None:
                    break
        return keys

    def shut(self, reason: str) -> None:
        """End all waits, here and on the peers, after the run has failed."""
        self._failure = self._failure or reason
        for connected in self.sockets:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a contiguous CPU tensor; of a lazy conjugate or negative, those of the values that it shows."""
    tensor = tensor.resolve_conj().resolve_neg()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def fill(tensor: Tensor, message: bytes) -> None:
    """Fill a contiguous CPU tensor, without incrementing its version: autograd may have saved views of its values."""
    if len(message) != tensor.nbytes:
        raise RuntimeError(f"another rank sent {len(message)} bytes where {tensor.nbytes} were expected")
    ctypes.memmove(tensor.data_ptr(), message, len(message))


def tensor_of(message: bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor from a message's bytes."""
    made = torch.empty(shape, dtype=dtype, device="cpu")
    fill(made, message)
    return made
