"""Communication and memory of a system's step, read in the same way for all systems, in untimed runs."""

import os
import socket
import stat
import struct
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from machines import CABLE, bytes_sent, is_on_one_of_two
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Which argument of a collective holds all of its data, and how often a rank sends these over: with the best algorithms
# each rank sends (N - 1) / N of them, twice in a sum; as a mean over ranks where one alone sends or receives.
WHOLE: dict[str, tuple[int, int]] = {
    "allreduce_": (0, 2),
    "allreduce_coalesced_": (0, 2),
    "broadcast_": (0, 1),
    "reduce_": (0, 1),
    "_allgather_base_": (0, 1),
    "allgather_": (0, 1),
    "allgather_coalesced_": (0, 1),
    "allgather_into_tensor_coalesced_": (0, 1),
    "_reduce_scatter_base_": (1, 1),
    "reduce_scatter_": (1, 1),
    "reduce_scatter_tensor_coalesced_": (1, 1),
    "all_reduce": (0, 2),
    "alltoall_": (1, 1),
    "alltoall_base_": (1, 1),
}
# what is received another rank sends
NOTHING = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}


class Asked(TorchDispatchMode):
    """Bytes that all c10d calls within the block, from Python or C++, require this rank to send."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_inside_a_wrapper(types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self.bytes += asked_by(func.overloadpacket.__name__, args, dist.get_world_size(), dist.get_rank())
        return func(*args, **(kwargs or {}))


def is_inside_a_wrapper(types: Any) -> bool:
    """Whether an operator acts on a tensor subclass that handles it by calling other operators, which are seen too."""
    wrappers = [kind for kind in types if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__]
    return bool(wrappers) and FakeTensor not in wrappers  # those leave it to modes, by which FSDP2 plans its shards


def asked_by(name: str, args: Any, ranks: int, rank: int = 0) -> float:
    """Bytes that a rank must send for one call, in a group of ``ranks`` ranks.

    Raises:
        NotImplementedError: for an unknown call, so that none goes uncounted.
    """
    if name in NOTHING:
        return 0.0
    if name == "all_gather_into_tensor":  # of DTensor, which gives its own part alone
        return float(bytes_of(args[0]) * (ranks - 1))
    if name == "send":
        return float(bytes_of(args[0]))
    if name == "alltoall_base_" and (sizes := args[4]):  # elements for each rank
        return bytes_of(args[1]) * (1 - sizes[rank] / max(1, sum(sizes)))
    if name not in WHOLE:
        raise NotImplementedError(f"c10d::{name}: benchmarks/readings.py does not know what it sends")
    position, times = WHOLE[name]
    return times * bytes_of(args[position]) * (ranks - 1) / ranks


def bytes_of(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tree_leaves(tensors))


def sent_by_sockets() -> int:
    """Bytes sent and acknowledged on this process's TCP connections: all traffic of Gloo and of the store."""
    total = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # closed meanwhile
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                total += struct.unpack_from("=Q", info, 120)[0]  # tcpi_bytes_acked in linux/tcp.h
    return total


class Read:
    """Bytes that ranks on one machine exchange without a network within the block, as ours do if permitted: `bytes`.

    These are the bytes that a rank reads from other ranks' memory, and those that it sends in small messages.
    """

    def __enter__(self) -> "Read":
        self.bytes = 0
        self._undo = ExitStack()
        memory = sys.modules.get("lightning_zero.engine.comm.cross_memory.process_memory")
        messages = sys.modules.get("lightning_zero.engine.comm.cross_memory.small_messages")
        if memory is None or messages is None:
            return self
        read, send = memory.read_memory, messages.SmallMessages.send

        def count_and_read(process: int, address: int, target: Tensor) -> None:
            self.bytes += target.nbytes
            read(process, address, target)

        def count_and_send(small: Any, tag: int, messages: list[bytes]) -> Any:
            self.bytes += sum(map(len, messages))
            return send(small, tag, messages)

        self._undo.enter_context(patch.object(memory, "read_memory", count_and_read))
        self._undo.enter_context(patch.object(messages.SmallMessages, "send", count_and_send))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def communication(step: Callable[[], None]) -> dict[str, float]:
    """Bytes that a rank must send in one step; on a CPU, also the bytes that its sockets send in another step, and with
    two machines the bytes that leave this rank's machine.

    Bytes exchanged without a network count for the first two: see `Read`.
    """
    found = {}
    if dist.get_backend() == "gloo" and sys.platform == "linux":
        all_is_sent()
        before, left_before = sent_by_sockets(), bytes_sent()[CABLE] if is_on_one_of_two() else 0
        dist.barrier()  # the machine's other ranks may not go on to send before this one has read
        with Read() as read:
            step()
            all_is_sent()
        found["sent_bytes"] = float(sent_by_sockets() - before + read.bytes)
        if is_on_one_of_two():
            found["left_bytes"] = float(bytes_sent()[CABLE] - left_before)
    with Asked() as asked, Read() as read:
        step()
        all_is_sent()
    return found | {"asked_bytes": asked.bytes + read.bytes}


def all_is_sent() -> None:
    """Wait until all started sends have arrived: some systems leave gathers for the next step in progress."""
    dist.barrier()
    time.sleep(0.2)


class Live(TorchDispatchMode):
    """Peak bytes of live CPU tensors that were made within the block: `peak`.

    It tracks each storage that an operator has returned, to Python or C++, and at every new storage sums the bytes of
    all live ones. torch's profiler does not work here: it misses the release of tensors that a Gloo thread was the last
    to hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_inside_a_wrapper(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        new = [storage for tensor in tree_leaves(result) if (storage := self._unknown(tensor)) is not None]
        if new:
            for storage in new:
                self._storages[storage._cdata] = weakref.ref(storage)  # torch keeps it as long as the storage lives
            # a garbage collection may free some at any time
            alive = [storage for kept in self._storages.values() if (storage := kept()) is not None]
            self._storages = {storage._cdata: self._storages[storage._cdata] for storage in alive}
            self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
        return result

    def _unknown(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.device.type != "cpu" or type(tensor) not in (Tensor, nn.Parameter):
            return None
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        return storage if known is None or known() is not storage else None
