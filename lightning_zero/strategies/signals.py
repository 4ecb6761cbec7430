"""Handlers for SIGTERM and SLURM's requeue signal: all ranks act together although signals arrive at different times.

Lightning's own handlers communicate wherever a signal interrupts a rank, although other ranks may be in another
collective. Here, a handler only sets a flag. Before each training batch, where Lightning has a
collective for SIGTERM anyway, ranks exchange their flags. In evaluation, which may run without collectives, ranks agree
through the process group's store on the batch at which to end.
"""

from __future__ import annotations

import itertools
import time
from types import FrameType
from typing import Any

from lightning_zero.callbacks.restarts import Restarts
from lightning_zero.engine import Communicator, process_group
from lightning_zero.strategies import lightning_internals as internals

_ASKED = "asked to end"
_BETWEEN_LOOKS = 1e-3  # seconds
_runs = itertools.count()


class Signals:
    """Signal handlers of one Trainer run with several processes. Create this before the Trainer installs handlers."""

    def __init__(self, trainer: Any, communicator: Communicator | None, restarts: Restarts | None) -> None:
        self._trainer, self._connector, self._communicator = trainer, internals.signal_connector(trainer), communicator
        self._restarts = restarts
        run = trainer.strategy.broadcast(next(_runs))  # no run finds what an earlier one has stored
        self._is_asked_to_end = self._is_asked_to_requeue = False
        self._rank, self._size = process_group.rank(), process_group.world_size()
        self._store = process_group.named_store(f"lightning_zero/signals/{run}")
        self._next_look = 0.0  # when to look next whether another rank was asked to end
        self._loops = self._batches = 0

        # Functions instead of methods: a deep copy of the Trainer shares functions, but would copy a method's `self`.
        def on_sigterm(number: int, frame: FrameType | None) -> None:
            if not self._is_asked_to_end and (launcher := trainer.strategy.launcher) is not None:
                launcher.kill(number)
            self._is_asked_to_end = True

        def on_requeue(number: int, frame: FrameType | None) -> None:
            if trainer.training:
                self._is_asked_to_requeue = True
            else:
                internals.requeue(self._connector, number, frame)

        for name, handler in zip(internals.SIGNAL_HANDLERS, (on_sigterm, on_requeue)):
            setattr(self._connector, name, handler)

    def agree(self, what: str, *, is_end: bool = False) -> None:
        """Exchange the flags of all ranks, and requeue or end if any rank received a signal. Collective.

        Between the micro-batches of a step, ranks go on until the step is complete: a checkpoint contains no gradients.
        Called before each training batch and at the end of training, where Lightning also ends runs with DDP.
        """
        ends, requeues = self._meet(what, [self._is_asked_to_end, self._is_asked_to_requeue], has_ended=is_end)
        if not is_end and self._is_within_step:
            ends = requeues = False  # the flags stay set
        if self._restarts is not None and not ends:
            self._restarts.between_batches(is_end=is_end)
        if requeues:
            self._is_asked_to_requeue = False
            environment = self._trainer.strategy.cluster_environment
            with self._trainer.strategy.checkpoints.for_restart(is_sharded=False):
                internals.requeue(self._connector, environment.requeue_signal, None)
        if ends:
            self._end()

    def end_epoch(self) -> None:
        """Meet the other ranks at the end of a training epoch, before validation and the last hooks. Collective."""
        self._meet("the end of a training epoch", [False, False], has_ended=True)

    def _meet(self, what: str, noted: list[bool], *, has_ended: bool) -> list[bool]:
        """Exchange flags between two batches, and return for each whether any rank has set it. Collective.

        Raises:
            RuntimeError: on every rank, if some ranks have ended the epoch or the training, and others have not.
        """
        assert self._communicator is not None
        control = self._communicator.everyone.control
        *agreed, some_have_ended, some_have_not = control.any_rank([*noted, has_ended, not has_ended], what)
        if some_have_ended and some_have_not:
            loop = self._trainer.fit_loop
            epoch, batches = loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready
            ranks = list(enumerate(control.gather_numbers(has_ended, what)))
            raise RuntimeError(
                f"Rank(s) {[rank for rank, ended in ranks if ended]} have ended their training loop in epoch {epoch} "
                f"after {batches} batches, but rank(s) {[rank for rank, ended in ranks if not ended]} have not. Give "
                "every rank the same number of training batches (a sampler that pads or drops, or "
                f"Trainer(limit_train_batches={batches})), and stop training on every rank at the same batch."
            )
        return agreed

    @property
    def _is_within_step(self) -> bool:
        if internals.skips_backward(self._trainer):  # such a pass has no steps
            return False
        return self._trainer.lightning_module.automatic_optimization and internals.should_accumulate(self._trainer)

    def begin_loop(self) -> None:
        """Start counting the batches of an evaluation loop."""
        self._loops, self._batches = self._loops + 1, 0

    def before_batch(self) -> None:
        """End an evaluation loop once all ranks have recorded a SIGTERM. Called before each batch of the loop.

        A rank that has received the signal records its current batch number in the store, and so do the other ranks
        when they see this. Once all ranks have recorded a number, a rank ends at its first batch after the largest
        number. If ranks communicate in every batch, no rank is past this batch yet, so all end at the same batch.
        Otherwise each rank ends independently.
        """
        self._batches += 1
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _BETWEEN_LOOKS
            self._is_asked_to_end = self._is_asked_to_end or self._store.check([_ASKED])
        if not self._is_asked_to_end or self._is_within_step:
            return
        keys = [f"{self._loops}/{rank}" for rank in range(self._size)]
        if not self._store.check([keys[self._rank]]):
            self._store.set(keys[self._rank], str(self._batches))
            self._store.set(_ASKED, "")
        if self._store.check(keys) and self._batches > max(map(int, self._store.multi_get(keys))):
            self._end()

    def _end(self) -> None:
        self._connector.received_sigterm = True
        raise self._trainer.strategy.lightning.utilities.exceptions.SIGTERMException

    def close(self) -> None:
        """Restore Lightning's handlers."""
        for name in internals.SIGNAL_HANDLERS:
            vars(self._connector).pop(name, None)
