"""Handlers for SIGTERM and SLURM's requeue signal: all ranks act together although signals arrive at different times.

Lightning's own handlers communicate wherever a signal interrupts a rank, although other ranks may be in another
collective. Here, a handler only sets a flag. Before each training batch, where Lightning has a collective for SIGTERM
anyway, ranks exchange their flags. As under DDP, evaluation goes on.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from lightning_zero.callbacks.restarts import Restarts
from lightning_zero.strategies import lightning_internals as internals
from lightning_zero.strategies.rank_group import RankGroup

_MEETING = "the next training batch"
"""The exchange's name, also at the end of an epoch and of training: ranks may be at different ones of these places."""


class Signals:
    """Signal handlers of one Trainer run. Create this before the Trainer installs handlers."""

    def __init__(self, trainer: Any, ranks: RankGroup, restarts: Restarts | None) -> None:
        self._trainer, self._connector = trainer, internals.signal_connector(trainer)
        self._ranks, self._restarts = ranks, restarts
        self._is_asked_to_end = self._is_asked_to_requeue = False

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

    def agree(self, *, is_end: bool = False) -> None:
        """Exchange the flags of all ranks, and requeue or end if any rank received a signal. Collective.

        Between the micro-batches of a step, ranks go on until the step is complete: a checkpoint contains no gradients.
        Called before each training batch and at the end of training, where Lightning also ends runs with DDP.
        """
        ends, requeues = self._meet([self._is_asked_to_end, self._is_asked_to_requeue], has_ended=is_end)
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
            self._connector.received_sigterm = True
            raise self._trainer.strategy.lightning.utilities.exceptions.SIGTERMException

    def end_epoch(self) -> None:
        """Meet the other ranks at the end of a training epoch, before validation and the last hooks. Collective."""
        self._meet([False, False], has_ended=True)

    def _meet(self, noted: list[bool], *, has_ended: bool) -> list[bool]:
        """Exchange flags between two batches, and return for each whether any rank has set it. Collective.

        Every rank raises an error if some ranks have ended the epoch or the training, and others have not.
        """
        if self._ranks.is_single:
            return noted
        assert self._ranks.communicator is not None
        control = self._ranks.communicator.everyone
        *agreed, some_have_ended, some_have_not = control.any_rank([*noted, has_ended, not has_ended], _MEETING)
        if some_have_ended and some_have_not:
            loop = self._trainer.fit_loop
            epoch, batches = loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready
            ranks = list(enumerate(control.gather_numbers(has_ended, _MEETING)))
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

    def close(self) -> None:
        """Restore Lightning's handlers. Scripts can read from ``trainer.received_sigterm`` whether a signal came."""
        self._connector.received_sigterm = self._connector.received_sigterm or self._is_asked_to_end
        for name in internals.SIGNAL_HANDLERS:
            vars(self._connector).pop(name, None)
