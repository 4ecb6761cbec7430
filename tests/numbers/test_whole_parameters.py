"""Optimizers that need whole matrices train as under DDP, bit for bit: each matrix has one owner, which updates it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adafactor, AdamW

import lightning_zero
from tests.support import whole
from tests.support.trainer import Learner, fit
from tests.support.training import (
    CLOSE,
    Recipe,
    batch,
    prepare,
    same_on_every_rank,
    same_runs,
    same_tensors,
    same_values,
    train_ddp,
    train_zero,
)
from tests.support.whole import Layered
from tests.support.workers import rank, world_size

OPTIMIZERS = [
    whole.muon_and_adamw,
    whole.adafactor,
    whole.adafactor_with_momentum,
    whole.transformers_adafactor,
    whole.muon_of_mixed_groups,
    whole.soap,
    whole.shampoo,
    whole.lamb,
    whole.lars,
    whole.came,
    whole.lion,
    whole.cautious_lion,
]


LOW_BIT = [
    whole.adamw_8bit_of_torchao,
    whole.adamw_4bit_of_torchao,
    whole.adamw_8bit_of_bitsandbytes,
    whole.lion_8bit_of_bitsandbytes,
]


def model_for(optimizer: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    return whole.wide if optimizer in LOW_BIT else Layered


def train_both(stage: int, optimizer: Callable[[nn.Module], Any], steps: int = 20, **options: Any) -> None:
    recipe = Recipe(model_for(optimizer), optimizer, steps=steps)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its update for each shape
        reference, run = train_ddp(recipe), train_zero(recipe, stage, **options)
    same_runs(run, reference)
    same_on_every_rank(run.weights)
    assert not torch.equal(run.weights["layers.0.up.weight"], prepare(recipe)[0].layers[0].up.weight)


@pytest.mark.exhaustive(but=2)
@pytest.mark.behaviour(
    "The numbers",
    "Muon, Adafactor, SOAP, Shampoo, LAMB, LARS, CAME; 8-bit and 4-bit AdamW and Lion; Muon with AdamW, as one or two",
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS + LOW_BIT, ids=lambda optimizer: optimizer.__name__)
def test_whole_parameter_optimizers_equal_ddp_over_20_steps(run_on, stage, optimizer):
    run_on(2, train_both, stage=stage, optimizer=optimizer)


def clip_value(parameters: Any) -> None:
    nn.utils.clip_grad_value_(parameters, 1e-3)


ON_DISK = {"optimizer": "nvme", "path": "swap"}

CROSSED: list[Any] = [
    pytest.param(Recipe(Layered, whole.lars, micro_batches=3), {}, id="accumulation"),
    pytest.param(Recipe(Layered, whole.muon_and_adamw, clip=clip_value), {}, id="clipping"),
    pytest.param(Recipe(Layered, whole.adafactor), {"offload": "cpu"}, id="offload"),
    pytest.param(Recipe(Layered, whole.muon_and_adamw), {"offload": "cpu", "overlap": False}, id="offload in step"),
    pytest.param(Recipe(Layered, whole.muon_of_mixed_groups), {"offload": "cpu"}, id="offload of mixed groups"),
    pytest.param(Recipe(Layered, whole.soap), {"offload": "cpu"}, id="offload of counts in groups"),
    pytest.param(Recipe(Layered, whole.adafactor), {"offload": ON_DISK}, id="offload to a disk"),
    pytest.param(Recipe(Layered, whole.muon_of_mixed_groups), {"offload": ON_DISK}, id="mixed groups on a disk"),
    pytest.param(Recipe(Layered, whole.soap), {"offload": ON_DISK}, id="counts in groups on a disk"),
    pytest.param(Recipe(Layered, whole.adafactor), {"unit_numel": 0}, id="single units"),
    pytest.param(Recipe(Layered, whole.adafactor), {"bucket_numel": 300}, id="split units"),
    pytest.param(Recipe(Layered, whole.adafactor), {"activation_checkpointing": "units"}, id="recomputing"),
]


def train_crossed(stage: int, recipe: Recipe, options: dict[str, Any]) -> None:
    run = train_zero(recipe, stage, **options)
    # Stages 2 and 3 reduce each micro-batch: the same sums, rounded in a different order.
    bound = CLOSE if recipe.micro_batches > 1 and stage > 1 else 0
    same_runs(run, train_ddp(recipe), bound)
    same_on_every_rank(run.weights)


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("recipe", "options"), CROSSED)
def test_whole_parameter_optimizers_equal_ddp_combined_with_other_options(run_on, stage, recipe, options):
    run_on(2, train_crossed, stage=stage, recipe=recipe, options=options)


def skip_a_layer(stage: int, optimizer: Callable[[nn.Module], Any], offload: str | None) -> None:
    """The data decide whether a layer is used, below stage 3 on each rank separately; in some steps no rank uses it."""
    from lightning_zero.engine import Engine

    recipe = Recipe(whole.skipping, optimizer)
    (plain, expected), (module, ours) = prepare(recipe), prepare(recipe)
    model = DistributedDataParallel(plain, find_unused_parameters=True)
    engine = Engine(module, [ours], stage=stage, offload=offload)
    used = 0
    for index in range(10):
        inputs = batch(index, of=0 if stage == 3 else None)
        for each, chosen in ((model, expected), (module, ours)):
            chosen.zero_grad()
            each(*inputs).backward()
            chosen.step()
        used += plain.layers[2].up.weight.grad is not None
    assert 0 < used < 10
    same_tensors(engine.full_state_dict(), dict(plain.state_dict()), bound=0)
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [whole.adafactor, whole.came], ids=lambda optimizer: optimizer.__name__)
@pytest.mark.parametrize("offload", [None, "cpu", ON_DISK], ids=str)
def test_layers_may_be_skipped_depending_on_the_data(run_on, stage, optimizer, offload):
    run_on(2, skip_a_layer, stage=stage, optimizer=optimizer, offload=offload)


def train_in_the_order_of_ranks(stage: int) -> None:
    """On three and four ranks DDP's ring sums in its own order; this reference sums in the order of ranks."""
    from lightning_zero.engine import Engine

    size = world_size()
    torch.manual_seed(0)
    module, plain = Layered(), Layered()
    plain.load_state_dict(module.state_dict())
    optimizer, expected = whole.adafactor(module), whole.adafactor(plain)
    engine = Engine(module, [optimizer], stage=stage)
    owners = {owner for bucket in engine.buckets for owner in bucket.layout.owners}
    assert owners == set(range(size))
    for index in range(6):
        module(*batch(index)).backward()
        plain(*batch(index)).backward()
        for parameter in plain.parameters():
            parts = [torch.empty_like(parameter) for _ in range(size)]
            dist.all_gather(parts, parameter.grad)
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            parameter.grad = total * (1.0 / size)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    same_tensors(engine.full_state_dict(), dict(plain.state_dict()), bound=0)
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [3, 4])
def test_whole_parameter_optimizers_on_more_ranks_equal_sums_in_the_order_of_ranks(run_on, stage, size):
    run_on(size, train_in_the_order_of_ranks, stage=stage)


def count_calls(stage: int) -> None:
    """Muon orthogonalises each matrix once per step, on its owner."""
    from torch.optim import _muon

    calls, original = [], _muon._zeropower_via_newtonschulz
    _muon._zeropower_via_newtonschulz = lambda *args: calls.append(args[0].shape) or original(*args)
    try:
        steps = 4
        train_zero(Recipe(Layered, whole.muon_and_adamw, steps=steps), stage)
    finally:
        _muon._zeropower_via_newtonschulz = original
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(calls)]))
    assert sum(counts).item() == steps * len(whole.matrices(Layered()))
    assert max(counts) - min(counts) <= steps * 2, "evenly over the ranks"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_each_matrix_is_orthogonalised_once_per_step_across_all_ranks(run_on, stage, size):
    run_on(size, count_calls, stage=stage)


# --------------------------------------------------------------------------------------------------------------- state


@torch.compiler.set_stance("force_eager")
def same_states(stage: int, optimizer: Callable[[nn.Module], Any], **options: Any) -> None:
    """The state dict equals DDP's; a new engine that loads it resumes training exactly."""
    from lightning_zero.engine import Engine

    recipe = Recipe(model_for(optimizer), optimizer)
    plain, expected = prepare(recipe)
    model = DistributedDataParallel(plain)
    module, ours = prepare(recipe)
    engine = Engine(module, [ours], stage=stage, **options)

    def train(indices: range) -> None:
        for index in indices:
            for each, chosen in ((model, expected), (module, ours)):
                each(*batch(index)).backward()
                chosen.step()
                chosen.zero_grad()

    train(range(4))
    state = engine.full_optimizer_state_dict(ours)
    same_values(state, expected.state_dict(), "state")
    for parameter, name in zip(module.parameters(), dict(plain.named_parameters()), strict=True):
        shown = lightning_zero.full_optimizer_state(parameter)
        same_values(shown, dict(expected.state[plain.get_parameter(name)]), f"state of {name}")
    weights = engine.full_state_dict()
    engine.close()
    same_values(ours.state_dict(), expected.state_dict(), "state after the end")

    module, ours = prepare(recipe)
    engine = Engine(module, [ours], stage=stage, **options)
    module.load_state_dict(weights)
    ours.load_state_dict(state)
    train(range(4, 7))
    same_tensors(engine.full_state_dict(), dict(plain.state_dict()), bound=0)
    engine.close()


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "optimizer",
    [each for each in OPTIMIZERS + LOW_BIT if each is not whole.muon_and_adamw],
    ids=lambda optimizer: optimizer.__name__,
)
@pytest.mark.parametrize("offload", [None, ON_DISK], ids=str)
def test_state_dicts_of_whole_parameter_optimizers_equal_ddps_and_can_be_loaded(run_on, stage, optimizer, offload):
    run_on(2, same_states, stage=stage, optimizer=optimizer, offload=offload)


# ---------------------------------------------------------------------------------------------------------- added late


def give_late(stage: int, offload: str | None, how: str) -> None:
    """Add parameters, or a whole optimizer, after the engine is created: their buckets are rebuilt."""
    from lightning_zero.engine import Engine

    torch.manual_seed(0)
    plain, module = Layered(), Layered()
    module.load_state_dict(plain.state_dict())
    model = DistributedDataParallel(plain, find_unused_parameters=True)

    def begin(of: nn.Module) -> list[Any]:
        if how == "a late optimizer":
            return [AdamW(whole.others(of), lr=0.01)]
        if how == "exchanged":
            return [Adafactor(whole.matrices(of)[:2], lr=0.01), AdamW(whole.matrices(of)[2:], lr=0.01)]
        return [Adafactor(whole.matrices(of)[:2], lr=0.01), AdamW(whole.others(of), lr=0.01)]

    def give(of: nn.Module, optimizers: list[Any]) -> list[Any]:
        if how == "a late optimizer":
            return [*optimizers, Adafactor(whole.matrices(of), lr=0.01)]
        if how == "exchanged":
            groups = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
            groups[0][-1], groups[1][0] = groups[1][0], groups[0][-1]
            return optimizers
        optimizers[0].add_param_group({"params": whole.matrices(of)[2:]})
        return optimizers

    expected, ours = begin(plain), begin(module)
    engine = Engine(module, ours, stage=stage, offload=offload)
    for index in range(6):
        if index == 3:
            expected, ours = give(plain, expected), give(module, ours)
            if how == "a late optimizer":
                engine.set_optimizers(ours)
        for each, chosen in ((model, expected), (module, ours)):
            each(*batch(index)).backward()
            for optimizer in chosen:
                optimizer.step()
            each.zero_grad()
    same_tensors(engine.full_state_dict(), dict(plain.state_dict()), bound=0)
    for theirs, mine in zip(expected, ours, strict=True):
        if how != "exchanged":  # torch's ``state_dict`` raises a KeyError for a parameter that has left its group
            same_values(engine.full_optimizer_state_dict(mine), theirs.state_dict(), "state")
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [None, "cpu", ON_DISK], ids=str)
@pytest.mark.parametrize("how", ["a late optimizer", "add_param_group", "exchanged"])
def test_optimizers_and_parameter_groups_may_be_added_after_the_engine_is_created(run_on, stage, offload, how):
    run_on(2, give_late, stage=stage, offload=offload, how=how)


def give_within_accumulation() -> None:
    from lightning_zero.engine import Engine

    module = Layered()
    engine = Engine(module, [AdamW(whole.others(module))], stage=2)
    module(*batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"'layers\.0.*' has a gradient.*after optimizer.zero_grad\(\)"):
        engine.set_optimizers([Adafactor(whole.matrices(module))])
    module.zero_grad()
    engine.set_optimizers([Adafactor(whole.matrices(module))])
    engine.close()


def test_parameters_with_gradients_cannot_be_added_to_a_whole_parameter_optimizer(run_on):
    run_on(2, give_within_accumulation)


def give_between_backward_and_step() -> None:
    """A group is added while its parameters have gradients: updates are refused as a whole, until these are dropped."""
    from lightning_zero.engine import Engine

    torch.manual_seed(0)
    plain, module = Layered(), Layered()
    module.load_state_dict(plain.state_dict())
    model = DistributedDataParallel(plain, find_unused_parameters=True)
    expected, optimizer = (Adafactor(whole.matrices(of)[:2]) for of in (plain, module))
    engine = Engine(module, [optimizer], stage=3)
    for each in (model, module):
        each(*batch(0)).backward()
    for of, chosen in ((plain, expected), (module, optimizer)):
        chosen.add_param_group({"params": whole.matrices(of)[2:]})
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'layers\.\d.*' has a gradient.*after optimizer.zero_grad\(\)"):
            optimizer.step()
    same_tensors(engine.full_state_dict(), dict(plain.state_dict()), bound=0)
    for each, chosen in ((model, expected), (module, optimizer)):
        each.zero_grad()
        each(*batch(1)).backward()
        chosen.step()
    same_tensors(engine.full_state_dict(), dict(plain.state_dict()), bound=0)
    engine.close()


def test_an_update_of_added_parameters_that_have_gradients_is_refused(run_on):
    run_on(2, give_between_backward_and_step)


def give_before_an_evaluation(stage: int) -> None:
    """A group is added, and only one rank has a batch to evaluate before training continues."""
    from lightning_zero import uneven_forwards
    from lightning_zero.engine import Engine

    torch.manual_seed(0)
    module = Layered()
    optimizer = Adafactor(whole.matrices(module)[:2])
    engine = Engine(module, [optimizer], stage=stage)
    optimizer.add_param_group({"params": whole.matrices(module)[2:]})
    with uneven_forwards(module), torch.no_grad():
        for _ in range(1 - rank()):
            module(*batch(0))
    module(*batch(0)).backward()
    optimizer.step()
    assert all(len(optimizer.state[parameter]) for parameter in whole.matrices(module))
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_may_have_nothing_to_evaluate_after_a_group_was_added(run_on, stage):
    run_on(2, give_before_an_evaluation, stage=stage)


def unfreeze(stage: int, offload: str | None) -> None:
    """Unfreeze a layer in mid-run. (DDP would not reduce its gradients, so they are averaged here.)"""
    from lightning_zero.engine import Engine

    recipe = Recipe(Layered, whole.adafactor)
    (plain, expected), (module, ours) = prepare(recipe), prepare(recipe)
    for each in (plain, module):
        each.layers[1].requires_grad_(False)
    engine = Engine(module, [ours], stage=stage, offload=offload)
    for index in range(6):
        if index == 3:
            for each in (plain, module):
                each.layers[1].requires_grad_(True)
        for each, chosen in ((plain, expected), (module, ours)):
            chosen.zero_grad()
            each(*batch(index)).backward()
            for parameter in plain.parameters() if each is plain else ():
                if parameter.grad is not None:
                    parameter.grad.div_(2)
                    dist.all_reduce(parameter.grad)
            chosen.step()
    same_tensors(engine.full_state_dict(), dict(plain.state_dict()), bound=0)
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [None, "cpu", ON_DISK], ids=str)
def test_a_layer_may_be_unfrozen_in_mid_run(run_on, stage, offload):
    run_on(2, unfreeze, stage=stage, offload=offload)


# ------------------------------------------------------------------------------------------------- through the Trainer


class Scheduled(Learner):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Compiled(Learner):
    def configure_model(self) -> None:
        for layer in self.model.layers:
            layer.compile(backend="aot_eager")


class ByHand(Learner):
    """Muon and AdamW as two optimizers, in manual optimization."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(*batch)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return whole.muon_and_adamw(self.model).optimizers


IN_THE_TRAINER: list[Any] = [
    pytest.param(partial(Scheduled, Layered, whole.soap), {"gradient_clip_val": 0.001}, "value", id="schedules"),
    pytest.param(partial(Learner, Layered, whole.adafactor), {"precision": "bf16-mixed"}, None, id="bf16-mixed"),
    pytest.param(partial(Learner, Layered, whole.came), {"precision": "16-mixed"}, None, id="16-mixed"),
    pytest.param(partial(Compiled, Layered, whole.muon_of_mixed_groups), {}, None, id="compiled"),
    pytest.param(partial(ByHand, Layered), {}, None, id="two by hand"),
]


def fit_both(stage: int, learner: Any, options: dict[str, Any], clips_by: str | None) -> None:
    options = {**options, **({"gradient_clip_algorithm": clips_by} if clips_by else {})}
    reference = fit("ddp_find_unused_parameters_true", learner, **options)
    run = fit(f"zero{stage}", learner, **options)
    same_runs(run, reference)
    same_on_every_rank(run.weights)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("learner", "options", "clips_by"), IN_THE_TRAINER)
def test_whole_parameter_optimizers_through_the_trainer_equal_ddp(run_on, stage, learner, options, clips_by):
    run_on(2, fit_both, stage=stage, learner=learner, options=options, clips_by=clips_by)


def fit_low(stage: int) -> None:
    """Masters are in fp32, unlike under DDP: training follows fp32 within the precision of bf16."""
    learner = partial(Learner, Layered, whole.adafactor, batches=10)
    reference, run = fit("ddp", learner), fit(f"zero{stage}", learner, precision="bf16-true")
    for loss, expected in zip(run.losses, reference.losses, strict=True):
        assert abs(loss - expected) <= 0.01 * abs(expected)
    assert not torch.equal(run.losses[0].float(), reference.losses[0])


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_parameter_optimizers_in_bf16_follow_fp32(run_on, stage):
    run_on(2, fit_low, stage=stage)
