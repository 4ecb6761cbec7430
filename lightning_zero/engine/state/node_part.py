"""This rank's part of a bucket, if the ranks of each machine together hold all parameters (``shard_within``)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.engine.comm.bucket_collectives import Pending, end_with
from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.streams import current_stream
from lightning_zero.engine.plan.layout import BucketLayout, Segment
from lightning_zero.engine.plan.mesh import NODE
from lightning_zero.engine.state.ledger import Ledger
from lightning_zero.engine.tensor.sharded_tensor import flat_range


class NodePart:
    """Parameter values of this rank's shard, and of the shards of ranks with the same local index on other machines.

    The bucket is gathered from the parts of one machine's ranks. After each change of the parameters, machines exchange
    shards once; then all ranks with the same local index hold the same values.

    Args:
        values: the part's values, a 1-D tensor in the dtype of the gathered buffer.
        number: the bucket's number among all buckets, the same on every rank.

    Attributes:
        own: this rank's shard, a view of ``values``.
    """

    def __init__(
        self, values: Tensor, layout: BucketLayout, communicator: Communicator, number: int, what: str, ledger: Ledger
    ) -> None:
        self._values, self._number, self._what, self._ledger = values, number, what, ledger
        self._communicator = communicator
        self._ranges, self._collectives = layout.ranges_in_part, communicator.along((NODE,))
        self._begin, _ = layout.own_part
        low, high = layout.own_range
        self.own = values[low - self._begin : high - self._begin]
        self._pending: list[Pending] = []
        end_with(self, self._pending)
        self._arrived: torch.Event | None = None  # recorded on the stream that waited for the last exchange
        ledger.add("parameters", values.nbytes)

    def refresh(self, new: Tensor | None) -> None:
        """Start to fetch the other shards of this part, after every rank has updated its own shard. Collective.

        Args:
            new: the new values of this rank's shard; None if they are in ``own`` already.
        """
        values = self.values()
        if new is not None:
            self.own.copy_(new)
        self._pending.append(self._collectives.all_gather(values, self._ranges, self._what))

    def values(self) -> Tensor:
        """The values of this part. Waits for shards that are being fetched."""
        stream = current_stream(self._values.device)
        if self._pending:
            self._pending.pop().wait()
            self._arrived = stream.record_event() if stream is not None else None
        elif self._arrived is not None and stream is not None:
            stream.wait_event(self._arrived)  # the wait may have been on another stream
        return self._values

    def exchange(self, segment: Segment) -> None:
        """Fetch a parameter's values in this part, after each rank has written its range to ``own``. Collective."""
        start, stop = self._range_of(segment)
        ranges = [
            (min(max(low, start), stop) - start, min(max(high, start), stop) - start) for low, high in self._ranges
        ]
        self._collectives.all_gather(self.values()[start:stop], ranges, self._what).wait()

    def write(self, segment: Segment, value: Tensor) -> None:
        """Expand ``value``, the same on every rank, to a parameter's shape; write the range that is in this part."""
        start, stop = self._range_of(segment)
        begin = self._begin - segment.start
        self.values()[start:stop].copy_(flat_range(value.expand(segment.shape), start + begin, stop + begin))

    def _range_of(self, segment: Segment) -> tuple[int, int]:
        """A parameter's range within this part, possibly empty."""
        start, stop = (min(max(each - self._begin, 0), len(self._values)) for each in (segment.start, segment.stop))
        return start, stop

    def repartition(self, flat: Tensor, layout: BucketLayout) -> NodePart:
        """Return a part with a new layout, to use instead of this part.

        Args:
            flat: the values of all parameters in the new layout, 1-D.
        """
        self._count_out()
        return NodePart(
            flat[slice(*layout.own_part)].to(self._values.device, self._values.dtype, copy=True),
            layout,
            self._communicator,
            self._number,
            self._what,
            self._ledger,
        )

    def abandon(self) -> None:
        """Drop this part after a failure. A running exchange is not awaited: other ranks may never join it."""
        self._pending.clear()
        self._count_out()

    def _count_out(self) -> None:
        self._ledger.add("parameters", -self._values.nbytes)
