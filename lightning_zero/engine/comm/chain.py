"""Exchanges in two halves, the second of which needs the result of the first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from lightning_zero.engine.comm.transport import Started


class Chain:
    """Begins the second halves of exchanges in background threads, so that callers do not wait for the first halves.

    Each exchange has its own thread, since ranks may begin gathers in different orders. The threads are daemons, not
    an executor's threads: they wait for other ranks, and must not keep the interpreter from exiting.
    """

    def __init__(self) -> None:
        self._halfway: set[threading.Event] = set()  # one event per exchange, set once the second half has begun

    def start(
        self, first: Started, then: Callable[[Any], Started], after: threading.Event | None = None
    ) -> tuple[Started, threading.Event]:
        """Chain two exchanges into one: a thread awaits the first, and then begins the second with its result.

        Args:
            after: the previous exchange's event. This exchange's second half begins only once that event is set, so
                that all ranks begin second halves in the same order.

        Returns:
            The combined exchange, and an event that is set once its second half has begun or has failed to begin.
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

    def when_all_continue(self, call: Callable[[], object]) -> None:
        """Call a function once every second half has begun or failed to begin, without blocking the caller."""
        unfinished = list(self._halfway)
        if not unfinished:
            call()
            return

        def call_later() -> None:
            for begun in unfinished:
                begun.wait()
            call()

        threading.Thread(target=call_later, name="lightning_zero-close", daemon=True).start()
