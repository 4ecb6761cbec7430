"""The rendezvous of ranks before an implicit collective, so that a missing rank causes an error instead of a hang.

``if rank == 0: print(p.norm())`` works under DDP, where every rank holds all of ``p``. If ``p`` is sharded, the same
line needs a collective of all ranks. Such collectives are rare, so there is time to check in the process group's store
first that all ranks have arrived.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from lightning_zero.engine.comm.control_plane import ControlPlane
from lightning_zero.engine.comm.failures import SAME_UNITS, failure
from lightning_zero.engine.comm.process_group import named_store

_CONTEXTS = 3, 16, 64, 256
"""The next gather is expected from this many last ones: from more of them where fewer have been followed by different
gathers, as where a network runs twice before its backward."""

_UNCLEAR = -1  # expected in place of a bucket after different gathers
_MOST_EXPECTATIONS = 2**13

_ARRIVAL = 1 << 48
"""One rank's arrival in a sum of arrivals and checksums of 32 bits."""

_SAME_LINES = (
    "Run this line on every rank (not inside 'if rank == 0:', and not after a loop that has fewer batches on this "
    "rank); or enter 'with lightning_zero.full_parameters(module):' on every rank, and run the line inside."
)


class Rendezvous:
    """Makes all ranks of one engine wait for each other before a collective that user code has caused.

    Args:
        everyone: the control plane of these ranks.
        timeout: how long a rank waits for the others.

    Attributes:
        meetings: the number of rendezvous so far.
        is_closed: whether ``close`` was called; always False if no other process exists.
        absent: ranks that run no forward in the current turn, and only take part in gathers; set by ``Join``.
        announce: called with a bucket's number before the bucket is gathered, so that absent ranks take part; None if
            no rank is absent.
    """

    def __init__(self, everyone: ControlPlane, timeout: timedelta) -> None:
        self._everyone, self._rank, self._size = everyone, everyone.rank, everyone.size
        self.is_closed = False
        self.absent: list[int] = []
        self.announce: Callable[[int], object] | None = None
        self.meetings = 0
        self._is_met = False
        self._last: tuple[int, ...] = ()  # the buckets gathered last
        self._next: dict[tuple[int, ...], int] = {}  # by the buckets gathered last: the next one on every rank
        self._timeout = timeout.total_seconds()
        if everyone.name:
            self._store = named_store(f"lightning_zero/rendezvous/{everyone.name}")

    def meet(self, what: str, advice: str = _SAME_LINES) -> None:
        """Wait until every rank has called this method with the same argument.

        Args:
            what: this rank's operation, including the parameter's name.
            advice: the end of the error message if another rank passes a different operation.

        Raises:
            RuntimeError: if another rank passes a different operation, has ended, does not call this method in time,
                is in a deadlock with this rank, or if this process is a fork of a rank's process.
        """
        if not self._everyone.name or self._is_met:
            return
        self.require_all(what)
        if self.is_closed:
            raise RuntimeError(
                f"Rank {self._rank} needs every rank for {what}, but the run that sharded the module over {self._size} "
                "ranks has ended. If the run failed, call Trainer.fit, validate, test or predict again with this "
                "module on all ranks: the call unshards the module first. Or create a new module, and load a "
                "checkpoint. Make copies on every rank: a copy made on only some ranks stays sharded."
            )
        with self._everyone.waiting(f"the rendezvous for {what}"):
            asked = self._exchange(what)
        if different := [rank for rank, other in enumerate(asked) if other != what]:
            raise RuntimeError(
                f"Rank {self._rank} needs every rank for {what}, since each rank holds only a shard, but rank(s) "
                f"{different} asked for {asked[different[0]]}. {advice}"
            )

    def agree_on_gather(self, bucket: int, what: str) -> None:
        """Call ``meet`` before the gather of a bucket, unless all ranks have already gathered it after the same others.

        Ranks that start different gathers would receive each other's values. In most programs, gathers repeat in the
        same order in each step, so that ranks meet only in the first steps.

        Raises:
            RuntimeError: as for ``meet``.
        """
        if not self._everyone.name or self._is_met or self.absent:  # one rank announces the gathers to the absent ranks
            return
        for length in _CONTEXTS:
            context = self._last[-length:]
            if (expected := self._next.get(context)) != _UNCLEAR:
                break
        if expected != bucket:
            self.meet(what, SAME_UNITS)
            if len(self._next) > _MOST_EXPECTATIONS:  # as where units are skipped at random
                self._next.clear()
            is_longest = length == _CONTEXTS[-1]
            self._next[context] = bucket if expected is None or is_longest else _UNCLEAR
        self._last = (*self._last[1 - _CONTEXTS[-1] :], bucket)

    def _exchange(self, what: str) -> list[str]:
        """Wait for the other ranks, and return what each has passed.

        Ranks add up their arrivals and checksums, so that requests and values do not grow with the number of ranks.
        Only if checksums differ, each rank writes what it has passed.
        """
        key, self.meetings = f"meeting/{self.meetings}", self.meetings + 1
        own = _ARRIVAL + zlib.crc32(what.encode())
        self._store.add(key, own)

        def sum_of_all() -> int:
            total = self._store.add(key, 0)
            return total if total >= self._size * _ARRIVAL else 0

        total = self._poll(sum_of_all)
        if self._rank == 0 and self.meetings > 1:  # all ranks have left the rendezvous before
            self._store.delete_key(f"meeting/{self.meetings - 2}")
        if total == self._size * own:
            return [what] * self._size
        keys = [f"{key}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], what)
        self._poll(lambda: self._store.check(keys))
        return [each.decode() for each in self._store.multi_get(keys)]

    def _poll(self, read: Callable[[], int]) -> int:
        """Read the store until the value is not 0, and return it.

        The store is polled, since a wait in the store would not end when a rank ends.
        """
        deadline, pause = time.monotonic() + self._timeout, 1e-4
        while True:
            gone = self._everyone.gone  # before the store is read, since a rank may arrive and then end
            if value := read():
                return value
            if failure() is not None or gone:
                raise RuntimeError(f"the program has ended on rank(s) {gone}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not finished after {self._timeout:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    @contextmanager
    def met(self, what: str) -> Iterator[None]:
        """Context that begins with a rendezvous. Collectives that all ranks begin inside it need no other."""
        self.meet(what)
        with self.have_met():
            yield

    @contextmanager
    def have_met(self) -> Iterator[None]:
        """Context in which ``meet`` does nothing, for collectives that every rank is known to begin now."""
        before, self._is_met = self._is_met, True
        try:
            yield
        finally:
            self._is_met = before

    def require_all(self, what: str) -> None:
        """Check that every rank still has a batch of the evaluation loop, or a forward to run.

        Raises:
            RuntimeError: on the ranks that have a batch or a forward left, if other ranks have none.
        """
        if self.absent:
            raise RuntimeError(
                f"Rank {self._rank} needs every rank for {what}, but rank(s) {self.absent} have no batch "
                "left in this evaluation loop, or no forward left to run, and only take part in all-gathers of "
                "parameters. Run this line before or after the loop (for example in on_validation_epoch_end), or give "
                "every rank the same number of batches."
            )

    def close(self) -> None:
        """Close the rendezvous, and forget absent ranks, which a failed run may have left set."""
        self.is_closed, self.absent, self.announce = bool(self._everyone.name), [], None
