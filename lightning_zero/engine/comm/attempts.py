"""Attempts to run a job: an agent (torchrun) starts a new attempt when a process has died.

All attempts share the agent's store, which still contains the addresses of the previous attempt's processes. So that
new processes do not connect to these addresses, each attempt has its own keys in the store.
TORCHELASTIC_RESTART_COUNT cannot number the attempts: it counts the restarts of one machine only (pytorch/pytorch
issue 108158).
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

from lightning_zero.engine.comm.process_group import Store, TCPStore, named_store


def uses_agent_store() -> bool:
    """Whether an agent provides the process group's store; otherwise rank 0's process does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_attempt(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Store | None:
    """The part of the agent's store that only this attempt uses; None if no agent provides a store. Collective.

    Rank 0 takes the next number. The others may still find the number of an earlier attempt: one that they have joined
    before, or whose rank 0 has ended and will never say that all have joined.

    Raises:
        RuntimeError: if a process does not arrive in time.
    """
    if not uses_agent_store():
        return None
    agents = TCPStore(address, port, size, is_master=False, timeout=timeout)
    store, number, is_new = named_store(f"lightning_zero/attempts of {size}", agents), 0, False
    if rank == 0:
        number = store.add("attempt", 1)
        store.wait([f"{number}/{other}" for other in range(1, size)], timeout)
        store.set(f"{number}/have all joined", "")
        return named_store(f"{number}", store)
    deadline = time.monotonic() + timeout.total_seconds()
    while not (is_new and store.check([f"{number}/have all joined"])):
        if (newest := store.add("attempt", 0)) > number:
            number, is_new = newest, store.add(f"{newest}/{rank}", 1) == 1
        if time.monotonic() > deadline:
            raise RuntimeError(f"Rank {rank} timed out waiting for rank 0 of this attempt. Check that rank 0 starts.")
        time.sleep(0.01)
    return named_store(f"{number}", store)
