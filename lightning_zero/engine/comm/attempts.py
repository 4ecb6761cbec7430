"""Attempts at a job whose processes an agent (torchrun) restarts after one has died.

All attempts share the agent's store, in which the processes of the previous attempt have left their addresses; new
processes would connect to these. So each attempt has its own keys in the store. A number from the environment cannot
tell attempts apart: TORCHELASTIC_RESTART_COUNT counts the restarts of one machine (pytorch/pytorch issue 108158).
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
_GRACE = 0.3  # seconds in which a process can still report that a peer is gone


def store_of_attempt(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Store | None:
    """The part of the agent's store for the processes of this attempt; None if no agent provides a store. Collective.

    Args:
        address, port: the store's address and port.
        timeout: how long to wait for the other processes.

    Raises:
        RuntimeError: if some process has not arrived in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = TCPStore(address, port, size, is_master=False, timeout=timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    name = _gather(store, size, timeout) if rank == 0 else _join(store, rank, deadline)
    return named_store(f"{_KEY}/{name}", store)


def _gather(store: Store, size: int, timeout: timedelta) -> str:
    """On the first rank: choose a name, and confirm it once all other ranks have registered under it."""
    name = secrets.token_hex(8)
    store.set(_KEY, name)
    guests = [f"{_KEY}/{name}/{rank}" for rank in range(1, size)]
    store.wait(guests, timeout)
    store.set(f"{_KEY}/{name}/came", json.dumps([guest.decode() for guest in store.multi_get(guests)]))
    return name


def _join(store: Store, rank: int, deadline: float) -> str:
    """Register under the name in the store until the first rank confirms: the name may be an earlier attempt's."""
    own, name = secrets.token_hex(8), ""
    while time.monotonic() < deadline:
        if store.check([_KEY]) and (found := store.get(_KEY).decode()) != name:
            name = found
            store.set(f"{_KEY}/{name}/{rank}", own)
        came = f"{_KEY}/{name}/came"
        if name and store.check([came]) and own in json.loads(store.get(came)):
            return name
        time.sleep(0.01)
    raise RuntimeError(f"Rank {rank} waited for rank 0 of this attempt, which has not arrived. Did its process start?")


def will_be_repeated() -> bool:
    """Whether an agent restarts all processes if one dies."""
    try:
        return int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) > int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    except (KeyError, ValueError):
        return False


def leave_soon(reason: str) -> None:
    """End this process in a moment, whatever it is doing: the next attempt begins once all old processes are gone.

    Args:
        reason: why the process ends; printed first.
    """

    def leave() -> None:
        print(
            f"This process exits, so that the agent can restart all processes: {reason}.", file=sys.stderr, flush=True
        )
        sys.stdout.flush()
        os._exit(1)

    timer = threading.Timer(_GRACE, leave)
    timer.daemon = True
    timer.start()
