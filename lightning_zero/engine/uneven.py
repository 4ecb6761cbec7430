"""Evaluation loops that end at different batches: a rank with nothing left to compute serves the gathers of the others.

Each batch is a turn. Ranks first tell each other how far they are (which dataloader their next batch is from, or that
they are at the end); those who are behind run theirs, and the others take part in what the first of these announces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.bucket import Bucket
from lightning_zero.engine.collectives import Communicator
from lightning_zero.engine.schedule import Schedule

_END = 2**62
_OVER = -1  # in the place of a bucket's number: the turn is over


class Turns:
    """Whose turn it is in an evaluation loop.

    While ranks are absent, parameters that user code reads are gathered by bucket, which the absent can serve. What
    they cannot know (a sum over parts of some other sharded tensor, a write) is an error.

    Args:
        buckets: all of the engine, by number.
    """

    def __init__(self, communicator: Communicator, schedule: Schedule, buckets: list[Bucket]) -> None:
        self._communicator, self._schedule, self._buckets = communicator, schedule, buckets
        self._sent: list[tuple[Tensor, Any]] = []  # messages are kept until they have left

    def take(self, position: int | None) -> None:
        """End this rank's turn, and return when it has another, or when every rank is at its end. Collective.

        Args:
            position: the index of the dataloader of its next batch; None at the end.
        """
        self._end()
        communicator = self._communicator
        own = _END if position is None else position
        while True:
            positions = torch.zeros(communicator.size, dtype=torch.int64)
            positions[communicator.rank] = own
            communicator.agree(positions, "the other ranks' next batch in an evaluation loop")
            behind = int(positions.min())
            absent = [rank for rank, other in enumerate(positions.tolist()) if other > behind]
            if own == behind:
                self._begin(absent)
                return
            self._serve(leader=int(positions.argmin()))

    def _begin(self, absent: list[int]) -> None:
        communicator = self._communicator
        communicator.absent = absent
        if absent and communicator.rank == min(set(range(communicator.size)).difference(absent)):
            communicator.before_gather = self._announce

    def _end(self) -> None:
        communicator = self._communicator
        if not communicator.absent:
            return
        for unit in self._schedule.units:
            self._schedule.release_if_idle(unit)  # what was gathered to be read
        if communicator.before_gather is not None:
            self._announce(_OVER)
            for _, work in self._sent:
                work.wait()
            self._sent = []
        communicator.absent, communicator.before_gather = [], None

    def _announce(self, number: int) -> None:
        """Tell the absent which bucket is gathered next, and the order of units that the turn has left behind."""
        message = self._message()
        message[0] = number
        message[1 : 1 + len(self._schedule.order)] = torch.tensor(self._schedule.order, dtype=torch.int64)
        works = self._communicator.tell(self._communicator.absent, message)
        self._sent.extend((message, work) for work in works)

    def _serve(self, leader: int) -> None:
        while True:
            message = self._message()
            self._communicator.hear(leader, message, f"what rank {leader} gathers in an evaluation loop")
            number, *order = message.tolist()
            if number == _OVER:
                self._schedule.order = [unit for unit in order if unit >= 0]
                return
            bucket = self._buckets[number]
            stays = bucket.is_ready
            bucket.gather(refresh=True)
            bucket.wait()
            if not stays:
                bucket.release()

    def _message(self) -> Tensor:
        return torch.full((1 + len(self._schedule.units),), -1, dtype=torch.int64)
