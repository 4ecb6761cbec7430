"""Optimizer-in-backward: with offloaded masters a Trainer's update starts during backward, unless hooks prevent it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import OffloadConfig, ZeroStrategy
from tests.support.trainer import make_trainer
from tests.support.training import same_values

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
STEPS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Tower(LightningModule):
    """Eight blocks. In the backward of the first, notes whether the masters of the last have already changed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.was_early: list[bool] = []
        self.forwards = 0
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 0:
                self.note_in_backward_of(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def last_masters(self) -> tuple[Any, Tensor | None]:
        """The update of the last unit, if one has begun, and the unit's masters after it, if they are in memory."""
        engine = self.trainer.strategy.engine
        bucket = engine.units[-1].buckets[0]
        if bucket.update is not None:
            bucket.update.work.wait()
        return bucket.update, bucket.residency.part(slice(None)).clone() if bucket.states is None else None

    def note_in_backward_of(self, x: Tensor) -> None:
        before = self.last_masters()

        def note(_: Tensor) -> None:
            update, masters = self.last_masters()
            is_new = update is not None and update is not before[0]
            assert masters is None or torch.equal(masters, before[1]) != is_new
            self.was_early.append(is_new)

        if self.forwards:  # before the first step the order of buckets is unknown
            x.register_hook(note)
        self.forwards += 1


def loader() -> DataLoader[Any]:
    x = torch.randn(8 * STEPS, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=4)


def run(module: Callable[[], Tower], stage: int, offload: Any, **options: Any) -> tuple[Any, Tower]:
    torch.manual_seed(0)
    tower, made = module(), {key: make() if callable(make) else make for key, make in options.items()}
    own = made.pop("strategy", {})
    trainer = make_trainer(ZeroStrategy(stage, offload=offload, **own), **{"max_epochs": 1, "max_steps": STEPS} | made)
    trainer.fit(tower, loader())
    return trainer, tower


def compare(stage: int, module: Callable[[], Tower], expected: Any, path: str | None = None, **options: Any) -> None:
    """Train with and without offload: bit for bit the same, with updates as early as expected after the first step."""
    offload = OffloadConfig("nvme", path=path, sub_group=16) if path else "cpu"
    found = []
    for where in (None, offload):
        trainer, tower = run(module, stage, where, **options)
        found.append((tower.state_dict(), trainer.optimizers[0].state_dict()["state"], tower.seen))
    same_values(found[1], found[0], "with offload", 0)
    assert tower.was_early, "nothing was looked at"
    if isinstance(expected, bool):
        expected = [expected] * len(tower.was_early)
    assert tower.was_early == expected


@STAGES
@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize("size", [1, 2])
def test_masters_of_the_last_unit_change_before_the_backward_of_the_first(run_on, stage, place, size, tmp_path: Path):
    run_on(size, compare, stage=stage, module=Tower, expected=True, path=str(tmp_path) if place == "nvme" else None)


class Looks(Callback):
    """Halves each gradient in one hook, and records the norms of parameters and gradients there."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.look)

    def look(self, trainer: Any, tower: Tower, *args: Any) -> None:
        look(tower)


def look(tower: Tower) -> None:
    if tower.blocks[0].up.weight.grad is not None:
        for p in tower.parameters():
            p.grad.mul_(0.5)
        tower.seen.append([(p.norm().item(), p.grad.norm().item()) for p in tower.parameters()])


class OverridesBackward(Tower):
    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()


class OnBeforeBackward(Tower):
    def on_before_backward(self, loss: Tensor) -> None:
        (0.5 * loss).backward(retain_graph=True)


class OnAfterBackward(Tower):
    def on_after_backward(self) -> None:
        look(self)


class OnBeforeOptimizerStep(Tower):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        look(self)


class ConfigureGradientClipping(Tower):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
        look(self)


class OptimizerStep(Tower):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        def closure_then_look() -> Any:
            loss = closure()
            look(self)
            return loss

        optimizer.step(closure=closure_then_look)


class StepPreHook(Tower):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: look(self))  # before the closure: there is no gradient yet
        return optimizer


class BackwardHook(Tower):
    def __init__(self) -> None:
        super().__init__()
        last = self.blocks[-1].down
        self.blocks[0].register_full_backward_hook(lambda *_: self.seen.append(last.weight.norm().item()))


class OwnStep(Tower):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        step = optimizer.step

        def own(closure: Any = None) -> Any:
            def closure_then_look() -> Any:
                loss = closure()
                look(self)
                return loss

            return step(closure_then_look)

        optimizer.step = own
        return optimizer


class Manual(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        look(self)
        optimizer.step()


class Reentrant(Tower):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x.requires_grad_())
        self.note_in_backward_of(x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=True)
        return x


WAIT = [
    OverridesBackward,
    OnBeforeBackward,
    OnAfterBackward,
    OnBeforeOptimizerStep,
    ConfigureGradientClipping,
    OptimizerStep,
    StepPreHook,
    BackwardHook,
    OwnStep,
    Manual,
    Reentrant,
]


@STAGES
@pytest.mark.parametrize("module", WAIT, ids=lambda module: module.__name__)
@pytest.mark.exhaustive
def test_updates_wait_for_the_end_of_backward_where_a_module_acts_between_it_and_the_step(run_on, stage, module):
    run_on(2, compare, stage=stage, module=module, expected=False)


@STAGES
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_updates_wait_where_a_callback_may_look_at_gradients(run_on, stage, hook):
    run_on(2, compare, stage=stage, module=Tower, expected=False, callbacks=partial(callbacks, hook))


def callbacks(hook: str) -> list[Callback]:
    return [Looks(hook)]


class Scales(Precision):
    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        look(module)
        return super().post_backward(tensor, module)


def scaled() -> list[Any]:
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))]


def own_precision() -> list[Any]:
    return [Scales()]


@STAGES
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.01},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"plugins": scaled},
        {"plugins": own_precision},
        {"strategy": {"overlap": False}},
    ],
    ids=["clipping by norm", "clipping by value", "loss scale", "a precision plugin", "overlap=False"],
)
def test_updates_wait_where_the_trainer_changes_gradients_or_overlap_is_off(run_on, stage, options):
    run_on(2, compare, stage=stage, module=Tower, expected=False, **options)


@STAGES
def test_with_accumulation_updates_begin_in_the_last_micro_batch(run_on, stage):
    # 2 optimizer steps, of 3 micro-batches
    options = {"accumulate_grad_batches": 3, "max_steps": 2}
    run_on(2, compare, stage=stage, module=Tower, expected=[False] * 4 + [True], **options)


@STAGES
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.exhaustive
def test_updates_begin_in_backward_at_other_precisions(run_on, stage, precision):
    run_on(2, compare, stage=stage, module=Tower, expected=True, precision=precision)


class PenaltyAtTimes(Tower):
    """Reads a weight outside its module in some steps, so that its gradient arrives in two parts."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.blocks[-1].down.weight.square().sum() if batch_idx in (2, 4, 5) else loss


@STAGES
def test_updates_wait_when_a_gradient_arrives_in_more_parts_than_ever_before(run_on, stage):
    # step 2 is the first with two parts; step 3 waits in vain for a second part, until the end of backward
    run_on(2, compare, stage=stage, module=PenaltyAtTimes, expected=[True, False, False, True, True])


class Chained(Tower):
    """A learning rate that follows a schedule each step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]


@STAGES
def test_updates_begin_in_backward_with_a_learning_rate_schedule(run_on, stage):
    run_on(2, compare, stage=stage, module=Chained, expected=True)


class Unfreezes(Tower):
    """Freezes its second and third blocks for the first three batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks[:3].requires_grad_(batch_idx >= 3)
        self.blocks[0].requires_grad_(True)


@STAGES
def test_after_unfreezing_in_mid_run_updates_begin_one_step_later(run_on, stage):
    run_on(2, compare, stage=stage, module=Unfreezes, expected=[True, True, False, True, True])


def trains_without_offload_costs_nothing() -> None:
    trainer, _ = run(Tower, 3, None)
    assert trainer.strategy._early_updates is None


def test_without_offload_no_early_updates_are_set_up(run_on):
    run_on(1, trains_without_offload_costs_nothing)
