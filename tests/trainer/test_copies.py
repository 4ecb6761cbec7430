"""Copies that a project makes during a run are independent of the run and do not disturb it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero import ZeroStrategy
from lightning_zero.strategies.loops import WrappedMethod
from tests.support.training import same_values
from tests.support.workers import world_size
from tests.trainer.cases import Net, data, fit, observed, same_as_under_ddp, shared_folder


class HoldsTrainer(Callback):
    """Keeps the trainer, as many callbacks do, and copies the named parts of it in training and in validation."""

    def __init__(self, *names: str) -> None:
        self.names, self.trainer, self.copies = names, None, []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.trainer = trainer

    def copy(self) -> None:
        for name in self.names:
            found = self.trainer
            for part in filter(None, name.split(".")):
                found = found[int(part)] if part.isdigit() else getattr(found, part)
            self.copies, kept = [], self.copies  # not copies of copies
            kept.append(copy.deepcopy(found))
            self.copies = kept

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.copy()

    def on_validation_batch_end(self, *_: Any) -> None:
        if not self.trainer.sanity_checking and not self.copies:
            self.copy()


WHAT = ("callbacks", "strategy", "fit_loop", "lightning_module", "optimizers", "optimizers.0", "")


def copy_in_a_run(strategy: str) -> Any:
    """`copy.deepcopy` of a trainer, its callbacks, its strategy, its loops, the module, optimizers, in mid-run"""
    holder = HoldsTrainer(*WHAT)
    trainer, module = fit(strategy, callbacks=[holder])
    assert len(holder.copies) == 2 * len(WHAT)
    return observed(trainer, module)


@pytest.mark.behaviour("The Trainer", copy_in_a_run.__doc__)
@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_made_during_a_run_leave_it_the_same_as_under_ddp(run_on, ranks):
    run_on(ranks, same_as_under_ddp, case=copy_in_a_run)


def copy_with_all_that_runs_beside(offload: str | None) -> None:
    def run(*names: str) -> Any:
        torch.manual_seed(0)
        holder = HoldsTrainer(*names)
        saving = ModelCheckpoint(shared_folder(), every_n_train_steps=1, save_top_k=-1)
        strategy = ZeroStrategy(3, offload=offload, async_save=True, checkpoint="sharded")
        trainer, module = fit(strategy, callbacks=[holder, saving], enable_checkpointing=True)
        return observed(trainer, module), holder.copies

    expected, _ = run()
    found, copies = run(*WHAT)
    same_values(found, expected, "after copies")
    assert copies
    for each in copies:
        if isinstance(each, Trainer):
            assert each.strategy.engine is None
            assert not isinstance(each.fit_loop.epoch_loop.val_loop.run, WrappedMethod)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_background_saves_and_updates_are_not_copied(run_on, offload):
    run_on(2, copy_with_all_that_runs_beside, offload=offload)


def fit_a_copy(folder: Path) -> None:
    """A trainer copied in mid-run fits another module."""
    holder = HoldsTrainer("")
    fit("zero3", callbacks=[holder], max_epochs=1)
    torch.manual_seed(0)
    again, trainer = Net(), holder.copies[0]
    trainer.callbacks.clear()
    trainer.fit_loop.max_epochs = 1
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit_loop.epoch_loop.reset()
    trainer.fit(again, data())
    assert not any(torch.equal(p, q) for p, q in zip(again.parameters(), Net().parameters()) if p.ndim == 2)


def test_a_trainer_copied_during_a_run_fits_another_module(run_on, tmp_path):
    run_on(1, fit_a_copy, folder=tmp_path)
    assert world_size() == 1
