"""Transport between several machines with several ranks each: an element comes to each machine once.

A rank's column is the slices of all ranks with the same local index, one a machine. A gather first fetches this rank's
column from the other machines, and then the other columns from the ranks of its machine. A reduction first sums within
the machine, and then each column between machines. With M machines of G ranks a machine sends (M - 1) / M of a buffer;
direct exchanges between all ranks would send G times as much.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.comm.codec import Cast, Codec
from lightning_zero.engine.comm.gloo_transport import GlooTransport
from lightning_zero.engine.comm.shared_memory_transport import SharedMemoryTransport
from lightning_zero.engine.comm.transport import Piece, Ranges, Started, Transport
from lightning_zero.engine.plan.topology import Topology


class TwoLevelTransport(Transport):
    """Shared memory within each machine, and Gloo between ranks with the same local index.

    The slices of such ranks are adjacent (see ``mesh.ALL``), so a column is one range.

    Args:
        within: between the ranks of this machine, numbered by local index.
        across: between the ranks with this one's local index, numbered by machine.
        topology: of all ranks.
        rank: this one.
    """

    takes_pieces = True
    encodes_within = False

    def __init__(self, within: SharedMemoryTransport, across: GlooTransport, topology: Topology, rank: int) -> None:
        self._within, self._across = within, across
        self._column = topology.across(rank)
        self._columns = [topology.across(each) for each in topology.within(rank)]
        self._halfway: set[threading.Event] = set()  # of exchanges, set when the second half begins
        self._last_reduction: threading.Event | None = None

    def all_gather(self, full: Tensor, ranges: Ranges, number: int, own: Tensor | None = None) -> Started:
        first = self._across.all_gather(full, [ranges[rank] for rank in self._column], number, own)
        columns = self._spans(ranges)
        return self._chained(first, lambda _: self._within.all_gather(full, columns, number))[0]

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
        """Sum this rank's column over machines; its slices are adjacent."""
        begin = ranges[0][0]
        relative = [(start - begin, stop - begin) for start, stop in ranges]
        started, self._last_reduction = self._chained(
            first, lambda column: self._across.reduce_scatter(column, relative, codec), after=self._last_reduction
        )
        return started

    def _spans(self, ranges: Ranges) -> list[tuple[int, int]]:
        """The range of each column."""
        for column in self._columns:
            assert all(ranges[a][1] == ranges[b][0] for a, b in pairwise(column)), "a column's slices are not adjacent"
        return [(ranges[column[0]][0], ranges[column[-1]][1]) for column in self._columns]

    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        columns, column = self._spans(ranges), [ranges[rank] for rank in self._column]
        mine = flat[column[0][0] : column[-1][1]]
        relative = [(start - column[0][0], stop - column[0][0]) for start, stop in column]
        within = self._within.reduction_bytes(flat, columns, Cast(flat.dtype))
        return within + self._across.reduction_bytes(mine, relative, codec)

    def close(self) -> None:
        unfinished = list(self._halfway)
        if not unfinished:
            self._within.close()
            return

        def close_later() -> None:  # the other ranks of this machine need the second halves
            for begun in unfinished:
                begun.wait()
            self._within.close()

        threading.Thread(target=close_later, name="lightning_zero-close", daemon=True).start()

    def _chained(
        self, first: Started, then: Callable[[Any], Started], after: threading.Event | None = None
    ) -> tuple[Started, threading.Event]:
        """Chain two exchanges into one: a thread awaits the first, and then begins the second with its result.

        Each has a thread of its own, since ranks may begin gathers in different orders. No executor: these threads wait
        for other ranks, and must not keep the interpreter from ending.

        Args:
            after: set when the second half has begun that comes before this one on all ranks.

        Returns:
            The whole, and what is set when its second half has begun, or cannot begin.
        """
        second: Future[Started] = Future()
        begun = threading.Event()
        self._halfway.add(begun)

        def go_on() -> None:
            try:
                if after is not None:
                    after.wait()
                for each in first.waits:
                    each()
                second.set_result(then(first.finish() if first.finish is not None else None))
            except BaseException as error:
                second.set_exception(error)
            finally:
                begun.set()
                self._halfway.discard(begun)

        def wait_for_both() -> None:
            for each in second.result().waits:
                each()

        def finish() -> Tensor | None:
            last = second.result().finish
            return last() if last is not None else None

        threading.Thread(target=go_on, name="lightning_zero-second-half", daemon=True).start()
        return Started([wait_for_both], first.buffers, finish, ends_by_itself=True), begun
