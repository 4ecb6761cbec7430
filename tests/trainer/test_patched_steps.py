"""`optimizer.step` and strategy methods patched by the project, for example by its tests with `unittest.mock`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.strategies import Strategy
from torch.optim import SGD, Adam, Optimizer

from tests.support.trainer import make_trainer
from tests.trainer.cases import Net, behaviours, data, same_as_under_ddp, trained


class StepsWith(Net):
    """Has an optimizer whose `step` is replaced on the instance."""

    def replaced(self, optimizer: Optimizer) -> Any:
        return mock.Mock(wraps=optimizer.step)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.step = self.replaced(optimizer)
        self.step_of_optimizer = optimizer.step
        return optimizer

    def on_train_end(self) -> None:
        self.seen.append(getattr(self.step_of_optimizer, "call_count", None))


class StepsByFunction(StepsWith):
    def replaced(self, optimizer: Optimizer) -> Any:
        before = optimizer.step

        def step(closure: Any = None) -> Any:
            return before(closure)

        return step


def wrap_by_a_mock(strategy: str) -> Any:
    """`optimizer.step = Mock(wraps=optimizer.step)`, or a project's own function."""
    return [trained(strategy, kind()) for kind in (StepsWith, StepsByFunction)]


def patch_the_class(strategy: str) -> Any:
    """`patch.object(SGD, "step", ...)`, with a function that calls the original"""
    before = SGD.step

    def step(self: Optimizer, closure: Any = None) -> Any:
        return before(self, closure)

    class Descends(Net):
        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1, momentum=0.9)

    with mock.patch.object(SGD, "step", step):
        by_function = trained(strategy, Descends())
    with mock.patch.object(SGD, "step", autospec=True, side_effect=before) as mocked:
        return by_function, trained(strategy, Descends()), mocked.call_count


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=self.lr)


def count_backwards(strategy: str) -> Any:
    """`patch.object(Strategy, "backward", wraps=trainer.strategy.backward)`, with automatic and manual optimization"""
    found = []
    for kind in (Net, ByHand):
        module, trainer = kind(), make_trainer(strategy)
        with mock.patch.object(Strategy, "backward", wraps=trainer.strategy.backward) as backward:
            trainer.fit(module, data())
        found.append((backward.call_count, {name: value.clone() for name, value in module.state_dict().items()}))
    return found


@pytest.mark.exhaustive(but=2)
@behaviours("The Trainer", wrap_by_a_mock, patch_the_class, count_backwards)
@pytest.mark.parametrize("ranks", [1, 2])
def test_patched_steps_and_strategy_methods_are_called_as_under_ddp(run_on, case, ranks):
    run_on(ranks, same_as_under_ddp, case=case)


class Swallows(Net):
    """Trains with an optimizer whose steps are mocks that do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


def swallow_steps(strategy: str) -> Any:
    """A class's `step` that is a mock and does nothing"""
    with mock.patch("torch.optim.SGD.step") as step:
        return trained(strategy, Swallows()), step.call_count


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_step_that_does_nothing_leaves_the_weights_unchanged(run_on, ranks):
    run_on(ranks, same_as_under_ddp, case=swallow_steps)
