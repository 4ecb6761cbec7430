"""Buffers take rank 0's values exactly when DDP copies them; each rank's statistics enter its losses and weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.support import rank
from tests.trainer.cases import Net, data, fit, observed, same_as_under_ddp, trained


class Statistics(Net):
    """Batch norm, a plain buffer and a counter, which change in training and in evaluation, differently by rank.

    Arguments:
        manual: whether optimization is manual.
        optimizers: 1, or 2 for one of the blocks and one of the rest.
        accumulate: micro-batches of a manual step, of which all but the last are not synchronised.
        in_hook: whether `on_train_batch_end` runs the backward, instead of `training_step`.
    """

    def __init__(self, manual: bool, optimizers: int = 1, accumulate: int = 1, in_hook: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.count_of_optimizers, self.accumulate, self.in_hook = optimizers, accumulate, in_hook
        self.blocks.append(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def loss(self, batch: Any) -> Tensor:
        self.mean.mul_(0.5).add_(batch[0].mean(0) + rank(), alpha=0.5)
        self.count += 1 + rank()
        self.seen.append((self.mean.clone(), self.count.clone()))
        return super().loss([batch[0] - self.mean, batch[1]])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        loss = self.loss(batch)
        if self.in_hook:
            self.kept = loss
        else:
            self.optimize(loss, batch_idx)
        return None

    def optimize(self, loss: Tensor, batch_idx: int) -> None:
        is_last = (batch_idx + 1) % self.accumulate == 0
        with nullcontext() if is_last else self.trainer.strategy.block_backward_sync():
            self.manual_backward(loss)
        if is_last:
            optimizers = self.optimizers()
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
                optimizer.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.in_hook:
            self.optimize(self.kept, batch_idx)
        with torch.no_grad():
            self.seen.append(self(batch[0]))  # not through DDP

    def configure_optimizers(self) -> Any:
        blocks = list(self.blocks.parameters())
        rest = [*self.head.parameters(), self.scale]
        return [SGD(each, lr=0.1) for each in ([blocks + rest] if self.count_of_optimizers == 1 else [blocks, rest])]


def automatic(strategy: str) -> Any:
    return trained(strategy, Statistics(False), num_sanity_val_steps=2, val_check_interval=2)


def automatic_accumulation(strategy: str) -> Any:
    return buffers_of(Statistics(False), strategy, accumulate_grad_batches=2)


def manual(strategy: str) -> Any:
    return [trained(strategy, Statistics(True), num_sanity_val_steps=sanity) for sanity in (0, 2)]


def manual_with_two_optimizers(strategy: str) -> Any:
    return trained(strategy, Statistics(True, optimizers=2), num_sanity_val_steps=0)


def manual_accumulation(strategy: str) -> Any:
    return buffers_of(Statistics(True, accumulate=2), strategy)


def buffers_of(module: Statistics, strategy: str, **options: Any) -> Any:
    fit(strategy, module, num_sanity_val_steps=0, **options)
    return dict(module.named_buffers()), module.seen


class Switching(Statistics):
    def on_train_epoch_start(self) -> None:
        self.automatic_optimization = self.current_epoch == 1


def manual_then_automatic(strategy: str) -> Any:
    return trained(strategy, Switching(True), num_sanity_val_steps=0, max_epochs=3)


def manual_in_a_hook(strategy: str) -> Any:
    return trained(strategy, Statistics(True, in_hook=True), num_sanity_val_steps=0)


def evaluated_between_fits(strategy: str) -> Any:
    module = Statistics(True)
    trainer, _ = fit(strategy, module, num_sanity_val_steps=0, max_epochs=1)
    module.mean += rank()
    results = trainer.validate(module, data(16), verbose=False)
    module.count += rank()
    return results, observed(*fit(strategy, module))


EXACT = [automatic, manual, manual_with_two_optimizers, manual_then_automatic, manual_in_a_hook, evaluated_between_fits]
ACCUMULATING = [automatic_accumulation, manual_accumulation]  # stages 2 and 3 average each micro-batch


@pytest.mark.exhaustive(but=2)
@pytest.mark.behaviour(
    "The Trainer", "Manual optimization: buffers follow rank 0's in the first step only, as under Lightning's DDP"
)
@pytest.mark.parametrize("case", [*EXACT, *ACCUMULATING])
def test_buffers_follow_rank_0s_exactly_when_they_do_under_ddp(run_on, case):
    run_on(2, same_as_under_ddp, case=case, bound=1e-6 if case in ACCUMULATING else 0)
