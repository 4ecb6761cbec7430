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
from lightning_zero.engine.comm.failures import explained, failure
from lightning_zero.engine.comm.process_group import DistError, named_store
from lightning_zero.engine.comm.watchdog import PATIENCE, name_in


@dataclass
class Absence:
    """Ranks that have no input left, and only take part in gathers; kept by the join of uneven inputs.

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
        timeout: seconds after which a rank counts as lost that has neither come nor left a notice of another wait.

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
            RuntimeError: on a rank that asked, if another is busy elsewhere, asked for something else or never came.
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
        with explained(what, DistError):  # the store may be gone with the rank that hosts it
            self._meet(what)

    def _meet(self, what: str) -> None:
        number, self.meetings = self.meetings, self.meetings + 1
        others = [rank for rank in range(self._size) if rank != self._rank]
        keys = [f"meeting/{number}/{rank}" for rank in others]
        self._store.set(f"meeting/{number}/{self._rank}", what)
        pause = 1e-4
        while not self._store.check(keys):  # one request for all of them; a wait that ends without them would be logged
            if pause > 0.05:
                self._await(others, what, number)
                break
            time.sleep(pause)
            pause *= 2
        asked = {rank: said.decode() for rank, said in zip(others, self._store.multi_get(keys))}
        different = [rank for rank in others if asked[rank] != what]
        if different:
            self._fail(what, different, f"asked for {asked[different[0]]}")
        if number >= 2:  # everybody has read the one before the last
            self._store.delete_key(f"meeting/{number - 2}/{self._rank}")

    def _await(self, missing: list[int], what: str, number: int) -> None:
        """Wait for ranks that have not come at once, and find out whether they will."""
        deadline = time.monotonic() + self._timeout
        seen: dict[int, tuple[str, float]] = {}
        while True:
            ended = self._communicator.watch.ended  # before it is seen whether they have come
            missing = [rank for rank in missing if not self._store.check([f"meeting/{number}/{rank}"])]
            if not missing:
                return
            if time.monotonic() > deadline:
                self._call_off(number)
                self._fail(what, missing, f"did not come within {self._timeout:.0f} s")
            if reason := failure():
                raise RuntimeError(f"Rank {self._rank} needs every rank for {what}, but {reason}")
            if gone := sorted(ended.intersection(missing)):
                self._fail(what, gone, "have ended")
            for rank in missing:
                # A notice may be a moment old: only one that stands says that its rank will not come.
                notice = self._communicator.watch.notice_of(rank)
                if not notice or seen.get(rank, ("", 0.0))[0] != notice:
                    seen[rank] = (notice, time.monotonic())
                elif time.monotonic() - seen[rank][1] > PATIENCE:
                    self._call_off(number)
                    self._fail(what, missing, f"wait in {name_in(notice)}")
            time.sleep(0.1)

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

    def _call_off(self, number: int) -> None:
        """A meeting to which some did not come has not taken place: the next one has its number, as it has for them."""
        self.meetings = number
        self._store.delete_key(f"meeting/{number}/{self._rank}")

    def _fail(self, what: str, ranks: list[int], reason: str) -> None:
        raise RuntimeError(
            f"Rank {self._rank} needs the whole of {what}, of which every rank holds a part, but rank(s) {ranks} "
            f"{reason}. Run this line on every rank (no 'if rank == 0:' around it), or inside "
            "'with lightning_zero.full_parameters(module):' entered by all."
        )
