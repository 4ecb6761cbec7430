"""Exchanges between ranks of one machine, which read each other's memory where the system permits it.

Gloo copies bytes into the kernel and out of it again (the loopback device), in several threads. Here, bytes are copied
once, by cross-memory attach (``process_memory.py``), and sockets only carry signals that memory is ready or has been
read.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.comm.cross_memory import process_memory
from lightning_zero.engine.comm.cross_memory.small_messages import Key, SmallMessages

_ADDRESS = struct.Struct("<q")
_PATIENCE = 30.0  # timeout for connecting, in seconds
_CHUNK = 2**15  # elements added up at a time: they fit into the cache, and torch adds them on one core

_exchanges_of_process: weakref.WeakSet[CrossMemoryExchanges] = weakref.WeakSet()


class _Exchange:
    """An exchange in flight. It ends when this rank has read from all others, and all others have read from it.

    Args:
        kept: tensors that the other ranks read, kept alive until the exchange ends.
        take: reads from one peer; called with (the peer's position, its process ID, an address) in the transport's
            thread, for one peer after another, once the memory at the address is ready.

    Attributes:
        taken: number of peers read so far; peers are read in order.
        ended: completed when the exchange ends, perhaps with an error.
    """

    def __init__(self, kept: Any, take: Callable[[int, int, int], None]) -> None:
        self._kept, self.take = kept, take
        self.taken = 0
        self.ended: Future[None] = Future()

    def end(self, failure: str | None = None) -> None:
        self._kept, self.take = None, lambda *_: None  # drop the references to tensors
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(RuntimeError(failure))


class CrossMemoryExchanges:
    """Exchanges with the other ranks of a group, all of which are on this machine.

    Args:
        peers: rank, process ID and two sockets for each other rank, in ascending order of ranks. The
            second socket is for small messages.

    Attributes:
        small: exchanges of small messages over sockets, without reading other processes' memory.
    """

    def __init__(
        self, rank: int, peers: list[tuple[int, int, socket.socket, socket.socket]], timeout: timedelta
    ) -> None:
        self._rank, self._timeout, self._process = rank, timeout, os.getpid()
        self._ranks = [other for other, _, _, _ in peers]
        self._processes = [process for _, process, _, _ in peers]
        # Guards the attributes below. Reentrant: garbage collection may close the exchanges during any allocation.
        self._lock = threading.RLock()
        self._exchanges: dict[Key, _Exchange] = {}  # in flight; the thread that removes an exchange ends it
        self._failure: str | None = None  # if set, every new exchange fails for this reason
        self._closing = False
        self._late: deque[Key] = deque()  # exchanges that this rank began after a peer's message had arrived
        self._awake, self._woken = socket.socketpair()
        self._awake.setblocking(False)  # if the socket is full, the thread wakes up anyway
        # Messages with an exchange's key contain a memory address. Messages with ~tag report that this memory was read.
        self._signals = SmallMessages([(other, line) for other, _, line, _ in peers], timeout, self._wake)
        self.small = SmallMessages([(other, line) for other, _, _, line in peers], timeout, self._wake)
        _exchanges_of_process.add(self)
        # Not an executor's thread: the interpreter must not wait at exit for a thread that lives as long as the group.
        self._thread = threading.Thread(target=self._run, name="lightning_zero-shared-memory", daemon=True)
        self._thread.start()

    def gather(self, tag: int, slices: Sequence[Tensor]) -> Callable[[], None]:
        """Fill ``slices`` from the other ranks' memory, while the other ranks read this rank's slice.

        Args:
            tag: the exchange's tag; all ranks must begin exchanges with equal tags in the same order.

        Returns:
            A function that waits until the exchange has ended. It raises a RuntimeError if the exchange failed, or did
            not end in time.
        """

        def take(position: int, process: int, address: int) -> None:
            process_memory.read_memory(process, address, slices[self._ranks[position]])

        return self._begin(tag, [slices[self._rank]] * len(self._ranks), take)

    def reduce(self, tag: int, own: Tensor, sent: Sequence[Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Add up all ranks' contributions, in the order of ranks; the sum is complete when the exchange has ended.

        Args:
            tag: see ``gather``.
            own: this rank's own contribution, 1-D.
            sent: for each rank, the values that it adds to its own; they may have another dtype than ``own``. This
                rank's element is ignored.
        """
        total, wire = torch.empty_like(own), sent[0].dtype
        # The first two terms may be swapped: rank 0 adds its own values after those of rank 1.
        own_follows = max(self._rank - 1, 0)

        def take(position: int, process: int, address: int) -> None:
            for start in range(0, len(own), _CHUNK):
                part, mine = total[start : start + _CHUNK], own[start : start + _CHUNK]
                is_first = position == 0
                term = part if is_first and wire == own.dtype else torch.empty_like(part, dtype=wire)
                process_memory.read_memory(process, address + start * term.itemsize, term)
                if not is_first:
                    part.add_(term)
                elif term is not part:
                    part.copy_(term)
                if position == own_follows:
                    part.add_(mine)

        return self._begin(tag, [sent[rank] for rank in self._ranks], take, own), total

    def _begin(
        self, tag: int, sources: list[Tensor], take: Callable[[int, int, int], None], kept: Any = None
    ) -> Callable[[], None]:
        exchange, key = _Exchange((sources, kept), take), self._signals.begin(tag)
        with self._lock:
            failure = self._failure
            if failure is None:
                self._exchanges[key] = exchange
            is_late = key in self._signals.received  # messages that arrive later are handled by the thread
        wait = partial(self._wait, exchange.ended)
        if failure is not None:
            exchange.end(failure)
            return wait
        self._signals.post(key, enumerate(_ADDRESS.pack(source.data_ptr()) for source in sources))
        if is_late:
            self._late.append(key)
            self._wake()
        return wait

    def _wait(self, ended: Future[None]) -> None:
        try:
            ended.result(self._timeout.total_seconds())
        except TimeoutError:
            raise RuntimeError(f"not finished after {self._timeout}") from None

    def _end(self, key: Key, failure: str | None = None) -> None:
        """End an exchange, unless another thread has already ended it."""
        with self._lock:
            exchange = self._exchanges.pop(key, None)
        if exchange is not None:
            exchange.end(failure)

    def sever(self, reason: str) -> None:
        """Make all exchanges in flight and all new exchanges fail, here and on the peers."""
        if os.getpid() != self._process:
            return  # in a forked process, such as a DataLoader's, the connections belong to the parent
        with self._lock:
            self._failure, self._closing = self._failure or reason, True
            unfinished = list(self._exchanges)
        # Shut the sockets before freeing tensors kept for peers: a peer that reads freed memory must see the shutdown.
        self._signals.shut(reason)
        self.small.shut(reason)
        for key in unfinished:
            self._end(key, reason)
        self._wake()

    def close(self) -> None:
        """Refuse new exchanges. The thread finishes exchanges in flight, since peers need them."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._failure = self._failure or "the exchange with the other ranks was closed"
            self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)

    def _wake(self) -> None:
        with suppress(OSError):
            self._awake.send(b"x")

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            poll, woken = None, self._woken.fileno()
            while not (self._closing and not self._exchanges and self._is_all_sent):
                if poll is None:
                    poll, is_usual = self._make_poll(), self._is_all_sent and not self._signals.lost
                ready = dict(poll.poll())
                if woken in ready:
                    self._woken.recv(4096)
                late = [self._late.popleft() for _ in range(len(self._late))]
                for tag, ordinal in dict.fromkeys(late + self._signals.take_in(ready)):
                    self._go_on((max(tag, ~tag), ordinal))
                for position in self._signals.lost:
                    self._lose(position)
                if not (is_usual and self._is_all_sent and not self._signals.lost):
                    self._signals.send_unsent()
                    self.small.send_unsent()
                    poll = None
        except Exception as error:
            self.sever(str(error))
        finally:
            for each in (*self._signals.sockets, *self.small.sockets, self._awake, self._woken):
                each.close()

    @property
    def _is_all_sent(self) -> bool:
        return not self._signals.has_unsent and not self.small.has_unsent

    def _make_poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        self._signals.register(poll, receives=True)
        self.small.register(poll, receives=False)
        return poll

    def _go_on(self, key: Key) -> None:
        """Read from peers in order until a peer is not ready; end the exchange once all ranks have read."""
        exchange, (tag, ordinal) = self._exchanges.get(key), key
        if exchange is None:
            return
        ready = self._signals.received.get(key, {})
        while exchange.taken in ready:
            position = exchange.taken
            try:
                exchange.take(position, self._processes[position], *_ADDRESS.unpack(ready[position]))
            except OSError as error:
                self._lose(position, str(error))
                return
            if self._has_ended(position):
                self._lose(position)
                return
            exchange.taken += 1
            self._signals.post((~tag, ordinal), [(position, b"")])
        if exchange.taken == len(self._signals.received.get((~tag, ordinal), ())) == len(self._ranks):
            del self._signals.received[key], self._signals.received[~tag, ordinal]
            self._end(key)

    def _has_ended(self, position: int) -> bool:
        """Whether a peer has closed its connection, even if messages are unread; data just read may then be invalid."""
        poll = select.poll()
        poll.register(self._signals.sockets[position], select.POLLRDHUP)
        return bool(poll.poll(0))

    def _lose(self, position: int, failure: str = "") -> None:
        """Fail all new exchanges, and those in flight that still depend on a peer that has closed its connection."""
        failure = failure or f"rank {self._ranks[position]} closed the connection"
        with self._lock:
            self._failure = self._failure or failure
            exchanges = list(self._exchanges.items())
        for (tag, ordinal), exchange in exchanges:
            if exchange.taken <= position or position not in self._signals.received.get((~tag, ordinal), ()):
                self._end((tag, ordinal), failure)


def sever_all(reason: str) -> None:
    """Make every exchange of this process fail, because the run has failed."""
    for exchanges in list(_exchanges_of_process):
        exchanges.sever(reason)


# -- connecting ---------------------------------------------------------------------------------------------------


def connect(
    here: Sequence[int], rank: int, timeout: timedelta, exchange_objects: Callable[[Any], list[Any]]
) -> CrossMemoryExchanges | None:
    """Connect the ranks of a machine, or of a part of it. Collective over all ranks of all groups.

    Args:
        here: the ranks to connect, including this one; a rank's number in the exchanges is its position.
        exchange_objects: all-gathers a small object over all ranks of all groups.

    Returns:
        The exchanges; None on every rank if any rank cannot read the memory of another rank in its group.
    """
    probe = torch.randint(2**62, (8,), generator=torch.Generator().manual_seed(os.getpid()), device="cpu")
    with ExitStack() as stack:
        said = None
        with suppress(OSError):
            if process_memory.is_supported():
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                listener.bind("")  # the system chooses a name, without a file
                listener.listen(socket.SOMAXCONN)
                process_memory.let_read(os.getppid())
                said = os.getpid(), listener.getsockname(), probe.data_ptr(), probe.tolist()
        every = exchange_objects(said)
        told, place, size = [every[each] for each in here], here.index(rank), len(here)
        if None in every or any(exchange_objects(_is_unreadable(probe, told))):
            process_memory.let_read(0)
            return None
        lines, error = {}, None
        try:
            lines = _connect_to([name for _, name, _, _ in told[:place]], place, stack)
        except OSError as raised:
            error = raised
        if any(exchange_objects(error is not None)):
            return None
        processes = [process for process, _, _, _ in told]
        while len(lines) < 2 * (size - 1):  # all ranks have connected, so accepting does not block
            line, _ = listener.accept()
            process, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if process in processes:  # other processes may connect, too
                lines[tuple(map(int, line.recv(32).split()))] = line
        stack.pop_all()
        listener.close()
    others = [other for other in range(size) if other != place]
    peers = [(other, processes[other], lines[other, 0], lines[other, 1]) for other in others]
    return CrossMemoryExchanges(place, peers, timeout)


def _is_unreadable(probe: Tensor, told: list[Any]) -> bool:
    """Whether any process's memory cannot be read, or differs from the values that the process has sent."""
    try:
        for process, _, address, expected in told:
            process_memory.read_memory(process, address, found := torch.empty_like(probe))
            if found.tolist() != expected:
                return True
    except OSError:
        return True
    return False


def _connect_to(names: list[bytes], rank: int, stack: ExitStack) -> dict[tuple[int, ...], socket.socket]:
    """Connect two sockets to each lower rank, keyed by (rank, number); both ends of a socket have the same number."""
    lines: dict[tuple[int, ...], socket.socket] = {}
    for other, name in enumerate(names):
        for number in range(2):
            lines[other, number] = line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(line).settimeout(_PATIENCE)
            line.connect(name)
            line.send(f"{rank} {number}".encode())
    return lines
