"""A collective that user code asks for implicitly must be asked for by every rank: an error in seconds, not a hang.

``if rank == 0: print(p.norm())`` is right under DDP, where every rank holds all of ``p``. Where ``p`` is sharded the
same line needs every rank. Such requests are rare, so each first meets the others in the process group's store.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_zero.engine.collectives import Communicator

_PATIENCE = 3.0
"""Seconds that a rank may be blocked in a collective before it says so, and that another lets such a notice stand."""

_generations = itertools.count()


class Agreement:
    """Where the ranks of one engine meet before a collective that only user code asked for.

    Args:
        communicator: the group.
        timeout: seconds after which a rank that has neither come nor said where it is counts as lost.
    """

    def __init__(self, communicator: Communicator, timeout: float) -> None:
        self._communicator = communicator
        self._rank, self._size, self._timeout = communicator.rank, communicator.size, timeout
        self._blocked: tuple[str, float] | None = None
        self._announced: str | None = None
        self._lock = threading.Lock()  # of what is announced
        self._closed = threading.Event()
        if self._size == 1:
            return
        self._meetings = 0
        prefix = f"lightning_zero/{next(_generations)}"
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(prefix, store)
        # a connection of its own: the main thread may hold the other for as long as it is blocked
        self._notices = dist.PrefixStore(prefix, store.clone() if hasattr(store, "clone") else store)
        self._watcher = threading.Thread(target=self._watch, name="lightning_zero-agreement", daemon=True)
        self._watcher.start()

    def meet(self, what: str) -> None:
        """Return when every rank has asked for the same.

        Args:
            what: what this rank asks for, naming the parameter.

        Raises:
            RuntimeError: on a rank that asked, if another is busy elsewhere, asked for something else or never came.
        """
        if self._size == 1:
            return
        self.require_all(what)
        number, self._meetings = self._meetings, self._meetings + 1
        self._store.set(f"meeting/{number}/{self._rank}", what)
        others = [rank for rank in range(self._size) if rank != self._rank]
        deadline, pause = time.monotonic() + self._timeout, 1e-4
        missing = others
        seen: dict[int, tuple[str, float]] = {}
        while missing := [rank for rank in missing if not self._store.check([f"meeting/{number}/{rank}"])]:
            if time.monotonic() > deadline:
                self._call_off(number)
                self._fail(what, missing, f"did not come within {self._timeout:.0f} s")
            for rank in missing:
                # A notice may be a moment old: only one that stands says that its rank will not come.
                notice = self._store.get(f"blocked/{rank}").decode() if self._store.check([f"blocked/{rank}"]) else ""
                if not notice or seen.get(rank, ("", 0.0))[0] != notice:
                    seen[rank] = (notice, time.monotonic())
                elif time.monotonic() - seen[rank][1] > _PATIENCE:
                    self._call_off(number)
                    self._fail(what, missing, f"wait in {notice.partition(':')[2]}")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        asked = {rank: self._store.get(f"meeting/{number}/{rank}").decode() for rank in others}
        different = [rank for rank in others if asked[rank] != what]
        if different:
            self._fail(what, different, f"asked for {asked[different[0]]}")
        if number >= 2:  # everybody has read the one before the last
            self._store.delete_key(f"meeting/{number - 2}/{self._rank}")

    def require_all(self, what: str) -> None:
        """Refuse what every rank must do while some have no batch left in an evaluation loop.

        Raises:
            RuntimeError: then, on every rank that has one.
        """
        if self._communicator.absent:
            raise RuntimeError(
                f"Rank {self._communicator.rank} needs every rank for {what}, but rank(s) {self._communicator.absent} "
                "have no batch left in this evaluation loop, and only take part in the gathers of parameters. Do it "
                "before the loop or after it (on_validation_epoch_end and its kin), or give every rank as many batches."
            )

    @contextmanager
    def blocked_in(self, what: str) -> Iterator[None]:
        """Around anything in which this rank waits for others."""
        outer, self._blocked = self._blocked, (what, time.monotonic())
        try:
            yield
        finally:
            self._blocked = outer
            if self._announced is not None:
                with self._lock:
                    self._withdraw()

    def close(self) -> None:
        self._closed.set()

    def _call_off(self, number: int) -> None:
        """A meeting to which some did not come has not taken place: the next one has its number, as it has for them."""
        self._meetings = number
        self._store.delete_key(f"meeting/{number}/{self._rank}")

    def _fail(self, what: str, ranks: list[int], reason: str) -> None:
        raise RuntimeError(
            f"Rank {self._rank} needs the whole of {what}, of which every rank holds a part, but rank(s) {ranks} "
            f"{reason}. Run this line on every rank (no 'if rank == 0:' around it), or inside "
            "'with lightning_zero.full_parameters(module):' entered by all."
        )

    def _withdraw(self) -> None:
        if self._announced is not None:
            self._announced = None
            # emptied, not deleted: another may be about to read it, and would wait for it to come back
            self._notices.set(f"blocked/{self._rank}", "")

    def _watch(self) -> None:
        while not self._closed.wait(_PATIENCE / 3):
            blocked = self._blocked
            if blocked is None or time.monotonic() - blocked[1] < _PATIENCE:
                continue
            notice = f"{blocked[1]}:{blocked[0]}"  # the time tells one wait from another
            try:
                with self._lock:
                    if self._blocked is blocked and self._announced != notice:
                        self._notices.set(f"blocked/{self._rank}", notice)
                        self._announced = notice
            except RuntimeError:  # the store went away with the rank that hosted it: nobody is left to tell
                return
