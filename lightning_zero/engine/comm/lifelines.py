"""Connections between the processes of a group, by which each learns within moments that another has ended.

A collective fails when its connections close, but a wait in the process group's store does not, nor does a wait for a
rank that itself waits for the ended process. So each rank has a TCP connection to the first rank, which the system
closes when a process ends, however it ends; the first rank passes the news on. A process that is stopped, in a debugger
or busy for hours keeps its connection: the system answers for it. A machine that is gone does not answer TCP's
keepalive probes.
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
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import util
from typing import Any

from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.process_group import ProcessGroup

log = logging.getLogger(__name__)

LOST, LEFT = "lost", "left"
"""Kinds of message: a rank's process was killed or has crashed; a rank's process has ended normally."""

_CLOSED = "closed"  # a rank goes on without this group
_PATIENCE = 10.0  # seconds that a rank waits for the first one to say where it listens, and to answer
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}  # seconds, seconds, and unanswered ones

_all: weakref.WeakSet[Lifelines] = weakref.WeakSet()


class Lifelines:
    """This rank's connection to the first rank of its group; on the first rank, the connections of all.

    Args:
        group: all of its ranks make this at the same point.
        hear: called in a thread with each message: its kind (``LOST``, ``LEFT``, or one of the callers of ``say``), the
            rank in the group that it is about, and a text.

    Attributes:
        group: the process group.
        lost, left: ranks of the group about which such a message has come.
    """

    def __init__(self, group: ProcessGroup, hear: Callable[[str, int, str], None]) -> None:
        self.group, self.lost, self.left = group, set[int](), set[int]()
        self._hear, self._rank, self._process = hear, process_group.rank(group), os.getpid()
        self._store = process_group.default_store()
        self._key = f"lightning_zero/lifelines/{','.join(map(str, process_group.ranks_of(group)))}"
        self._line: socket.socket | None = None
        self._closed: set[int] = set()
        self._others: list[_Line] = []  # on the first rank
        if self._rank == 0:
            self._listener, self._token = _listener(), secrets.token_hex(16)
            self._line, own_end = socket.socketpair()
            self._others.append(_Line(own_end, 0))
            where = _own_address(self._store), self._listener.getsockname()[1], self._token
            self._store.set(self._key, json.dumps(where))
        else:
            self._line = self._connect()
        self._thread = threading.Thread(
            target=self._serve if self._rank == 0 else self._listen, name="lightning_zero-lifelines", daemon=True
        )
        self._thread.start()
        _all.add(self)
        # also where a process of multiprocessing's ends, which leaves out `atexit`
        self._at_exit = util.Finalize(None, self._part, (LEFT,), exitpriority=100)

    @property
    def ended(self) -> set[int]:
        """Ranks of the group whose processes have ended."""
        return self.lost | self.left

    def say(self, kind: str, text: str = "") -> None:
        """Tell all other ranks something. A signal handler may call this."""
        if self._line is not None and os.getpid() == self._process:
            with suppress(OSError):
                self._line.send(_message(kind, self._rank, text))

    def close(self) -> None:
        """End the connection: the process goes on, and the other ranks do not take it for one that has ended."""
        if self._at_exit.still_active():
            self._at_exit.cancel()
            self._part(_CLOSED)

    def _part(self, kind: str) -> None:
        self.say(kind)
        if self._rank != 0:
            self._closed.add(self._rank)
        if self._rank != 0 and self._line is not None:
            with suppress(OSError):
                self._line.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)

    def _connect(self) -> socket.socket | None:
        """Reach the first rank. Where that cannot be done, the ranks' ends are not told."""
        deadline, error = time.monotonic() + _PATIENCE, None
        while time.monotonic() < deadline:
            try:
                self._store.wait([self._key], timedelta(seconds=_PATIENCE))
                address, port, token = json.loads(self._store.get(self._key))
            except RuntimeError as raised:
                error = raised
                break
            for host in dict.fromkeys((address, _host_of(self._store))):
                with suppress(OSError):
                    return _introduced(host, port, _message(token, self._rank))
            time.sleep(0.1)  # what was read may be of an earlier group in the same store
        log.debug("rank %d has no lifeline: %s", self._rank, error or "the first rank does not answer")
        return None

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """On all ranks but the first."""
        if self._line is None:
            return
        line = _Line(self._line, 0)
        while (messages := line.read()) is not None:
            for message in messages:
                self._take(*message)
        if not self._closed.intersection((0, self._rank)):
            self._take(LOST, 0, "")
        self._line.close()

    def _serve(self) -> None:
        """On the first rank."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._others[0].socket, selectors.EVENT_READ, self._others[0])
            while 0 not in self._closed:
                for key, _ in selector.select():
                    line = key.data
                    if line is None:
                        with suppress(OSError):
                            line = _Line(self._listener.accept()[0])
                            _keep_probing(line.socket)
                            selector.register(line.socket, selectors.EVENT_READ, line)
                            self._others.append(line)
                    elif not self._heard(line):
                        selector.unregister(line.socket)
                        line.socket.close()
                        self._others.remove(line)
                        if line.rank is not None and line.rank not in self._closed:
                            self._pass_on(LOST, line.rank, "")
        self._close_sockets()

    def _heard(self, line: _Line) -> bool:
        """Take what has come from a rank; False if the connection is at its end."""
        messages = line.read()
        for kind, rank, text in messages or ():
            if line.rank is not None:
                self._pass_on(kind, line.rank, text)
            elif kind == self._token:
                line.rank = rank
                line.send(_message("welcome", 0))
                for kind, ranks in ((LOST, self.lost), (LEFT, self.left)):
                    for ended in ranks:
                        line.send(_message(kind, ended))
            else:  # a stranger
                return False
        return messages is not None

    def _pass_on(self, kind: str, rank: int, text: str) -> None:
        message = _message(kind, rank, text)
        for line in self._others:
            if line.rank not in (None, 0, rank):
                line.send(message)
        self._take(kind, rank, text)

    def _take(self, kind: str, rank: int, text: str) -> None:
        if kind in (LOST, LEFT, _CLOSED):
            self._closed.add(rank)
            {LOST: self.lost, LEFT: self.left}.get(kind, set()).add(rank)
        if rank != self._rank:
            self._hear(kind, rank, text)

    def _close_sockets(self) -> None:
        sockets = [line.socket for line in self._others] + ([self._listener] if self._rank == 0 else [])
        for each in sockets + ([self._line] if self._line is not None else []):
            each.close()


class _Line:
    """One end of a connection, and the rank that has the other end, once it is known."""

    def __init__(self, connected: socket.socket, rank: int | None = None) -> None:
        self.socket, self.rank, self._rest = connected, rank, b""

    def read(self) -> list[Any] | None:
        """Wait for messages, of (kind, rank, text); None at the end of the connection."""
        try:
            data = self.socket.recv(2**16)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines] if data else None
        except ValueError:  # of a stranger
            return None

    def send(self, message: bytes) -> None:
        with suppress(OSError):
            self.socket.send(message, socket.MSG_DONTWAIT)


def _message(kind: str, rank: int, text: str = "") -> bytes:
    return json.dumps([kind, rank, text]).encode() + b"\n"


def _introduced(host: str, port: int, introduction: bytes) -> socket.socket:
    """A connection to the first rank, which has answered."""
    connected = socket.create_connection((host, port), timeout=_PATIENCE)
    try:
        connected.sendall(introduction)
        welcome = b""
        while not welcome.endswith(b"\n"):
            byte = connected.recv(1)
            if not byte:
                raise ConnectionError  # it is not the first rank
            welcome += byte
    except OSError:
        connected.close()
        raise
    connected.settimeout(None)
    _keep_probing(connected)
    return connected


def _keep_probing(connected: socket.socket) -> None:
    """Let the system find out when the other machine does not answer any more."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listener() -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=both)


def _host_of(store: Any) -> str:
    """Of the process group's store, as this rank has reached it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "localhost")


def _own_address(store: Any) -> str:
    """This machine's, as others reach it that have reached the store."""
    try:
        (family, *_, address), *_ = socket.getaddrinfo(_host_of(store), 1, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as unsent:
            unsent.connect(address)
            return str(unsent.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _close_copies() -> None:
    """In a forked process (of a DataLoader): its copies would keep connections open when this process has ended."""
    for lifelines in _all:
        lifelines._close_sockets()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)
