"""A Trainer whose accelerator is the emulated device: a project's fit, checkpoint and resumption, all in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import Parameter

from lightning_zero import ZeroAutoStrategy, ZeroStrategy
from tests.emulated.device import NAME, in_order
from tests.support.trainer import Learner, TrainerRun, fit, fit_ddp, make_trainer
from tests.support.training import CLOSE, same_runs

pytestmark = pytest.mark.exhaustive

STAGES = pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])


class Emulated(Accelerator):
    """An accelerator as a device vendor would provide it to Lightning."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == NAME

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device(NAME, 0)] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


@in_order
def fit_as_ddp(strategy: str) -> None:
    """DDP runs on the CPU, since Lightning's own DDP supports no devices but NVIDIA's."""
    found = fit(strategy, accelerator=Emulated())
    assert found.losses[0].device.type == NAME
    same_runs(found, fit_ddp(), CLOSE)


@STAGES
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fit_equals_ddps(run_on_device, ranks, strategy):
    run_on_device(ranks, fit_as_ddp, strategy=strategy)


@in_order
def fit_as_chosen() -> None:
    speed = {"flops": 1e12, "memory_bandwidth": 1e11, "memory": 1.0}  # too little for any choice
    strategy = ZeroAutoStrategy(resources=speed)
    found = fit(strategy, accelerator=Emulated())
    assert strategy.choice is not None
    assert (strategy.choice.offload, strategy.choice.activation_checkpointing) == ("cpu", "units")
    same_runs(found, fit_ddp(), CLOSE)


def test_zero_auto_offloads_from_a_device_with_little_memory(run_on_device):
    run_on_device(2, fit_as_chosen)


class Failing(Callback):
    """Fails once, on every rank."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._fail)

    def _fail(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            raise ValueError("a project's own error")


@in_order
def fail_and_fit_again(strategy: str, hook: str) -> None:
    module = Learner()
    with pytest.raises(ValueError, match="a project's own error"):
        make_trainer(strategy, accelerator=Emulated(), callbacks=[Failing(hook)]).fit(module)
    make_trainer(strategy, accelerator=Emulated()).fit(module)
    assert all(type(parameter) is Parameter and parameter.device.type == "cpu" for parameter in module.parameters())


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_an_error_in_a_fit_reaches_the_project_and_the_module_can_be_fitted_again(run_on_device, strategy, hook):
    run_on_device(2, fail_and_fit_again, strategy=strategy, hook=hook)


@in_order
def resume(folder: Path, **options: Any) -> None:
    def train(**also: Any) -> TrainerRun:
        keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        trainer = {"accelerator": Emulated(), "max_epochs": 3, "enable_checkpointing": True, "callbacks": [keep]}
        return fit(ZeroStrategy(**options), **trainer, **also)

    whole, resumed = train(), train(ckpt_path=str(folder / "epoch=0.ckpt"))
    same_runs(resumed, replace(whole, losses=whole.losses[-len(resumed.losses) :]))
    assert len(resumed.losses) == len(whole.losses) * 2 // 3


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_run_continues_exactly(run_on_device, tmp_path, stage, form):
    run_on_device(2, resume, folder=tmp_path, stage=stage, checkpoint=form, async_save=True)
