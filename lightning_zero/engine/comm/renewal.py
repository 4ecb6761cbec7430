"""Replace the default process group, after its run has failed, with a new group of the same processes."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.failures import ended_ranks, forget


def have_all_come(state: Any, patience: float) -> bool:
    """Whether, after a failure, all ranks of the default process group call this in time and with equal states.

    Args:
        state: this rank's state, which must be serialisable as JSON.
        patience: seconds that ranks wait for each other's states; they wait twice as long for rank 0's decision.
    """
    if ended_ranks():
        return False
    rank, size = process_group.rank(), process_group.world_size()
    store = process_group.named_store("lightning_zero/come")
    said = json.dumps(state)
    try:
        store.set(str(rank), said)
        if rank == 0:
            store.wait([str(other) for other in range(size)], timedelta(seconds=patience))
            store.set("verdict", "yes" if all(store.get(str(r)).decode() == said for r in range(size)) else "no")
        store.wait(["0"], timedelta(seconds=patience))
        store.wait(["verdict"], timedelta(seconds=2 * patience))
        return store.get("verdict").decode() == "yes"
    except RuntimeError:  # a rank is missing, or the store's host is gone
        if rank == 0:
            with suppress(RuntimeError):
                store.set("verdict", "no")
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
