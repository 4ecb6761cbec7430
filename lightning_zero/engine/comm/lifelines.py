"""TCP connections between the processes of a group, through which every rank is notified at once when another ends.

When a process ends, its connections close and its collectives fail. But a wait in the process group's store does not
fail, nor does a wait for a rank that itself waits for the ended process. So each rank has a connection to the first
rank. The system closes this connection when either process ends for any reason, and the first rank notifies the other
ranks. A suspended process (SIGSTOP) keeps its connection, since its system answers TCP's keepalive probes. A machine
that has crashed does not answer them, so its connections are closed as well.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from contextlib import suppress
from multiprocessing import util
from typing import Any

from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.process_group import ProcessGroup

log = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds that a rank waits before it notifies the first rank of its wait."""

LOST, LEFT, WAITS, TICK = "lost", "left", "waits", "tick"
"""Kinds of message: a rank's process was killed or has crashed; a rank's process has ended normally; what a rank waits
for (received only by the first rank); and a tick, which is not sent: each rank passes it to its own ``hear`` several
times per ``PATIENCE``."""

_CLOSED = "closed"  # a rank has closed its connection, but its process continues
_TIMEOUT = 10.0  # seconds that a rank waits for the first rank's answer, once it knows the first rank's address
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}  # seconds, seconds, number of unanswered probes

_all: weakref.WeakSet[Lifelines] = weakref.WeakSet()


class Lifelines:
    """This rank's connection to the first rank of its group; on the first rank, the connections of all ranks.

    Args:
        group: the process group. Creating this object is collective over the group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._rank, self._process = process_group.rank(group), os.getpid()
        store = process_group.default_store()
        key = f"lightning_zero/lifelines/{','.join(map(str, process_group.ranks_of(group)))}"
        self._closed: set[int] = set()  # ranks whose closed connections are not reported (again)
        self._ends: list[bytes] = []  # messages about ended ranks, for ranks that connect later
        self._lock = threading.RLock()  # guards sending; reentrant, since a signal handler may send
        self._listener: socket.socket | None = None
        self._line: socket.socket | None
        if self._rank == 0:
            self._listener, self._token = _listener(), secrets.token_hex(16)
            self._line, own_end = socket.socketpair()
            self._lines = [_Line(own_end, 0)]
            store.set(key, json.dumps((_own_address(store), self._listener.getsockname()[1], self._token)))
        else:
            self._line = _connect(store, key, self._rank)
            self._lines = [_Line(self._line, 0)] if self._line is not None else []
        # Not an executor's thread: the thread lives as long as the group, and must not delay the interpreter's exit.
        self._thread = threading.Thread(target=self._run, name="lightning_zero-lifelines", daemon=True)
        self._thread.start()
        _all.add(self)
        # processes of ``multiprocessing`` do not run ``atexit`` handlers
        self._at_exit = util.Finalize(None, self._part, (LEFT,), exitpriority=100)

    def hear(self, kind: str, rank: int, text: str) -> None:
        """Handle a message from or about a rank of the group. Called in ``_thread``."""
        raise NotImplementedError

    def say(self, kind: str, text: str = "") -> None:
        """Send a message to all other ranks (``WAITS``: only to the first rank). A signal handler may call this."""
        if self._line is not None and os.getpid() == self._process:
            with suppress(OSError), self._lock:
                self._line.sendall(_message(kind, self._rank, text))

    def close(self) -> None:
        """Close the connection without reporting this process as ended."""
        if self._at_exit.still_active():
            self._at_exit.cancel()
            self._part(_CLOSED)

    def _part(self, kind: str) -> None:
        self.say(kind)
        if self._rank != 0 and self._line is not None:
            self._closed.add(self._rank)
            with suppress(OSError):
                self._line.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for line in self._lines:
                selector.register(line.socket, selectors.EVENT_READ, line)
            if self._listener is not None:
                selector.register(self._listener, selectors.EVENT_READ)
            while self._lines and (self._rank != 0 or 0 not in self._closed):
                for key, _ in selector.select(PATIENCE / 3):
                    line = key.data
                    if line is None:
                        assert self._listener is not None
                        with suppress(OSError):
                            line = _Line(self._listener.accept()[0])
                            _keep_probing(line.socket)
                            selector.register(line.socket, selectors.EVENT_READ, line)
                            self._lines.append(line)
                    elif not self._read(line):
                        selector.unregister(line.socket)
                        line.socket.close()
                        self._lines.remove(line)
                        if line.rank is not None and not self._closed.intersection((line.rank, self._rank)):
                            self._take(LOST, line.rank, "")
                self.hear(TICK, self._rank, "")
        self._close_sockets()

    def _read(self, line: _Line) -> bool:
        """Handle the messages that have arrived; return False at the end of the connection."""
        messages = line.read()
        for kind, rank, text in messages or ():
            if line.rank is not None:
                self._take(kind, rank, text)
            elif kind == self._token:
                line.rank = rank
                for message in (_message("welcome", 0), *self._ends):
                    line.send(message)
            else:  # not a rank of this group
                return False
        return messages is not None

    def _take(self, kind: str, rank: int, text: str) -> None:
        """Call ``hear`` with a message; the first rank also forwards the message to the other ranks."""
        if kind in (LOST, LEFT, _CLOSED):
            self._closed.add(rank)
        if self._rank == 0 and kind != WAITS:
            message = _message(kind, rank, text)
            if kind in (LOST, LEFT):
                self._ends.append(message)
            for line in self._lines:
                if line.rank not in (None, 0, rank):
                    line.send(message)
        self.hear(kind, rank, text)

    def _close_sockets(self) -> None:
        for each in (*(line.socket for line in self._lines), self._listener, self._line):
            if each is not None:
                each.close()


class _Line:
    """One end of a connection, and the rank at the other end, once known."""

    def __init__(self, connected: socket.socket, rank: int | None = None) -> None:
        self.socket, self.rank, self._rest = connected, rank, b""

    def read(self) -> list[Any] | None:
        """Wait for messages, and return a (kind, rank, text) for each; None at the end of the connection."""
        try:
            data = self.socket.recv(2**16)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines] if data else None
        except ValueError:  # the sender is another program
            return None

    def send(self, message: bytes) -> None:
        with suppress(OSError):
            self.socket.send(message, socket.MSG_DONTWAIT)


def _message(kind: str, rank: int, text: str = "") -> bytes:
    return json.dumps([kind, rank, text]).encode() + b"\n"


def _connect(store: Any, key: str, rank: int) -> socket.socket | None:
    """Connect to the first rank. If that fails, return None: this rank will then not notice when other ranks end."""
    error = None
    try:
        has_come = _comes(key, store)
        deadline = time.monotonic() + _TIMEOUT
        while has_come and time.monotonic() < deadline:
            address, port, token = json.loads(store.get(key))
            for host in dict.fromkeys((address, _host_of(store))):
                with suppress(OSError):
                    return _introduced(host, port, _message(token, rank))
            time.sleep(0.1)  # the address may be from an earlier group in the same store
    except RuntimeError as raised:
        error = raised
    log.debug("rank %d will not notice when other ranks end: %s", rank, error or "the first rank does not answer")
    return None


def _comes(key: str, store: Any) -> bool:
    """Wait for a key for the store's timeout, since the first rank may come much later.

    Ctrl-C ends this wait, unlike ``store.wait``.
    """
    deadline, pause = time.monotonic() + store.timeout.total_seconds(), 1e-3
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True


def _introduced(host: str, port: int, introduction: bytes) -> socket.socket:
    """Connect to the first rank, and wait for its answer."""
    connected = socket.create_connection((host, port), timeout=_TIMEOUT)
    try:
        connected.sendall(introduction)
        while (byte := connected.recv(1)) != b"\n":  # read the welcome, and nothing after it
            if not byte:
                raise ConnectionError  # the other end is not the first rank
    except OSError:
        connected.close()
        raise
    connected.settimeout(None)
    _keep_probing(connected)
    return connected


def _keep_probing(connected: socket.socket) -> None:
    """Let the system detect that the other machine no longer answers (TCP keepalive)."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listener() -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=both)


def _host_of(store: Any) -> str:
    """The address at which this rank has connected to the process group's store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "localhost")


def _own_address(store: Any) -> str:
    """This machine's address on the network on which this rank reaches the store."""
    try:
        (family, *_, address), *_ = socket.getaddrinfo(_host_of(store), 1, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as unsent:
            unsent.connect(address)
            return str(unsent.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _close_copies() -> None:
    """In a forked process, close the copied sockets: they would keep connections open after the parent has ended."""
    for lifelines in _all:
        lifelines._close_sockets()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)
