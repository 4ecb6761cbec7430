"""A signal received by some ranks ends all of them together, just as a signal to all ranks ends DDP."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero import ZeroStrategy
from lightning_zero.engine.comm.failures import failure
from tests.support import rank
from tests.support.trainer import Learner, make_trainer

AMONG = pytest.mark.parametrize("receivers", [[0], [1], [0, 1]], ids=["rank 0", "rank 1", "all ranks"])


class Evaluating(Learner):
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.model(*batch), on_step=True, on_epoch=True, sync_dist=True)
        self.evaluated = batch_idx

    def val_dataloader(self):
        return self.train_dataloader()


class Terminate(Callback):
    """Send this process a SIGTERM during a batch, whose collectives the other ranks may have entered already."""

    def __init__(self, receivers, where, batch):
        self.receivers, self.where, self.batch = receivers, where, batch

    def _maybe(self, where, batch):
        if where == self.where and batch == self.batch and rank() in self.receivers:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self._maybe("start", batch_idx)

    def on_after_backward(self, trainer, module):
        self._maybe("backward", trainer.global_step)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self._maybe("end", batch_idx)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self._maybe("evaluation", batch_idx)


def terminated(stage, receivers, where, batch, folder):
    callbacks = [Terminate(receivers, where, batch), ModelCheckpoint(folder, "terminated", save_on_exception=True)]
    module = Evaluating(batches=6)
    trainer = make_trainer(
        ZeroStrategy(stage),
        callbacks=callbacks,
        enable_checkpointing=True,
        max_epochs=1,
        num_sanity_val_steps=0,
        limit_val_batches=6 if where == "evaluation" else 0,
    )
    begin = time.monotonic()
    with pytest.raises(SIGTERMException):
        trainer.fit(module)
    assert time.monotonic() - begin < 15 and failure() is None
    assert trainer.received_sigterm
    saved = torch.load(f"{folder}/terminated.ckpt", weights_only=True)
    assert saved["global_step"] == trainer.global_step
    make_trainer(ZeroStrategy(stage), max_epochs=1, limit_val_batches=0).fit(module)  # the processes can train again
    return trainer.global_step, getattr(module, "evaluated", None)


@pytest.mark.exhaustive(but=2)
@pytest.mark.behaviour("The Trainer", "SIGTERM to some ranks, or to all, ends every rank after the same batch")
@AMONG
@pytest.mark.parametrize(
    ("stage", "where", "batch"), [(1, "start", 2), (2, "backward", 2), (3, "end", 2), (3, "backward", 5)]
)
def test_all_ranks_stop_training_after_the_same_batch_whichever_got_sigterm(
    run_on, tmp_path, stage, where, batch, receivers
):
    first, second = run_on(
        2, terminated, stage=stage, receivers=receivers, where=where, batch=batch, folder=str(tmp_path)
    )
    assert first == second == (batch + 1, None)


@pytest.mark.parametrize("receivers", [[0], [1]], ids=["rank 0", "rank 1"])
def test_all_ranks_end_after_the_validation_in_which_one_got_sigterm(run_on, tmp_path, receivers):
    options = {"stage": 3, "receivers": receivers, "where": "evaluation", "batch": 1, "folder": str(tmp_path)}
    assert run_on(2, terminated, **options) == [(6, 5), (6, 5)]
