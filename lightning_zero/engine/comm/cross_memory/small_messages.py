"""Messages of up to 64 KiB between ranks of one machine: small values, and the signals of large exchanges.

A large exchange wakes a thread that reads the other process's memory, which takes about a hundred microseconds or
more. Gloo's collectives take longer. A small message is copied to the kernel when it is sent, and the waiting
thread itself receives it from there, which takes about ten microseconds.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

from torch import Tensor

SMALL = 2**16
"""An exchange of up to this many bytes per rank is small. A socket's buffer holds a few messages of this size."""

GATHER_TAG, REDUCE_TAG, CONTROL_TAG = 1, 2, 3
"""The tags of exchanges: parameters, gradients, and the control plane's values."""

Key = tuple[int, int]
"""An exchange's key: its tag, and the number of earlier exchanges with this tag; the same on all ranks."""

_HEAD = struct.Struct("<qq")  # a key
_LONGEST = 1e6  # seconds of one poll, whose timeout in milliseconds must fit into 32 bits


class SmallMessages:
    """Messages between this rank and the other ranks of a group; all of these ranks run on this machine.

    A rank may begin any number of exchanges before it waits for one: while a socket's buffer is full, messages stay
    unsent, and a thread sends them later.

    Args:
        peers: rank and socket (SOCK_SEQPACKET) of each other rank; an exchange's messages are listed in this order.

    Attributes:
        received: received messages, by the exchange's key and the peer's position in ``peers``.
        lost: positions of peers that have closed the connection.
    """

    def __init__(self, peers: list[tuple[int, socket.socket]], timeout: timedelta) -> None:
        self.ranks, self.sockets = [rank for rank, _ in peers], [connected for _, connected in peers]
        self.received: dict[Key, dict[int, bytes]] = {}
        self.lost: set[int] = set()
        self._timeout = timeout.total_seconds()
        # Guards the attributes above and below. Its lock is reentrant: garbage collection may close an engine, and so
        # begin exchanges, during any allocation.
        self._changed = threading.Condition()
        self._begun: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)  # counts exchanges by tag
        self._unsent: list[deque[bytes]] = [deque() for _ in peers]
        self._sender: threading.Thread | None = None  # sends unsent messages
        self._failure: str | None = None
        self._poll, self._is_polling = select.poll(), False  # only one of the waiting threads polls
        for connected in self.sockets:
            connected.setblocking(False)
            self._poll.register(connected, select.POLLIN)

    def send(self, tag: int, messages: Sequence[bytes]) -> Key:
        """Begin an exchange, and send a message to each other rank in the order of peers. Returns its key."""
        key = tag, next(self._begun[tag])
        for position, message in enumerate(messages):
            self.post(key, position, message)
        return key

    def post(self, key: Key, position: int, message: bytes = b"") -> None:
        """Send an exchange's message to a peer. It may overtake other exchanges' messages.

        Raises:
            RuntimeError: if the system refuses the message.
        """
        message = _HEAD.pack(*key) + message
        try:
            self.sockets[position].send(message)
        except BlockingIOError:
            with self._changed:
                self._unsent[position].append(message)
                if self._sender is None:
                    sender = threading.Thread(target=self._send_unsent, name="lightning_zero-small", daemon=True)
                    sender.start()  # which may fail; the thread waits for the lock
                    self._sender = sender
        except OSError as error:
            self._check(error)

    def _check(self, error: OSError) -> None:
        """Raise if the system refused a message; if the connection is closed, waits for its messages raise instead."""
        if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF):
            self.shut(f"a message could not be sent: {error}")
            raise RuntimeError(self._failure) from error

    def _send_unsent(self) -> None:
        while True:
            with self._changed:
                positions = [position for position, unsent in enumerate(self._unsent) if unsent]
                if not positions:
                    self._sender = None
                    return
            poll = select.poll()
            for position in positions:
                poll.register(self.sockets[position], select.POLLOUT)
            poll.poll()
            for unsent, connected in ((self._unsent[position], self.sockets[position]) for position in positions):
                try:
                    while unsent:
                        connected.send(unsent[0])
                        unsent.popleft()
                except BlockingIOError:
                    pass
                except OSError as error:
                    unsent.clear()
                    with suppress(RuntimeError):  # the next wait raises it
                        self._check(error)

    def receive(self, key: Key) -> list[bytes]:
        """Wait for the messages of an exchange, one from each peer.

        Raises:
            RuntimeError: if a peer closed the connection, or a message did not arrive in time.
        """
        deadline = None
        with self._changed:
            while True:
                if not self._is_polling:
                    self._take_in()
                found = self.received.get(key, {})
                if len(found) == len(self.ranks):
                    del self.received[key]
                    return [found[position] for position in range(len(self.ranks))]
                if missing := self.lost.difference(found):
                    raise RuntimeError(self._failure or f"rank {self.ranks[min(missing)]} closed the connection")
                deadline = deadline or time.monotonic() + self._timeout
                remaining = deadline - time.monotonic()
                if remaining < 0:
                    self.shut(f"not finished after {self._timeout:.0f} s")  # so that no peer reads memory that is freed
                    raise RuntimeError(self._failure)
                if self._is_polling:
                    self._changed.wait(remaining)
                else:
                    self._wait_for_sockets(remaining)

    def _wait_for_sockets(self, seconds: float) -> None:
        self._is_polling = True
        self._changed.release()
        try:
            self._poll.poll(1000 * min(seconds, _LONGEST))
        finally:
            self._changed.acquire()
            self._is_polling = False
            self._changed.notify_all()  # another thread may poll now

    def _take_in(self) -> None:
        """Receive all messages that have arrived."""
        for position, connected in enumerate(self.sockets):
            while position not in self.lost:
                try:
                    message = connected.recv(SMALL + _HEAD.size)
                except BlockingIOError:
                    break
                except ConnectionResetError:
                    continue  # the peer closed before reading all messages; the messages that it sent can still be read
                except OSError:
                    message = b""
                if message:
                    self.received.setdefault(_HEAD.unpack_from(message), {})[position] = message[_HEAD.size :]
                else:
                    self.lost.add(position)
                    with suppress(OSError, ValueError, KeyError):
                        self._poll.unregister(connected)
                self._changed.notify_all()

    def has_ended(self, position: int) -> bool:
        """Whether a peer has closed its connection, even if messages are unread."""
        poll = select.poll()
        poll.register(self.sockets[position], select.POLLRDHUP)
        return bool(poll.poll(0))

    def shut(self, reason: str) -> None:
        """End all waits, here and on the peers, after the run has failed."""
        self._failure = self._failure or reason
        for connected in self.sockets:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections once all messages are sent."""
        if (sender := self._sender) is not None:
            sender.join()
        for connected in self.sockets:
            connected.close()


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a contiguous CPU tensor; of a lazy conjugate or negative, those of the values that it shows."""
    tensor = tensor.resolve_conj().resolve_neg()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def fill(tensor: Tensor, message: bytes) -> None:
    """Fill a contiguous CPU tensor, without incrementing its version: autograd may have saved views of its values."""
    if len(message) != tensor.nbytes:
        raise RuntimeError(f"another rank sent {len(message)} bytes where {tensor.nbytes} were expected")
    ctypes.memmove(tensor.data_ptr(), message, len(message))
