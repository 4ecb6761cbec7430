"""Mirrors: copies of ranks' slots on other machines, so that the states of a lost machine survive."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.slots import SlotWriter
from lightning_zero.engine.comm.ring import Ring

_MESSAGE = 2**26  # maximum size of a message, in bytes


class Mirror:
    """Sends this rank's slots to the next machine, and stores the slots of a rank on the previous one. Collective.

    As in Gemini (SOSP 2023, section 4), rank r sends its slots to rank r + ``ranks_of_machine``, modulo the world size.

    Args:
        folder: the slots' folder.
        ranks_of_machine: number of ranks on each machine.
        timeout: timeout of each message.
    """

    def __init__(self, folder: str, ranks_of_machine: int, timeout: timedelta | None) -> None:
        self._folder, self._ring = folder, Ring(ranks_of_machine, timeout)
        self._writers: dict[int, SlotWriter] = {}

    @property
    def of_rank(self) -> int:
        """The rank whose slots this rank stores."""
        return self._ring.behind

    def exchange(self, contents: Tensor | None, index: int) -> None:
        """Send a slot's contents, and store those received from the previous machine. Collective; usable in any thread.

        Args:
            contents: the contents of this rank's slot; None sends nothing.
            index: the slot's index.

        Raises:
            OSError: if there is no room for the received contents.
        """
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        sent = nothing if contents is None else contents
        length, error = self._ring.exchange_number(len(sent)), None
        try:
            received = self._writer(index).overwritten(length) if length else nothing
        except OSError as raised:
            received, error = torch.empty(length, dtype=torch.uint8, device="cpu"), raised
        begin = SlotWriter.VALUES
        self._ring.exchange(sent[begin:], received[begin:])
        self._ring.exchange(sent[:begin], received[:begin])  # sent last: the header marks the slot as complete
        if error is not None:
            raise error

    def _writer(self, index: int) -> SlotWriter:
        if index not in self._writers:
            self._writers[index] = SlotWriter(os.path.join(self._folder, f"{self.of_rank}.m{index}"))
        return self._writers[index]

    def close(self) -> None:
        """Destroy the ring's process group and close the files."""
        for writer in self._writers.values():
            writer.close()
        self._ring.close()


def send_file(path: str, sender: int, receives: bool, rank: int, broadcast: Callable[[Any, int], Any]) -> str | None:
    """Send a file from one rank to others, in parts. Collective.

    Args:
        path: on the sending rank, the path of the file; on receiving ranks, the path to write to.
        sender: the sending rank.
        receives: whether this rank writes the file.
        rank: this process's rank.
        broadcast: function that broadcasts a value from one rank to all.

    Returns:
        The reason why this rank could not write the file; None if there was no error.
    """
    error: str | None = None
    with ExitStack() as files:
        source = files.enter_context(open(path, "rb")) if rank == sender else None
        size, target = broadcast(os.path.getsize(path) if source is not None else None, sender), None
        try:
            if receives:
                target = files.enter_context(open(path, "wb"))
                os.posix_fallocate(target.fileno(), 0, size)
        except OSError as raised:
            error = f"on rank {rank}: {raised}"
        for _ in range(0, size, _MESSAGE):
            part = broadcast(source.read(_MESSAGE) if source is not None else None, sender)
            if target is not None and error is None:
                target.write(part)
    return error
