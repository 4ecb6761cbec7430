"""A free TCP port for processes that a test starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port that a started process may listen on, but that no other socket is given in the meantime."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers set it, which may then bind as well
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]
