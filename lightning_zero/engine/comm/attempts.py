"""Attempts to run a job: an agent (torchrun) starts a new attempt when a process has died.

All attempts share the agent's store, which still contains the addresses of the previous attempt's processes. So that
new processes do not connect to these addresses, each attempt has its own keys in the store.
TORCHELASTIC_RESTART_COUNT cannot identify an attempt: it counts the restarts of one machine only (pytorch/pytorch
issue 108158).
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from datetime import timedelta

from lightning_zero.engine.comm.process_group import Store, TCPStore, named_store

_KEY = "lightning_zero/attempt"
_GRACE = 0.3  # seconds in which a process can still report a lost peer before it exits


def store_of_attempt(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Store | None:
    """The part of the agent's store that only this attempt uses; None if no agent provides a store. Collective.

    Args:
        address, port: the store's address and port.
        timeout: how long to wait for the other processes.

    Raises:
        RuntimeError: if a process does not arrive in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = TCPStore(address, port, size, is_master=False, timeout=timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    name = _gather(store, size, timeout) if rank == 0 else _join(store, rank, deadline)
    return named_store(f"{_KEY}/{name}", store)


def _gather(store: Store, size: int, timeout: timedelta) -> str:
    """On rank 0: choose the attempt's name, and confirm it once all other ranks have registered under this name."""
    name = secrets.token_hex(8)
    store.set(_KEY, name)
    guests = [f"{_KEY}/{name}/{rank}" for rank in range(1, size)]
    store.wait(guests, timeout)
    store.set(f"{_KEY}/{name}/came", json.dumps([guest.decode() for guest in store.multi_get(guests)]))
    return name


def _join(store: Store, rank: int, deadline: float) -> str:
    """On other ranks: register under the stored name, which may be an earlier attempt's, until rank 0 confirms."""
    own, name = secrets.token_hex(8), ""
    while time.monotonic() < deadline:
        if store.check([_KEY]) and (found := store.get(_KEY).decode()) != name:
            name = found
            store.set(f"{_KEY}/{name}/{rank}", own)
        came = f"{_KEY}/{name}/came"
        if name and store.check([came]) and own in json.loads(store.get(came)):
            return name
        time.sleep(0.01)
    raise RuntimeError(f"Rank {rank} timed out waiting for rank 0 of this attempt. Check that rank 0 starts.")


def will_be_repeated() -> bool:
    """Whether an agent will restart all processes if one dies."""
    try:
        return int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) > int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    except (KeyError, ValueError):
        return False


def leave_soon(reason: str) -> None:
    """End this process after a short delay, whatever it is doing. The next attempt begins once all processes end.

    Args:
        reason: why the process ends; printed to stderr.
    """

    def leave() -> None:
        print(
            f"This process exits, so that the launcher can restart all processes. The reason: {reason}.",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        os._exit(1)

    timer = threading.Timer(_GRACE, leave)
    timer.daemon = True
    timer.start()
