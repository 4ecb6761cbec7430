"""Functions for process groups and stores. No other file uses private names of ``torch.distributed``."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout

ProcessGroup = dist.ProcessGroup
Store = dist.Store
TCPStore = dist.TCPStore
ReduceOp = dist.ReduceOp
DistError = dist.DistError

FOREVER = timedelta(days=1000)
_UNUSED_TAG = 7699
_CAN_KEEP_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


def is_initialized() -> bool:
    """Whether this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


@contextmanager
def simulated(rank: int, size: int) -> Iterator[None]:
    """Context whose default group has torch's backend ``fake``: no other rank exists, and collectives change nothing.

    Code inside does not see this process's other groups, which are unchanged afterwards.
    """
    world = dist.distributed_c10d._world
    groups, default, count = set(all_groups()), world.default_pg, world.group_count
    world.default_pg = None
    forget_meshes()
    try:
        dist.init_process_group("fake", rank=rank, world_size=size)
        yield
    finally:
        # Names of groups contain their number, which must be the same on every real rank.
        world.default_pg, world.group_count = default, count
        for group in set(all_groups()) - groups:
            dist.destroy_process_group(group)
        forget_meshes()


def world_size(group: ProcessGroup | None = None) -> int:
    """The number of ranks in a process group (None: the default group); 1 if torch.distributed is not initialised."""
    return dist.get_world_size(group or dist.group.WORLD) if is_initialized() else 1


def rank(group: ProcessGroup | None = None) -> int:
    """This process's rank in a group (None: the default group); 0 if torch.distributed is not initialised."""
    return dist.get_rank(group or dist.group.WORLD) if is_initialized() else 0


def ranks_of(group: ProcessGroup) -> list[int]:
    """The ranks of a group, as numbered in the default group."""
    return dist.get_process_group_ranks(group)


def default_group() -> ProcessGroup:
    """The default process group.

    Raises:
        ValueError: if no default group exists.
    """
    return dist.distributed_c10d._get_default_group()


def is_default(group: ProcessGroup | None) -> bool:
    """Whether a group is the default group, which contains every rank; None stands for the default group."""
    return group is None or group is dist.group.WORLD


def all_groups() -> list[ProcessGroup]:
    """The process groups that this process is a member of."""
    return list(dist.distributed_c10d._world.pg_map)


def new_group(ranks: list[int], backend: str, timeout: timedelta | None) -> ProcessGroup:
    """Make a group of the given ranks of the default group, in the given order. Collective over the default group.

    Raises:
        ValueError: if the order is not ascending and torch is older than 2.12, which always sorts.
    """
    if _CAN_KEEP_ORDER:
        return dist.new_group(ranks, timeout=timeout, backend=backend, sort_ranks=False)
    if ranks != sorted(ranks):
        raise ValueError(
            f"torch {torch.__version__} cannot make a process group of the ranks {ranks} in this order. Number the "
            "ranks machine by machine, as torchrun does, or use torch 2.12 or newer."
        )
    return dist.new_group(ranks, timeout=timeout, backend=backend)


def new_patient_group() -> ProcessGroup:
    """Make a Gloo group of all ranks, whose waits have no timeout: they end when a rank fails or ends. Collective."""
    group = new_group(list(range(world_size())), "gloo", None)
    dist.distributed_c10d._set_pg_timeout(FOREVER, group)
    return group


def restart(**options: Any) -> None:
    """Replace the default process group with a new one of the same processes. Collective.

    The new group has other keys in the same store, so that it does not receive messages of the old group.

    Args:
        options: arguments of ``torch.distributed.init_process_group`` other than backend, store, rank and world size.
    """
    backend, store = backend_name(), named_store("lightning_zero/restarted")
    place: dict[str, Any] = {"rank": rank(), "world_size": world_size()}
    destroy()
    dist.init_process_group(backend, store=store, **place, **options)


def destroy(group: ProcessGroup | None = None) -> None:
    """Destroy a process group; None destroys the default group and all others."""
    if group is None:
        forget_meshes()
    dist.destroy_process_group(group)


def forget_meshes() -> None:
    """Clear DTensor's cache of results and their meshes, which would communicate in groups that no longer exist."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


# -- backends of a group ----------------------------------------------------------------------------------------------


def backend_name(group: ProcessGroup | None = None, device: torch.device | None = None) -> str:
    """The backend's name in lower case, such as "nccl" or "gloo"; with a device, the name of the device's backend."""
    return dist.get_backend(group) if device is None else (group or default_group())._get_backend(device).name().lower()


def backends_of(group: ProcessGroup) -> list[Any]:
    """The backend objects that a group uses, one for each type of device."""
    return [group._get_backend(device) for device in group._device_types]


def serves_cpu(group: ProcessGroup) -> bool:
    """Whether a group can communicate tensors in CPU memory."""
    return "cpu:" in dist.get_backend_config(group)


def is_fake(group: ProcessGroup) -> bool:
    """Whether a group has torch's backend ``fake``, so that no other rank exists."""
    return "fake" in dist.get_backend_config(group)


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of a group's collectives on a device; torch's default if the backend has none."""
    return getattr(getattr(group._get_backend(device), "options", None), "_timeout", default_pg_timeout)


def gloo_backend(name: str, group: ProcessGroup) -> Any:
    """Make a Gloo backend with connections of its own between the ranks of a group. Collective over this group."""
    store = dist.PrefixStore(name, dist.distributed_c10d._world.pg_map[group][1])
    timeout = timeout_of(group, torch.device("cpu")) if serves_cpu(group) else default_pg_timeout
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)


def close_connections(backend: Any) -> None:
    """End all waits in a Gloo backend, here and on the ranks that wait for this rank.

    Gloo's abort() does not end waits, but a receive that times out closes all connections. A receive from an ended rank
    fails at once and closes none, so each rank is tried. After the first timeout, the remaining receives fail at once.
    """
    for peer in set(range(backend.size())) - {backend.rank()}:
        with suppress(RuntimeError):
            backend.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _UNUSED_TAG).wait(
                timedelta(milliseconds=1)
            )


def end_waits(groups: Sequence[ProcessGroup]) -> None:
    """End all waits and transfers in some groups, which are unusable afterwards."""
    for group in groups:
        with suppress(RuntimeError, ValueError):  # the group may have failed, or already be destroyed
            for backend in backends_of(group):
                if backend.name().lower() == "gloo":
                    close_connections(backend)
                else:
                    backend.abort()
    if any(is_in_flight(work) for work in list(_in_flight)):
        for group in groups:  # their destructors would wait for these collectives, also at the program's end
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


_in_flight: weakref.WeakSet[Any] = weakref.WeakSet()


def noted(work: Any) -> Any:
    """Note a collective of Gloo, for ``end_waits``, and return it."""
    _in_flight.add(work)
    return work


def is_in_flight(work: Any) -> bool:
    """Whether a collective of Gloo is still in flight after a moment.

    It may be so until the group's timeout: Gloo does not end a send of which the socket had taken only a part when the
    connection closed.
    """
    try:
        work.wait(timedelta(seconds=0.1))
        return False
    except RuntimeError:
        return not work.is_completed()  # otherwise the collective has failed


# -- the store --------------------------------------------------------------------------------------------------------


def default_store() -> Store:
    """The key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def named_store(name: str, store: Store | None = None) -> Store:
    """A view of a store (by default, the default group's) that prefixes all keys with a name."""
    return dist.PrefixStore(name, store or default_store())


# -- collectives and messages -----------------------------------------------------------------------------------------


def barrier(device: torch.device | None = None) -> None:
    """Wait until every rank of the default group has called this function."""
    is_nccl = device is not None and dist.get_backend() == "nccl"
    dist.barrier(device_ids=[device.index] if device is not None and is_nccl else None)


def broadcast_object(value: Any, source: int) -> Any:
    """Broadcast the source rank's picklable value over the default group, and return it."""
    holder = [value]
    dist.broadcast_object_list(holder, source)
    return holder[0]


def all_gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Gather a picklable value from each rank, in the order of ranks. Collective."""
    if (size := world_size(group)) == 1:
        return [value]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, value, group)
    return gathered


def broadcast_coalesced(group: ProcessGroup, tensors: Sequence[Tensor], message_bytes: int) -> None:
    """Broadcast the first rank's values of several tensors, in place, in messages of about ``message_bytes``."""
    values = [tensor.resolve_conj().resolve_neg() for tensor in tensors]  # backends send the bytes of lazy conjugates
    dist._broadcast_coalesced(group, values, message_bytes, 0)
    for tensor, value in zip(tensors, values):
        if value is not tensor:
            tensor.copy_(value)


def send(tensor: Tensor, group: ProcessGroup | None, rank: int) -> Any:
    """Start to send a contiguous 1-D tensor to a rank of a group."""
    return (group or default_group()).send([tensor.view(torch.uint8)], rank, 0)


def receive(tensor: Tensor, group: ProcessGroup | None, rank: int) -> None:
    """Receive a contiguous 1-D tensor from a rank of a group, however long that rank takes to send it."""
    (group or default_group()).recv([tensor.view(torch.uint8)], rank, 0).wait(FOREVER)


def groups_among(arguments: Sequence[Any]) -> list[ProcessGroup]:
    """The process groups among the arguments of an operator of ``torch.ops.c10d``."""
    objects = (each for each in arguments if isinstance(each, torch.ScriptObject))
    return [ProcessGroup.unbox(each) for each in objects if each._type().qualified_name().endswith(".ProcessGroup")]


def wait_for(work: torch.ScriptObject) -> None:
    """Wait for a collective that an operator of ``torch.ops.c10d`` has started."""
    dist.Work.unbox(work).wait()


# -- attempts of a job -------------------------------------------------------------------------------------------------


def uses_agent_store() -> bool:
    """Whether an agent provides the process group's store; otherwise rank 0's process does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_attempt(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Store | None:
    """The part of the agent's store that only this attempt uses; None if no agent provides a store. Collective.

    An agent (torchrun) starts a new attempt when a process has died. All attempts share the agent's store, which still
    contains the addresses of the previous attempt's processes. So that new processes do not connect to these
    addresses, each attempt has its own keys. TORCHELASTIC_RESTART_COUNT cannot number the attempts: it counts the
    restarts of one machine only (pytorch/pytorch issue 108158).

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
