"""Typical Fabric training loops, under DDP and at each stage: the same losses, weights and optimizer states."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam

from lightning_zero.engine.init.deferred_param import is_deferred
from tests.fabric.training import make_fabric, same_as_under_ddp, set_up, state_of, train, weights
from tests.support.models import OddModel, Repeated, adam_with_large_eps, sgd_nesterov
from tests.support.training import CLOSE, batch
from tests.support.workers import rank, world_size


def fabrics(*cases: Any) -> pytest.MarkDecorator:
    """Run a test with each case; the case's docstring is its row in docs/reference/compatibility.md."""
    marked = [
        pytest.param(case, id=case.__name__, marks=pytest.mark.behaviour("Fabric", str(case.__doc__).rstrip(".")))
        for case in cases
    ]
    return pytest.mark.parametrize("case", marked)


def noise(*shape: int, seed: int) -> Tensor:
    """This rank's noise, the same under every strategy."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank()))


# ---------------------------------------------------------------------------------------------------------- one module


def plain(strategy: str) -> Any:
    """`setup(model, optimizer)`, `backward`, `step`; evaluation with `eval()` and `no_grad` in between"""
    fabric = make_fabric(strategy)
    model, optimizer = set_up(fabric)
    losses = train(fabric, model, optimizer)
    model.eval()
    with torch.no_grad():
        losses.append(model(*batch(50)))
    with torch.inference_mode(world_size() > 1):
        losses.append(model(*batch(51)).clone())
    model.train()
    losses += train(fabric, model, optimizer, first=3)
    return losses, weights(model), state_of(optimizer)


def accumulated(strategy: str) -> Any:
    """`no_backward_sync` over micro-batches"""
    fabric = make_fabric(strategy)
    model, optimizer = set_up(fabric, optimizer=adam_with_large_eps)
    for index in range(9):
        with fabric.no_backward_sync(model, enabled=index % 3 != 2):
            fabric.backward(model(*batch(index)) / 3)
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), state_of(optimizer)


def clipped(strategy: str) -> Any:
    """`clip_gradients` by norm (2, infinity) and by value; a non-finite norm is an error if requested"""
    fabric = make_fabric(strategy)
    model, optimizer = set_up(fabric, partial(OddModel, rows=1), adam_with_large_eps)
    norms = []
    for index, how in enumerate([{"max_norm": 0.1}, {"clip_val": 0.01}, {"max_norm": 0.05, "norm_type": float("inf")}]):
        fabric.backward(model(*batch(index)))
        norms.append(fabric.clip_gradients(model, optimizer, **how))
        optimizer.step()
        optimizer.zero_grad()
    fabric.backward(model(*batch(9)) * (float("nan") if rank() == 0 else 1.0))
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    return norms, weights(model)


class Counting(nn.Module):
    """Its buffer differs by rank after each forward; a forward may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        self.count += 1 + rank()
        if fails:
            raise ValueError
        return self.net(x).square().mean() * self.count


def buffers_of_each_forward(strategy: str) -> Any:
    """Buffers follow rank 0's after each forward with a synchronised backward: not after evaluation or an error"""
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    module = Counting()
    model, optimizer = fabric.setup(module, SGD(module.parameters(), lr=1e-4))
    seen = []

    def forward(index: int, trains: bool = True, synchronises: bool = True) -> None:
        with torch.set_grad_enabled(trains), fabric.no_backward_sync(model, enabled=not synchronises):
            loss = model(noise(4, 7, seed=index))
            if trains:
                fabric.backward(loss)
        seen.append((module.count.clone(), loss.detach()))

    for epoch in range(2):
        forward(0, trains=False)
        forward(1, trains=False)
        for _ in range(2):
            forward(2 + epoch)
            forward(4 + epoch, synchronises=False)
            with pytest.raises(ValueError):
                model(noise(4, 7, seed=8), fails=True)
            forward(6 + epoch)
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(ValueError):
                model(noise(4, 7, seed=8), fails=True)
    return seen, dict(module.named_buffers())


class Methods(nn.Module):
    """Has a method besides `forward` that uses layers, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def features(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.blocks(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean() + self.features(x).mean()

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters())


def marked(strategy: str) -> Any:
    """Methods marked by `mark_forward_method`; an unmarked one that runs layers is refused"""
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    module = Methods()
    model, optimizer = fabric.setup(module, Adam(module.parameters(), lr=0.01))
    assert model.count() == 7 * 7 * 3 + 7 * 3 + 7 * 5 + 5 + 1
    if world_size() > 1:
        with pytest.raises(RuntimeError, match="mark_forward_method"):
            model.features(noise(4, 7, seed=0))
    model.mark_forward_method(module.features)
    model.mark_forward_method("loss")
    features = model.features(noise(4, 7, seed=0)).detach()
    losses = []
    for index in range(3):
        loss = model.loss(noise(4, 7, seed=index))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return features, losses, weights(model)


class Lit(LightningModule):
    """A LightningModule whose `training_step` and `configure_optimizers` a Fabric script calls."""

    def __init__(self) -> None:
        super().__init__()
        self.model = OddModel()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(*batch)

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=0.01)


def lightning_module(strategy: str) -> Any:
    """A LightningModule's `training_step` and `configure_optimizers`"""
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    module = Lit()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    losses = []
    for index in range(3):
        loss = model.training_step(batch(index), index)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, weights(model)


def compiled(strategy: str) -> Any:
    """A module compiled by `torch.compile` before `setup`"""
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    module = OddModel()
    model, optimizer = fabric.setup(torch.compile(module, backend="eager"), Adam(module.parameters(), lr=0.01))
    return train(fabric, model, optimizer), weights(module)


def scheduled(strategy: str) -> Any:
    """A scheduler passed to `setup`, `add_param_group`, a closure"""
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    module = OddModel()
    optimizer = Adam([p for p in module.parameters() if p.ndim >= 2], lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = fabric.setup(module, optimizer, scheduler=schedule)
    optimizer.add_param_group({"params": [p for p in module.parameters() if p.ndim < 2], "lr": 0.001})
    schedule.base_lrs.append(0.001)
    losses = []
    for index in range(3):

        def closure(index: int = index) -> Tensor:
            optimizer.zero_grad()
            loss = model(*batch(index))
            fabric.backward(loss)
            return loss

        losses.append(optimizer.step(closure).detach())
        schedule.step()
    return losses, weights(model), state_of(optimizer)


@pytest.mark.exhaustive(but=1)
@fabrics(plain, marked, lightning_module, compiled, scheduled)
def test_a_loop_gives_ddps_numbers(run_on, case):
    run_on(2, same_as_under_ddp, case=case)


def compiled_beside_another(strategy: str) -> Any:
    """Train compiled code, and go on after another module has been set up."""
    fabric = make_fabric(strategy)
    torch._dynamo.reset()
    compiled = []

    def count(guards: Sequence[Any]) -> list[bool]:  # called whenever something is compiled
        compiled.append([guard.name for guard in guards])
        return [True] * len(guards)

    model, optimizer = set_up(fabric)
    model = torch.compile(model, backend="eager", options={"guard_filter_fn": count})
    losses = train(fabric, model, optimizer)
    before = list(compiled)
    other = fabric.setup(nn.Linear(2, 2))
    losses += train(fabric, model, optimizer)
    assert before
    assert compiled == before, "compiled again"
    del other
    return losses, weights(model)


def test_code_is_not_compiled_again_when_another_module_is_set_up(run_on):
    run_on(2, same_as_under_ddp, case=compiled_beside_another)


@fabrics(clipped, accumulated, buffers_of_each_forward)
def test_clipping_and_accumulation_give_ddps_numbers_up_to_rounding(run_on, case):
    run_on(2, same_as_under_ddp, case=case, bound=CLOSE)


def test_one_rank_gives_a_single_devices_numbers(run_on):
    run_on(1, on_one_rank)


def on_one_rank() -> None:
    for case in (plain, accumulated, marked):
        same_as_under_ddp(case)
    same_as_under_ddp(clipped, CLOSE)


# ------------------------------------------------------------------------------------------ several modules, optimizers


class Pair(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inside, 9), nn.Tanh(), nn.Linear(9, outside))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def gan(strategy: str, order: str = "together") -> Any:
    """Two modules with an optimizer each: a GAN"""
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    one, two = Pair(5, 6), Pair(6, 1)
    first, second = Adam(one.parameters(), lr=0.01), SGD(two.parameters(), lr=0.1, momentum=0.9)
    if order == "together":
        generator, first = fabric.setup(one, first)
        critic, second = fabric.setup(two, second)
    elif order == "modules first":
        generator, critic = fabric.setup_module(one), fabric.setup_module(two)
        first, second = fabric.setup_optimizers(first, second)
    else:
        first, second = fabric.setup_optimizers(first, second)
        generator, critic = fabric.setup_module(one), fabric.setup_module(two)
    losses = []
    for index in range(3):
        fake = generator(noise(4, 5, seed=index))
        loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(noise(4, 6, seed=50 + index))).mean()
        fabric.backward(loss)
        second.step()
        second.zero_grad()
        loss = F.softplus(-critic(fake)).mean()
        fabric.backward(loss)
        norm = fabric.clip_gradients(generator, first, max_norm=10.0)
        first.step()
        first.zero_grad()
        second.zero_grad()
        losses += [loss.detach(), (norm * 1e5).round()]
    return losses, weights(one), weights(two), state_of(first), state_of(second)


def gan_modules_first(strategy: str) -> Any:
    """`setup_module`, then `setup_optimizers`"""
    return gan(strategy, "modules first")


def gan_optimizers_first(strategy: str) -> Any:
    """`setup_optimizers`, then `setup_module`"""
    return gan(strategy, "optimizers first")


def one_optimizer(strategy: str) -> Any:
    """One optimizer over the parameters of two modules, with state from before `setup`; its state saved and loaded"""
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    one, two = Pair(5, 6), Pair(6, 1)
    optimizer = Adagrad([*one.parameters(), *two.parameters()], lr=0.05, initial_accumulator_value=0.1)
    encoder, optimizer = fabric.setup(one, optimizer)
    decoder = fabric.setup_module(two)

    def step(index: int) -> Tensor:
        loss = decoder(encoder(noise(4, 5, seed=index))).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(encoder, optimizer, clip_val=0.01)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [step(0), step(1)]
    state = copy.deepcopy(optimizer.state_dict())
    losses.append(step(2))
    optimizer.load_state_dict(state)
    losses.append(step(3))
    return losses, weights(one), weights(two), state_of(optimizer)


def two_optimizers(strategy: str) -> Any:
    """Two optimizers over one module, one of which is set up again, with another module"""
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    module, other = OddModel(), Pair(2, 2)
    first = Adam([p for p in module.parameters() if p.ndim >= 2], lr=0.01)
    second = SGD([p for p in module.parameters() if p.ndim < 2], lr=0.1)
    model, one, two = fabric.setup(module, first, second)
    _, one = fabric.setup(other, first)
    losses = []
    for index in range(3):
        loss = model(*batch(index))
        fabric.backward(loss)
        one.step()
        two.step()
        model.zero_grad()
        losses.append(loss.detach())
    return losses, weights(model), state_of(one), state_of(two)


def optimizer_made_later(strategy: str) -> Any:
    """An optimizer made of a module that is set up already"""
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    model = fabric.setup_module(OddModel())
    optimizer = fabric.setup_optimizers(sgd_nesterov(model))
    return train(fabric, model, optimizer), weights(model), state_of(optimizer)


def made_empty(strategy: str) -> Any:
    """A module made in `fabric.init_module(empty_init=True)`, on the meta device, and initialised as it is sharded"""
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    with fabric.init_module(empty_init=strategy != "ddp"):
        module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    assert all(is_deferred(p) is (strategy != "ddp") for p in module.parameters())
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(sgd_nesterov(model))
    for index in range(3):
        fabric.backward(model(noise(4, 6, seed=index)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), state_of(optimizer)


def target_network(strategy: str) -> Any:
    """A copy of a set-up module: a target network that follows by `lerp_`, itself set up or not"""
    fabric = make_fabric(strategy)
    model, optimizer = set_up(fabric)
    target = copy.deepcopy(model.module)
    losses = train(fabric, model, optimizer)
    with torch.no_grad():
        for followed, followers in zip(model.parameters(), target.parameters(), strict=True):
            followers.lerp_(followed, 0.5)
        losses.append(target(*batch(7)))
    second = fabric.setup_module(target)
    with torch.no_grad():
        losses.append(second(*batch(7)))
    return losses, weights(second)


@pytest.mark.exhaustive(but=2)
@fabrics(
    gan,
    gan_modules_first,
    gan_optimizers_first,
    one_optimizer,
    two_optimizers,
    optimizer_made_later,
    made_empty,
    target_network,
)
def test_several_modules_and_optimizers_give_ddps_numbers(run_on, case):
    run_on(2, same_as_under_ddp, case=case)


# ----------------------------------------------------------------------------------------------------------- precision


def mixed(strategy: str) -> Any:
    """`precision="bf16-mixed"`"""
    fabric = make_fabric(strategy, precision="bf16-mixed")
    model, optimizer = set_up(fabric, Repeated)
    return train(fabric, model, optimizer), weights(model)


def double(strategy: str) -> Any:
    """`precision="64-true"`"""
    fabric = make_fabric(strategy, precision="64-true")
    model, optimizer = set_up(fabric)
    return train(fabric, model, optimizer), weights(model)


def scaled(strategy: str) -> Any:
    """`precision="16-mixed"`: the scale is DDP's, clipping unscales, an overflow on one rank skips the step"""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    fabric = make_fabric(strategy, plugins=MixedPrecision("16-mixed", "cpu", scaler))
    model, optimizer = set_up(fabric, optimizer=adam_with_large_eps)
    scales, norms = [], []
    for index in range(6):
        loss = model(*batch(index))
        fabric.backward(loss * (3e38 if index == 3 and rank() == world_size() - 1 else 1.0))
        if index % 2 == 0:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5))
        optimizer.step()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[3] < scales[2] and max(scales) > scales[0], scales
    return scales, norms, weights(model)


@fabrics(mixed, double)
def test_mixed_and_double_precision_give_ddps_numbers(run_on, case):
    run_on(2, same_as_under_ddp, case=case)


@fabrics(scaled)
def test_a_scaled_loss_gives_ddps_numbers(run_on, case):
    run_on(2, same_as_under_ddp, case=case, bound=1e-5)


def in_low_precision() -> None:
    """All stages agree bit for bit in bf16 with fp32 masters, which keep updates that are too small for bf16."""
    ends = []
    for stage in (1, 2, 3):
        fabric = make_fabric(f"zero{stage}", precision="bf16-true")
        model, optimizer = set_up(fabric)
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        ends.append((train(fabric, model, optimizer), weights(model)))
        engine = fabric.strategy.engines[-1]
        assert all(bucket.master_dtype == torch.float32 for bucket in engine.buckets)
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=0)


def test_bf16_parameters_have_fp32_masters(run_on):
    run_on(2, in_low_precision)
