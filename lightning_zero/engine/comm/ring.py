"""Exchange messages around a ring of ranks, in a separate process group that a background thread may use."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor

from lightning_zero.engine.comm.process_group import begin_send, destroy, new_group, rank, receive, world_size

_MESSAGE = 2**26  # bytes


class Ring:
    """A ring of all ranks: each sends to the rank ``distance`` ahead, and receives from the rank ``distance`` behind.

    Creating a ring and exchanging values are collective.

    Args:
        distance: the receiver's rank minus the sender's, modulo the number of ranks.
        timeout: the timeout of a message; None for the backend's default.
    """

    def __init__(self, distance: int, timeout: timedelta | None) -> None:
        self._size = world_size()
        self._ahead, self._behind = (rank() + distance) % self._size, (rank() - distance) % self._size
        self._group = new_group(list(range(self._size)), "gloo", timeout)

    @property
    def behind(self) -> int:
        """The rank from which this rank receives."""
        return self._behind

    def exchange_number(self, number: int) -> int:
        """Send a number ahead, and return the number received from behind."""
        received = torch.empty(1, dtype=torch.int64, device="cpu")
        self.exchange(torch.tensor([number], device="cpu"), received)
        return int(received)

    def exchange(self, sent: Tensor, received: Tensor) -> None:
        """Send one CPU tensor, and receive into another. Some ranks may send or receive nothing (an empty tensor)."""
        works = [begin_send(part, self._group, self._ahead) for part in sent.split(_MESSAGE) if len(part)]
        for part in received.split(_MESSAGE):
            if len(part):
                receive(part, self._group, self._behind)
        for work in works:
            work.wait()

    def close(self) -> None:
        """Destroy the ring's process group."""
        destroy(self._group)
