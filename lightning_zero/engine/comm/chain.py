"""Collectives in two halves, the second of which needs the result of the first."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from lightning_zero.engine.comm.transport import Started


class Chain:
    """Starts second halves in a background thread, in the order of the first halves, which all ranks share.

    The thread is a daemon, not an executor's thread: it waits for other ranks, and must not keep the interpreter from
    exiting.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._queue,), name=f"lightning_zero-{name}", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._queue.put, None)
        self._end.atexit = False

    def start(self, first: Started, then: Callable[[Any], Started]) -> Started:
        """Chain two collectives into one: the thread awaits the first, and then starts the second with its result."""
        second: Future[Started] = Future()

        def go_on() -> None:
            try:
                for wait in first.waits:
                    wait()
                second.set_result(then(first.finish() if first.finish is not None else None))
            except BaseException as error:
                second.set_exception(error)

        def wait_for_both() -> None:
            for wait in second.result().waits:
                wait()

        def finish() -> Any:
            last = second.result().finish
            return last() if last is not None else None

        self._queue.put(go_on)
        return Started([wait_for_both], first.buffers, finish, ends_by_itself=True)

    def close(self, then: Callable[[], None]) -> None:
        """End the thread, once every second half has started or failed to start, and ``then`` was called.

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
