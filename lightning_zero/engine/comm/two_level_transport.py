"""Transport between several machines with several ranks each: every element is sent to each machine only once.

A column consists of the slices of all ranks with the same local index, one slice per machine. A gather first fetches
this rank's column from the other machines, and then the other columns from the other ranks of this machine. A reduction
first sums within each machine, and then sums each column across machines. With M machines of G ranks each, a machine
sends (M - 1) / M of a buffer to others; direct exchanges between all ranks would send G times as much.
"""

from __future__ import annotations

import threading
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_zero.engine.comm.chain import Chain
from lightning_zero.engine.comm.codec import Cast, Codec
from lightning_zero.engine.comm.gloo_transport import GlooTransport
from lightning_zero.engine.comm.shared_memory_transport import SharedMemoryTransport
from lightning_zero.engine.comm.transport import Ranges, Span, Started, Transport
from lightning_zero.engine.plan.topology import Topology


class TwoLevelTransport(Transport):
    """Uses shared memory within each machine, and Gloo between ranks with the same local index.

    The slices of ranks with the same local index are adjacent (see ``mesh.ALL``), so a column is one range.

    Args:
        within: the transport between the ranks of this machine, numbered by local index.
        across: the transport between the ranks with this rank's local index, numbered by machine.
        topology: the topology of all ranks.
        rank: this process's rank.
    """

    takes_spans = True
    encodes_within = False

    def __init__(self, within: SharedMemoryTransport, across: GlooTransport, topology: Topology, rank: int) -> None:
        self._within, self._across = within, across
        self._column = topology.across(rank)
        self._columns = [topology.across(each) for each in topology.within(rank)]
        self._chain = Chain()
        self._last_reduction: threading.Event | None = None

    def all_gather(self, full: Tensor, ranges: Ranges, number: int) -> Started:
        first = self._across.all_gather(full, [ranges[rank] for rank in self._column], number)
        return self._gather_within(first, full, ranges, number)

    def exchange_changes(self, full: Tensor, ranges: Ranges, number: int, message: Tensor) -> Started:
        column = [ranges[rank] for rank in self._column]
        first = self._across.exchange_changes(full, column, number, message)
        return self._gather_within(first, full, ranges, number)

    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        columns = self._column_ranges(ranges)
        first = self._within.reduce_scatter(flat, columns, Cast(flat.dtype))
        return self._then_across(first, [ranges[rank] for rank in self._column], codec)

    def reduce_spans(self, spans: list[list[Span]], dtype: torch.dtype, factor: float) -> Started:
        columns = [[span for rank in column for span in spans[rank]] for column in self._columns]
        first = self._within.reduce_spans(columns, dtype, factor)
        ends = accumulate((sum(span.numel for span in spans[rank]) for rank in self._column), initial=0)
        return self._then_across(first, list(pairwise(ends)), Cast(dtype))

    def _gather_within(self, first: Started, full: Tensor, ranges: Ranges, number: int) -> Started:
        """Once this rank's column has arrived, gather the other columns from the ranks of this machine."""
        columns = self._column_ranges(ranges)
        return self._chain.start(first, lambda _: self._within.all_gather(full, columns, number))[0]

    def _then_across(self, first: Started, ranges: Ranges, codec: Codec) -> Started:
        """Once this rank's column has been summed within the machine, sum it across machines."""
        begin = ranges[0][0]
        relative = [(start - begin, stop - begin) for start, stop in ranges]
        started, self._last_reduction = self._chain.start(
            first, lambda column: self._across.reduce_scatter(column, relative, codec), after=self._last_reduction
        )
        return started

    def _column_ranges(self, ranges: Ranges) -> list[tuple[int, int]]:
        for column in self._columns:
            assert all(ranges[a][1] == ranges[b][0] for a, b in pairwise(column)), "a column's slices are not adjacent"
        return [(ranges[column[0]][0], ranges[column[-1]][1]) for column in self._columns]

    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        columns, column = self._column_ranges(ranges), [ranges[rank] for rank in self._column]
        mine = flat[column[0][0] : column[-1][1]]
        relative = [(start - column[0][0], stop - column[0][0]) for start, stop in column]
        within = self._within.reduction_bytes(flat, columns, Cast(flat.dtype))
        return within + self._across.reduction_bytes(mine, relative, codec)

    def close(self) -> None:
        self._chain.when_all_continue(self._within.close)  # exchanges in flight may still begin a gather
