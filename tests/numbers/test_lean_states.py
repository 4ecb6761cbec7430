"""``state_dtype="bf16"`` and ``masters=False``: bf16 states and parameters, updated in fp32, rounded stochastically."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, Rprop

from lightning_zero import ZeroStrategy
from lightning_zero.engine import Engine
from lightning_zero.engine.optim import updating
from tests.support.models import OddModel
from tests.support.trainer import Learner, fit
from tests.support.training import same_tensors, same_values
from tests.support.workers import rank, world_size

BF16 = torch.bfloat16
STATES: dict[str, Any] = {"state_dtype": "bf16"}
NO_MASTERS: dict[str, Any] = {"masters": False}
LEAN: dict[str, Any] = {"state_dtype": "bf16", "masters": False}
STEPS = 20


class Layer(nn.Module):
    """Two weights, whose gradients in a step are given patterns of quarters, so that any sum of them is exact."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.bias = nn.Parameter(torch.randn(rows))

    def forward(self, step: int) -> Tensor:
        loss = torch.zeros(())
        for number, parameter in enumerate(self.parameters()):
            pattern = torch.arange(parameter.numel()).mul(7).add(3 * number + 5 * step).remainder(9).sub(4) / 4
            loss = loss + (parameter * pattern.view(parameter.shape).to(parameter.dtype)).sum().float()
        return loss


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(7, 15), Layer(33, 9), Layer(3, 50)])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, step: int) -> Tensor:
        loss = self.scale.float() * (step % 3)
        for layer in self.layers:
            loss = loss + layer(step)
        return loss


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.01, weight_decay=0.1)


def of_another_package(name: str, parameters: Any) -> Optimizer:
    import pytorch_optimizer

    return getattr(pytorch_optimizer, name)(parameters, lr=0.01)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": adamw,
    "amsgrad": partial(Adam, lr=0.01, amsgrad=True),
    "fused": partial(AdamW, lr=0.01, fused=True),
    "foreach": partial(AdamW, lr=0.01, foreach=True),
    "SGD": partial(SGD, lr=0.01, momentum=0.9, nesterov=True),
    "Adagrad": partial(Adagrad, lr=0.01, initial_accumulator_value=0.1),
    "RMSprop": partial(RMSprop, lr=0.01, centered=True, momentum=0.5),
    "NAdam": partial(NAdam, lr=0.01),
    "Rprop": partial(Rprop, lr=0.01),
    "Lion": partial(of_another_package, "Lion"),
    "ScheduleFreeAdamW": partial(of_another_package, "ScheduleFreeAdamW"),
}


class Started:
    """A module under an engine, with small chunks, so that a parameter has several."""

    def __init__(
        self, optimizer: str = "AdamW", stage: int = 3, low: bool = False, engine_seed: int = 0, **options: Any
    ) -> None:
        updating.CHUNK_NUMEL = 64
        torch.manual_seed(0)
        self.module = Layers()
        if options.get("masters") is False or low:
            self.module = self.module.bfloat16()
        torch.manual_seed(engine_seed)
        self.optimizer = OPTIMIZERS[optimizer](self.module.parameters())
        self.engine = Engine(self.module, [self.optimizer], stage=stage, units=[Layer], **options)

    def train(self, steps: Any = range(STEPS), micro_batches: int = 1) -> Started:
        for step in steps:
            for _ in range(micro_batches):
                self.module(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def end(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        found = self.engine.full_state_dict(), self.engine.full_optimizer_state_dict(self.optimizer)
        self.engine.close()
        updating.CHUNK_NUMEL = 2**18
        return copy.deepcopy(found)


def trained(optimizer: str = "AdamW", stage: int = 3, micro_batches: int = 1, **options: Any) -> Any:
    return Started(optimizer, stage, **options).train(micro_batches=micro_batches).end()


OPTIONS = {"states": STATES, "no masters": NO_MASTERS, "lean": LEAN}


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The numbers", '`state_dtype="bf16"`, `masters=False`: the same bits on every stage and number of ranks'
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", OPTIONS)
def test_all_stages_and_numbers_of_ranks_give_the_same_bits(run_on, optimizer, options):
    reference = run_on(1, trained, optimizer=optimizer, stage=1, **OPTIONS[options])[0]
    dtypes = {value.dtype for state in reference[1]["state"].values() for value in state.values() if value.dim()}
    assert dtypes == {torch.float32 if options == "no masters" else BF16}
    everything = {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu"}
    on_disk = {"optimizer": "nvme", "parameters": "nvme", "path": "swap"}
    offloaded: list[Any] = [(1, 1, "cpu"), (2, 3, everything), (3, 2, "cpu"), (2, 3, on_disk)]
    for size, stage, offload in [*itertools.product((1, 2, 3), (1, 2, 3), [None]), *offloaded]:
        weights, state = run_on(size, trained, optimizer=optimizer, stage=stage, offload=offload, **OPTIONS[options])[0]
        same_values(weights, reference[0], f"weights of {size} ranks at stage {stage}")
        same_values(state, reference[1], f"state of {size} ranks at stage {stage}")


@pytest.mark.parametrize("options", OPTIONS)
def test_results_are_near_those_of_fp32_states_and_masters(run_on, options):
    """For weights below 4, bf16's spacing is at most 2**-6; a rounding's standard deviation is at most half of it."""
    (weights, _), (expected, _) = (
        run_on(2, trained, **each)[0] for each in (OPTIONS[options], {"low": options != "states"})
    )
    error = math.sqrt(STEPS) * 2**-7
    for name, value in expected.items():
        difference = weights[name].float() - value.float()
        assert difference.abs().max() < 4.5 * error, name
        assert difference.mean().abs() < 4 * error / math.sqrt(value.numel()), name


def test_another_seed_gives_other_bits(run_on):
    (weights, _), (others, _) = (run_on(1, trained, engine_seed=seed, **LEAN)[0] for seed in (0, 1))
    assert any(not torch.equal(weights[name], others[name]) for name in weights)


def decay_a_moment() -> float:
    """Adam's second moment after one gradient of 1 and many of 0, as the mean of equal elements."""
    module = nn.Linear(64, 64, bias=False)
    optimizer = Adam(module.parameters(), lr=0.0)
    engine = Engine(module, [optimizer], stage=2, state_dtype="bf16")
    for step in range(301):
        module.weight.grad = None
        (module.weight.sum() if step == 0 else 0 * module.weight.sum()).backward()
        optimizer.step()
    state = engine.full_optimizer_state_dict(optimizer)["state"][0]
    assert state["step"] == 301
    engine.close()
    return state["exp_avg_sq"].double().mean().item() / (0.001 * 0.999**300)


def test_the_second_moment_decays_where_rounding_to_nearest_would_freeze_it(run_on):
    """Each of 300 roundings of 4,096 elements has a relative standard deviation of at most 2**-8 / 2."""
    error = math.sqrt(300 / 4096) * 2**-9
    assert all(abs(ratio - 1) < 4 * error for ratio in run_on(2, decay_a_moment))


class Subclass(AdamW):
    """Calls its base class's ``step``, which torch also wraps with hooks once an AdamW has been made."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def step_by_a_subclass() -> None:
    assert AdamW([nn.Parameter(torch.ones(1))])
    found = trained(**LEAN)
    OPTIMIZERS["subclass"] = partial(Subclass, lr=0.01, weight_decay=0.1)
    same_values(trained("subclass", whole_parameters=False, **LEAN), found, "a subclass")


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_calls_its_base_classs_step_updates_once(run_on, size):
    run_on(size, step_by_a_subclass)


def unfreeze_and_clip() -> None:
    """A bf16 parameter unfrozen in mid-run gets no master either, and gradients can be clipped."""
    started = Started(stage=3, **LEAN)
    parameters = list(started.module.parameters())
    parameters[0].requires_grad_(False)
    for step in range(4):
        if step == 2:
            parameters[0].requires_grad_(True)
        before = parameters[0].detach().clone()
        started.module(step).backward()
        norm = nn.utils.clip_grad_norm_(started.module.parameters(), 0.5)
        assert norm > 1 and nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None) < 0.505
        started.optimizer.step()
        started.optimizer.zero_grad()
        assert torch.equal(parameters[0].detach() + 0, before + 0) == (step < 2)
    assert started.engine.masters_by_name() == {}
    numel = sum(bucket.layout.padded_numel for bucket in started.engine.buckets)
    assert started.engine.report().at_rest["parameters"] == 2 * numel // world_size()
    started.end()


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_without_masters_can_be_unfrozen_and_their_gradients_clipped(run_on, size):
    run_on(size, unfreeze_and_clip)


# -- gradients and accumulation ---------------------------------------------------------------------------------------


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4096, dtype=BF16))

    def forward(self, x: float) -> Tensor:
        return (self.weight * x).sum()


def accumulate(stage: int) -> Tensor:
    """The gradient after one micro-batch of 1 and 64 of 2**-9, of which bf16 would lose every one: 1 + 1/8."""
    module = Weight()
    optimizer = SGD(module.parameters(), lr=1.0)
    engine = Engine(module, [optimizer], stage=stage, masters=False)
    for micro_batch in range(65):
        module(1.0 if micro_batch == 0 else 2.0**-9).backward()
        nbytes = 2 if micro_batch == 0 else 4
        assert engine.report().at_rest["gradients"] == nbytes * 4096 // world_size()
    optimizer.step()
    weight = engine.full_state_dict()["weight"]
    engine.close()
    return weight


@pytest.mark.parametrize(("stage", "size"), [(1, 1), (1, 2), (2, 2), (3, 2)])
def test_small_gradients_of_micro_batches_add_up(run_on, stage, size):
    assert all((weight == -1.125).all() for weight in run_on(size, accumulate, stage=stage))


def accumulated(stage: int, unsynchronised: int, **options: Any) -> Any:
    """Train on three micro-batches a step, whose sum is exact in fp32 and not in bf16, the first ones in no_sync."""
    started = Started(stage=stage, **LEAN, **options)
    for step in range(4):
        for micro_batch, scale in enumerate((1.0, 2.0**-9, 2.0**-11)):
            with started.engine.no_sync() if micro_batch < unsynchronised else nullcontext():
                (started.module(step) * scale).backward()
        started.optimizer.step()
        started.optimizer.zero_grad()
    return started.end()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("unsynchronised", [0, 1, 2, 3])
def test_all_stages_and_numbers_of_ranks_give_the_same_bits_with_accumulation(run_on, unsynchronised):
    reference = run_on(1, accumulated, stage=3, unsynchronised=unsynchronised)[0]
    within: dict[str, Any] = {"shard_within": 2}
    offloaded: dict[str, Any] = {"offload": {"optimizer": "cpu", "gradients": "cpu"}}
    settings: list[tuple[int, int, dict[str, Any]]] = [(2, 1, {}), (2, 2, {}), (2, 3, offloaded), (4, 3, within)]
    for size, stage, options in settings:
        if unsynchronised == 3 and stage == 1:
            continue  # ranks then update with their own gradients, as under DDP
        found = run_on(size, accumulated, stage=stage, unsynchronised=unsynchronised, **options)[0]
        same_values(found, reference, f"{size} ranks at stage {stage} with {options}")


def accumulate_and_resume() -> None:
    """Gradients are accumulated with the same bits after a restart."""
    whole = Started(**LEAN).train(micro_batches=3).end()
    first = Started(**LEAN).train(range(10), micro_batches=3).end()
    later = Started(**LEAN)
    later.module.load_state_dict(first[0])
    later.optimizer.load_state_dict(first[1])
    same_values(later.train(range(10, STEPS), micro_batches=3).end(), whole, "the resumed run")


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("size", [1, 2])
def test_accumulated_gradients_have_the_same_bits_after_a_restart(run_on, size):
    run_on(size, accumulate_and_resume)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def resumed(saved: Any, stage: int, **options: Any) -> Any:
    later = Started(stage=stage, engine_seed=99, **options)  # the checkpoint's seed takes precedence
    later.module.load_state_dict(saved[0])
    later.optimizer.load_state_dict(saved[1])
    return later.train(range(STEPS // 2, STEPS)).end()


def half(stage: int, **options: Any) -> Any:
    return Started(stage=stage, **options).train(range(STEPS // 2)).end()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("options", ["states", "lean"])
def test_a_run_resumed_on_other_stages_and_ranks_equals_an_uninterrupted_one(run_on, options):
    chosen = OPTIONS[options]
    whole = run_on(1, trained, **chosen)[0]
    saved = run_on(2, half, stage=2, **chosen)[0]
    for size, stage, more in ((1, 1, {}), (2, 3, {"offload": "cpu"}), (3, 3, {}), (3, 1, {})):
        found = run_on(size, resumed, saved=saved, stage=stage, **chosen, **more)[0]
        same_values(found, whole, f"{size} ranks at stage {stage}")


def load_into_other_dtypes() -> None:
    """States of bf16 and fp32 load into each other, and into plain optimizers."""
    lean, full = (Started(low=True, **options).train(range(10)).end() for options in (LEAN, {}))
    for saved, options in itertools.product((lean, full), (LEAN, STATES, NO_MASTERS, {})):
        other = Started(low=True, **options)
        other.module.load_state_dict(saved[0])
        other.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        expected = BF16 if "state_dtype" in options else torch.float32
        _, state = other.end()
        for number, entries in state["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                value = saved[1]["state"][number][key].to(expected)
                same_tensors({key: entries[key]}, {key: value}, bound=0)
            assert entries["step"] == 10 and entries["step"].dtype == torch.float32
    plain = Layers()
    optimizer = adamw(plain.parameters())
    plain.load_state_dict(lean[0])
    optimizer.load_state_dict(lean[1])
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    plain(1).backward()
    optimizer.step()


@pytest.mark.parametrize("size", [1, 2])
def test_states_in_bf16_and_fp32_load_into_each_other_and_into_plain_optimizers(run_on, size):
    run_on(size, load_into_other_dtypes)


def step_after_the_end() -> None:
    module = Layers()
    optimizer = adamw(module.parameters())
    engine = Engine(module, [optimizer], stage=1, **STATES)
    for index in range(2):
        module(index).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    module(2).backward()
    optimizer.step()


def test_the_optimizer_continues_without_the_engine(run_on):
    run_on(2, step_after_the_end)


def resume_with_a_trainer(folder: Path, checkpoint: str, precision: str, options: dict[str, Any]) -> None:
    """A fit that is resumed after the first of two epochs equals an uninterrupted one; DDP continues it, too."""
    from tests.numbers.test_checkpoints import SaveAfter

    learner = partial(Learner, OddModel, adam_of)
    path = folder / "saved.ckpt"

    def strategy() -> ZeroStrategy:
        return ZeroStrategy(stage=3, checkpoint=checkpoint, **options)

    saving = SaveAfter(5, path, at_epoch_end=True)
    whole = fit(strategy(), learner, callbacks=[saving], precision=precision)
    found = fit(strategy(), learner, ckpt_path=str(path), precision=precision)
    same_tensors(found.weights, whole.weights, bound=0)
    for other in ["zero2", *(["ddp"] if checkpoint == "full" else [])]:
        assert len(fit(other, learner, ckpt_path=str(path), precision=precision).losses) == 5
    fit("zero1", learner, callbacks=[SaveAfter(5, folder / "other.ckpt", at_epoch_end=True)], precision=precision)
    assert len(fit(strategy(), learner, ckpt_path=str(folder / "other.ckpt"), precision=precision).losses) == 5


def adam_of(module: nn.Module) -> Optimizer:
    return adamw(module.parameters())


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The Trainer", '`state_dtype="bf16"`, `masters=False`: checkpoints load with other options, and under DDP'
)
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
@pytest.mark.parametrize(("precision", "options"), [("bf16-true", LEAN), ("bf16-mixed", STATES)])
def test_a_trainers_run_resumes_exactly_and_under_other_strategies(run_on, tmp_path, checkpoint, precision, options):
    run_on(2, resume_with_a_trainer, folder=tmp_path, checkpoint=checkpoint, precision=precision, options=options)


# -- what is refused --------------------------------------------------------------------------------------------------


def refuse(says: str, dtype: torch.dtype = BF16, optimizer: Any = None, codes: bool = False, **options: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    if codes:
        module.codes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    before = copy.deepcopy(module.state_dict())
    made = (optimizer or SGD)(module.parameters(), lr=0.1)
    with pytest.raises((TypeError, ValueError), match=says):
        Engine(module, [made], **options)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    same_values(module.state_dict(), before, "the module")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        {**NO_MASTERS, "dtype": torch.float16, "says": "masters=False updates bf16 parameters .* are in float16"},
        {**NO_MASTERS, "dtype": torch.float32, "says": "are in float32. Write precision='bf16-true'"},
        {**NO_MASTERS, "dtype": torch.float32, "codes": True, "says": "the module's parameters are in float32. Write"},
        {**STATES, "optimizer": Adafactor, "says": "Adafactor cannot be used with state_dtype='bf16'"},
        {**NO_MASTERS, "optimizer": Adafactor, "says": "Adafactor cannot be used with masters=False"},
    ],
    ids=str,
)
def test_what_cannot_be_rounded_is_refused_before_anything_is_changed(run_on, size, case):
    run_on(size, refuse, **case)


def refuse_on_one_rank(options: dict[str, Any], says: str) -> None:
    module = nn.Linear(4, 4).to(BF16)
    expected = rf"module differs between ranks: weight .* {says} on rank 1. .* with the same options"
    with pytest.raises(ValueError, match=expected):
        Engine(module, [adamw(module.parameters())], **(options if rank() else {}))


@pytest.mark.parametrize(
    ("options", "says"),
    [(NO_MASTERS, "with masters=False"), (LEAN, "with state_dtype='bf16' and masters=False")],
    ids=str,
)
def test_ranks_with_different_options_get_an_error(run_on, options, says):
    run_on(2, refuse_on_one_rank, options=options, says=says)


def test_another_state_dtype_is_refused():
    with pytest.raises(ValueError, match="state_dtype='fp8' must be 'bf16' or None"):
        ZeroStrategy(state_dtype="fp8")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, inputs: Tensor, scale: float) -> Tensor:
        return self.layer(inputs) * scale


def accumulate_on_one_rank(stage: int) -> tuple[torch.dtype, list[float]]:
    """Accumulate a small gradient on rank 0 only; the mean with the large one has no exact value in bf16."""
    module = Scaled().to(BF16)
    engine = Engine(module, [SGD(module.parameters(), lr=1.0)], stage=stage, masters=False, units=[nn.Linear])
    inputs = torch.ones(1, 64, dtype=BF16)
    with engine.no_sync():
        if rank() == 0:
            module(inputs, 2.0**-8).sum().backward()
    module(inputs, 1.0).sum().backward()
    local: Any = module.layer.weight.grad
    return local.local.dtype, local.local.float().unique().tolist()


def test_ranks_agree_on_the_dtype_of_gradients_that_only_one_has_accumulated(run_on: Any) -> None:
    results = run_on(2, accumulate_on_one_rank, stage=1)
    assert results == [(torch.float32, [1 + 2.0**-9])] * 2
