"""Training on a device: DDP's numbers, and all work on the device is in order, at every stage and offload."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lightning_zero
from lightning_zero.engine import Engine, OffloadConfig
from tests.emulated import device
from tests.emulated.device import NAME, in_order
from tests.engine import test_activation_offload as activations
from tests.libraries import test_float8
from tests.numbers.test_offload import EACH, ON_BOTH, Wide, is_as_without
from tests.support import models
from tests.support.training import CLOSE, Recipe, batch, prepare, same_runs, same_tensors, train_ddp, train_zero

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
RANKS = pytest.mark.parametrize("ranks", [1, 2])


@in_order
def is_ddps(recipe: Recipe, stage: int, bound: float = 0, **options: Any) -> None:
    found = train_zero(recipe, stage, **options)
    assert found.losses[0].device.type == NAME
    same_runs(found, train_ddp(recipe), bound)


@in_order
def is_as_without_offload(recipe: Recipe, stage: int, offload: str, **options: Any) -> None:
    is_as_without(recipe, stage, offload, **options)


@pytest.mark.exhaustive(but=1)
@STAGES
@RANKS
def test_a_run_equals_ddps(run_on_device, ranks, stage):
    run_on_device(ranks, is_ddps, recipe=Recipe(steps=4, device=NAME), stage=stage)


@in_order
def streams(folder: Path, stage: int, **options: Any) -> None:
    module, optimizer = prepare(Recipe(device=NAME))
    engine = Engine(module, [optimizer], stage=stage, **options)
    for index in range(3):
        module(*batch(index, device=NAME)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found = {name: value.cpu() for name, value in lightning_zero.iter_full_parameters(module, 4000)}
        same_tensors(found, engine.full_state_dict(), bound=0)
    lightning_zero.export_weights(module, folder, max_shard_bytes=2000, dtype=torch.float16)
    files = (load_file(file) for file in folder.glob("*.safetensors"))
    exported = {name: value for weights in files for name, value in weights.items()}
    same_tensors({name: exported[name] for name in found}, {name: value.half() for name, value in found.items()}, 0)
    engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("options", [{}, {"offload": OffloadConfig(optimizer="cpu")}], ids=["", "offloaded"])
@pytest.mark.parametrize("stage", [3, 1])
def test_whole_tensors_are_streamed_and_exported_in_order(run_on_device, tmp_path, stage, options):
    run_on_device(2, streams, folder=tmp_path, stage=stage, **options)


@pytest.mark.parametrize(
    "options",
    [{"overlap": False}, {"prefetch": 0, "reduction_buffers": 1}, {"prefetch": 2, "reduction_buffers": 3}],
    ids=["one after another", "prefetch 0", "prefetch 2"],
)
@STAGES
@pytest.mark.exhaustive
def test_overlap_and_prefetch_settings_change_nothing(run_on_device, stage, options):
    recipe = Recipe(Wide, steps=4, device=NAME)
    run_on_device(2, is_ddps, recipe=recipe, stage=stage, units=[nn.Linear], **options)


@STAGES
@RANKS
def test_runs_that_clip_and_accumulate_equal_ddps(run_on_device, ranks, stage):
    recipe = Recipe(steps=4, micro_batches=3, clip=models.clip, device=NAME)
    run_on_device(ranks, is_ddps, recipe=recipe, stage=stage, bound=CLOSE)


def clip_by_one_list(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """As ``clip_grad_norm_``, but without first dividing gradients by device."""
    gradients = [parameter.grad for parameter in parameters]
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (0.01 / total).clamp(max=1.0))
    return total


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_in_two_places_are_clipped_together(run_on_device, stage):
    offload = OffloadConfig(optimizer="cpu", gradients="cpu", fraction=0.5)
    recipe = Recipe(Wide, models.exact_sgd, steps=4, clip=clip_by_one_list, device=NAME)
    run_on_device(2, is_ddps, recipe=recipe, stage=stage, units=[nn.Linear], bound=CLOSE, offload=offload)


@pytest.mark.parametrize(
    "optimizer", [models.adam_foreach, models.adam_amsgrad, models.sgd_nesterov, models.nadam, models.several_groups]
)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.exhaustive
def test_runs_of_other_optimizers_equal_ddps(run_on_device, stage, optimizer):
    run_on_device(2, is_ddps, recipe=Recipe(optimizer=optimizer, steps=4, device=NAME), stage=stage)


@pytest.mark.exhaustive(but=2)
@EACH
@STAGES
@RANKS
def test_offload_changes_nothing(run_on_device, ranks, stage, offload):
    recipe = Recipe(optimizer=models.exact_sgd, steps=4, device=NAME)
    run_on_device(ranks, is_as_without_offload, recipe=recipe, stage=stage, offload=offload)


@ON_BOTH
@pytest.mark.parametrize("stage", [1, 3])
def test_offload_changes_nothing_in_low_precision(run_on_device, stage, offload):
    recipe = Recipe(Wide, models.exact_sgd, steps=4, dtype=torch.bfloat16, device=NAME)
    run_on_device(2, is_as_without_offload, recipe=recipe, stage=stage, offload=offload)


@in_order
def rounds_alike(stage: int, **options: Any) -> None:
    recipe = Recipe(Wide, models.exact_sgd, steps=4, micro_batches=3, dtype=torch.bfloat16, device=NAME)
    options |= {"state_dtype": "bf16", "masters": False}
    same_runs(train_zero(recipe, stage, **options), train_zero(recipe, stage, overlap=False, **options))


@pytest.mark.parametrize("options", [{}, {"offload": {"optimizer": "cpu", "gradients": "cpu"}}], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_stochastic_rounding_is_the_same_without_overlap(run_on_device, stage, options):
    run_on_device(2, rounds_alike, stage=stage, **options)


@in_order
def evaluate_before_each_step(**options: Any) -> None:
    module, optimizer = prepare(Recipe(Wide, models.exact_sgd, device=NAME))
    engine = Engine(module, [optimizer], units=[nn.Linear], **options)
    for step in range(3):
        module(*batch(step, device=NAME)).backward()
        with torch.no_grad():
            module(*batch(step, device=NAME))
        optimizer.step()
        optimizer.zero_grad()
    engine.close()


def test_an_update_waits_for_copies_of_the_parameters_it_changes(run_on_device):
    """The gradient was ready before this forward pass, so waiting for it does not wait for the copies of that pass."""
    offload = {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu"}
    run_on_device(2, evaluate_before_each_step, offload=offload)


@pytest.mark.parametrize("optimizer", [models.adam, models.adam_foreach, models.adagrad_with_initial_accumulator])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.exhaustive
def test_optimizers_with_offloaded_states_train_as_ddp(run_on_device, place, optimizer):
    recipe = Recipe(optimizer=optimizer, steps=4, device=NAME)
    offload = {"optimizer": place, "path": "swap"}
    run_on_device(2, is_ddps, recipe=recipe, stage=3, bound=CLOSE, offload=offload)


@in_order
def scale_losses() -> None:
    """As `GradScaler` does with a fused optimizer: its kernel divides by a scale on the device."""
    recipe = Recipe(device=NAME)
    (plain, plain_optimizer), (module, optimizer) = prepare(recipe), prepare(recipe)
    optimizer.param_groups[0]["fused"] = True
    engine = Engine(module, [optimizer], stage=3, offload="cpu")
    for step in range(3):
        plain(*batch(step, device=NAME)).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        (module(*batch(step, device=NAME)) * 1024).backward()
        optimizer.grad_scale = torch.full((), 1024.0, device=NAME)
        optimizer.found_inf = torch.zeros((), device=NAME)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        optimizer.zero_grad()
    same_tensors(engine.full_state_dict(), plain.state_dict(), bound=CLOSE)
    engine.close()


def test_an_offloaded_update_waits_for_the_scale_of_the_loss(run_on_device):
    run_on_device(1, scale_losses)


@RANKS
@pytest.mark.exhaustive
def test_offloaded_activations_change_nothing(run_on_device, ranks):
    recipe = Recipe(partial(Wide, 704), steps=3, device=NAME)  # a hidden state is large enough to be offloaded
    offload = {"activations": "cpu", "optimizer": None}
    checkpointed = {"units": [nn.Linear], "activation_checkpointing": "units"}
    run_on_device(ranks, is_ddps, recipe=recipe, stage=3, offload=offload, **checkpointed)


@in_order
def moves_inputs(kind: type[activations.Net]) -> None:
    found = []
    for offload in (None, activations.OFFLOAD):
        model = activations.made(kind).to(NAME)
        engine, optimizer = activations.engine_for(model, offload=offload, device=NAME)
        losses = [activations.step_of(model, optimizer, step, NAME).cpu() for step in (0, 1, 2)]
        found.append(dict(enumerate(losses)) | engine.full_state_dict())
        engine.close()
    same_tensors(found[1], found[0], bound=0)


@pytest.mark.parametrize("kind", [activations.Keywords, activations.Views, activations.Shared, activations.Twice])
def test_offloaded_inputs_of_every_kind_change_nothing(run_on_device, kind):
    run_on_device(1, moves_inputs, kind=kind)


# -------------------------------------------------------------------------------------------------------- missing waits


def is_seen_without(waits: str, recipe: Recipe, stage: int, **options: Any) -> bool:
    """Whether the emulation detects missing waits: an ordering error, or different numbers."""
    expected = train_ddp(recipe)
    device.races_so_far()
    device.native.ignore(waits)
    try:
        same_runs(train_zero(recipe, stage, **options), expected, CLOSE)
    except AssertionError:
        return True
    finally:
        device.native.ignore("")
        races = device.races_so_far()
    return bool(races)


@pytest.mark.parametrize(
    ["waits", "stage", "offload"],
    [
        ("", 3, {"optimizer": "cpu", "parameters": "cpu"}),
        ("collective", 1, None),
        ("collective", 2, None),
        ("collective", 3, None),
        ("event", 3, {"optimizer": "cpu"}),
        ("event", 3, {"optimizer": "cpu", "parameters": "cpu"}),
        ("host", 1, {"optimizer": "cpu", "gradients": "cpu"}),
        ("host", 3, {"optimizer": "cpu", "parameters": "cpu"}),
    ],
)
def test_disabling_a_kind_of_wait_is_detected(run_on_device, waits, stage, offload):
    recipe = Recipe(Wide, steps=3, device=NAME)
    seen = run_on_device(
        2, is_seen_without, waits=waits, recipe=recipe, stage=stage, offload=offload, units=[nn.Linear]
    )
    assert seen == [waits != ""] * 2


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"overlap": False}, {"offload": "cpu"}, {"prefetch": 2, "reduction_buffers": 3}], ids=str
)
def test_sharding_within_groups_equals_ddp_except_for_the_order_of_sums(run_on_device, options, micro_batches):
    recipe = Recipe(Wide, models.exact_sgd, steps=4, micro_batches=micro_batches, device=NAME)
    run_on_device(4, is_ddps, recipe=recipe, stage=3, bound=CLOSE, units=[nn.Linear], shard_within=2, **options)


def test_low_precision_within_groups_equals_stage_3(run_on_device):
    recipe = Recipe(Wide, models.exact_sgd, steps=4, dtype=torch.bfloat16, device=NAME)
    run_on_device(4, is_as_flat, recipe=recipe)


@in_order
def is_as_flat(recipe: Recipe) -> None:
    same_runs(train_zero(recipe, 3, shard_within=2), train_zero(recipe, 3), CLOSE)


@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}, {"offload": {"fraction": 0.5}}], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.exhaustive(but=1)
def test_weights_gathered_in_float8_are_in_order(run_on_device, stage, options):
    recipe = Recipe(partial(test_float8.converted, "gathered"), models.exact_sgd, steps=4, device=NAME)
    run_on_device(2, is_as_without_float8, recipe=recipe, stage=stage, units=test_float8.is_block, **options)


@in_order
def is_as_without_float8(recipe, stage, **options):
    plain = replace(recipe, model=partial(test_float8.converted, "tensorwise"))
    same_runs(train_zero(recipe, stage, **options), train_zero(plain, stage, **options))
