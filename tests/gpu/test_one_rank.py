"""One rank over NCCL, as in a user's first run on one GPU: plain torch's numbers, also from a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from tests.gpu.one_device import Layers
from tests.numbers.test_offload import Wide
from tests.support.models import Block, OddModel, Repeated, adam_fused
from tests.support.trainer import TrainerRun, fit
from tests.support.training import CLOSE, Recipe, same_runs, same_tensors, train_ddp, train_zero

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
LOW = 1e-2  # relative; where kernels add bf16 numbers in an order that differs from run to run


def in_a_group(device: str, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function within a process group of this rank alone."""
    where = torch.device(device, 0) if device == "cuda" else None
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=where)
    try:
        return act(*args, **kwargs)
    finally:
        dist.destroy_process_group()


def is_plain_torchs(recipe: Recipe, stage: int, bound: float = CLOSE, **options: Any) -> None:
    found = in_a_group(recipe.device, train_zero, recipe, stage, **options)
    assert found.losses[0].device.type == recipe.device
    same_runs(found, train_ddp(recipe, options.get("compute_dtype")), bound)


@STAGES
@pytest.mark.parametrize("model", [OddModel, Repeated, Wide])
def test_a_run_equals_plain_torchs(run_on, device, stage, model):
    run_on(1, is_plain_torchs, timeout=120, recipe=Recipe(model, steps=4, device=device), stage=stage)


@STAGES
def test_a_fused_optimizer_updates_as_in_plain_torch(run_on, device, stage):
    recipe = Recipe(OddModel, adam_fused, steps=4, micro_batches=2, device=device)
    run_on(1, is_plain_torchs, timeout=120, recipe=recipe, stage=stage)


@STAGES
def test_computation_in_bf16_equals_autocasts(run_on, device, stage):
    recipe = Recipe(Wide, steps=4, device=device)
    options = {"compute_dtype": torch.bfloat16, "bound": LOW}
    run_on(1, is_plain_torchs, timeout=120, recipe=recipe, stage=stage, **options)


@pytest.mark.parametrize("activations", ["none", "cpu"])
def test_recomputed_blocks_give_the_same_numbers(run_on, device, activations):
    options: dict[str, Any] = {"activation_checkpointing": [Block]}
    if activations == "cpu":
        options["offload"] = {"activations": "cpu"}
    run_on(1, is_plain_torchs, timeout=120, recipe=Recipe(steps=4, device=device), stage=3, **options)


def compiled(device: str, stage: int) -> None:
    def train(shards: bool) -> dict[str, torch.Tensor]:
        from lightning_zero.engine import Engine

        torch.manual_seed(0)
        module = Layers(32, 3).to(device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine = Engine(module, [optimizer], stage=stage, device=device) if shards else None
        step = torch.compile(module)
        losses = []
        for _ in range(3):
            loss = step(torch.ones(4, 32, device=device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if engine is not None:
            engine.close()
        return {"losses": torch.stack(losses), **module.state_dict()}

    same_tensors(in_a_group(device, train, True), train(False), CLOSE)


@STAGES
def test_a_compiled_module_trains_as_without_the_engine(run_on, device, stage):
    run_on(1, compiled, timeout=170, device=device, stage=stage)


def fitted(strategy: Any, device: str, precision: str) -> TrainerRun:
    accelerator = "gpu" if device == "cuda" else "cpu"
    try:
        return fit(strategy, accelerator=accelerator, precision=precision, gradient_clip_val=0.5)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def fits_as_ddp(device: str, stage: int, precision: str) -> None:
    found, expected = fitted(f"zero{stage}", device, precision), fitted(DDPStrategy(), device, precision)
    same_runs(found, expected, CLOSE if precision == "32-true" else LOW)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@STAGES
def test_a_trainer_fits_as_with_ddp(run_on, device, stage, precision):
    run_on(1, fits_as_ddp, timeout=120, device=device, stage=stage, precision=precision)
