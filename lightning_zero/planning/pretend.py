"""Communication with simulated ranks, to run the engine as one rank of many on fake tensors.

Only the shapes of results are correct. All ranks are assumed to hold the same values, and to be at the same point in
the program.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightning_zero.engine import Engine
from lightning_zero.engine.comm.backend_transport import BackendTransport
from lightning_zero.engine.comm.codec import Codec, Quantised
from lightning_zero.engine.comm.collectives import BucketCollectives, Communicator, Everyone, Gathering
from lightning_zero.engine.comm.control_plane import ControlPlane
from lightning_zero.engine.comm.counters import Counters, Link
from lightning_zero.engine.comm.gloo_transport import GlooTransport
from lightning_zero.engine.comm.rendezvous import Absence, Rendezvous
from lightning_zero.engine.comm.shared_memory_transport import SharedMemoryTransport
from lightning_zero.engine.comm.tensor_parallel import ActivationParts, TensorParallel
from lightning_zero.engine.comm.transport import Ranges, Span, Started, Transport, slices_of
from lightning_zero.engine.compat import FakeTensor
from lightning_zero.engine.config import EngineConfig, OffloadConfig
from lightning_zero.engine.offload.states import DiskStates, Swap
from lightning_zero.engine.offload.updates import DiskUpdate, OnSubGroup, Updates
from lightning_zero.engine.plan.mesh import ALL, LOCAL, NODE, Mesh
from lightning_zero.engine.plan.topology import Topology
from lightning_zero.io.swap import SwapFile
from lightning_zero.planning.timeline import Recorder

if TYPE_CHECKING:
    from lightning_zero.engine.comm.tensor_parallel import DeviceMesh


class PretendControlPlane(ControlPlane):
    """A control plane of one rank, except that it returns this rank's values for every simulated rank."""

    def __init__(self, size: int) -> None:
        super().__init__(None, [0], 0, None, Counters(), 0)
        self._size = size

    def gather_numbers(self, number: int, what: str) -> list[int]:
        return [number] * self._size

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self._size


class PretendWatch:
    """A ``Watch`` for simulated ranks, which are never awaited."""

    def check_process(self, what: str) -> None:
        pass

    def begin(self, what: str) -> int:
        return 0

    def waiting(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()


_CHANGES = Quantised(4, 128)
"""Simulates encoded parameter changes. Their real length depends on values, which fake tensors lack: with AdamW, it is
2.5 to 9 bits per element for learning rates from 1e-5 to 1e-3. Real encoding takes about as long."""


_LENGTH = 8
"""Size in bytes of the length field that is sent before each message of changes."""


class _PretendTransport(Transport):
    """Base class of transports that allocate the same buffers as real transports, but send nothing.

    Args:
        leaving: bytes that all ranks of a machine together send to other machines, per byte of a collective's buffer.
    """

    def __init__(self, recorder: Recorder, size: int, rank: int, leaving: float) -> None:
        self._recorder, self._size, self._rank, self._leaving = recorder, size, rank, leaving

    def _parts(self, flat: Tensor, ranges: Ranges) -> tuple[Tensor, list[Tensor]]:
        """This rank's slice of a flat buffer, and the other ranks' slices."""
        slices = slices_of(flat, ranges)
        return slices.pop(self._rank), slices

    def all_gather(self, full: Tensor, ranges: Ranges, number: int) -> Started:
        return Started([self._sent_of(full.nbytes)], [full])

    def encode_changes(self, own: Tensor, new: Tensor) -> Tensor:
        message = _CHANGES.encode(new.float() - own)
        own.copy_(new)
        return message

    def exchange_changes(self, full: Tensor, ranges: Ranges, number: int, message: Tensor) -> Started:
        for part in self._parts(full, ranges)[1]:
            _CHANGES.decode(message.new_zeros(_CHANGES.size(len(part))), len(part), torch.float32).add_(part)
        lengths, messages = (self._sent_of(self._size * nbytes) for nbytes in (_LENGTH, len(message)))
        return Started([lengths, messages], [full])

    def _sent_of(self, nbytes: int) -> Callable[[], None]:
        """Record a collective in which a rank sends a buffer without its own part; return a function that awaits it."""
        sent = nbytes * (self._size - 1) / self._size
        return partial(self._recorder.wait, self._recorder.launch(sent, nbytes * self._leaving))


class PretendBackendTransport(_PretendTransport, BackendTransport):
    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        sent = codec.encode(flat)
        start, stop = ranges[self._rank]
        shard = sent.new_empty(codec.size(stop - start))
        return Started([self._sent_of(sent.nbytes)], [sent], lambda: codec.decode(shard, stop - start, flat.dtype))


class PretendGlooTransport(_PretendTransport, GlooTransport):
    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        own, others = self._parts(flat, ranges)
        dtype = flat.dtype
        sent = [codec.encode(part) for part in others]
        received = [own.new_empty(codec.size(len(own)), dtype=codec.dtype) for _ in others]
        waits = [self._sent_of(codec.size(len(flat)) * codec.dtype.itemsize)]
        return Started(waits, [own, *sent, *received], lambda: codec.decode(received[0], len(own), dtype))


class PretendSharedMemoryTransport(_PretendTransport, SharedMemoryTransport):
    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        own, others = self._parts(flat, ranges)
        sent = [codec.encode(part) for part in others]
        return self._sum_of([own, *sent], codec.size(len(flat)) * codec.dtype.itemsize, torch.empty_like(own))

    def reduce_spans(self, spans: list[list[Span]], dtype: torch.dtype, factor: float) -> Started:
        kept = [span.values for part in spans for span in part if span.values is not None]
        numel = [sum(span.numel for span in part) for part in spans]
        total = torch.empty(numel[self._rank], dtype=dtype, device="cpu")
        return self._sum_of(kept, sum(numel) * dtype.itemsize, total)

    def _sum_of(self, kept: list[Tensor], nbytes: int, total: Tensor) -> Started:
        return Started([self._sent_of(nbytes)], kept, lambda: total)


TRANSPORTS: dict[str, type[_PretendTransport]] = {
    "nccl": PretendBackendTransport,
    "gloo": PretendGlooTransport,
    "shared memory": PretendSharedMemoryTransport,
}
"""Transports by the name that ``lightning-zero doctor`` prints. Their buffers for reducing gradients differ."""


class PretendTensorParallel(TensorParallel):
    """Simulated tensor-parallel ranks, which all have the same values."""

    def __init__(self, mesh: DeviceMesh | None, counters: Counters) -> None:
        super().__init__(mesh, counters)
        self._watch, self.control = PretendWatch(), PretendControlPlane(self.size)  # type: ignore[assignment]

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    def check_same(self, batch: Any, sampler: str) -> None:
        pass


class PretendActivationParts(ActivationParts):
    """Assumes that each activation is the same on all tensor-parallel ranks."""

    def __init__(self, tensor: TensorParallel, recorder: Recorder) -> None:
        super().__init__(tensor, tensor.group)
        self._recorder = recorder

    def agree(self, values: Mapping[int, Tensor]) -> frozenset[int]:
        return frozenset(values)

    def gather(self, flat: Tensor, mark: Tensor) -> Callable[[], Any]:
        self.count(flat)
        return partial(self._recorder.wait, self._recorder.launch_tensor_parallel(flat.nbytes))


class PretendCommunicator(Communicator):
    """The communicator of one of several simulated ranks.

    Args:
        size: the number of ranks.
        device: the device of the flat buffers.
        recorder: records the collectives.
        transport: a key of ``TRANSPORTS``.
        rank: this rank's position along the data-parallel dimension.
        machines: number of machines; the ranks are split evenly among them.
        shard_within: as in ``EngineConfig``.
        mesh: the ranks' device mesh; None without tensor parallelism.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        recorder: Recorder,
        transport: str,
        rank: int,
        machines: int,
        shard_within: Literal["node"] | int | None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.rank, self.device, self.counters, self._recorder = rank, device, Counters(), recorder
        self.tensor = PretendTensorParallel(mesh, self.counters)
        self.everyone = Everyone(rank * self.tensor.size, size, PretendControlPlane(size))
        groups_here = min(self.tensor.size, size // machines)  # data-parallel groups that have ranks on one machine
        self.size = size = size // self.tensor.size
        machines = min(machines, size)
        self.mesh = Mesh.flat(size, rank)
        self.watch, self.control = PretendWatch(), PretendControlPlane(size)  # type: ignore[assignment]
        self.gathering = Gathering(range(size), rank, self.control)

        def between(members: Sequence[int], leaving: float, link: Link | None = None) -> BucketCollectives:
            made = TRANSPORTS[transport](recorder, len(members), members.index(rank), leaving)
            return BucketCollectives(made if len(members) > 1 else None, self.counters, (), self.watch, link)

        # In NCCL's ring, every byte leaves each machine; in other transports (two levels), it enters each machine once.
        leaving = groups_here * ((size - 1) / size if transport == "nccl" else (machines - 1) / machines)
        self.is_on_one_machine = machines == 1
        self.may_compress = machines > 1 and transport != "nccl"
        self._along = {ALL: between(range(size), leaving if machines > 1 else 0.0)}
        self.shards_within = False
        if shard_within is None:
            return
        topology = Topology(tuple(each * machines // size for each in range(size)))
        groups = topology.groups(shard_within)
        self.shards_within = groups.has_two_levels
        if self.shards_within:
            self.mesh, column = Mesh.of(groups, rank), groups.across(rank)
            beyond = len({topology.machines[each] for each in column})
            self._along[LOCAL,] = between(groups.within(rank), 0.0, "within")
            self._along[NODE,] = between(column, size // machines * (beyond - 1) / beyond, "across")

    def activation_parts(self) -> ActivationParts:
        return PretendActivationParts(self.tensor, self._recorder)

    def broadcast_ranges(self, flat: Tensor, ranges: list[tuple[int, int]], what: str) -> None:
        pass

    def all_reduce(self, tensor: Tensor, op: Any = None) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor


class PretendRendezvous(Rendezvous):
    """A rendezvous that never waits, like that of one rank."""

    def __init__(self) -> None:
        self._size, self._is_met, self.is_closed, self.absence = 1, False, False, Absence()


class InlineUpdates(Updates):
    """Runs updates in the calling thread, because the fake mode is active only in the thread that has entered it.

    Args:
        recorder: records the operators of updates as operators on the host.
        gradients: as for ``Updates``.
    """

    def __init__(self, recorder: Recorder, gradients: bool) -> None:
        super().__init__(False, gradients)
        self._recorder = recorder

    def _put(self, run: Callable[[], None]) -> None:
        self._recorder.on_host = True
        try:
            run()
        finally:
            self._recorder.on_host = False

    def start(self, update: DiskUpdate) -> None:
        for states, act in update.acts.items():
            self._put(partial(_update_sub_groups, states, act))
        update.end()


def _update_sub_groups(states: DiskStates, act: OnSubGroup) -> None:
    extents = states.extents()
    ring = states.swap.ring(max(extent.nbytes for extent in extents))
    for index, extent in enumerate(extents):
        memory = ring.buffer(index, extent.nbytes)
        extent.file.read(memory, extent.position)
        act(*states.range_of(index), states.views(index, memory))
        extent.file.write(memory, extent.position)


class _InlineReader:
    def submit(self, read: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(read())
        return done

    def shutdown(self) -> None:
        pass


class _PretendFile:
    """A file with a size but no content, which records reads and writes. See ``SwapFile`` for the methods."""

    def __init__(self, nbytes: int, recorder: Recorder) -> None:
        self.nbytes, self._recorder = nbytes, recorder

    def read(self, into: memoryview, position: int) -> None:
        self._recorder.disk(len(into))

    def write(self, data: memoryview, position: int) -> None:
        self._recorder.disk(len(data))

    def close(self) -> None:
        pass


class _NotedFile(SwapFile):
    """A real file, for real tensors, that records reads and writes."""

    def __init__(self, folder: str, nbytes: int, recorder: Recorder) -> None:
        super().__init__(folder, nbytes)
        self._recorder = recorder

    def read(self, into: memoryview, position: int) -> None:
        self._recorder.disk(len(into))
        super().read(into, position)

    def write(self, data: memoryview, position: int) -> None:
        self._recorder.disk(len(data))
        super().write(data, position)


class PretendSwap(Swap):
    """A ``Swap`` that runs everything in the calling thread, and creates no files if tensors are fake."""

    def __init__(self, folder: str, sub_group: int, recorder: Recorder) -> None:
        super().__init__(folder, sub_group)
        self.reader = _InlineReader()  # type: ignore[assignment]
        self._recorder = recorder
        tried = torch.empty(0, device="cpu")
        self._mode = tried.fake_mode if isinstance(tried, FakeTensor) else None

    def open(self, nbytes: int) -> SwapFile:
        file: Any = _PretendFile(nbytes, self._recorder)
        if self._mode is None:
            file = _NotedFile(self._folder, nbytes, self._recorder)
        self._files.add(file)
        return file

    def over(self, memory: memoryview, dtype: torch.dtype, numel: int, offset: int) -> Tensor:
        values = super().over(memory, dtype, numel, offset)
        return values if self._mode is None else self._mode.from_tensor(values)


def pretending(
    ranks: int, recorder: Recorder, transport: str = "nccl", rank: int = 0, machines: int = 1
) -> type[Engine]:
    """Return an engine class that runs as one of several simulated ranks.

    Args:
        transport: a key of ``TRANSPORTS``.
        rank: the rank to simulate; with a mesh, its position along the data-parallel dimension.
        machines: number of machines; the ranks are split evenly among them.

    An engine with a mesh must run within ``process_group.pretended``.
    """

    class PretendingEngine(Engine):
        _check_room = staticmethod(lambda *_: None)  # type: ignore[assignment]  # a plan may be for another host

        def _world_size(self, group: Any) -> int:
            return ranks

        def _connect(self, group: Any, device: torch.device) -> None:
            within = self.config.shard_within
            self.communicator = PretendCommunicator(
                ranks, device, recorder, transport, rank, machines, within, self._mesh
            )
            self.rendezvous = PretendRendezvous()

        def _open_swap(self, offload: OffloadConfig) -> Swap:
            assert offload.path is not None
            return PretendSwap(os.path.abspath(offload.path), offload.sub_group, recorder)

        def _updates_thread(self, config: EngineConfig) -> Updates:
            return InlineUpdates(recorder, config.offloads is not None and config.offloads.gradients is not None)

    return PretendingEngine
