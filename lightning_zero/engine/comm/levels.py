"""Collectives between several machines with several ranks each: every element is sent to each machine only once.

A column consists of the slices of all ranks with the same local index, one slice per machine. A gather first fetches
this rank's column from the other machines, and then the other columns from the other ranks of this machine. A reduction
first sums within each machine, and then sums each column across machines. With M machines of G ranks each, a machine
sends (M - 1) / M of a buffer to others; direct exchanges between all ranks would send G times as much.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_zero.engine.comm.chain import Chain
from lightning_zero.engine.comm.codec import Cast, Codec
from lightning_zero.engine.comm.transport import Ranges, Started, Transport
from lightning_zero.engine.plan.mesh import Topology


class Levels(Transport):
    """The two operations over two groups, one within this machine and one across machines.

    The slices of ranks with the same local index are adjacent (see ``mesh.ALL``), so a column is one range.

    Args:
        within: the transport between the ranks of this machine, in the order of local indices.
        across: the transport between the ranks with this rank's local index, in the order of machines.
    """

    encodes_within = False

    def __init__(self, within: Transport, across: Transport, topology: Topology, rank: int) -> None:
        self._within, self._across = within, across
        self._column = topology.across(rank)
        self._columns = [topology.across(each) for each in topology.within(rank)]
        # Gathers may not wait for the second halves of reductions, since ranks may start the two in different orders.
        self._gathers, self._reductions = Chain("gathers"), Chain("reductions")

    def all_gather(self, full: Tensor, ranges: Ranges) -> Started:
        columns, (begin, stop, slices) = self._column_ranges(ranges), self._own_column(ranges)
        first = self._across.all_gather(full[begin:stop], slices)

        def later() -> Started:
            _result_of(first)
            return self._within.all_gather(full, columns)

        return self._gathers.start(later, first.buffers)

    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        _, _, slices = self._own_column(ranges)
        first = self._within.reduce_scatter(flat, self._column_ranges(ranges), Cast(flat.dtype))
        return self._reductions.start(
            lambda: self._across.reduce_scatter(_result_of(first), slices, codec), first.buffers
        )

    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        begin, stop, slices = self._own_column(ranges)
        within = self._within.reduction_bytes(flat, self._column_ranges(ranges), Cast(flat.dtype))
        return within + self._across.reduction_bytes(flat[begin:stop], slices, codec)

    def _own_column(self, ranges: Ranges) -> tuple[int, int, Ranges]:
        """The start and stop of this rank's column, and the slices in it, relative to its start."""
        begin, stop = ranges[self._column[0]][0], ranges[self._column[-1]][1]
        return begin, stop, [(ranges[rank][0] - begin, ranges[rank][1] - begin) for rank in self._column]

    def _column_ranges(self, ranges: Ranges) -> Ranges:
        for column in self._columns:
            assert all(ranges[a][1] == ranges[b][0] for a, b in pairwise(column)), "a column's slices are not adjacent"
        return [(ranges[column[0]][0], ranges[column[-1]][1]) for column in self._columns]

    def close(self) -> None:
        # second halves that have not started yet still use the inner transport
        self._gathers.close(lambda: self._reductions.close(self._within.close))


def _result_of(started: Started) -> Any:
    for wait in started.waits:
        wait()
    return started.finish() if started.finish is not None else None
