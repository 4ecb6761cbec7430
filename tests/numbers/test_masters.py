"""fp32 masters of low-precision parameters: unfrozen in mid-run, loaded, or with third-party optimizers."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, Optimizer

from lightning_zero.engine import Engine
from lightning_zero.engine.optim.kinds import placed
from lightning_zero.engine.tensor.sharded_tree import on_cpu, on_meta, whole
from tests.numbers.test_bf16 import Weight
from tests.support.workers import rank, world_size

# A quarter of bf16's spacing just below 1: one such update is lost in rounding, 16 of them are not.
TINY = {torch.bfloat16: 2.0**-10, torch.float16: 2.0**-13}


def late(stage: int, dtype: torch.dtype) -> tuple[nn.Module, Any, Any]:
    """One weight that is frozen when the engine is created, and one that trains."""
    module = nn.ModuleDict({"early": Weight(dtype, 1.0), "late": Weight(dtype, 1.0)})
    module["late"].linear.weight.requires_grad_(False)
    optimizer = SGD(module.parameters(), lr=1.0)
    return module, optimizer, Engine(module, [optimizer], stage=stage)


def held(engine: Any) -> int:
    return engine.report().at_rest["parameters"]


def step(module: nn.Module, optimizer: Any, x: float) -> None:
    (module["early"](x) + module["late"](x)).backward()
    optimizer.step()
    optimizer.zero_grad()


def unfreeze() -> None:
    size = world_size()
    for dtype, stage in itertools.product(TINY, (1, 2, 3)):
        tiny = TINY[dtype]
        module, optimizer, engine = late(stage, dtype)
        frozen, before = module["late"].linear.weight, held(engine)
        step(module, optimizer, tiny)
        assert held(engine) == before, "what is frozen has no master"
        frozen.requires_grad_(True)
        for _ in range(16):
            step(module, optimizer, tiny)
        # There is a new master of four bytes an element; at stage 3 it replaces the shard.
        assert held(engine) == before + (2 if stage == 3 and size > 1 else 4) * 64 // size
        weights, masters = engine.full_state_dict(), engine.masters_by_name()
        assert weights["late.linear.weight"].dtype == dtype
        assert (weights["late.linear.weight"] == 1 - 16 * tiny).all(), weights["late.linear.weight"]
        assert torch.equal(masters["late.linear.weight"], torch.full((64, 1), 1 - 16 * tiny))
        assert torch.equal(masters["early.linear.weight"], torch.full((64, 1), 1 - 17 * tiny))
        engine.close()
        assert (frozen == 1 - 16 * tiny).all()


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The numbers", "A low-precision parameter unfrozen in mid-run gets an fp32 master")
@pytest.mark.parametrize("size", [1, 2])
def test_small_updates_add_up_in_a_parameter_that_was_unfrozen_in_mid_run(run_on, size):
    run_on(size, unfreeze)


def resume_unfrozen() -> None:
    """A run resumed from weights and masters continues with the masters' precision, also for frozen parameters."""
    tiny = TINY[torch.bfloat16]
    for stage in (1, 3):
        module, optimizer, engine = late(stage, torch.bfloat16)
        saved = {
            "early.linear.weight": torch.full((64, 1), 1 - tiny),
            "late.linear.weight": torch.full((64, 1), 1 - tiny),
        }
        with torch.no_grad():
            # Changed since the masters were saved (by averaging weights, say): the parameter's value takes precedence.
            module["early"].linear.weight[5] = 0.5
            module["late"].linear.weight[60] = 0.25
        engine.load_masters(saved)
        masters = engine.masters_by_name()
        saved["early.linear.weight"][5], saved["late.linear.weight"][60] = 0.5, 0.25
        for name, value in saved.items():
            assert torch.equal(masters[name], value), f"{name}: {masters[name]}"
        engine.close()


@pytest.mark.parametrize("size", [1, 2])
def test_loaded_masters_restore_full_precision_except_where_parameters_have_changed(run_on, size):
    run_on(size, resume_unfrozen)


def save_a_foreign_optimizer() -> None:
    module, optimizer, engine = late(3, torch.bfloat16)
    foreign = Adagrad([nn.Parameter(torch.ones(3))])
    state = engine.full_optimizer_state_dict(foreign, leaf=on_cpu if rank() == 0 else on_meta)
    assert torch.equal(state["state"][0]["sum"], torch.zeros(3))
    engine.close()


def test_an_optimizer_that_the_engine_was_not_given_keeps_its_own_state_dict(run_on):
    run_on(2, save_a_foreign_optimizer)


def load_beside_a_foreign_parameter(**foreign: Any) -> None:
    """Load the state of a parameter that is not the module's, saved in fp32 on the CPU."""

    def make(**options: Any) -> tuple[nn.Module, nn.Parameter, SGD]:
        module, other = nn.Linear(3, 3), nn.Parameter(torch.ones(3, **options))
        return module, other, SGD([*module.parameters(), other], lr=1.0, momentum=0.9)

    module, other, saved = make()
    (module(other).sum() + other.sum()).backward()
    saved.step()
    _, expected, plain = make(**foreign)
    plain.load_state_dict(saved.state_dict())
    module, other, optimizer = make(**foreign)
    engine = Engine(module, [optimizer], stage=3)
    optimizer.load_state_dict(saved.state_dict())
    state, expected_state = optimizer.state[other]["momentum_buffer"], plain.state[expected]["momentum_buffer"]
    assert (state.dtype, state.device) == (expected_state.dtype, expected_state.device)
    assert state.is_meta or torch.equal(state, expected_state)
    whole = optimizer.state_dict()["state"]
    assert torch.equal(whole[0]["momentum_buffer"] + 0, saved.state_dict()["state"][0]["momentum_buffer"])
    del optimizer.state[other]  # closing would move it, but the meta device has no values
    engine.close()


@pytest.mark.parametrize("foreign", [{"dtype": torch.float64}, {"device": "meta"}], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_the_state_of_a_foreign_parameter_is_loaded_to_its_dtype_and_device_as_by_torch(run_on, size, foreign):
    run_on(size, load_beside_a_foreign_parameter, **foreign)


def load_a_mismatch() -> None:
    module, optimizer, engine = late(3, torch.bfloat16)
    step(module, optimizer, 1.0)
    before = optimizer.state_dict()
    [group] = before["param_groups"]
    halves = [{**group, "params": [0]}, {**group, "params": [1]}]
    buffer = torch.zeros(64, 1)
    refused, kept = {"state": {0: {"momentum_buffer": buffer}}, "param_groups": halves}, weakref.ref(buffer)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(refused)
    del refused, buffer
    gc.collect()
    assert kept() is None, "what could not be loaded is kept alive"
    assert optimizer.state_dict() == before
    engine.close()


def test_a_state_dict_with_different_groups_is_refused_by_torch_and_not_kept_alive(run_on):
    run_on(2, load_a_mismatch)


class Averaging(Optimizer):
    """Keeps one number for each element under a name that torch's optimizers use for a count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("mu", torch.zeros_like(p)).mul_(0.5).add_(p.grad)
            p.sub_(self.state[p]["mu"])


def load_an_entry_that_is_called_as_a_count() -> None:
    module = nn.Linear(3, 5)
    optimizer = Averaging(module.parameters())
    engine = Engine(module, [optimizer], stage=2, whole_parameters=False)
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    for state in engine.full_optimizer_state_dict(optimizer)["state"].values():
        assert torch.equal(state["mu"], torch.full_like(state["mu"], 1.5))
    engine.close()


def test_an_elementwise_state_entry_may_have_the_name_of_a_count(run_on):
    run_on(2, load_an_entry_that_is_called_as_a_count)


def step_after_a_state_dict_that_failed() -> None:
    module = nn.Linear(3, 5)
    optimizer = SGD(module.parameters(), lr=1.0, momentum=0.5)

    def refuse(*_: Any) -> None:
        raise RuntimeError("not now")

    handle = optimizer.register_state_dict_post_hook(refuse)
    engine = Engine(module, [optimizer], stage=2)
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="not now"):
        optimizer.state_dict()
    handle.remove()
    optimizer.step()
    for state in optimizer.state_dict()["state"].values():
        assert torch.equal(state["momentum_buffer"], torch.full_like(state["momentum_buffer"], 1.5))
    engine.close()


def step_after_state_dicts_of_a_wrapper() -> None:
    module = nn.Linear(3, 5)
    optimizer = SGD(module.parameters(), lr=1.0, momentum=0.5)
    wrapper = LightningOptimizer(optimizer)  # as ``self.optimizers()`` returns
    engine = Engine(module, [optimizer], stage=2)
    for expected in (1.0, 1.5, 1.75):
        optimizer.zero_grad()
        module(torch.ones(3)).sum().backward()
        optimizer.step()
        for state in wrapper.state_dict()["state"].values():
            assert torch.equal(state["momentum_buffer"], torch.full_like(state["momentum_buffer"], expected))
    engine.close()


@pytest.mark.parametrize("size", [1, 2])
def test_the_state_dict_of_lightnings_wrapper_is_the_optimizers(run_on, size):
    run_on(size, step_after_state_dicts_of_a_wrapper)


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_keeps_its_state_when_a_state_dict_hook_raises(run_on, size):
    run_on(size, step_after_a_state_dict_that_failed)


def replace_all_state(filled: bool, offload: str | None) -> None:
    """As in plain torch, after `optimizer.state = ...`, the next step creates state or continues from the given one."""
    found = []
    for stage in (None, 1, 3):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        optimizer = Adam(module.parameters(), lr=0.1)
        engine = Engine(module, [optimizer], stage=stage, offload=offload) if stage is not None else None
        for number in range(4):
            module(torch.full((1, 3), 1.0 + number)).sum().backward()
            if number == 2:
                given = (
                    {
                        p: {
                            "step": torch.tensor(5.0),
                            "exp_avg": torch.ones(p.shape),
                            "exp_avg_sq": torch.ones(p.shape),
                        }
                        for p in module.parameters()
                    }
                    if filled
                    else {}
                )
                optimizer.state = defaultdict(dict, given)
                assert len(optimizer.state_dict()["state"]) == len(given)
            optimizer.step()
            optimizer.zero_grad()
        states = [optimizer.state[p] for p in module.parameters()]
        found.append([{key: whole(value).clone() for key, value in state.items()} for state in states])
        assert len(optimizer.state_dict()["state"]) == 4
        if engine is not None:
            engine.close()
        found[-1] += [{"values": p.detach().clone()} for p in module.parameters()]
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_all_state_of_an_optimizer_may_be_replaced_as_in_plain_torch(run_on, size, filled, offload):
    run_on(size, replace_all_state, filled=filled, offload=offload)


def reset_by_hand(in_one_loop: bool, **options: Any) -> None:
    """Adam begins anew, as in continual learning; sizes at which several parameters share a master."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    reference = copy.deepcopy(module)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (module, reference)]
    engine = Engine(module, optimizers[:1], stage=2, **options)
    for each, optimizer in zip((module, reference), optimizers):
        for turn in range(4):
            optimizer.zero_grad()
            each(torch.linspace(0, 1 + turn, 64).view(2, 32)).square().mean().backward()
            optimizer.step()
            if turn != 1:
                continue
            states = [optimizer.state[p] for p in each.parameters()]
            with torch.no_grad():
                for names in [("step", "exp_avg", "exp_avg_sq")] if in_one_loop else [("step",), ("exp_avg",)]:
                    for state in states:
                        for name in names:
                            state[name].zero_()
    for ours, theirs in zip(module.parameters(), reference.parameters()):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(*(whole(o.state[p][name]) for o, p in zip(optimizers, (ours, theirs))))
        torch.testing.assert_close(whole(ours).detach(), theirs.detach())
    engine.close()


@pytest.mark.parametrize("in_one_loop", [True, False])
@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}], ids=["", "offload"])
def test_states_may_be_reset_in_place_one_after_another(run_on, in_one_loop, options):
    run_on(2, reset_by_hand, in_one_loop=in_one_loop, **options)


def load_a_wider_state(optimizer: Any, stage: int) -> None:
    """Continue in fp32 from an optimizer's state of a float64 run, in plain torch and with the engine."""

    def make(dtype: torch.dtype) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
        return module, optimizer(module.parameters(), lr=0.1)

    def train(module: nn.Module, made: Optimizer) -> None:
        for number in range(2):
            made.zero_grad()
            module(torch.full((1, 3), 1.0 + number, dtype=module[0].weight.dtype)).square().sum().backward()  # type: ignore[index,operator,union-attr]
            made.step()

    _, wide = made = make(torch.float64)
    train(*made)
    saved, found = wide.state_dict(), []
    for is_ours in (False, True):
        module, narrow = make(torch.float32)
        engine = Engine(module, [narrow], stage=stage) if is_ours else None
        narrow.load_state_dict(copy.deepcopy(saved))
        states = [copy.deepcopy(narrow.state_dict()["state"])]
        train(module, narrow)
        states.append(copy.deepcopy(narrow.state_dict()["state"]))
        if engine is not None:
            engine.close()
        found.append((states, {name: value.detach() for name, value in module.state_dict().items()}))
    torch.testing.assert_close(found[1], found[0])  # dtypes, too


@pytest.mark.parametrize(("optimizer", "stage"), [(Adam, 1), (Adam, 3), (Adafactor, 1), (Adafactor, 3)])
def test_state_saved_in_float64_is_loaded_in_the_dtype_of_fp32_masters_as_by_torch(run_on, optimizer, stage):
    run_on(2, load_a_wider_state, optimizer=optimizer, stage=stage)


class Counting(SGD):
    """Saves and loads an attribute of its own, and keeps a list of its parameters."""

    total = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total = state_dict["total"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "total"})
        self.trained = [p for group in self.param_groups for p in group["params"]]


def load_attributes() -> None:
    module = nn.Linear(3, 5)
    optimizer = Counting(module.parameters(), lr=1.0, momentum=0.5)
    engine = Engine(module, [optimizer], stage=2)
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.total = 7
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.total = 0
    optimizer.load_state_dict(saved)
    assert optimizer.total == 7
    for trained, own, parameter in zip(optimizer.trained, optimizer.param_groups[0]["params"], module.parameters()):
        assert trained is own is parameter
    optimizer.step()
    for state in optimizer.state_dict()["state"].values():
        assert torch.equal(state["momentum_buffer"], torch.full_like(state["momentum_buffer"], 1.5))
    engine.close()


@pytest.mark.parametrize("size", [1, 2])
def test_attributes_that_an_optimizers_own_load_state_dict_sets_are_kept(run_on, size):
    run_on(size, load_attributes)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
@pytest.mark.parametrize("key", ["step", "mu_product"])
def test_counts_are_loaded_with_the_device_and_dtype_that_torch_gives_them(key, options):
    parameter, count = nn.Parameter(torch.empty(4, device="meta")), torch.tensor(3, dtype=torch.int64)
    if key != "step":
        count = count.float()
    expected = Optimizer._process_value_according_to_param_policy(
        parameter, count, 0, [{"params": [0], **options}], key
    )
    found = placed(key, count, {"params": [parameter], **options}, parameter.device)
    assert (found.device, found.dtype) == (expected.device, expected.dtype)
    assert found is not count


def read_what_was_loaded() -> None:
    module = nn.Linear(3, 5)
    optimizer = SGD(module.parameters(), lr=1.0, momentum=0.5)
    engine = Engine(module, [optimizer], stage=2)
    seen = []

    def read(own: Optimizer) -> None:
        assert own.param_groups[0]["params"][0] is module.weight
        seen.append(whole(own.state[module.weight]["momentum_buffer"]).clone())

    optimizer.register_load_state_dict_post_hook(read)
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(seen) == 2 and all(torch.equal(each, torch.ones(5, 3)) for each in seen)
    optimizer.step()
    assert torch.equal(whole(optimizer.state[module.weight]["momentum_buffer"]), torch.full((5, 3), 1.5))
    engine.close()


def test_a_hook_after_loading_finds_the_state_that_was_loaded(run_on):
    run_on(2, read_what_was_loaded)
