"""Transport between several machines with several ranks each: between machines each element travels once a machine.

A gather fetches this rank's column from the machines, that is, the slices of the ranks that have its place there, and
then the columns of the other ranks of its machine. A reduction adds up within the machine, and then the column between
machines. So (N - 1) / N of a buffer leave a machine of N, where direct exchanges between all ranks send G times as much
with G ranks a machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.comm.codec import Cast, Codec
from lightning_zero.engine.comm.gloo_transport import GlooTransport
from lightning_zero.engine.comm.shared_memory_transport import SharedMemoryTransport
from lightning_zero.engine.comm.transport import Piece, Ranges, Started, Transport
from lightning_zero.engine.plan.topology import Topology

_MOST_AT_ONCE = 64  # gathers whose second half waits for its first: other ranks may begin them in another order


class TwoLevelTransport(Transport):
    """Shared memory within each machine, and Gloo between ranks that have the same place on theirs.

    The slices of such ranks are neighbours (see ``mesh.ALL``), so a column is one range.

    Args:
        within: between the ranks of this machine, numbered by their places.
        across: between this rank and those that have its place on other machines, numbered by machine.
        topology: of all ranks.
        rank: this one.
    """

    takes_pieces = True

    def __init__(self, within: SharedMemoryTransport, across: GlooTransport, topology: Topology, rank: int) -> None:
        self._within, self._across = within, across
        self._column = topology.across(rank)
        self._columns = [topology.across(each) for each in topology.within(rank)]
        # What follows a first half begins in a thread. Reductions have one, which keeps their order.
        self._gathers = ThreadPoolExecutor(_MOST_AT_ONCE, "lightning_zero-gather")
        self._reductions = ThreadPoolExecutor(1, "lightning_zero-reduce")
        for executor in (self._gathers, self._reductions):
            weakref.finalize(self, executor.shutdown, wait=False)

    def all_gather(self, full: Tensor, ranges: Ranges, number: int, own: Tensor | None = None) -> Started:
        first = self._across.all_gather(full, [ranges[rank] for rank in self._column], number, own)
        columns = self._spans(ranges)
        return _chained(self._gathers, first, lambda _: self._within.all_gather(full, columns, number))

    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        columns = self._spans(ranges)
        first = self._within.reduce_scatter(flat, columns, Cast(flat.dtype))
        return self._then_across(first, [ranges[rank] for rank in self._column], codec)

    def reduce_pieces(self, pieces: list[list[Piece]], dtype: torch.dtype, factor: float) -> Started:
        columns = [[piece for rank in column for piece in pieces[rank]] for column in self._columns]
        first = self._within.reduce_pieces(columns, dtype, factor)
        ends = accumulate((sum(piece.numel for piece in pieces[rank]) for rank in self._column), initial=0)
        return self._then_across(first, list(pairwise(ends)), Cast(dtype))

    def _then_across(self, first: Started, ranges: Ranges, codec: Codec) -> Started:
        """Add up this rank's column, whose slices are neighbours, over machines."""
        begin = ranges[0][0]
        relative = [(start - begin, stop - begin) for start, stop in ranges]
        return _chained(self._reductions, first, lambda column: self._across.reduce_scatter(column, relative, codec))

    def _spans(self, ranges: Ranges) -> list[tuple[int, int]]:
        """The range of each column."""
        return [(ranges[column[0]][0], ranges[column[-1]][1]) for column in self._columns]

    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        columns, column = self._spans(ranges), [ranges[rank] for rank in self._column]
        mine = flat[column[0][0] : column[-1][1]]
        relative = [(start - column[0][0], stop - column[0][0]) for start, stop in column]
        within = self._within.reduction_bytes(flat, columns, Cast(flat.dtype))
        return within + self._across.reduction_bytes(mine, relative, codec)

    def close(self) -> None:
        self._within.close()
        for executor in (self._gathers, self._reductions):
            executor.shutdown(wait=False)


def _chained(executor: ThreadPoolExecutor, first: Started, then: Callable[[Any], Started]) -> Started:
    """One exchange that begins with another one's result; the thread waits for the first, and begins the second."""

    def go_on() -> Started:
        for wait in first.waits:
            wait()
        return then(first.finish() if first.finish is not None else None)

    second: Future[Started] = executor.submit(go_on)

    def wait() -> None:
        for each in second.result().waits:
            each()

    def finish() -> Tensor | None:
        last = second.result().finish
        return last() if last is not None else None

    return Started([wait], first.buffers, finish, ends_by_itself=True)
