"""How ranks of one machine reach each other's memory: the probe of the permission, and the sockets between them."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.comm import process_memory
from lightning_zero.engine.comm.cma_exchange import CrossMemoryExchanges

_PATIENCE = 30.0  # seconds that ranks wait for each other when they connect


def connect(
    rank: int,
    size: int,
    timeout: timedelta,
    exchange_objects: Callable[[Any], list[Any]],
    failure: Callable[[], str | None] = lambda: None,
) -> CrossMemoryExchanges | None:
    """Reach the other ranks of a group by their memory; None on every rank where any of them cannot. Collective.

    Args:
        timeout: of each exchange to come.
        exchange_objects: gives every rank's small object to all.
        failure: why other ranks will not come, if that is known.
    """
    probe = torch.randint(2**62, (8,), generator=torch.Generator().manual_seed(os.getpid()), device="cpu")
    with ExitStack() as stack:
        said = None
        with suppress(OSError):
            if process_memory.is_supported():
                listener = stack.enter_context(_listener())
                where = listener.getsockname(), probe.data_ptr(), probe.tolist()
                said = process_memory.memory_domain(), os.getpid(), *where
        told = exchange_objects(said)
        if None in told or len({each[0] for each in told}) > 1:
            return None
        processes = [each[1] for each in told]
        if any(exchange_objects(_is_unreadable(probe, told))):
            allowed = all(exchange_objects(process_memory.let_read(os.getppid())))
            if not allowed or any(exchange_objects(_is_unreadable(probe, told))):
                process_memory.let_read(0)
                return None  # before any rank waits for another that gives up
        sockets, error = {}, None
        try:
            sockets = _connect_all(rank, listener, [each[2] for each in told], processes, failure)
        except OSError as raised:
            error = raised
        if any(exchange_objects(error is not None)):
            for connected in (each for both in sockets.values() for each in both):
                connected.close()
            return None
    peers = [(other, processes[other], *sockets[other]) for other in ((rank - k) % size for k in range(1, size))]
    return CrossMemoryExchanges(rank, peers, timeout)


def _is_unreadable(probe: Tensor, told: list[Any]) -> bool:
    """Whether the memory of any process cannot be read, or holds something else than it has told."""
    try:
        for _, process, _, address, expected in told:
            process_memory.read_memory(process, address, found := torch.empty_like(probe))
            if found.tolist() != expected:
                return True
    except OSError:
        return True
    return False


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.settimeout(_PATIENCE)
    listener.bind("")  # a name of the system's own choice, of no file
    listener.listen()
    return listener


def _connect_all(
    rank: int, listener: socket.socket, names: list[bytes], processes: list[int], failure: Callable[[], str | None]
) -> dict[int, tuple[socket.socket, socket.socket]]:
    """Two sockets to each other rank."""
    sockets = {}
    for other, name in enumerate(names[:rank]):
        sockets[other] = peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(_PATIENCE)
        peer.connect(name)
        peer.send(str(rank).encode())
    for _ in names[rank + 1 :]:
        peer = _accepted(listener, failure)
        peer.settimeout(_PATIENCE)
        other = int(peer.recv(16))
        process, _, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if process != processes[other]:
            raise OSError(f"process {process} is not rank {other}")
        sockets[other] = peer
    pairs = {}
    for other, peer in sockets.items():
        if other < rank:
            second, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                socket.send_fds(peer, [b"x"], [theirs.fileno()])
        else:
            _, (descriptor,), _, _ = socket.recv_fds(peer, 1, 1)
            second = socket.socket(fileno=descriptor)
        peer.settimeout(None)
        pairs[other] = peer, second
    return pairs


def _accepted(listener: socket.socket, failure: Callable[[], str | None]) -> socket.socket:
    """The next connection; looks now and then whether others have failed, which leaves nothing to be seen here."""
    deadline = time.monotonic() + _PATIENCE
    while not select.select([listener], [], [], 0.2)[0]:
        if time.monotonic() > deadline or failure() is not None:
            raise TimeoutError  # where all then do without
    return listener.accept()[0]
