"""Changes of files that are offloaded to a disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from lightning_zero.io.swap import BUFFERS, Buffers, SwapFile, Turn


@contextmanager
def all_buffers_in_use() -> Iterator[None]:
    """Context whose first change of a file waits until each buffer has been read into; otherwise, chance decides."""
    reads, real_read, real_change, is_first = threading.Semaphore(0), SwapFile.read, Buffers.change, True

    def read(*args: Any) -> None:
        real_read(*args)
        reads.release()

    def change(buffers: Buffers, file: SwapFile, act: Callable[[Any], object], turn: Turn) -> None:
        def act_later(contents: Any) -> None:
            nonlocal is_first
            for _ in range(BUFFERS if is_first else 0):
                assert reads.acquire(timeout=20), "a buffer was not used"
            is_first = False
            act(contents)

        real_change(buffers, file, act_later, turn)

    with patch.object(SwapFile, "read", read), patch.object(Buffers, "change", change):
        yield
