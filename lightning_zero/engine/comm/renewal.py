"""Replace the default process group, after its run has failed, with a new group of the same processes."""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta
from typing import Any

from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.failures import ended_ranks, forget
from lightning_zero.engine.comm.process_group import Store


def have_all_come(state: Any, patience: float) -> bool:
    """Whether, after a failure, all ranks of the default process group call this in time and with equal states.

    Args:
        state: this rank's state, which must be serialisable as JSON.
        patience: seconds that ranks wait for each other's states; they wait twice as long for rank 0's decision.
    """
    if ended_ranks():
        return False
    rank, size = process_group.rank(), process_group.world_size()
    store, said = process_group.named_store("lightning_zero/come"), json.dumps(state)
    try:
        return _decide(store, size, said, patience) if rank == 0 else _join(store, rank, said, patience)
    except RuntimeError:  # a rank is missing, or the store's host is gone
        return False


def _decide(store: Store, size: int, said: str, patience: float) -> bool:
    """On rank 0: begin an attempt, and decide once the other ranks' states have arrived.

    After a "no", the group and its store may stay the same, so each attempt has its own name.
    """
    name, equal = secrets.token_hex(8), False
    store.set("name", name)
    others = [f"{name}/{other}" for other in range(1, size)]
    try:
        store.wait(others, timedelta(seconds=patience))
        equal = all(store.get(other).decode() == said for other in others)
    finally:
        store.set(f"{name}/verdict", "yes" if equal else "no")
    return equal


def _join(store: Store, rank: int, said: str, patience: float) -> bool:
    """On other ranks: send this rank's state in rank 0's attempt, and wait for the decision."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        name = store.get("name").decode() if store.check(["name"]) else None
        if name is not None and not store.check([f"{name}/verdict"]):  # an attempt with a verdict is an earlier one
            store.set(f"{name}/{rank}", said)
            store.wait([f"{name}/verdict"], timedelta(seconds=2 * patience))
            return store.get(f"{name}/verdict").decode() == "yes"
        time.sleep(0.01)
    return False


def renew(**options: Any) -> None:
    """Replace the default process group, whose run has failed, with a new one. Collective.

    The new group uses the same store with different keys, so that it does not receive messages of the old group.

    Args:
        options: arguments of ``torch.distributed.init_process_group`` other than backend, store, rank and world size.

    Raises:
        RuntimeError: if a rank's process has ended.
    """
    if ended := sorted(ended_ranks()):
        raise RuntimeError(
            "These processes cannot continue after the failure: the program has ended on rank(s) "
            f"{', '.join(map(str, ended))}. Restart all ranks."
        )
    rank, size, backend = process_group.rank(), process_group.world_size(), process_group.backend_name()
    store = process_group.named_store("lightning_zero/renewed")
    forget()
    process_group.destroy()
    process_group.start(backend, store, rank, size, **options)
