"""A data-parallel group: its collectives on flat buffers, its control planes, and the groups that it creates."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.backend_transport import BackendTransport, Levels
from lightning_zero.engine.comm.control_plane import ControlPlane
from lightning_zero.engine.comm.counters import Counters
from lightning_zero.engine.comm.cross_memory.exchange import connect
from lightning_zero.engine.comm.failures import Notices, explained, notices, waits_for
from lightning_zero.engine.comm.process_group import ProcessGroup
from lightning_zero.engine.comm.rendezvous import Rendezvous
from lightning_zero.engine.comm.simulation import Simulation
from lightning_zero.engine.comm.tensor_parallel import DATA, ActivationParts, TensorParallel
from lightning_zero.engine.comm.transport import Bounds, Cast, Codec, Pending, Transport, encoded_bytes
from lightning_zero.engine.plan.mesh import ALL, LOCAL, NODE, Mesh, Topology

if TYPE_CHECKING:
    from lightning_zero.engine.comm.tensor_parallel import DeviceMesh


class BucketCollectives:
    """Collectives on flat buffers between the ranks along some dimensions of the mesh.

    Args:
        transport: the transport between these ranks; None if there is only one rank.
        across: the ranks on other machines with which this rank itself exchanges slices, by their positions along
            these dimensions.
        members: these ranks, as numbered in the default group.
        note: for simulated ranks, called with the bytes of each collective that begins; returns a function that is
            called when this rank waits for the collective.
    """

    def __init__(
        self,
        transport: Transport | None,
        control: ControlPlane,
        across: Sequence[int] = (),
        members: Sequence[int] = (),
        note: Callable[[int], Callable[[], None]] | None = None,
    ) -> None:
        self._transport, self._control, self._counters = transport, control, control.counters
        self._across, self._members, self._note = across, members, note

    def all_gather(self, full: Tensor, bounds: Bounds, what: str) -> Pending:
        """See ``Transport.all_gather``; ``what`` names the collective in error messages."""
        if self._transport is None:
            return Pending([], [])
        return self._begin("all_gather", what, full, bounds, Cast(full.dtype), self._transport.all_gather)

    def reduce_scatter(self, flat: Tensor, bounds: Bounds, codec: Codec, what: str) -> Pending:
        """Sum a flat buffer over ranks; ``wait()`` returns this rank's slice of the sum (1-D), in the buffer's dtype.

        Args:
            flat: 1-D and contiguous. Its contents may be overwritten.
            codec: encodes the values to be sent. Received values are decoded, and added up in the buffer's dtype.
            what: a description of what is summed, for error messages.
        """
        if self._transport is None:
            return Pending([], [flat], lambda: flat)
        return self._begin("reduce_scatter", what, flat, bounds, codec, self._transport.reduce_scatter, codec)

    def _begin(
        self,
        kind: str,
        what: str,
        flat: Tensor,
        bounds: Bounds,
        codec: Codec,
        begin: Callable[..., Pending],
        *more: Any,
    ) -> Pending:
        """Begin a collective, and count its slices: those that cross between machines under the link "across"."""
        assert self._transport is not None
        slices = [bounds[place + 1] - bounds[place] for place in self._across]
        crossing, within = sum(slices), codec if self._transport.encodes_within else Cast(flat.dtype)
        rest = flat.numel() - crossing
        if crossing:
            self._counters.add(kind, crossing, sum(encoded_bytes(codec, numel) for numel in slices), "across")
        self._counters.add(kind, rest, encoded_bytes(within, rest), "within")
        waiting = self._control.waiting(what, self._members)
        with explained(what):
            pending = begin(flat, bounds, *more)
        pending.waiting = waiting
        if self._note is not None:
            pending.waits.append(self._note(encoded_bytes(codec, flat.numel())))
        return pending

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


# -- which ranks share a machine ---------------------------------------------------------------------------------------


def memory_domain() -> str:
    """An identifier of the running system and the process's namespaces.

    Only processes with equal identifiers can possibly read each other's memory.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return " ".join([boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")])


def machines_of(exchange_objects: Callable[[Any], list[Any]]) -> Topology:
    """Find which ranks share a machine; a rank that cannot report its machine counts as alone on a machine."""
    said = None
    with suppress(OSError):
        said = memory_domain()
    return Topology(tuple(number if each is None else each for number, each in enumerate(exchange_objects(said))))


# -- the communicator --------------------------------------------------------------------------------------------------


_communicators = itertools.count()


class Communicator:
    """A data-parallel group. With a single rank, it communicates and counts nothing.

    CPU ranks of one machine may read each other's memory, instead of using the collectives of ``torch.distributed``,
    unless the environment variable ``LIGHTNING_ZERO_CROSS_MEMORY`` is 0.

    Args:
        group: the process group; None means the default group. Ignored if no process group is initialised.
        mesh: a device mesh with a data-parallel and a tensor-parallel dimension, in place of ``group``.
        simulation: describes the ranks of a fake process group; None for real ranks.

    Attributes:
        rank, size: this rank's number in the group, and the group's size.
        control: the control plane of the group.
        everyone: that of all ranks that hold the module: the data-parallel ranks times the tensor-parallel ranks.
        name: identifies this communicator on every rank; empty if no other process exists.
        tensor: the tensor-parallel ranks that share tensors with this rank.
        mesh: the mesh of ranks, two-dimensional if collectives have two levels, or ``shards_within`` is set.
        shards_within: whether parameters are sharded within groups of ranks.
        is_on_one_machine: whether all ranks are known to be on one machine.
        may_compress: whether gradients cross between machines in an exchange of their own, which can be compressed.
        timeout: the process group's timeout.
        rendezvous: makes all ranks that hold the module wait for each other.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        device: torch.device,
        shard_within: Literal["node"] | int | None = None,
        mesh: DeviceMesh | None = None,
        simulation: Simulation | None = None,
    ) -> None:
        self.device, self.counters = device, Counters()
        group = mesh[DATA].get_group() if mesh is not None else group
        self.size, self.rank = process_group.world_size(group), process_group.rank(group)
        self.tensor = TensorParallel(mesh, self.counters)
        self._own_groups: list[ProcessGroup] = []
        self.mesh, self.shards_within = Mesh.flat(self.size, self.rank), False
        self.is_on_one_machine, self.may_compress = True, False
        self.everyone = self.control = ControlPlane(self.counters)
        self._along: dict[tuple[str, ...], BucketCollectives] = {ALL: BucketCollectives(None, self.control)}
        self.name, self.timeout = "", process_group.FOREVER
        if self.size * self.tensor.size > 1:
            self.group = group or process_group.default_group()
            self._ranks = process_group.ranks_of(self.group)
            self.timeout = process_group.timeout_of(self.group, device)
            self._meet(process_group.default_group() if self.tensor.size > 1 else self.group, simulation)
        self.rendezvous = Rendezvous(self.everyone, self.timeout)
        if self.size > 1:
            topology, groups, is_gloo_on_cpu = self._arrange(shard_within, simulation)
            self._choose_transports(topology, groups, is_gloo_on_cpu, simulation)

    def _meet(self, everywhere: ProcessGroup, simulation: Simulation | None) -> None:
        """Make the control planes, and agree with real ranks on the engine's name. Collective."""
        all_ranks, rank = process_group.ranks_of(everywhere), process_group.rank(everywhere)
        has_cpu = process_group.serves_cpu(everywhere)
        own: Notices | None = None

        def control(
            ranks: Sequence[int], rank: int, group: ProcessGroup, groups: Sequence[Sequence[int]]
        ) -> ControlPlane:
            if simulation is not None:
                return ControlPlane(self.counters, ranks, rank)
            on_cpu = group if has_cpu else self._new_group("gloo", groups)
            return ControlPlane(self.counters, ranks, rank, on_cpu, group, own, self.name)

        self.everyone = self.control = control(all_ranks, rank, everywhere, [all_ranks])
        if simulation is None and not process_group.is_fake(everywhere):
            # rank 0 provides the number in the engine's name, since the ranks' own counts may differ after a failure
            with explained("setting up the sharded module"):
                (number,) = self.everyone.numbers_of(0, [next(_communicators)], "the name of the engine")
            self.counters.clear()  # the communicator has only just been made: this exchange does not count
            self.name = f"{all_ranks[0]}/{number}"
            own = notices(collective=len(all_ranks) == process_group.world_size())
            own.begun[self.name] = Counter()
            self.everyone.notices, self.everyone.name = own, self.name
        if self.tensor.size > 1:
            tensor = self.tensor
            tensor.control = control(process_group.ranks_of(tensor.group), tensor.rank, tensor.group, tensor.groups)
            tensor.note = simulation.gathers if simulation is not None else None
            self.control = ControlPlane(self.counters)
            if self.size > 1:
                self.control = control(self._ranks, self.rank, self.group, self._alike)

    def _arrange(
        self, shard_within: Literal["node"] | int | None, simulation: Simulation | None
    ) -> tuple[Topology, Topology, bool]:
        """Find which ranks share a machine, and which share all parameters. Collective.

        Returns:
            The ranks of each machine, the ranks of each group, and whether they use Gloo on the CPU.

        Raises:
            ValueError: if parameters cannot be sharded within groups as ``shard_within`` describes.
        """
        if simulation is None:
            backend = process_group.backend_name(self.group, self.device)
            is_gloo_on_cpu = backend == "gloo" and self.device.type == "cpu"
            topology = machines_of(self.control.gather_objects)
        else:
            is_gloo_on_cpu, topology = simulation.transport != "nccl", simulation.topology(self.size)
        groups = topology.groups(shard_within) if shard_within is not None else topology
        self.shards_within = shard_within is not None and groups.has_two_levels
        self.is_on_one_machine = len(topology.nodes) == 1
        self.may_compress = not self.is_on_one_machine and (is_gloo_on_cpu or self.shards_within)
        if self.is_on_one_machine:
            self.counters.link = "within"
        return topology, groups if self.shards_within else topology, is_gloo_on_cpu

    def _choose_transports(
        self, topology: Topology, groups: Topology, is_gloo_on_cpu: bool, simulation: Simulation | None
    ) -> None:
        """Choose the transports between the ranks. Collective."""
        backend = process_group.backend_name(self.group, self.device)
        is_gloo = backend == "gloo" if simulation is None else simulation.transport == "gloo"
        reads_memory = simulation is None and is_gloo_on_cpu
        machine, here = topology.within(self.rank), groups.within(self.rank)
        # with tensor parallelism, each data-parallel group would choose for itself, but all create groups together
        has_levels = reads_memory and groups.has_two_levels and self.tensor.size == 1
        direct = None  # the transport that reads the memory of the machine's other ranks
        if reads_memory and (len(groups.nodes) == 1 or has_levels):
            direct = connect(here, self.rank, self.timeout, self.control.gather_objects)

        def between(groups: Sequence[Sequence[int]]) -> Transport:
            # New groups: in the existing one, other collectives (such as Lightning's own) would wait for gathers.
            gathers, reductions = self._new_group(backend, groups), self._new_group(backend, groups)
            return BackendTransport(gathers, reductions, is_gloo)

        def put(over: tuple[str, ...], transport: Transport, ranks: Sequence[int], partners: Sequence[int]) -> None:
            """Use a transport between ranks, given in the order of positions, of which the partners exchange slices."""
            across = [place for place, rank in enumerate(ranks) if rank in partners and rank not in machine]
            note = simulation.note(topology, over, ranks, self.tensor.size) if simulation is not None else None
            (members,) = self._renumbered([ranks])
            self._along[over] = BucketCollectives(transport, self.control, across, members, note)

        everyone = range(self.size)
        if direct is not None and len(here) == self.size:
            self.control.small = direct.small
            put(ALL, direct, everyone, everyone)
            return
        if not has_levels and not self.shards_within:
            put(ALL, between(self._alike), everyone, everyone)
            return

        self.mesh, column = Mesh.of(groups, self.rank), groups.across(self.rank)
        columns = [[ranks[place] for ranks in groups.nodes] for place in range(len(here))]
        across, within = between(self._renumbered(columns)), direct or between(self._renumbered(groups.nodes))
        if not self.shards_within:
            levels = Levels(within, across, here.index(self.rank) * len(column), len(column))
            put(ALL, levels, [rank for ranks in columns for rank in ranks], column)
            return
        put((LOCAL,), within, here, here)
        put((NODE,), across, column, column)

    @property
    def _alike(self) -> Sequence[Sequence[int]]:
        """The data-parallel groups of all tensor-parallel ranks."""
        return list(zip(*self.tensor.groups)) if self.tensor.size > 1 else [self._ranks]

    def _renumbered(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """Convert ranks' numbers in this group to their numbers in the default group."""
        return [[self._ranks[rank] for rank in ranks] for ranks in groups]

    def along(self, over: Sequence[str]) -> BucketCollectives:
        """The collectives between the ranks along the given dimensions of the mesh."""
        return self._along[tuple(over)]

    # -- other values on the group's device -------------------------------------------------------------------------

    def broadcast_ranges(self, flat: Tensor, ranges: list[tuple[int, int]], what: str) -> Pending:
        """Start to fill each ``ranges[r]`` of ``flat`` from its owner, rank r, with one broadcast per rank. Slow.

        ``wait()`` returns ``flat``.
        """
        works = []
        for source, (start, stop) in enumerate(ranges):
            if stop > start and self.name:
                part = flat[start:stop]
                self.counters.add("control", part.numel(), part.nbytes)
                sent = part.view(torch.uint8)  # backends lack dtypes
                works.append(dist.broadcast(sent, self._ranks[source], self.group, async_op=True))
        pending = Pending(waits_for(works, are_of_gloo=flat.device.type == "cpu"), [flat], lambda: flat)
        pending.waiting = self.control.waiting(what)
        return pending

    def all_reduce(self, tensor: Tensor, op: Any = None) -> Tensor:
        """Reduce a small tensor in place over all ranks, via the device, since NCCL cannot reduce CPU tensors."""
        on_device = tensor.to(self.device)
        self.control.all_reduce(on_device, op)
        self.tensor.control.all_reduce(on_device, op)
        return tensor.copy_(on_device) if on_device is not tensor else tensor

    def activation_parts(self) -> ActivationParts:
        """Make the object that divides activations among tensor-parallel ranks, with its own group. Collective."""
        backend = process_group.backend_name(self.group, self.device)
        return ActivationParts(self.tensor, self._new_group(backend, self.tensor.groups))

    # -- groups and waits -------------------------------------------------------------------------------------------

    def _new_group(self, backend: str, groups: Sequence[Sequence[int]]) -> ProcessGroup:
        """Make several groups with the user's timeout, and return the group that contains this rank. Collective.

        Args:
            groups: the ranks of each group, as numbered in the default group. Every rank is in exactly one group.
        """
        own = process_group.rank()
        with explained("creating a process group"):
            for ranks in groups:
                made = process_group.new_group(list(ranks), backend, self.timeout)
                if own in ranks:
                    self._own_groups.append(made)
        return self._own_groups[-1]

    def end_transfers(self) -> None:
        """After a failure, end the transfers of this object's groups, so that their memory can be freed."""
        process_group.end_waits(self._own_groups)

    def close(self) -> None:
        """Close the rendezvous and the transports, and destroy the groups that this object created."""
        self.rendezvous.close()
        if self.everyone.notices is not None:
            for collectives in self._along.values():
                collectives.close()
            self.everyone.notices.begun.pop(self.name, None)  # no other rank waits for its collectives any more
            while self._own_groups:
                with suppress(RuntimeError, ValueError):  # the group may have failed, or already be destroyed
                    process_group.destroy(self._own_groups.pop())
