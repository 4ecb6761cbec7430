"""SIGTERM, and SLURM's signal to requeue: ranks get them at different moments, or one alone does, and act together.

Lightning communicates in its handlers, wherever the signal has interrupted a rank, while other ranks may be in another
collective. Here a handler only notes the signal. Before each training batch, where Lightning has a collective for this,
ranks tell each other what they have noted; evaluation, in which ranks need not communicate, ends where the ranks'
notes in the store show that none has gone further.
"""

from __future__ import annotations

import itertools
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.engine.collectives import Communicator
from lightning_zero.engine.watch import lifelines_over, listeners

_ASKED = "SIGTERM"
_runs = itertools.count()  # of those without an engine
_HANDLERS = "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"


class Signals:
    """Those that come during one run of a Trainer's, in a process of several.

    Arguments:
        trainer: about to install its handlers.
        communicator: of the engine, if there is one; training has one.
    """

    def __init__(self, trainer: Any, communicator: Communicator | None) -> None:
        self._trainer, self._connector, self._communicator = trainer, trainer._signal_connector, communicator
        run = f"without/{next(_runs)}" if communicator is None else communicator.name
        self._is_asked_to_end = self._is_asked_to_requeue = False
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore(f"lightning_zero/signals/{run}", dist.distributed_c10d._get_default_store())
        self._lifelines = lifelines_over()
        self._loops = self._batches = 0
        listeners[_ASKED] = self._ask_to_end
        requeue = type(self._connector)._slurm_sigusr_handler_fn

        # functions, of which copies of the Trainer have the same ones
        def on_sigterm(number: int, frame: FrameType | None) -> None:
            if not self._is_asked_to_end and (launcher := trainer.strategy.launcher) is not None:
                launcher.kill(number)
            self._ask_to_end()
            self._lifelines.say(_ASKED)

        def on_requeue(number: int, frame: FrameType | None) -> None:
            if trainer.training:
                self._is_asked_to_requeue = True
            else:
                requeue(self._connector, number, frame)

        for name, handler in zip(_HANDLERS, (on_sigterm, on_requeue)):
            setattr(self._connector, name, handler)

    def _ask_to_end(self) -> None:
        self._is_asked_to_end = True

    def before_training_batch(self) -> None:
        """Act upon what any rank has noted. Collective.

        Raises:
            SIGTERMException: on every rank, if any has got a SIGTERM.
        """
        self._agree("the next training batch")

    def at_end(self) -> None:
        """The same at the end of training, which is where DDP's loop ends then."""
        self._agree("the end of training")

    def _agree(self, what: str) -> None:
        assert self._communicator is not None
        noted = torch.tensor([self._is_asked_to_end, self._is_asked_to_requeue], dtype=torch.uint8, device="cpu")
        self._communicator.agree(noted, what)
        ends, requeues = noted.tolist()
        if requeues:
            self._is_asked_to_requeue = False
            environment = self._trainer._accelerator_connector.cluster_environment
            type(self._connector)._slurm_sigusr_handler_fn(self._connector, environment.requeue_signal, None)
        if ends:
            self._end()

    def begin_loop(self) -> None:
        """At the begin of an evaluation loop."""
        self._loops, self._batches = self._loops + 1, 0

    def before_batch(self) -> None:
        """Before each batch of an evaluation loop.

        Each rank that knows of the signal says at which batch it has learnt of it. Where ranks communicate in every
        batch, none is further than the last of these by the time that all have said so; the next batch is where all
        end. Where they do not, each ends by itself.

        Raises:
            SIGTERMException: there.
        """
        self._batches += 1
        if not self._is_asked_to_end:
            return
        keys = [f"{self._loops}/{rank}" for rank in range(self._size)]
        if not self._store.check([keys[self._rank]]):
            self._store.set(keys[self._rank], str(self._batches))
        if self._store.check(keys) and self._batches > max(map(int, self._store.multi_get(keys))):
            self._end()

    def _end(self) -> None:
        self._connector.received_sigterm = True
        raise self._trainer.strategy.lightning.utilities.exceptions.SIGTERMException

    def close(self) -> None:
        """Leave the handlers to Lightning."""
        listeners.pop(_ASKED, None)
        for name in _HANDLERS:
            vars(self._connector).pop(name, None)
