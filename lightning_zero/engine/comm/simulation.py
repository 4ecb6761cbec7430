"""What an engine needs to run as one rank of a process group of torch's backend ``fake``, which has no other rank.

All ranks are assumed to hold the same values, and to be at the same point of the program. Only the shapes of results
are correct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from lightning_zero.engine.plan.mesh import NODE, Topology


@dataclass(frozen=True)
class Simulation:
    """What a fake process group does not tell about its ranks, and what is called when they would communicate.

    Updates and reads in the background run in the calling thread, and no files are created.

    Attributes:
        transport: the transport whose buffers are allocated.
        machines: number of machines; the ranks are split evenly among them.
        sends: called when a collective begins, with the bytes that this rank sends, and the bytes that all ranks of its
            machine send to other machines; returns a function that is called when this rank waits for the collective.
        gathers: the same for a gather over tensor-parallel ranks; called with the bytes of the whole buffer.
        on_host: context of an update in the host's memory.
        moves: called with the number of bytes that are read from or written to a disk.
    """

    transport: Literal["nccl", "gloo", "shared memory"] = "nccl"
    machines: int = 1
    sends: Callable[[float, float], Callable[[], None]] = lambda sent, leaving: lambda: None
    gathers: Callable[[int], Callable[[], None]] = lambda nbytes: lambda: None
    on_host: Callable[[], AbstractContextManager[None]] = nullcontext
    moves: Callable[[int], None] = lambda nbytes: None

    def topology(self, size: int) -> Topology:
        """The machine of each rank of a data-parallel group."""
        machines = min(self.machines, size)
        return Topology(tuple(rank * machines // size for rank in range(size)))

    def note(
        self, topology: Topology, over: tuple[str, ...], ranks: Sequence[int], together: int
    ) -> Callable[[int], Callable[[], None]]:
        """``sends`` for the collectives of one transport, called with the bytes of a whole buffer.

        Args:
            over, ranks: the dimensions of the mesh along which they communicate, and the ranks along these.
            together: the number of tensor-parallel ranks.
        """
        size, machines = len(topology.machines), len({topology.machines[rank] for rank in ranks})
        if over == (NODE,):  # the ranks of a machine communicate with different ranks
            groups, parts = size // len(topology.nodes), machines
        else:
            # In NCCL's ring, every byte leaves each machine; in other transports, it enters each machine once.
            groups = min(together, size * together // self.machines)
            parts = len(ranks) if self.transport == "nccl" else machines
        leaving = groups * (parts - 1) / parts if machines > 1 else 0.0
        sent = (len(ranks) - 1) / len(ranks)
        return lambda nbytes: self.sends(nbytes * sent, nbytes * leaving)


class SameThread(Executor):
    """An executor without threads: ``submit`` runs the function at once."""

    def submit(self, act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(act(*args, **kwargs))
        return done


class SimulatedFile:
    """A file with a size but no content. See ``SwapFile`` for the methods."""

    def __init__(self, moves: Callable[[int], None]) -> None:
        self.nbytes, self._moves = 0, moves

    def reserve(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read(self, into: Sized, position: int) -> None:
        self._moves(len(into))

    def write(self, data: Sized, position: int) -> None:
        self._moves(len(data))

    def close(self) -> None:
        pass
