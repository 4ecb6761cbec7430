"""Optimizers, schedulers and the hooks of a step, automatic and manual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler

from lightning_zero import full_grad
from tests.trainer.cases import (
    Net,
    behaviours,
    fit,
    observed,
    same_as_under_ddp,
    same_as_under_ddp_in_double,
    shared_folder,
    trained,
)

# ------------------------------------------------------------------------------------------------- several optimizers


class Gan(Net):
    """A generator (the blocks) and a critic, each with its optimizer, toggled in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, sign in ((first, -1), (second, 1)):
            self.toggle_optimizer(optimizer)
            self.seen.append([p.requires_grad for p in self.parameters()])
            fake = self.critic(self.blocks(batch[0])).mean()
            loss = fake if sign < 0 else self.critic(batch[0]).mean() - fake
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        generator = Adam(self.blocks.parameters(), lr=self.lr)
        critic = SGD(self.critic.parameters(), lr=self.lr, momentum=0.9)
        return [generator, critic], [lr_scheduler.ExponentialLR(each, 0.9) for each in (generator, critic)]


class UsesFakesTwice(Gan):
    """The generator's graph exists while the critic is updated."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        fake = self.blocks(batch[0])
        for optimizer in (critic, generator):
            self.toggle_optimizer(optimizer)
            if optimizer is critic:
                loss = self.critic(batch[0]).mean() - self.critic(fake.detach()).mean()
            else:
                loss = -self.critic(fake).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def use_fakes_twice(strategy: str) -> Any:
    """A GAN whose generator's output is used in both losses: one optimizer steps while another's graph exists"""
    return trained(ddp_that_finds_unused(strategy), UsesFakesTwice())


def ddp_that_finds_unused(strategy: str) -> str:
    return "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy


def train_a_gan(strategy: str) -> Any:
    """A GAN with manual optimization: `toggle_optimizer`, `clip_gradients`, two optimizers and schedulers."""
    return trained(ddp_that_finds_unused(strategy), Gan())


class Alternating(Net):
    """The second optimizer steps every other batch; both get gradients from the same backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return Adam(self.blocks.parameters(), lr=self.lr), SGD([*self.head.parameters(), self.scale], lr=0.1)


def alternate(strategy: str) -> Any:
    """Two optimizers that step at different times, while gradients for one of them accumulate."""
    return trained(strategy, Alternating())


class InTurn(Net):
    """Two networks in one unit, each with an optimizer; gradients are not cleared in between."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = nn.Linear(6, 4), nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, network in zip(self.optimizers(), (self.actor, self.critic)):
            optimizer.zero_grad()
            self.manual_backward(network(batch[0]).square().mean())
            self.seen.append(full_grad(network.weight))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [SGD(network.parameters(), lr=0.1) for network in (self.actor, self.critic)]


def take_turns(strategy: str) -> Any:
    """Two optimizers that each clear, compute and apply their own gradients in turn, as in a GAN or SAC."""
    return trained(ddp_that_finds_unused(strategy), InTurn())


class TwoBackwards(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for half in (slice(0, 2), slice(2, 4)):
            self.manual_backward(self.loss([part[half] for part in batch]) / 2)
        optimizer.step()


def backward_twice(strategy: str) -> Any:
    """`manual_backward` twice before a step"""
    return trained(strategy, TwoBackwards())


class SharpnessAware(Net):
    """Climbs along the gradient, computes the gradient there, goes back and steps: weights are written twice a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            climbed = [p.grad * (0.05 / norm) for p in self.parameters()]
            for p, e in zip(self.parameters(), climbed):
                p.add_(e)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, e in zip(self.parameters(), climbed):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()


def climb_first(strategy: str) -> Any:
    """Sharpness-aware minimisation: weights moved along the gradient and back within a step."""
    return trained(strategy, SharpnessAware())


# --------------------------------------------------------------------------------------------------------- schedulers

SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=6),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


class ManyScheduled(Net):
    """A head for each scheduler, with an optimizer of its own; OneCycleLR and CyclicLR write the momentum as well."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in SCHEDULERS)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.blocks(batch[0])
        self.manual_backward(sum(nn.functional.cross_entropy(head(hidden), batch[1]) for head in self.heads))
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers()):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            self.seen.append([float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["momentum"]])

    def configure_optimizers(self) -> Any:
        optimizers = [SGD(head.parameters(), lr=self.lr, momentum=0.9) for head in self.heads]
        return optimizers, [make(optimizer) for make, optimizer in zip(SCHEDULERS.values(), optimizers)]


def step_schedulers(strategy: str) -> Any:
    """Every scheduler of `torch.optim.lr_scheduler`, each with an optimizer of its own"""
    return trained(ddp_that_finds_unused(strategy), ManyScheduled())


class Scheduled(Net):
    """One scheduler, which the Trainer steps."""

    def __init__(self, make: Any, **config: Any) -> None:
        super().__init__()
        self.make, self.config = make, config

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), **self.config}}

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.optimizers().param_groups[0]["lr"]))


def wait_for_a_plateau(strategy: str) -> Any:
    """`ReduceLROnPlateau` on a validation loss; schedulers stepped each batch, each epoch or with a `frequency`"""

    def plateau(optimizer: Any) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0, threshold_mode="abs", factor=0.5)

    results = trained(strategy, Scheduled(plateau, monitor="val"), max_epochs=4)
    assert results["seen"][-1] < 0.01, "the rate was never reduced"
    return [
        results,
        trained(strategy, Scheduled(SCHEDULERS["OneCycleLR"], interval="step")),
        trained(strategy, Scheduled(SCHEDULERS["ExponentialLR"], interval="epoch")),
        trained(strategy, Scheduled(SCHEDULERS["ExponentialLR"], interval="step", frequency=2)),
    ]


def monitor_the_rate(strategy: str) -> Any:
    """`LearningRateMonitor` with momentum, several optimizers and named groups, written to a logger"""

    class Groups(Net):
        def configure_optimizers(self) -> Any:
            groups = [
                {"params": self.blocks.parameters(), "name": "blocks"},
                {"params": [*self.head.parameters(), self.scale], "name": "head", "lr": 0.1},
            ]
            optimizer = SGD(groups, lr=0.01, momentum=0.9)
            return {"optimizer": optimizer, "lr_scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5)}

    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    logger = CSVLogger(shared_folder() / "monitor")
    trainer, module = fit(strategy, Groups(), callbacks=[monitor], logger=logger, log_every_n_steps=1)
    return observed(trainer, module), {name: [float(v) for v in values] for name, values in monitor.lrs.items()}


class EditLearningRate(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 1e-3 * (1 + batch_idx)
        trainer.optimizers[0].param_groups[0]["betas"] = (0.8, 0.9)


def edit_the_rate(strategy: str) -> Any:
    """A callback that edits `param_groups[0]["lr"]` and betas"""
    return trained(strategy, callbacks=[EditLearningRate()])


# -------------------------------------------------------------------------------------------------- the hooks of a step


class Hooked(Net):
    """Overrides every hook of a step and looks at weights and gradients in each."""

    def look(self, where: str) -> None:
        shown = [p.grad.abs().max() if p.grad is not None else None for p in self.parameters()]
        self.seen.append([where, self.head.weight.abs().max().detach(), shown])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.look("on_train_batch_start")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look("on_before_zero_grad")

    def on_before_backward(self, loss: Any) -> None:
        self.look("on_before_backward")

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)
        self.look("backward")

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.clamp_(-0.05, 0.05)
        self.look("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.head.weight.grad.mul_(0.5)
        self.look("on_before_optimizer_step")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:  # warm-up, as in Lightning's documentation
            group["lr"] = self.lr * min(1.0, (self.trainer.global_step + 1) / 4)
        optimizer.step(closure=optimizer_closure)
        self.look("optimizer_step")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)
        self.look("optimizer_zero_grad")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.look("lr_scheduler_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.look("on_train_batch_end")

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=self.lr)
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.9)]


def override_every_hook(strategy: str) -> Any:
    """Every hook of a step overridden: `backward`, `optimizer_step`, `optimizer_zero_grad`, `lr_scheduler_step`"""
    return trained(strategy, Hooked())


class StepsByHand(Net):
    """`optimizer_step` always runs the closure, but steps on every other batch only."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def skip_steps(strategy: str) -> Any:
    """An `optimizer_step` that only runs the closure and skips the step"""
    return trained(strategy, StepsByHand())


class Norms(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.seen.append(norms)


def log_norms(strategy: str) -> Any:
    """`grad_norm` in `on_before_optimizer_step`"""
    return trained(strategy, Norms())


def clip_by_norm(strategy: str) -> Any:
    """Clipping by norm through the Trainer, with several optimizers and `configure_gradient_clipping` too"""

    class Configured(Norms):
        def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    return [trained(strategy, Norms(), gradient_clip_val=0.1), trained(strategy, Configured())]


def clip_by_value(strategy: str) -> Any:
    """Clipping by value through the Trainer"""
    return trained(strategy, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class GradientDescent(Net):
    """With SGD, whose steps are small where gradients are small, unlike Adam's."""

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


def accumulate_on_schedule(strategy: str) -> Any:
    """`accumulate_grad_batches` and `GradientAccumulationScheduler`"""
    scheduler = GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})
    options = {"max_epochs": 4, "limit_val_batches": 0}
    return [
        trained(strategy, GradientDescent(), callbacks=[scheduler], **options),
        trained(strategy, GradientDescent(), accumulate_grad_batches=2, **options),
    ]


class StartsAnew(Net):
    """Replaces its optimizers during a run: calls `configure_optimizers`, assigns new ones, constructs one anew."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)
        elif self.current_epoch == 2:
            self.trainer.optimizers = [SGD(self.parameters(), lr=0.05, momentum=0.9)]
        elif self.current_epoch == 3:
            SGD.__init__(self.trainer.optimizers[0], self.parameters(), lr=0.02, momentum=0.8)

    def on_train_epoch_end(self) -> None:
        path = shared_folder() / f"{self.current_epoch}.ckpt"
        self.trainer.save_checkpoint(path)
        self.seen.append(torch.load(path, weights_only=True)["optimizer_states"])


def take_new_optimizers(strategy: str) -> Any:
    """`trainer.optimizers = [...]` and `trainer.strategy.setup_optimizers(trainer)` in mid-run"""
    return trained(strategy, StartsAnew(), max_epochs=4)


class Returns(Net):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"tensor": loss, "dict": {"loss": loss, "extra": batch[0].sum()}, "None": None}[self.form]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs)


def return_from_a_step(strategy: str) -> Any:
    """`training_step` may return a tensor or a dict; None ends with Lightning's own error, as under DDP"""
    results = [trained(strategy, Returns(form)) for form in ("tensor", "dict")]
    with pytest.raises(RuntimeError, match="Skipping the `training_step` by returning None"):
        trained(strategy, Returns("None"))
    return results


def configure_in_every_form(strategy: str) -> Any:
    """`configure_optimizers` that returns None, a list, a dict, or two lists"""
    forms: list[Any] = [
        lambda optimizer: None,
        lambda optimizer: [optimizer],
        lambda optimizer: {"optimizer": optimizer},
        lambda optimizer: ([optimizer], [{"scheduler": lr_scheduler.StepLR(optimizer, 1), "name": "rate"}]),
    ]
    results = []
    for form in forms:
        module = Net()
        module.configure_optimizers = lambda: form(Adam(module.parameters()))  # type: ignore[method-assign]
        results.append(trained(strategy, module, max_epochs=1))
    return results


@pytest.mark.exhaustive(but=2)
@behaviours(
    "The Trainer",
    step_schedulers,
    wait_for_a_plateau,
    monitor_the_rate,
    edit_the_rate,
    take_turns,
    override_every_hook,
    skip_steps,
    clip_by_value,
    return_from_a_step,
    configure_in_every_form,
    take_new_optimizers,
    use_fakes_twice,
)
def test_an_optimization_step_equals_ddps_bit_for_bit(run_on, case):
    run_on(2, same_as_under_ddp, case=case)


@pytest.mark.exhaustive(but=1)
@behaviours(
    "The Trainer",
    train_a_gan,
    alternate,
    backward_twice,
    climb_first,
    log_norms,
    clip_by_norm,
    accumulate_on_schedule,
)
def test_a_step_with_a_global_norm_or_another_order_of_sums_differs_from_ddps_by_rounding_alone(run_on, case):
    run_on(2, same_as_under_ddp_in_double, case=case, bound=1e-13)
