"""Collectives of which a background thread does the later steps, in the order in which they were started."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from lightning_zero.engine.comm.transport import Started


class Chain:
    """Does later steps of collectives in a background thread, in the order of ``start``, which all ranks share.

    The thread is a daemon, not an executor's thread: it waits for other ranks, and must not keep the interpreter from
    exiting.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._queue,), name=f"lightning_zero-{name}", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._queue.put, None)
        self._end.atexit = False

    def start(self, later: Callable[[], Started], buffers: list[Tensor]) -> Started:
        """Let the thread call ``later``, which waits for the first steps of a collective, and starts the last one.

        Args:
            buffers: the tensors that the collective reads and writes.
        """
        last: Future[Started] = Future()

        def go_on() -> None:
            nonlocal later
            try:
                started = later()
                del later  # with the tensors that it refers to, before another thread goes on
                last.set_result(started)
            except BaseException as error:
                last.set_exception(error)

        def wait_for_all() -> None:
            for wait in last.result().waits:
                wait()

        def finish() -> Any:
            finish_last = last.result().finish
            return finish_last() if finish_last is not None else None

        if self._end.alive:
            self._queue.put(go_on)
        else:
            last.set_exception(RuntimeError("the transport was closed"))
        return Started([wait_for_all], buffers, finish, ends_by_itself=True)

    def close(self, then: Callable[[], None]) -> None:
        """End the thread, once all that was started has been done or failed, and ``then`` was called.

        A second call adds nothing to the queue: what no thread takes from it would keep the process groups alive.
        """
        if self._end.alive:
            self._queue.put(then)
            self._end()
        if threading.current_thread() is not self._thread:
            # This thread must not drop the last reference to a process group: destroying one at exit ends in an abort.
            self._thread.join(timeout=2)


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (go_on := queue.get()) is not None:
        go_on()
        del go_on  # with the tensors that it refers to
