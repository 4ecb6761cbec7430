"""fp16: the loss is scaled as under DDP, and an overflow on one rank skips the step on all."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import ZeroStrategy
from tests.numbers.test_checkpoints import SaveAfter, read, same_values
from tests.support import models
from tests.support.models import OddModel
from tests.support.trainer import Learner, ManualLearner, TrainerRun, fit
from tests.support.training import same_on_every_rank, same_runs
from tests.support.workers import rank, world_size

ROUNDED = 1e-5
"""Relative bound where summation order differs: a difference in fp32's last bit is sometimes one in fp16's last bit."""

SIZES = pytest.mark.parametrize("size", [1, 2])


def mixed() -> MixedPrecision:
    """The plugin for "16-mixed" on a GPU. On a CPU, Lightning interprets "16-mixed" as "bf16-mixed"."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return MixedPrecision("16-mixed", "cpu", scaler)


class Lifted(nn.Module):
    """A model, and a vector whose gradient can be chosen.

    On the last rank one element of that gradient overflows in batches 2 and 6: first in the first rank's shard, then
    in the last rank's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = OddModel()
        self.lift = nn.Parameter(torch.zeros(64))
        self.batches = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        overflows = {2: 0, 6: 63} if rank() == world_size() - 1 else {}
        factor = torch.zeros(64)
        if self.batches in overflows:
            factor[overflows[self.batches]] = 3e38  # times the scale it overflows fp32
        self.batches += 1
        return self.model(tokens, targets) + (self.lift * factor).sum()


class ScalePath(Callback):
    """The scale, the count of steps until it grows, and the learning rates, after each batch."""

    def __init__(self) -> None:
        self.path: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        state = trainer.precision_plugin.state_dict()
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.path.append((state["scale"], state["_growth_tracker"], rates))


def fit_mixed(strategy: Any, learner: Any, **options: Any) -> tuple[TrainerRun, list[Any]]:
    watch = ScalePath()
    run = fit(strategy, learner, plugins=mixed(), callbacks=[watch, *options.pop("callbacks", [])], **options)
    return run, watch.path


def fit_all(learner: Any, bound: float = 0, ddp: str = "ddp", **options: Any) -> None:
    """Train under DDP and at each stage: losses, weights and the scale's history are the same."""
    reference, expected = fit_mixed(ddp if world_size() > 1 else "ddp", learner, **options)
    for stage in (1, 2, 3):
        run, path = fit_mixed(f"zero{stage}", learner, **options)
        assert path == expected, f"stage {stage}: {path} instead of {expected}"
        same_runs(run, reference, bound)
        same_on_every_rank(run.weights)
    scales = [scale for scale, *_ in expected]
    # halved at each overflow, doubled after three steps without one
    assert any(after < before for before, after in zip(scales, scales[1:])), scales
    assert any(after > before for before, after in zip(scales, scales[1:])), scales


def skip_together(optimizer: Any) -> None:
    fit_all(partial(Learner, Lifted, optimizer, batches=10))


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The numbers", "`16-mixed`: an overflow on one rank skips the step on all; the scale changes as under DDP"
)
@SIZES
@pytest.mark.parametrize(
    "optimizer", [models.adam, models.adam_fused, models.several_groups], ids=lambda optimizer: optimizer.__name__
)
def test_an_overflow_on_one_rank_skips_the_step_on_all_ranks_and_the_scale_follows_ddps(run_on, optimizer, size):
    run_on(size, skip_together, optimizer=optimizer)


class WithSchedule(Learner):
    def configure_optimizers(self) -> dict[str, object]:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TwoOptimizers(ManualLearner):
    """Alternate two optimizers, with a scaler used by hand; gradients are clipped after they are unscaled."""

    def configure_optimizers(self) -> list[Optimizer]:
        first = [*self.model.model.blocks.parameters(), self.model.lift]
        others = [p for p in self.model.parameters() if all(p is not q for q in first)]
        return [torch.optim.Adam(first, lr=0.01, eps=1e-2), torch.optim.SGD(others, lr=0.1, momentum=0.9)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        scaler = self.trainer.precision_plugin.scaler
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.model(*batch)
            self.manual_backward(loss)
            raw = optimizer.optimizer
            scaler.unscale_(raw)
            parameters = [p for group in raw.param_groups for p in group["params"]]
            self.norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.05))
            scaler.step(raw)
            scaler.update()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        return loss.detach()


def skip_otherwise() -> None:
    by_adam = partial(Learner, Lifted, models.adam_with_large_eps, batches=10)
    fit_all(by_adam, ROUNDED, max_epochs=1, gradient_clip_val=0.05)
    # an epoch of 14 batches in windows of 3: the overflows are in the first and the third window
    fit_all(partial(WithSchedule, Lifted, models.sgd_nesterov, batches=14), ROUNDED, accumulate_grad_batches=3)
    fit_all(partial(TwoOptimizers, Lifted, batches=10), ROUNDED, "ddp_find_unused_parameters_true", max_epochs=1)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The numbers",
    "`16-mixed` with schedules, clipping, accumulation, two optimizers in manual optimization (within 1e-5)",
)
@SIZES
def test_fp16_with_a_schedule_clipping_accumulation_or_manual_optimization_equals_ddp(run_on, size):
    run_on(size, skip_otherwise)


def refuse_to_clip() -> None:
    for strategy in ("ddp", "zero1", "zero3"):
        with pytest.raises(RuntimeError, match="Adam, does not allow for gradient clipping"):
            fit_mixed(strategy, partial(Learner, Lifted, models.adam_fused), gradient_clip_val=0.05)


def test_lightning_refuses_to_clip_for_a_fused_optimizer_as_under_ddp(run_on):
    run_on(2, refuse_to_clip)


def resume(folder: Path) -> None:
    learner = partial(Learner, Lifted, batches=5)
    expected, path = fit_mixed("ddp", learner, callbacks=[SaveAfter(5, folder / "ddp.ckpt", at_epoch_end=True)])
    for stage in (1, 2, 3):
        file = folder / f"zero{stage}.ckpt"
        fit_mixed(f"zero{stage}", learner, callbacks=[SaveAfter(5, file, at_epoch_end=True)], max_epochs=1)
        checkpoint = read(file)
        assert checkpoint["MixedPrecision"]["scale"] == path[4][0] != 2.0**10
        same_values(checkpoint, read(folder / "ddp.ckpt"), "checkpoint")
        run, resumed = fit_mixed(f"zero{stage}", partial(Resumed, Lifted, batches=5), ckpt_path=file)
        assert resumed == path[5:], f"{resumed} instead of {path[5:]}"
        same_runs(run, TrainerRun(expected.losses[5:], expected.weights))
    folder /= "parts.ckpt"
    in_parts = ZeroStrategy(3, checkpoint="sharded")
    fit_mixed(in_parts, learner, callbacks=[SaveAfter(5, folder, at_epoch_end=True)], max_epochs=1)
    _, resumed = fit_mixed("zero2", partial(Resumed, Lifted, batches=5), ckpt_path=folder)
    assert resumed == path[5:], f"{resumed} instead of {path[5:]}"


class Resumed(Learner):
    """Continues the count of batches after resuming."""

    def on_train_start(self) -> None:
        self.model.batches = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The numbers", "`16-mixed`: checkpoints keep the scale and its growth count")
@SIZES
def test_fp16_checkpoints_equal_ddps_and_a_resumed_run_continues_with_their_scale(run_on, size, tmp_path):
    run_on(size, resume, folder=tmp_path)
