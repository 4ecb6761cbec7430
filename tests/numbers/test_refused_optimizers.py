"""Optimizers whose update of a parameter needs other parameters, and unknown ones, are refused on several ranks.

A single rank has full parameters, which every optimizer updates as in plain torch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Muon, Optimizer, SparseAdam

from lightning_zero import OffloadConfig, ZeroStrategy
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.engine import Engine
from lightning_zero.engine.compat import without_hooks
from lightning_zero.engine.tensor.sharded_tree import walk, whole
from tests.support.models import OddModel, Square, adam
from tests.support.trainer import Learner, make_trainer
from tests.support.training import Recipe, batch, same_runs, same_values, train_ddp, train_zero
from tests.support.whole import Layered, Together, matrices, others
from tests.support.workers import CaseFailed, rank


class SignDescent(Optimizer):
    """Elementwise, but not in the list of known optimizers."""

    def __init__(self, params: Any, lr: float = 0.001) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])
        return loss


REFUSED = [(LBFGS, "inner products of whole gradients"), (SparseAdam, "sparse"), (SignDescent, "elementwise")]


def make(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    return kind(model.parameters(), lr=0.001)


def refuse(stage: int, kind: type[Optimizer], says: str = "elementwise", **options: Any) -> None:
    from lightning_zero.engine import Engine

    module = Square()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises((TypeError, ValueError), match=rf"\b{kind.__name__}\b.*{says}"):
        optimizer = make(kind, module)
        Engine(module, [optimizer], stage=stage, **options)
        module(*batch(0)).backward()
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Reading(SGD):
    """Overrides a known optimizer's `step`."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(p.grad.norm())
        super().step()
        return loss


def logged(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def logged_step(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return logged_step


class Assigned(SGD):
    """Its `step` is the inherited one within another function."""

    step = logged(SGD.step)


@pytest.mark.parametrize("kind", [Reading, Assigned], ids=lambda kind: kind.__name__)
def test_a_subclass_with_its_own_step_is_refused_with_the_option_that_accepts_it(run_on, kind):
    run_on(2, refuse, stage=3, kind=kind, says="whole_parameters=False.*whole_parameters=True")


def train_with_an_inherited_step(is_created_before: bool) -> None:
    """With gradient 1 and learning rate 1, one step changes each weight by 1."""
    with mock.patch.object(SGD, "step", without_hooks(SGD.step)):  # as before any SGD is created

        class Inherits(SGD):
            def __init__(self, params: Any) -> None:
                super().__init__(params, lr=1.0)

        if is_created_before:
            SGD([nn.Parameter(torch.zeros(1))])
        module = nn.Linear(4, 1)
        nn.init.zeros_(module.weight)
        optimizer = Inherits(module.parameters())
        SGD([nn.Parameter(torch.zeros(1))])
        engine = Engine(module, [optimizer], stage=2, offload="cpu")
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        engine.close()
    assert torch.equal(module.weight, torch.full((1, 4), -1.0))


@pytest.mark.parametrize("is_created_before", [False, True])
def test_a_subclass_that_inherits_its_step_is_accepted_also_if_it_is_the_first_to_be_created(run_on, is_created_before):
    run_on(2, train_with_an_inherited_step, is_created_before=is_created_before)


class Wrapping(Optimizer):
    """Shows the groups and the state of the optimizer that it wraps, like OrthoGrad of ``pytorch_optimizer``."""

    def __init__(self, params: Any, lr: float) -> None:
        self.wrapped = SGD(params, lr)
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}

    @property
    def param_groups(self) -> Any:
        return self.wrapped.param_groups

    @property
    def state(self) -> Any:
        return self.wrapped.state


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_that_shows_the_state_of_another_is_refused_with_advice(run_on, size):
    says = "wraps.*Use the wrapped optimizer itself"
    run_on(size, refuse, stage=2, kind=Wrapping, says=says, whole_parameters=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("kind", "says"), REFUSED)
def test_an_optimizer_that_needs_other_parameters_or_is_unknown_is_refused_by_name(run_on, stage, kind, says):
    run_on(2, refuse, stage=stage, kind=kind, says=says)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(("kind", "says"), REFUSED[:2])
def test_an_optimizer_known_to_need_other_parameters_is_refused_whatever_is_declared(run_on, kind, says, declared):
    run_on(2, refuse, stage=3, kind=kind, says=says, whole_parameters=declared)


class ByTheMean(SignDescent):
    """Subtracts the mean of each parameter's gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad - p.grad.mean(), alpha=0.001)


def warns(stage: int, declared: Any, says: str) -> None:
    module = OddModel()
    optimizer = by_the_mean(module)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Engine(module, [optimizer], stage=stage, whole_parameters=declared).close()
    said = [str(warning.message) for warning in seen if "is not checked" in str(warning.message)]
    assert len(said) == (rank() == 0) and all(says in each for each in said), said


@pytest.mark.parametrize(
    ("declared", "says"), [(False, "its update of one element"), (True, "its update of one parameter")]
)
def test_a_warning_says_what_is_at_risk_if_the_statement_about_an_unknown_optimizer_is_wrong(run_on, declared, says):
    run_on(2, warns, stage=3, declared=declared, says=says)


def is_always(name: str, parameter: Tensor) -> bool:
    return True


def by_the_mean(model: nn.Module) -> Optimizer:
    return make(ByTheMean, model)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("declared", [True, is_always], ids=["all", "by a predicate"])
def test_an_unknown_optimizer_declared_to_need_whole_parameters_trains_as_under_ddp(run_on, stage, declared):
    run_on(2, train_both, stage=stage, optimizer=by_the_mean, whole_parameters=declared)


def muon_and_sign_descent(model: nn.Module) -> Any:
    """A known optimizer of whole parameters, and an unknown elementwise one."""
    return Together(Muon(matrices(model), lr=0.02), SignDescent(others(model)))


def test_the_option_for_unknown_optimizers_has_no_effect_on_known_ones(run_on):
    run_on(2, train_both, stage=3, model=Layered, optimizer=muon_and_sign_descent, whole_parameters=False)


def sign_descent(model: nn.Module) -> Optimizer:
    return make(SignDescent, model)


def train_both(stage: int, optimizer: Any = sign_descent, model: Any = OddModel, **options: Any) -> None:
    recipe = Recipe(model, optimizer)
    same_runs(train_zero(recipe, stage, **options), train_ddp(recipe))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_unknown_elementwise_optimizer_trains_as_under_ddp_when_the_user_allows_it(run_on, stage):
    run_on(2, train_both, stage=stage, whole_parameters=False)


class Unasked(Optimizer):
    """Like many projects' own: its step has the argument ``closure``, as torch's base class asks, and ignores it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state["velocity"] = p.grad + 0.5 * state.get("velocity", 0)
            p.sub_(state["velocity"], alpha=self.param_groups[0]["lr"])


def unasked(model: nn.Module) -> Optimizer:
    return make(Unasked, model)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_an_optimizer_that_ignores_its_closure_trains_as_under_ddp(run_on, stage, offload):
    run_on(2, train_both, stage=stage, optimizer=unasked, whole_parameters=False, offload=offload)


class Replacing(Optimizer):
    """Assigns ``data`` instead of writing in place, and clears gradients itself, as some projects' optimizers do."""

    def __init__(self, params: Any, lr: float, clears: str = "") -> None:
        super().__init__(params, {"lr": lr})
        self.clears = clears

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.data = p.data - group["lr"] * p.grad.data
                if self.clears == "each":
                    p.grad = None
                elif self.clears == "halves":
                    p.grad = p.grad / 2
        if self.clears == "all":
            self.zero_grad()


def replace_and_clear(clears: str, stage: int, **options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1, bias=False))
    reference = copy.deepcopy(model)
    optimizers = [Replacing(each.parameters(), 0.1, clears) for each in (model, reference)]
    engine = Engine(model, optimizers[:1], stage=stage, **options)
    for turn in range(3):
        for each, optimizer in zip((model, reference), optimizers):
            each(torch.full((2, 7), 1.0 + turn)).square().sum().backward()  # adds to gradients that are left
            optimizer.step()
        for ours, theirs in zip(model.parameters(), reference.parameters()):
            assert (ours.grad is None) == (theirs.grad is None)
            torch.testing.assert_close(whole(ours).detach(), theirs.detach())
            if theirs.grad is not None:
                torch.testing.assert_close(whole(ours.grad), theirs.grad)
    engine.close()


@pytest.mark.behaviour("The numbers", "An optimizer's `step` that assigns `p.data`, or drops or replaces `p.grad`")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("clears", ["", "each", "all", "halves"])
@pytest.mark.parametrize("whole_parameters", [False, True])
def test_a_step_may_replace_data_and_gradients(run_on, stage, clears, whole_parameters):
    run_on(2, replace_and_clear, stage=stage, clears=clears, whole_parameters=whole_parameters)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_of_offloaded_states_may_replace_data(run_on, stage):
    run_on(2, replace_and_clear, stage=stage, clears="", whole_parameters=False, offload="cpu")


class Scaled(SignDescent):
    """Reads attributes that the project has set on its parameters: a scale, and a sum of gradients."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(getattr(p, "total", p.grad), alpha=group["lr"] * getattr(p, "scale", 1.0))


def scaled(scales: tuple[float, ...], has_totals: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 1, bias=False))
    for p, scale in zip(model.parameters(), scales):
        p.scale = scale
        if has_totals:
            p.total = torch.zeros_like(p)
    return model


def use_attributes_in_step(
    kind: type[SignDescent] = Scaled, scales: tuple[float, ...] = (), has_totals: bool = False, **options: Any
) -> None:
    model, reference = (scaled(scales, has_totals) for _ in range(2))
    optimizers = [kind(each.parameters(), 0.1) for each in (model, reference)]
    engine = Engine(model, optimizers[:1], **options)
    for turn in range(3):
        for each, optimizer in zip((model, reference), optimizers):
            each(torch.full((2, 7), 1.0 + turn)).square().sum().backward()
            for p in each.parameters():
                if has_totals:
                    p.total += p.grad
            optimizer.step()
            optimizer.zero_grad()
    engine.close()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.equal(ours, theirs)


@pytest.mark.behaviour("The numbers", "An optimizer's `step` that reads attributes of parameters, set by user code")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_step_finds_the_attributes_of_whole_parameters(run_on, stage, offload):
    run_on(
        2,
        use_attributes_in_step,
        scales=(0.1, 0.2, 0.3),
        has_totals=offload is None,
        stage=stage,
        offload=offload,
        whole_parameters=True,
    )


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_an_elementwise_step_finds_attributes_that_are_equal_and_is_refused_others(run_on, offload):
    options = {"stage": 2, "offload": offload, "whole_parameters": False}
    run_on(2, use_attributes_in_step, scales=(0.1,) * 3, **options)
    with pytest.raises(CaseFailed, match="'scale' of '0.weight' cannot be read in the optimizer's step"):
        run_on(2, use_attributes_in_step, scales=(0.1, 0.2, 0.3), **options)


class Counting(SignDescent):
    """Counts its updates in an attribute of each parameter."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.updates = getattr(p, "updates", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] / p.updates)


@pytest.mark.parametrize("whole_parameters", [True, False])
@pytest.mark.parametrize("offload", [None, "cpu", "nvme"])
def test_a_step_finds_the_attributes_that_an_earlier_one_has_set(run_on, offload, whole_parameters):
    run_on(2, use_attributes_in_step, kind=Counting, stage=2, offload=offload, whole_parameters=whole_parameters)


class Nested(Optimizer):
    """Keeps its averages in a dict within the state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            averages = self.state[p].setdefault("averages", {"slow": torch.zeros_like(p)})
            averages["slow"].lerp_(p.grad, 0.1)
            p.sub_(averages["slow"], alpha=self.param_groups[0]["lr"])


def refuse_nested() -> None:
    model = nn.Linear(7, 5)
    engine = Engine(model, [optimizer := Nested(model.parameters(), 0.1)], stage=2, whole_parameters=False)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    with pytest.raises(TypeError, match="Nested has tensors .* inside of the entry 'averages'.*whole_parameters=True"):
        optimizer.state_dict()
    engine.close(communicate=False)


def test_nested_states_by_element_are_refused_rather_than_saved_wrongly(run_on):
    run_on(2, refuse_nested)


class LearnerWithLBFGS(Learner):
    def configure_optimizers(self) -> Optimizer:
        return LBFGS(self.parameters())


def refuse_in_the_trainer(stage: int) -> None:
    trainer = make_trainer(f"zero{stage}")
    with pytest.raises((TypeError, ValueError), match=r"\bLBFGS\b.*strategy='ddp'"):
        trainer.fit(LearnerWithLBFGS())
    assert trainer.global_step == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_trainer_refuses_lbfgs_before_the_first_step(run_on, stage):
    run_on(2, refuse_in_the_trainer, stage=stage)


# ----------------------------------------------------------------------------------------------------------- one rank


class Matrices(nn.Module):
    """A model for Muon: matrices only, none of them square."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16, bias=False), nn.Linear(16, 5, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return (self.down(self.up(tokens.float() / 10).tanh()).sum(1) - targets.float().mean(1)).square().mean()


class Biased(Matrices):
    """The same with a bias, and without empty parameters, which Adafactor does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)


class Rows(nn.Module):
    """An embedding with sparse gradients; some rows are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8, sparse=True)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return (self.embed(tokens).sum(-1) - targets).square().mean()


class Unused(OddModel):
    """With a parameter that never gets a gradient, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(3))


def lbfgs(model: nn.Module) -> Optimizer:
    return LBFGS(model.parameters(), lr=0.1, max_iter=4)


def lbfgs_with_line_search(model: nn.Module) -> Optimizer:
    return LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")


def add_dense_and_sparse(optimizer: Any, stage: int | None) -> tuple[str, Tensor]:
    """Add a sparse gradient to a dense one, and step; return the error, or "stepped", and the weights."""
    torch.manual_seed(0)
    module = Rows()
    made = optimizer(module)
    engine = Engine(module, [made], stage=stage) if stage else None
    module.embed.weight.square().sum().backward()
    module(torch.tensor([[1, 2]]), torch.zeros(1)).backward()
    try:
        made.step()
        outcome = "stepped"
    except RuntimeError as error:
        outcome = str(error)
    if engine is not None:
        engine.close()
    return outcome, module.embed.weight.detach().clone()


def add_as_in_plain_torch() -> None:
    expected = add_dense_and_sparse(adagrad, None)
    for stage in (1, 2, 3):
        same_values(add_dense_and_sparse(adagrad, stage), expected, f"stage {stage}")
        assert "SparseAdam does not support dense gradients" in add_dense_and_sparse(sparse_adam, stage)[0]


def test_a_dense_gradient_plus_a_sparse_one_is_dense_as_in_plain_torch(run_on):
    run_on(1, add_as_in_plain_torch)


def adagrad(model: nn.Module) -> Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01)


def adafactor(model: nn.Module) -> Optimizer:
    return Adafactor(model.parameters(), lr=0.01)


def muon(model: nn.Module) -> Optimizer:
    return Muon(model.parameters(), lr=0.01)


def sparse_adam(model: nn.Module) -> Optimizer:
    return SparseAdam(model.parameters(), lr=0.01)


def spam(model: nn.Module) -> Optimizer:
    """Its state has two numbers that belong to no parameter, from the start."""
    from pytorch_optimizer import SPAM

    return SPAM(model.parameters(), lr=0.01, warmup_epoch=2, grad_accu_steps=1, update_proj_gap=3)


def madgrad(model: nn.Module) -> Optimizer:
    """Its state has a tensor that belongs to no parameter, from the first step."""
    from pytorch_optimizer import MADGRAD

    return MADGRAD(model.parameters(), lr=0.01)


ON_ONE_RANK = [
    (lbfgs, Unused),
    (muon, Matrices),
    (spam, OddModel),
    (madgrad, OddModel),
    *(
        pytest.param(optimizer, model, marks=pytest.mark.exhaustive)
        for optimizer, model in (
            (lbfgs_with_line_search, OddModel),
            (adafactor, Biased),
            (sign_descent, OddModel),
            (adam, OddModel),
        )
    ),
]


def train_plain(strategy: str, optimizer: Any, model: Any, folder: str) -> Any:
    """Train two epochs, and a third resumed from their checkpoint; return weights and the optimizer's state."""

    def learner() -> Learner:
        return Learner(model, optimizer)

    path = f"{folder}/{strategy}.ckpt"
    torch.manual_seed(0)
    module, trainer = learner(), make_trainer(strategy)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    resumed, second = learner(), make_trainer(strategy, max_epochs=3)
    second.fit(resumed, ckpt_path=path)
    saved = [in_order(each) for each in torch.load(path, weights_only=False)["optimizer_states"]]
    return [{name: value.clone() for name, value in each.state_dict().items()} for each in (module, resumed)], saved


def train_as_plain_lightning(optimizer: Any, model: Any, folder: str) -> None:
    expected = train_plain("auto", optimizer, model, folder)
    for stage in (1, 2, 3):
        same_values(train_plain(f"zero{stage}", optimizer, model, folder), expected, f"stage {stage}")


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The numbers", "On one rank, every optimizer but SparseAdam, also those that need several closure calls"
)
@pytest.mark.parametrize(("optimizer", "model"), ON_ONE_RANK, ids=lambda part: part.__name__)
def test_on_one_rank_optimizers_train_save_and_resume_as_in_plain_lightning(run_on, optimizer, model, tmp_path):
    run_on(1, train_as_plain_lightning, optimizer=optimizer, model=model, folder=str(tmp_path))


def train_halves(optimizer: Any, **options: Any) -> list[Any]:
    """Train two steps, and two more in a new module and optimizer that load the first ones' state.

    Args:
        options: of the engines; without options, there are none.

    Returns:
        After each half, the weights and the optimizer's state.
    """
    halves: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        module = OddModel()
        made = optimizer(module)
        engine = Engine(module, [made], **options) if options else None
        if halves:
            module.load_state_dict(halves[0][0])
            made.load_state_dict(copy.deepcopy(halves[0][1]))
        for step in range(2):
            made.zero_grad()
            module(*batch(step)).backward()
            made.step()
        halves.append(copy.deepcopy((module.state_dict(), in_order(made.state_dict()))))
        if engine is not None:
            engine.close()
            same_values(in_order(made.state_dict()), halves[-1][1], "after close")
    return halves


def in_order(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict whose states are in the order of their keys, among which are names."""
    return {**state, "state": dict(sorted(state["state"].items(), key=lambda item: str(item[0])))}


def keep_own_entries() -> None:
    for optimizer, key, count in ((spam, "total_step", 2), (madgrad, "k", torch.tensor([2]))):
        expected = train_halves(optimizer)
        assert expected[0][1]["state"][key] == count
        for stage in (1, 2, 3):
            same_values(train_halves(optimizer, stage=stage), expected, f"stage {stage}")
    for overlap in (False, True):
        offload = OffloadConfig(optimizer="cpu", overlap=overlap)
        offloaded = train_halves(madgrad, stage=3, offload=offload, whole_parameters=True)
        same_values(offloaded, expected, f"offloaded, overlap={overlap}")


def test_optimizer_state_that_belongs_to_no_parameter_is_used_saved_and_loaded(run_on):
    run_on(1, keep_own_entries)


def test_optimizer_state_that_belongs_to_no_parameter_trains_as_under_ddp(run_on):
    run_on(2, train_both, stage=3, optimizer=madgrad, whole_parameters=True)


def save_own_entries_in_shards(folder: str) -> None:
    strategies = {"file": "auto", "shards": ZeroStrategy(checkpoint="sharded")}
    for name, strategy in strategies.items():
        torch.manual_seed(0)
        trainer = make_trainer(strategy)
        trainer.fit(Learner(OddModel, madgrad))
        trainer.save_checkpoint(f"{folder}/{name}")
    states = [in_order(open_checkpoint(f"{folder}/{name}").checkpoint["optimizer_states"][0]) for name in strategies]
    same_values(walk(states[1], Tensor.clone), walk(states[0], Tensor.clone), "saved")
    resumed = []
    for name, strategy in (("file", "auto"), ("shards", "zero3")):
        resumed.append(Learner(OddModel, madgrad))
        make_trainer(strategy, max_epochs=3).fit(resumed[-1], ckpt_path=f"{folder}/{name}")
    same_values(resumed[1].state_dict(), resumed[0].state_dict(), "resumed")


def test_optimizer_state_that_belongs_to_no_parameter_is_saved_in_sharded_checkpoints(run_on, tmp_path):
    run_on(1, save_own_entries_in_shards, folder=str(tmp_path))


def write_states() -> None:
    """`optimizer.state[p]` is the optimizer's own dictionary, as in plain torch."""
    from lightning_zero.engine import Engine

    module = OddModel()
    optimizer = adam(module)
    engine = Engine(module, [optimizer], stage=3)
    weight = module.embed.weight
    assert weight not in optimizer.state
    module(*batch(0)).backward()
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].shape == weight.shape
    optimizer.state[weight]["mine"] = 1
    assert optimizer.state[weight]["mine"] == 1
    optimizer.state[weight] = {}
    assert optimizer.state[weight] == {}
    del optimizer.state[weight]
    assert weight not in optimizer.state
    engine.close()


def test_on_one_rank_the_state_of_a_parameter_may_be_replaced(run_on):
    run_on(1, write_states)


def refuse_in_pieces() -> None:
    refuse(stage=3, kind=LBFGS, says="offload", offload="cpu")


def test_lbfgs_is_refused_with_offload_on_one_rank_too(run_on):
    run_on(1, refuse_in_pieces)


def refuse_overrides(by_module: bool) -> None:
    from bitsandbytes.optim import AdamW8bit, GlobalOptimManager

    from lightning_zero.engine import Engine

    manager, model = GlobalOptimManager.get_instance(), Square()
    try:
        if by_module:
            manager.register_module_override(model.layers[0].linear, "weight", {"optim_bits": 32})
        else:
            manager.override_config(model.layers[0].linear.weight, "optim_bits", 32)
        with pytest.raises(TypeError, match="overrides in .*GlobalOptimManager.* such as AdamW32bit, or use"):
            Engine(model, [AdamW8bit(model.parameters())], stage=3)
        other = Square()
        Engine(other, [AdamW8bit(other.parameters())], stage=3).close()
    finally:
        manager.initialize()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("by_module", [False, True])
def test_bitsandbytes_overrides_of_individual_tensors_are_refused(run_on, by_module):
    run_on(2, refuse_overrides, by_module=by_module)


class Paged(SGD):
    is_paged = True


def refuse_paged() -> None:
    refuse(stage=3, kind=Paged, says="unified memory, which cannot be offloaded: leave offload out", offload="cpu")
    module = Square()
    Engine(module, [make(Paged, module)]).close()


def test_paged_states_are_refused_with_offload(run_on):
    run_on(1, refuse_paged)


def refuse_rounding() -> None:
    refuse(stage=3, kind=Adafactor, says="or leave state_dtype='bf16' out.$", state_dtype="bf16")


def test_offload_is_no_advice_for_optimizers_whose_states_cannot_be_rounded(run_on):
    run_on(2, refuse_rounding)
