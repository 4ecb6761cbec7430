"""Model states offloaded to the CPU or a disk: losses, weights and optimizer states are the same bit for bit."""

from __future__ import annotations

import copy
import errno
import gc
import os
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_zero import full_parameters
from lightning_zero.engine import Engine
from lightning_zero.engine.comm.asynchronous import is_synchronized, synchronize
from lightning_zero.engine.config import OffloadConfig
from lightning_zero.engine.offload import MASTERS, DiskStates, Swap, Update, Updates
from lightning_zero.io.swap import BUFFERS, SwapFile
from tests.checkpoint import faults
from tests.support import models
from tests.support.disk import all_buffers_in_use
from tests.support.training import Recipe, batch, prepare, same_tensors, same_values, trained_once
from tests.support.workers import rank, world_size

OFFLOADS = {
    "cpu": {"optimizer": "cpu"},
    "cpu, half of it": {"optimizer": "cpu", "fraction": 0.5},
    "cpu, parameters too": {"optimizer": "cpu", "parameters": "cpu"},
    "cpu, gradients too": {"optimizer": "cpu", "gradients": "cpu"},
    "cpu, one after another": {"optimizer": "cpu", "overlap": False},
    "disk": {"optimizer": "nvme"},
    "disk, parameters in memory": {"optimizer": "nvme", "parameters": "cpu"},
    "disk, all else too": {"optimizer": "nvme", "gradients": "cpu", "parameters": "nvme"},
}
OF_OFFLOADING = tuple(f"lightning_zero-{name}" for name in ("fetch", "update"))  # threads
EACH = pytest.mark.parametrize("offload", OFFLOADS)
ON_BOTH = pytest.mark.parametrize("offload", ["cpu, parameters too", "disk, all else too"])


class Wide(nn.Module):
    """Layers whose shards each span several pieces of a file, also on two ranks; and layers of a few elements."""

    def __init__(self, width: int = 150, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, models.CLASSES)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), targets.flatten())


def option(offload: str | None, stage: int) -> Any:
    if offload is None:
        return None
    chosen = {**OFFLOADS[offload], "path": "swap"}
    if stage < 3:
        chosen.pop("parameters", None)
    return chosen


def train(recipe: Recipe, stage: int, offload: str | None, **options: Any) -> dict[str, Any]:
    module, optimizer = prepare(recipe)
    before = set(threading.enumerate())
    engine = Engine(module, [optimizer], stage=stage, offload=option(offload, stage), **options)
    losses = []
    batches = [batch(index, device=recipe.device) for index in range(recipe.steps * recipe.micro_batches)]
    for index, inputs in enumerate(batches):
        is_last = (index + 1) % recipe.micro_batches == 0
        loss = module(*inputs) / recipe.micro_batches
        loss.backward()
        losses.append(loss.detach().clone())
        if is_last:
            if recipe.clip is not None:
                recipe.clip(module.parameters())
            optimizer.step()
            optimizer.zero_grad()
    found = {
        "losses": losses,
        "weights": dict(engine.full_state_dict()),
        "states": engine.full_optimizer_state_dict(optimizer),
        "masters": engine.masters_by_name(),
    }
    engine.close()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in left if name.startswith(OF_OFFLOADING)], "threads are left"
    same_values({name: value.cpu() for name, value in module.state_dict().items()}, found["weights"], "in the end")
    same_values(optimizer.state_dict(), found["states"], "the optimizer in the end")
    assert not os.path.exists("swap") or not os.listdir("swap"), "files are left"
    return found


train_without = trained_once(train)
"""The reference: one run for all offloads."""


def is_as_without(recipe: Recipe, stage: int, offload: str, **options: Any) -> None:
    found = train(recipe, stage, offload, **options)
    same_values(found, train_without(recipe, stage, None, **options), offload)


@pytest.mark.exhaustive(but=2)
@pytest.mark.behaviour("The numbers", '`offload="cpu"` and `"nvme"`: whatever is offloaded, no number changes')
@EACH
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_with_offload_equals_one_without(run_on, ranks, stage, offload):
    run_on(ranks, is_as_without, recipe=Recipe(steps=4), stage=stage, offload=offload)


@ON_BOTH
@pytest.mark.parametrize("stage", [1, 3])
def test_offload_changes_no_numbers_in_low_precision(run_on, stage, offload):
    run_on(2, is_as_without, recipe=Recipe(Wide, steps=4, dtype=torch.bfloat16), stage=stage, offload=offload)


@pytest.mark.exhaustive(but=2)
@ON_BOTH
@pytest.mark.parametrize(
    "optimizer",
    [
        models.adam_fused,
        models.adam_foreach,
        models.adam_amsgrad,
        models.adamw_with_decay_groups,
        models.sgd_nesterov,
        models.adagrad_with_initial_accumulator,
        models.nadam,
        models.several_groups,
        models.with_an_empty_group,
    ],
)
def test_offload_changes_no_numbers_with_any_optimizer(run_on, optimizer, offload):
    run_on(2, is_as_without, recipe=Recipe(Wide, optimizer, steps=3), stage=3, offload=offload)


@ON_BOTH
@pytest.mark.parametrize("ranks", [1, 2])
def test_offload_changes_no_numbers_with_clipping_and_micro_batches(run_on, ranks, offload):
    recipe = Recipe(steps=4, micro_batches=3, clip=models.clip)
    run_on(ranks, is_as_without, recipe=recipe, stage=3, offload=offload)


@ON_BOTH
def test_offload_changes_no_numbers_with_activation_checkpointing(run_on, offload):
    options = {"units": [nn.Linear], "activation_checkpointing": "units"}
    run_on(2, is_as_without, recipe=Recipe(Wide, steps=3), stage=3, offload=offload, **options)


class AroundTorchs(torch.optim.AdamW):
    """With a step of its own that calls torch's, as in some projects."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def around_torchs(module: nn.Module) -> torch.optim.Optimizer:
    adamw(module)  # torch hooks a class's step when the class is instantiated
    return AroundTorchs(module.parameters(), lr=0.01)


def calls_of_hooks(offload: str | None, optimizer: Any) -> list[str]:
    module, optimizer = prepare(Recipe(Wide, optimizer))
    engine = Engine(module, [optimizer], offload=option(offload, 3), whole_parameters=False)
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    try:
        for step in range(3):
            module(*batch(step)).backward()
            optimizer.step()
        engine.close()
    finally:
        for handle in handles:
            handle.remove()
    return calls


@ON_BOTH
@pytest.mark.parametrize("optimizer", [adamw, around_torchs])
def test_global_optimizer_step_hooks_are_called_as_often_as_without_offload(run_on, optimizer, offload):
    (calls,) = run_on(1, calls_of_hooks, offload=offload, optimizer=optimizer)
    assert [calls] == run_on(1, calls_of_hooks, offload=None, optimizer=optimizer)
    assert calls.count("before") == calls.count("after") >= 3


@ON_BOTH
def test_an_optimizer_that_wraps_torchs_step_updates_as_without_offload(run_on, offload):
    recipe = Recipe(Wide, around_torchs, steps=3)
    run_on(2, is_as_without, recipe=recipe, stage=3, offload=offload, whole_parameters=False)


class StepsAfter(torch.optim.SGD):
    """Calls the closure itself, and torch's step without one."""

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


class PassesAll(torch.optim.SGD):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


class PassesTheLoss(torch.optim.SGD):
    """Calls the closure itself, and torch's step with another one."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        return super().step(lambda: loss)


def step_once(offload: str, passes_closure: bool) -> None:
    """With gradient 1 and learning rate 1, one step changes each weight by 1."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch hooks a class's step when the class is instantiated
    for kind in (StepsAfter, PassesAll, PassesTheLoss):
        assert torch.equal(change_by_a_step(kind, offload, passes_closure), torch.ones(1, 4)), kind


def change_by_a_step(kind: type[torch.optim.SGD], offload: str, passes_closure: bool) -> torch.Tensor:
    module = nn.Linear(4, 1)
    nn.init.zeros_(module.weight)
    optimizer = kind(module.parameters(), lr=1.0)
    engine = Engine(module, [optimizer], stage=3, offload=option(offload, 3), whole_parameters=False)
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(None))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = module(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    if passes_closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    engine.close()
    assert len(calls) == 2, "torch's hooks are not called within the subclass's step"
    return -module.weight.detach()


@EACH
@pytest.mark.parametrize("passes_closure", [False, True])
def test_a_step_within_a_step_updates_offloaded_parameters_once(run_on, passes_closure, offload):
    run_on(2, step_once, passes_closure=passes_closure, offload=offload)


class Descent(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad)


class Scaled(Wide):
    """A parameter is frozen, and another has a single element, like the step count in an optimizer's state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(tokens, targets)


class Accumulating(Descent):
    """Adagrad that makes its states when it is constructed, as torch's did before 2.12."""

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        super().__init__(sorted(parameters, key=lambda p: (p.requires_grad, p.dim())))
        for p in parameters:
            if p.requires_grad:
                self.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p, 0.25)}

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.mul_(0.5)  # before an error for want of states
            self.state[p]["step"] += 1
            self.state[p]["sum"].addcmul_(p.grad, p.grad)
            p.addcdiv_(p.grad, self.state[p]["sum"].sqrt(), value=-0.1)


@ON_BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_states_that_an_optimizer_makes_when_it_is_constructed_are_offloaded(run_on, dtype, offload):
    recipe = Recipe(Scaled, Accumulating, steps=3, dtype=dtype)
    run_on(2, is_as_without, recipe=recipe, stage=3, offload=offload, whole_parameters=False)


class Interrupted(Descent):
    """Its step ends as by Ctrl-C, which only the main thread receives."""

    is_interrupted = False

    def step(self) -> None:
        super().step()
        if self.is_interrupted and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt


def step_after_an_interrupted_one() -> None:
    module = nn.Linear(4, 1)
    nn.init.zeros_(module.weight)
    optimizer = Interrupted(module.parameters())
    engine = Engine(module, [optimizer], stage=2, offload="cpu", whole_parameters=False)
    first, second = (module(torch.full((1, 4), value)).sum() for value in (1.0, 10.0))  # no forward between the steps
    first.backward()
    optimizer.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    module.zero_grad()
    second.backward()
    optimizer.is_interrupted = False
    optimizer.step()
    engine.close()
    assert torch.equal(module.weight, torch.full((1, 4), -11.0))


def test_the_step_after_an_interrupted_one_updates_offloaded_parameters_again(run_on):
    run_on(2, step_after_an_interrupted_one)


def queue_and_interrupt(threads: int) -> None:
    """Ctrl-C comes when an update is in the queue already: in ``Thread.start``, for example."""
    updates, real, ended = Updates(threads=threads), ThreadPoolExecutor.submit, threading.Event()

    def submit(*args: Any) -> None:
        ThreadPoolExecutor.submit = real  # type: ignore[method-assign]
        real(*args)
        raise KeyboardInterrupt

    ThreadPoolExecutor.submit = submit  # type: ignore[assignment, method-assign]
    with pytest.raises(KeyboardInterrupt):
        updates.submit(lambda: (time.sleep(0.5), ended.set()))  # type: ignore[arg-type]
    updates.synchronize()
    assert ended.is_set(), "an update that is still running is awaited"
    assert updates.submit(lambda: None).result() is None, "the next update does not wait for ever"
    updates.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_update_in_whose_submission_ctrl_c_is_pressed_is_awaited(run_on, threads):
    run_on(1, queue_and_interrupt, threads=threads)


def ends_once_written() -> None:
    """The disk delays each write. Each update waits for the end of the one before, as a forward may."""
    swap, updates, real = Swap("swap"), Updates(threads=BUFFERS), SwapFile.write
    works: list[Future[None]] = []

    def write(*args: Any) -> None:
        time.sleep(0.02)
        real(*args)

    def update(number: int, fields: dict[str, torch.Tensor]) -> None:
        if number:
            works[number - 1].result()
        fields[MASTERS].add_(number + 1)

    states = [DiskStates(swap, f"bucket {number}", 1000, {MASTERS: torch.float32}) for number in range(8)]
    with patch.object(SwapFile, "write", write):
        for number, each in enumerate(states):
            works.append(updates.submit(partial(update, number), each))
        for number, (work, each) in enumerate(zip(works, states)):
            work.result()
            assert torch.equal(each.read(MASTERS, 0, 1000), torch.full((1000,), number + 1.0))
    updates.close()
    swap.close()


def test_an_update_on_a_disk_ends_once_it_is_written_while_the_next_one_is_running(run_on):
    run_on(1, ends_once_written)


def order_of_updates(offload: str | None, unfreezes: bool) -> dict[str, torch.Tensor]:
    """Parameters after steps with random noise, of which each update draws its own."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(12)))
    module[::3].requires_grad_(not unfreezes)
    optimizer = Noisy(module.parameters(), lr=0.1)
    options = {"units": [nn.Linear], "unit_numel": 0, "whole_parameters": False}
    engine = Engine(module, [optimizer], stage=3, offload=option(offload, 3), **options)
    module.requires_grad_(True)
    for _ in range(4):
        module(torch.ones(2, 48)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = engine.full_state_dict()
    engine.close()
    return found


class Noisy(torch.optim.SGD):
    """Langevin dynamics. Its results depend on the order of updates."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.add_(p.grad, alpha=-0.1).add_(torch.randn(p.shape), alpha=0.01)


def updates_in_order(offload: str, unfreezes: bool) -> None:
    first = order_of_updates(offload, unfreezes)
    for _ in range(3):
        same_tensors(order_of_updates(offload, unfreezes), first, bound=0)
    if not unfreezes:
        same_tensors(first, order_of_updates(None, unfreezes), bound=0)


PARAMETERS_TOO = "cpu, parameters too", "disk, parameters in memory", "disk, all else too"  # also those frozen at first


@pytest.mark.parametrize(
    ("offload", "unfreezes"),
    [("cpu", False), ("disk", False), ("disk, all else too", False), *((name, True) for name in PARAMETERS_TOO)],
)
def test_an_optimizer_that_draws_random_numbers_gives_the_same_results_again(run_on, offload, unfreezes):
    run_on(1, updates_in_order, offload=offload, unfreezes=unfreezes)


# ----------------------------------------------------------------------------------------------- changes between steps


def in_between(stage: int, offload: str | None) -> dict[str, Any]:
    """Freeze and unfreeze, write to parameters and states in every way, load, change the learning rate."""
    module, optimizer = prepare(Recipe(Wide))
    engine = Engine(module, [optimizer], stage=stage, offload=option(offload, stage))
    first, last, norms = module.layers[0], module.layers[2], []
    for step in range(8):
        if step == 2:
            first.bias.requires_grad_(False)
        if step == 3:
            with torch.no_grad():
                last.weight.mul_(0.5)
                last.bias.data.copy_(torch.full((150,), 0.25))
            optimizer.param_groups[0]["lr"] *= 0.1
        if step == 4:
            first.bias.requires_grad_(True)
            optimizer.state[last.weight]["exp_avg"].zero_()
            optimizer.state[last.bias]["step"].zero_()
            optimizer.state[last.weight]["exp_avg_sq"].copy_(torch.full((150, 150), 0.5))
        if step == 5:
            with full_parameters(module, writeback=True), torch.no_grad():
                module.head.weight[0] = 0.125
        if step == 6:
            saved, state = engine.full_state_dict(), engine.full_optimizer_state_dict(optimizer)
            module.load_state_dict({name: value * 2 for name, value in saved.items()})
            state["state"][0]["exp_avg"] += 1
            optimizer.load_state_dict(state)
        module(*batch(step)).backward()
        norms.append(torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).tolist())
        norms.append([float(p.detach().sum()) for p in module.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    weights, states = dict(engine.full_state_dict()), engine.full_optimizer_state_dict(optimizer)
    engine.close()
    return {"norms": norms, "weights": weights, "states": states}


in_between_without = trained_once(in_between)


def in_between_is_as_without(stage: int, offload: str) -> None:
    same_values(in_between(stage, offload), in_between_without(stage, None), offload)


@pytest.mark.exhaustive(but=2)
@EACH
@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_changes_between_steps_take_effect_as_without_offload(run_on, ranks, stage, offload):
    run_on(ranks, in_between_is_as_without, stage=stage, offload=offload)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def momentum_from_mid_run(offload: str | None) -> dict[str, Any]:
    module, optimizer = prepare(Recipe(Wide, sgd))
    engine = Engine(module, [optimizer], stage=3, offload=option(offload, 3))
    for step in range(5):
        if step == 2:
            optimizer.param_groups[0]["momentum"] = 0.9
        module(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {"weights": dict(engine.full_state_dict()), "states": engine.full_optimizer_state_dict(optimizer)}
    engine.close()
    return found


def momentum_from_mid_run_is_as_without(offload: str) -> None:
    same_values(momentum_from_mid_run(offload), momentum_from_mid_run(None), offload)


@pytest.mark.exhaustive(but=1)
@EACH
def test_an_option_that_adds_a_state_in_mid_run_takes_effect_as_without_offload(run_on, offload):
    run_on(2, momentum_from_mid_run_is_as_without, offload=offload)


def replaced(offload: str | None) -> dict[str, Any]:
    """Another optimizer replaces one whose last update is still running in the background."""
    module, optimizer = prepare(Recipe(Wide))
    engine = Engine(module, [optimizer], offload=option(offload, 3))
    act, is_waited_for, main = Update.act, threading.Event(), threading.current_thread()
    really_wait = Updates.synchronize

    def late(*args: Any) -> Any:
        assert threading.current_thread() is main or is_waited_for.wait(30), "nobody waits"
        return act(*args)

    def wait(updates: Updates) -> None:
        is_waited_for.set()
        really_wait(updates)

    for step in range(4):
        module(*batch(step)).backward()
        with pytest.MonkeyPatch.context() as patch:
            if step == 1:
                patch.setattr(Update, "act", late)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                patch.setattr(Updates, "synchronize", wait)
                former, optimizer = optimizer, models.sgd_nesterov(module)
                engine.set_optimizers([optimizer])
                assert not former.state
    weights, states = dict(engine.full_state_dict()), engine.full_optimizer_state_dict(optimizer)
    engine.close()
    return {"weights": weights, "states": states}


def replaced_is_as_without(offload: str) -> None:
    same_values(replaced(offload), replaced(None), offload)


@ON_BOTH
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_may_be_replaced_while_its_update_is_still_running(run_on, ranks, offload):
    run_on(ranks, replaced_is_as_without, offload=offload)


# --------------------------------------------------------------------------------------------------------- the overlap


def updates_in_forward(stage: int, offload: str) -> None:
    """The next forward begins before the last layer is updated: the test makes that update wait for the forward."""
    module, _ = prepare(Recipe(lambda: Wide(layers=4)))
    others = [p for name, p in module.named_parameters() if "head" not in name]
    groups = [{"params": others, "is_last": False}, {"params": module.head.parameters(), "is_last": True}]
    optimizer = torch.optim.AdamW(groups)
    engine = Engine(module, [optimizer], units=[nn.Linear], stage=stage, offload=option(offload, stage))
    act, began = Update.act, threading.Event()

    def waits(self: Update, *args: Any) -> Any:
        if self.group["is_last"]:
            assert began.wait(30), "the forward waits for all updates"
        return act(self, *args)

    module.layers[0].register_forward_hook(lambda *_: began.set())
    for step in range(3):
        loss = module(*batch(step))
        optimizer.zero_grad()
        loss.backward()
        began.clear()
        if step:  # the first step also tries out the optimizer
            Update.act = waits
        try:
            optimizer.step()
            module(*batch(step + 1))
        finally:
            Update.act = act
    engine.close()


@pytest.mark.parametrize(
    ("ranks", "stage", "offload"),
    [
        (1, 1, "cpu"),
        (1, 2, "disk"),
        (1, 3, "cpu, gradients too"),
        (1, 3, "disk, all else too"),
        (2, 3, "cpu, parameters too"),
        (2, 3, "disk, all else too"),
    ],
)
def test_updates_continue_during_the_next_forward(run_on, ranks, stage, offload):
    run_on(ranks, updates_in_forward, stage=stage, offload=offload)


def transformed(offload: str | None) -> list[torch.Tensor]:
    """Compute gradients by ``torch.func`` in a step, before anything else uses the parameters of the last update."""
    module, optimizer = prepare(Recipe(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))))
    engine = Engine(module, [optimizer], stage=2, offload=option(offload, 2))
    x, losses = torch.randn(6, 5), []
    for _ in range(3):
        with engine.window():
            gradients = torch.func.vmap(torch.func.grad(lambda y: module(y).sum()))(x)
            loss = module(x).square().mean() + gradients.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    engine.close()
    return losses


@EACH
def test_a_transform_uses_the_parameters_of_the_last_update(run_on, offload):
    assert run_on(1, transformed, offload=offload) == run_on(1, transformed, offload=None)


class Keeping(nn.Linear):
    """Keeps a view of its weight, as networks that inspect themselves do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.row = self.weight[0].detach()
        return super().forward(x)


def kept_parts(
    offload: str | None, stage: int = 2, sharded: bool = True, with_others: bool = False
) -> list[torch.Tensor]:
    """
    Args:
        with_others: other tensors share the buffers until the first backward ends, as those of a Gloo thread may, which
            releases late what it has broadcast.
    """
    module, optimizer = prepare(Recipe(lambda: nn.Sequential(Keeping(5, 7), nn.Tanh(), Keeping(7, 1))))
    engine = Engine(module, [optimizer], stage=stage, offload=option(offload, stage)) if sharded else None
    x, rows = torch.randn(6, 5), []
    others = [bucket.full[:1] for bucket in engine.buckets] if engine is not None and with_others else []
    for _ in range(3):
        module(x).square().mean().backward()
        others.clear()
        time.sleep(0.2 * rank())  # the other ranks have their own shards long before that
        optimizer.step()
        optimizer.zero_grad()
        rows += [layer.row.clone() for layer in (module[0], module[2])]
    if engine is not None:
        engine.close()
    return rows


@EACH
def test_a_view_that_a_module_keeps_of_its_weight_has_the_new_values_after_the_step(run_on, offload):
    ((kept,), (expected,)) = (run_on(1, kept_parts, offload=each) for each in (offload, None))
    same_values(kept, expected, offload)


@pytest.mark.exhaustive
@pytest.mark.parametrize("offload", [None, *OFFLOADS])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_kept_view_of_a_weight_has_the_new_values_when_other_ranks_shards_arrive_late(run_on, stage, offload):
    (expected,) = run_on(1, kept_parts, offload=None, sharded=False)
    for found in run_on(2, kept_parts, offload=offload, stage=stage):
        same_values(found, expected, offload or "")


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_kept_view_of_a_weight_has_the_new_values_when_other_tensors_shared_its_buffer(run_on, stage):
    (expected,) = run_on(1, kept_parts, offload=None, sharded=False)
    for found in run_on(2, kept_parts, offload=None, stage=stage, with_others=True):
        same_values(found, expected, "")


def traffic_on_disk(stage: int) -> None:
    """All pieces go through the pipeline once per step; nothing else is read or written."""
    module, optimizer = prepare(Recipe(Wide))
    engine = Engine(module, [optimizer], stage=stage, offload=option("disk", stage))
    calls: list[str] = []
    for step in range(4):
        module(*batch(step)).backward()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("read", "write"):
                call = getattr(DiskStates, name)
                patch.setattr(DiskStates, name, lambda *args, call=call, name=name: calls.append(name) or call(*args))
            optimizer.step()
            module(*batch(step))
            assert calls == [] or step == 0
            calls.clear()
            optimizer.state[module.head.weight]["exp_avg"].mul_(1.0)
        assert calls == ["read", "write"] or world_size() > 1 and calls == []  # where this rank owns none of it
        calls.clear()
        optimizer.zero_grad()
    engine.close()


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (1, 3), (2, 2)])
def test_apart_from_updates_nothing_is_read_from_or_written_to_the_disk(run_on, ranks, stage):
    run_on(ranks, traffic_on_disk, stage=stage)


def dtype_of_counts(offload: str | None) -> set[torch.dtype]:
    module = nn.Linear(4, 4).double()
    optimizer = torch.optim.AdamW(module.parameters())
    engine = Engine(module, [optimizer], stage=3, offload=option(offload, 3))
    module(torch.ones(2, 4, dtype=torch.double)).sum().backward()
    begun, go_on = threading.Event(), threading.Event()
    if engine.config.offload is not None:
        engine.background.submit(lambda: begun.set() or go_on.wait(30))
        begun.wait()
    go_on_later = threading.Timer(0.2, go_on.set)
    go_on_later.start()
    optimizer.step()
    torch.set_default_dtype(torch.double)  # as a Trainer's forward in 64-true does
    try:
        states = engine.full_optimizer_state_dict(optimizer)["state"]
    finally:
        torch.set_default_dtype(torch.float)
    engine.close()
    return {state["step"].dtype for state in states.values()}


@ON_BOTH
def test_step_counts_have_the_same_dtype_as_without_offload(run_on, offload):
    assert run_on(1, dtype_of_counts, offload=offload) == run_on(1, dtype_of_counts, offload=None) == [{torch.float32}]


class Odd(Wide):
    """A parameter that is never used, one that its module modifies in forward, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.unused = nn.Linear(150, 150)
        self.embed = nn.Embedding(models.VOCABULARY, 150, max_norm=0.5)
        self.layers.append(self.layers[1])


@EACH
@pytest.mark.parametrize("ranks", [1, 2])
def test_odd_modules_are_updated_as_without_offload(run_on, ranks, offload):
    options = {"units": [nn.Linear], "reduction_buffers": 1}
    run_on(ranks, is_as_without, recipe=Recipe(Odd, steps=4), stage=3, offload=offload, timeout=90, **options)


def unfrozen(offload: str | None, dtype: torch.dtype) -> dict[str, Any]:
    module, optimizer = prepare(Recipe(Wide, dtype=dtype))
    module.layers[0].requires_grad_(False)
    engine = Engine(module, [optimizer], units=[nn.Linear], offload=option(offload, 3), compute_dtype=torch.bfloat16)
    losses = []
    for step in range(5):
        if step == 2:
            module.layers[0].requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
            loss = module(*batch(step))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(engine.full_state_dict())
    engine.close()
    return {"losses": losses, "weights": weights}


unfrozen_without = trained_once(unfrozen)


def unfrozen_is_as_without(offload: str, dtype: torch.dtype) -> None:
    same_values(unfrozen(offload, dtype), unfrozen_without(None, dtype), offload)


@pytest.mark.exhaustive(but=2)
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_unfrozen_in_mid_run_train_as_without_offload(run_on, dtype, offload):
    run_on(2, unfrozen_is_as_without, offload=offload, dtype=dtype)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "gpu"}, "optimizer='gpu' must be 'cpu', 'nvme' or None"),
        ({"fraction": 1.5}, "fraction=1.5 must be a number from 0 to 1"),
        ({"optimizer": None, "parameters": "cpu"}, "requires optimizer='cpu'"),
        ({"optimizer": "cpu", "parameters": "nvme", "path": "x"}, "requires optimizer='nvme'"),
    ],
)
def test_invalid_offload_options_are_refused(options, said):
    with pytest.raises(ValueError, match="offload: ") as told:
        OffloadConfig(**options)
    assert said in str(told.value)


def refused_stage() -> None:
    module = nn.Linear(3, 3)
    before = dict(module.named_parameters())
    with pytest.raises(ValueError, match="parameters='cpu' requires stage 3"):
        Engine(module, [], stage=2, offload={"parameters": "cpu"})
    assert all(parameter is before[name] for name, parameter in module.named_parameters())


def test_offloading_parameters_requires_stage_3(run_on):
    run_on(2, refused_stage)


def refused_for_want_of_room(folder: Path) -> str:
    """The error is reported; the module and the optimizer are unchanged, and still train."""
    module, optimizer = prepare(Recipe(Wide, models.adagrad_with_initial_accumulator))
    before, state = copy.deepcopy(module.state_dict()), optimizer.state
    with pytest.raises(OSError, match="No space left on device") as told:
        Engine(module, [optimizer], offload={"optimizer": "nvme", "path": folder})
    assert told.value.errno == errno.ENOSPC
    assert not any(folder.iterdir())
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    same_values(module.state_dict(), before, "what was refused")
    assert optimizer.state is state
    module(*batch(0)).backward()
    optimizer.step()
    return str(told.value)


def no_room(folder: Path, nbytes: int) -> None:
    def on_the_disk() -> None:
        torch.set_num_threads(1)
        assert "bytes are required" in refused_for_want_of_room(folder)

    assert faults.on_a_small_disk(folder, nbytes, on_the_disk) == 0


# all masters take 4 * (11 * 150 + 3 * 150 * 151 + 151 * 16) = 288064 bytes, and Adam's moments twice as many
def test_a_disk_that_is_too_small_for_masters_is_reported_at_the_start_and_nothing_is_changed(run_on, tmp_path):
    run_on(1, no_room, folder=tmp_path, nbytes=2**18)


def no_room_for_states(folder: Path) -> None:
    def on_the_disk() -> None:
        torch.set_num_threads(1)
        module, optimizer = prepare(Recipe(Wide))
        engine = Engine(module, [optimizer], stage=3, offload={"optimizer": "nvme", "path": folder})
        module(*batch(0)).backward()
        with pytest.raises(OSError, match="No space left on device: .* bytes are required"):
            optimizer.step()
            engine.full_optimizer_state_dict(optimizer)
        with suppress(OSError):  # the same error
            engine.close()
        assert all(type(p) is nn.Parameter and p.isfinite().all() for p in module.parameters())
        module(*batch(1)).backward()
        optimizer.step()  # works as without the engine

    assert faults.on_a_small_disk(folder, 2**19, on_the_disk) == 0


def test_a_disk_that_is_too_small_for_states_is_reported_at_the_first_step(run_on, tmp_path):
    run_on(1, no_room_for_states, folder=tmp_path)


def no_room_for_one(folder: Path) -> None:
    reserve = SwapFile.reserve

    def refuse(self: SwapFile, nbytes: int) -> None:
        if rank() == 1 and nbytes > 2**15:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(self, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwapFile, "reserve", refuse)
        said = refused_for_want_of_room(folder / str(rank()))
    assert ("on rank 1: " in said) == (rank() == 0)


def test_a_disk_that_is_too_small_for_one_rank_is_reported_on_every_rank(run_on, tmp_path):
    run_on(2, no_room_for_one, folder=tmp_path)


def fails(when: str) -> None:
    """A failed read is reported, and nothing of it is saved; data of a failed write stays in memory."""
    module, optimizer = prepare(Recipe(Wide))
    engine = Engine(module, [optimizer], stage=3, offload=option("disk, parameters in memory", 3))
    module(*batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    name = {"read": "preadv", "write": "pwrite"}[when]
    call = getattr(os, name)

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    module(*batch(1)).backward()
    setattr(os, name, broken)
    try:
        with pytest.raises(OSError, match="cannot be (read|written) at byte"):
            optimizer.step()
            engine.full_optimizer_state_dict(optimizer)
        assert engine.updates is None or when == "write"
        with suppress(OSError):  # raises again where masters are incomplete
            engine.close()
    finally:
        setattr(os, name, call)
    assert not os.listdir("swap"), "files are left"
    assert all(type(p) is nn.Parameter and p.isfinite().all() for p in module.parameters())
    module(*batch(2)).backward()
    optimizer.step()  # works as without the engine


def one_engine_of_two_fails() -> None:
    ours, theirs = (prepare(Recipe(Wide)) for _ in range(2))
    engines = [Engine(module, [optimizer], stage=3, offload="cpu") for module, optimizer in (ours, theirs)]

    def fail(self: Update, *args: Any) -> Any:
        raise RuntimeError("of their update")

    for module, optimizer in (ours, theirs):
        module(*batch(0)).backward()
        with pytest.MonkeyPatch.context() as patch:
            if module is theirs[0]:
                patch.setattr(Update, "act", fail)
            optimizer.step()
            while not is_synchronized():
                time.sleep(0.001)
    assert all(p.norm() > 0 for p in ours[0].parameters())
    assert engines[0].full_optimizer_state_dict(ours[1])["state"]
    with pytest.raises(RuntimeError, match="of their update"):
        engines[1].full_optimizer_state_dict(theirs[1])
    with pytest.raises(RuntimeError, match="of their update"):
        engines[1].close()
    engines[0].close()


def test_a_failed_update_is_reported_by_its_own_engine_only(run_on):
    run_on(1, one_engine_of_two_fails)


def with_an_empty_frozen_parameter(offload: str) -> None:
    module, optimizer = prepare(Recipe(Wide))
    module.register_parameter("empty", nn.Parameter(torch.empty(0, 3), requires_grad=False))
    engine = Engine(module, [optimizer], stage=3, offload=option(offload, 3))
    module(*batch(0)).backward()
    optimizer.step()
    assert engine.full_state_dict()["empty"].shape == (0, 3)
    engine.close()
    assert module.empty.shape == (0, 3)


@EACH
def test_a_frozen_parameter_may_be_empty(run_on, offload):
    run_on(2, with_an_empty_frozen_parameter, offload=offload)


@pytest.mark.parametrize("when", ["read", "write"])
def test_a_disk_failure_is_reported(run_on, when):
    run_on(1, fails, when=when)


# ------------------------------------------------------------------------------------------------------------- memory


def frees_all() -> None:
    module, optimizer = prepare(Recipe(Wide))
    engine = Engine(module, [optimizer], stage=3, offload=option("disk, all else too", 3))
    gc.disable()
    try:
        for step in range(2):
            module(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.close()
        left = weakref.ref(engine._swap)
        del engine, module, optimizer
        assert left() is None, "buffers are left to the garbage collector"
    finally:
        gc.enable()


def test_the_buffers_of_an_engine_are_freed_without_the_garbage_collector(run_on):
    run_on(1, frees_all)


def memory_of_an_update(width: int) -> tuple[int, int]:
    """Bytes of the buffers that transfer the states, and of the states."""
    module = nn.Sequential(*(nn.Linear(width, 256, bias=False) for _ in range(12)))
    optimizer = torch.optim.Adam(module.parameters())
    engine = Engine(
        module, [optimizer], stage=3, offload={"optimizer": "nvme", "path": "swap"}, units=[nn.Linear], unit_numel=0
    )
    for _ in range(2):  # the first update makes the moments
        sum(layer(torch.randn(4, width)).square().mean() for layer in module).backward()
        with all_buffers_in_use():
            optimizer.step()
            synchronize()
    report = engine.report()
    assert report.at_rest.get("host", 0) == 0 == report.at_rest.get("optimizer", 0)
    swap = engine._swap
    assert swap is not None
    buffers, states = sum(map(len, swap.buffers.free)), engine.bytes_on_disk()[0]
    engine.close()
    return buffers, states


def test_an_update_takes_three_buckets_of_memory_regardless_of_the_models_size(run_on):
    ((buffers, states),) = run_on(1, memory_of_an_update, width=128)
    assert buffers == 3 * 256 * 128 * (4 + 4 + 4)  # a master and two moments per element
    assert states == 4 * buffers


def load_right_after_a_step(place: str) -> None:
    """States that are loaded while the previous update is still running replace the results of that update."""
    runs = []
    for offload in (None, place):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 4))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.03)
        engine = Engine(module, [optimizer], stage=3, offload=offload)
        saved: dict[str, Any] = {}
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank())
            module(torch.randn(4, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                saved = copy.deepcopy(optimizer.state_dict())
            if step == 1:
                optimizer.load_state_dict(saved)
        runs.append(engine.full_state_dict())
        engine.close()
    same_tensors(runs[1], runs[0], bound=0)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_states_loaded_during_an_update_replace_its_results(run_on, size, place):
    run_on(size, load_right_after_a_step, place=place)
