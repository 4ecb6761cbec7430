"""Transport over Gloo: each pair of ranks exchanges slices of the flat buffers directly.

These exchanges overlap with computation. Each rank adds up slices in a fixed order, not in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engine.comm.chain import Chain
from lightning_zero.engine.comm.codec import Codec, apply_changes
from lightning_zero.engine.comm.process_group import ProcessGroup, rank, ranks_of
from lightning_zero.engine.comm.transport import Ranges, Started, Transport, slices_of


class GlooTransport(Transport):
    """Sends and receives between each pair of ranks; sums in the dtype of the flat buffer.

    Args:
        group: a Gloo process group.
        gather_tag: the tag of bucket 0's gathers. Bucket ``n`` has the tag ``gather_tag + n``, so ranks may gather
            buckets in different orders.
        reduce_tag: the tag of reductions.
        members: the ranks of the group that take part, in the order of their slices; by default all.
    """

    def __init__(
        self, group: ProcessGroup, gather_tag: int, reduce_tag: int, members: Sequence[int] | None = None
    ) -> None:
        self._group, self._gather_tag, self._reduce_tag = group, gather_tag, reduce_tag
        every, own = ranks_of(group), rank(group)
        members = range(len(every)) if members is None else members
        self._ranks, self._rank = [every[member] for member in members], list(members).index(own)
        size = len(self._ranks)
        # (rank to send to, rank to receive from), in the order of a ring, so that ranks differ in their first peers
        self._peers = [((self._rank + k) % size, (self._rank - k) % size) for k in range(1, size)]
        self._chain = Chain()

    def all_gather(self, full: Tensor, ranges: Ranges, number: int) -> Started:
        slices, tag = slices_of(full, ranges), self._gather_tag + number
        works: list[Any] = []
        for peer, source in self._peers:
            works.append(dist.irecv(slices[source], self._ranks[source], self._group, tag=tag))
            works.append(dist.isend(slices[self._rank], self._ranks[peer], self._group, tag=tag))
        return Started([work.wait for work in works], [full])

    def exchange_changes(self, full: Tensor, ranges: Ranges, number: int, message: Tensor) -> Started:
        # slices of ``data``, so that writes do not increment the version that autograd checks
        slices, tag = slices_of(full.data, ranges), self._gather_tag + number
        # Receivers do not know how long a message is, so its length is sent first.
        length = torch.tensor([len(message)], device="cpu")
        lengths = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in self._peers]
        come: list[Any] = []
        sent: list[Any] = []
        for (peer, source), expected in zip(self._peers, lengths):
            come.append(dist.irecv(expected, self._ranks[source], self._group, tag=tag))
            for each in (length, message):
                sent.append(dist.isend(each, self._ranks[peer], self._group, tag=tag))

        def receive(_: Any) -> Started:
            messages = [torch.empty(int(numel), dtype=torch.uint8, device="cpu") for numel in lengths]
            works: list[Any] = [
                dist.irecv(received, self._ranks[source], self._group, tag=tag)
                for received, (_, source) in zip(messages, self._peers)
            ]
            for work, received, (_, source) in zip(works, messages, self._peers):
                work.wait()
                apply_changes(slices[source], received)
            for work in sent:  # here, since callers may never wait for the exchange
                work.wait()
            return Started([], [])

        return self._chain.start(Started([work.wait for work in come], [full, length, message]), receive)[0]

    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec) -> Started:
        slices, dtype = slices_of(flat, ranges), flat.dtype
        # if slices are encoded before they are sent, this rank's slice is copied, so that the buffer can be freed
        own = slices[self._rank] if codec.dtype == dtype else slices[self._rank].clone()
        works: list[Any] = []
        sent, received = [], []
        for peer, source in self._peers:
            sent.append(codec.encode(slices[peer]))
            received.append(torch.empty(codec.size(len(own)), dtype=codec.dtype, device=flat.device))
            works.append(dist.irecv(received[-1], self._ranks[source], self._group, tag=self._reduce_tag))
            works.append(dist.isend(sent[-1], self._ranks[peer], self._group, tag=self._reduce_tag))

        def add_up() -> Tensor:
            total, rest = own, received
            if codec.dtype == dtype:
                total, *rest = received
                total.add_(own)
            for part in rest:
                codec.add(total, part)
            return total

        return Started([work.wait for work in works], sent, add_up)

    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        lengths = [stop - start for start, stop in ranges]
        own = lengths.pop(self._rank)
        travels = sum(map(codec.size, lengths)) + codec.size(own) * len(lengths)
        return own * flat.element_size() + travels * codec.dtype.itemsize
