"""The rendezvous of ranks before an implicit collective: an error in seconds, not a hang, if some do not come.

``if rank == 0: print(p.norm())`` is right under DDP, where every rank holds all of ``p``. Where ``p`` is sharded, the
same line needs every rank. Such collectives are rare, so ranks can afford to meet in the process group's store first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.failures import Watch, failure
from lightning_zero.engine.comm.process_group import named_store


@dataclass
class Absence:
    """Ranks that have no input left, and only take part in gathers; set by the join of uneven inputs.

    Attributes:
        ranks: the absent ones.
        announce: to be called with a bucket's number before its gather, for the absent ranks to take part; None if none
            are absent, or another rank announces.
    """

    ranks: list[int] = field(default_factory=list)
    announce: Callable[[int], None] | None = None


class Rendezvous:
    """Where the ranks of one engine meet before a collective that user code has caused.

    Args:
        communicator: the group.
        timeout: seconds to wait for the other ranks.

    Attributes:
        meetings: how many took place.
        is_closed: after the engine's end.
        absence: ranks that cannot come.
    """

    def __init__(self, communicator: Communicator, timeout: float) -> None:
        self._communicator, self._timeout = communicator, timeout
        self._rank, self._size = communicator.rank, communicator.size
        self.is_closed, self.absence = False, Absence()
        self.meetings = 0
        self._is_met = False
        if self._size > 1:
            self._store = named_store(f"lightning_zero/rendezvous/{communicator.name}")

    def meet(self, what: str) -> None:
        """Return when every rank has asked for the same.

        Args:
            what: what this rank asks for, naming the parameter.

        Raises:
            RuntimeError: if another rank asked for something else, has ended, never came, or waits for this one.
        """
        if self._size == 1 or self._is_met:
            return
        self.require_all(what)
        if self.is_closed:
            raise RuntimeError(
                f"{what} cannot be had whole: the run that cut it into parts, on {self._size} ranks, has ended. If it "
                "failed, call Trainer.fit, validate, test or predict with this module again on all of them, which puts "
                "the parts together first, or make a new module and load a checkpoint. A copy that not every rank has "
                "made stays in parts: make it on all of them."
            )
        watch = self._communicator.watch
        with watch.waiting(f"the rendezvous for {what}", may_be_refused=True):
            refusal = self._exchange(what, watch)
        if refusal:
            raise RuntimeError(
                f"Rank {self._rank} needs the whole of {what}, of which every rank holds a part, but {refusal}. Run "
                "this line on every rank (no 'if rank == 0:' around it), or inside 'with "
                "lightning_zero.full_parameters(module):' entered by all."
            )

    def _exchange(self, what: str, watch: Watch) -> str:
        """Wait for the other ranks; returns which of them do not ask for the same.

        The store is polled, since the end of a rank does not end a wait in the store.
        """
        number, self.meetings = self.meetings, self.meetings + 1
        keys = [f"meeting/{number}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], what)
        deadline, pause = time.monotonic() + self._timeout, 1e-4
        while not self._store.check(keys):  # one request for all of them
            ended = set(watch.ended)  # read before the store: a rank may come and then end
            if failure() is not None or any(not self._store.check([keys[rank]]) for rank in ended):
                raise RuntimeError("cancelled")
            if watch.refusal:  # this meeting has not taken place: the next one has its number, as on the other ranks
                self.meetings = number
                self._store.delete_key(keys[self._rank])
                return watch.refusal
            if time.monotonic() > deadline:
                raise RuntimeError(f"no end after {self._timeout:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        asked = [each.decode() for each in self._store.multi_get(keys)]
        if number >= 2:  # everybody has read the one before the last
            self._store.delete_key(f"meeting/{number - 2}/{self._rank}")
        different = [rank for rank, other in enumerate(asked) if other != what]
        return f"rank(s) {different} asked for {asked[different[0]]}" if different else ""

    @contextmanager
    def met(self, what: str) -> Iterator[None]:
        """Meet once for all collectives inside, which are the same on every rank."""
        self.meet(what)
        before, self._is_met = self._is_met, True
        try:
            yield
        finally:
            self._is_met = before

    def require_all(self, what: str) -> None:
        """Refuse what every rank must do while some have no batch left in an evaluation loop, or no forward to run.

        Raises:
            RuntimeError: then, on every rank that has one.
        """
        if self.absence.ranks:
            raise RuntimeError(
                f"Rank {self._rank} needs every rank for {what}, but rank(s) {self.absence.ranks} have no batch "
                "left in this evaluation loop, or no forward left to run, and only take part in the gathers of "
                "parameters. Do it before or after (on_validation_epoch_end and its kin), or give every rank as many."
            )

    def close(self) -> None:
        """End it, and an absence in which a failure has left it."""
        self.is_closed, self.absence = self._size > 1, Absence()
