"""A collective that user code asks for implicitly must be asked for by every rank: an error in seconds, not a hang.

``if rank == 0: print(p.norm())`` is right under DDP, where every rank holds all of ``p``. Where ``p`` is sharded the
same line needs every rank. Such requests are rare, so each first meets the others in the process group's store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_zero.engine.collectives import Communicator
from lightning_zero.engine.watch import PATIENCE, explained, failure, name_in


class Agreement:
    """Where the ranks of one engine meet before a collective that only user code asked for.

    Args:
        communicator: the group.
        timeout: seconds after which a rank that has neither come nor said where it is counts as lost.

    Attributes:
        meetings: how many took place.
        is_closed: after the engine's end.
    """

    def __init__(self, communicator: Communicator, timeout: float) -> None:
        self._communicator, self._timeout = communicator, timeout
        self._rank, self._size = communicator.rank, communicator.size
        self.is_closed = False
        self.meetings = 0
        self._is_met = False
        if self._size > 1:
            store = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"lightning_zero/agreement/{communicator.name}", store)

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
        with explained(what, dist.DistError):  # the store may be gone with the rank that hosts it
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
        if self._communicator.absent:
            raise RuntimeError(
                f"Rank {self._rank} needs every rank for {what}, but rank(s) {self._communicator.absent} have no batch "
                "left in this evaluation loop, or no forward left to run, and only take part in the gathers of "
                "parameters. Do it before or after (on_validation_epoch_end and its kin), or give every rank as many."
            )

    def close(self) -> None:
        self.is_closed = self._size > 1

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
