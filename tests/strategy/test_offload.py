"""`ZeroStrategy(offload=...)` with a Trainer and with Fabric: its meaning, and the same numbers as without it."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning_fabric
import pytest
import pytorch_lightning
import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch import Callback
from omegaconf import OmegaConf
from torch import nn

import lightning_zero.fabric
import lightning_zero.lightning_fabric
import lightning_zero.pytorch_lightning
from lightning_zero import OffloadConfig, ZeroStrategy
from lightning_zero.engine import config
from lightning_zero.io.disk import is_in_memory
from tests.examples.running import REPOSITORY
from tests.fabric.training import make_fabric, set_up, state_of, train, weights
from tests.support.models import Square
from tests.support.trainer import Learner, ManualLearner, TrainerRun, fit, make_trainer
from tests.support.training import same_runs, same_values, trained_once
from tests.support.workers import rank, world_size

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
PLACES = pytest.mark.parametrize("place", ["cpu", "nvme"])
learner = partial(Learner, batches=4)


@pytest.fixture
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the folder for temporary files count as one on a disk, whatever the test machine has."""
    if is_in_memory(tempfile.gettempdir()):
        monkeypatch.setattr(tempfile, "tempdir", str(REPOSITORY))


def test_a_string_or_mapping_stands_for_an_offload_config(on_a_disk, tmp_path: Path):
    default = tempfile.gettempdir()
    for given, meant in (
        (None, None),
        ({}, None),
        ("cpu", OffloadConfig(optimizer="cpu")),
        ("nvme", OffloadConfig(optimizer="nvme", path=default)),
        ({"optimizer": "nvme"}, OffloadConfig(optimizer="nvme", path=default)),
        ({"optimizer": "nvme", "path": str(tmp_path)}, OffloadConfig(optimizer="nvme", path=str(tmp_path))),
        (OmegaConf.create({"parameters": "cpu", "fraction": 0.5}), OffloadConfig(parameters="cpu", fraction=0.5)),
        (OffloadConfig(fraction=0.5), OffloadConfig(fraction=0.5)),
        (OffloadConfig(optimizer="nvme"), OffloadConfig(optimizer="nvme", path=default)),
    ):
        for strategy in (ZeroStrategy, lightning_zero.fabric.ZeroStrategy):
            assert strategy(stage=3, offload=given).config.offload == meant


@pytest.mark.skipif(not is_in_memory("/dev/shm"), reason="this system has no folder in memory")
@pytest.mark.parametrize("strategy", [ZeroStrategy, lightning_zero.fabric.ZeroStrategy])
def test_a_default_folder_that_lies_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch, strategy):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    with pytest.raises(ValueError, match="would write to /dev/shm, which is on an in-memory file system: "):
        strategy(offload="nvme")
    with pytest.raises(ValueError, match="which is on an in-memory file system"):
        make_trainer("zero3_nvme_spawn")
    strategy(offload="cpu")


def test_whether_a_folder_is_in_memory_is_recognised(tmp_path: Path):
    assert not is_in_memory("/proc")
    assert is_in_memory(str(tmp_path)) == is_in_memory(str(tmp_path / "not" / "there" / "yet"))


@STAGES
def test_every_other_namespace_registers_the_offload_names(on_a_disk, stage):
    for registry, cls in (
        (pytorch_lightning.strategies.StrategyRegistry, lightning_zero.pytorch_lightning.ZeroStrategy),
        (STRATEGY_REGISTRY, lightning_zero.fabric.ZeroStrategy),
        (lightning_fabric.strategies.STRATEGY_REGISTRY, lightning_zero.lightning_fabric.ZeroStrategy),
    ):
        for place, moved in (("_offload", "cpu"), ("_nvme", "nvme")):
            for suffix in ("", "_spawn", "_fork", "_notebook"):
                strategy = registry.get(f"zero{stage}{place}{suffix}")
                assert type(strategy) is cls and (strategy.stage, strategy.config.offload.optimizer) == (stage, moved)


# ------------------------------------------------------------------------------------------------- the same numbers


def moved(stage: int, place: str, path: str, **options: Any) -> ZeroStrategy:
    return ZeroStrategy(stage, offload=OffloadConfig(place, path=path, **options))


@trained_once
def fit_without(stage: int, learner: Any, **options: Any) -> TrainerRun:
    """The reference for both places of offloading."""
    return replace(fit(f"zero{stage}", learner, **options), module=None)


def fit_with_and_without(
    stage: int, place: str, path: str, learner: Any = learner, bound: float = 0, **options: Any
) -> None:
    reference = fit_without(stage, learner, **options)
    found = fit(moved(stage, place, path), learner, **options)
    same_runs(found, reference, bound)
    assert reference.reports[-1].at_rest["optimizer"] > 0 == found.reports[-1].at_rest.get("optimizer", 0)


@pytest.mark.exhaustive(but=2)
@STAGES
@PLACES
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_losses_and_weights_equal_those_without_offload(run_on, tmp_path: Path, stage, place, size):
    run_on(size, fit_with_and_without, stage=stage, place=place, path=str(tmp_path))
    assert not list(tmp_path.iterdir()), "the files are gone with the run"


@STAGES
@PLACES
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"learner": partial(ManualLearner, batches=4)},
    ],
    ids=["accumulation", "clipping by value", "clipping by norm", "bf16-mixed", "manual optimization"],
)
@pytest.mark.exhaustive
def test_other_trainer_options_give_the_same_numbers_with_offload(run_on, tmp_path: Path, stage, place, options):
    run_on(2, fit_with_and_without, stage=stage, place=place, path=str(tmp_path), **options)


def fit_names(stage: int, path: str) -> None:
    reference = fit_without(stage, learner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", path)
        patch.setattr(config, "is_in_memory", lambda folder: False)  # wherever the machine has its temporary files
        for name in (f"zero{stage}_offload", f"zero{stage}_nvme"):
            same_runs(fit(name, learner), reference, 0)


@pytest.mark.exhaustive(but=1)
@STAGES
def test_a_strategy_name_alone_trains_as_without_offload(run_on, tmp_path: Path, stage):
    run_on(2, fit_names, stage=stage, path=str(tmp_path))
    assert not list(tmp_path.iterdir())


class Breaks(Callback):
    """The disk of one rank fails from a given batch on."""

    def __init__(self, when: str, at: int, failing: int) -> None:
        self.when, self.at, self.failing = when, at, failing
        self.patch = pytest.MonkeyPatch()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at and rank() == self.failing:
            self.patch.setattr(os, {"read": "preadv", "write": "pwrite"}[self.when], self.fail)

    @staticmethod
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def fit_on_a_failing_disk(stage: int, path: str, when: str, at: int, **offload: Any) -> None:
    failing = world_size() - 1
    breaks = Breaks(when, at, failing)
    strategy, module = moved(stage, "nvme", f"{path}/{rank()}", **offload), Learner(batches=4)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[breaks])
    error, said = (OSError, "cannot be (read|written) at byte") if rank() == failing else (RuntimeError, "failed with")
    try:
        with pytest.raises(error, match=said):
            trainer.fit(module)
    finally:
        breaks.patch.undo()
    assert not list(Path(f"{path}/{rank()}").iterdir()), "files are left"
    if world_size() == 1:
        assert all(type(p) is nn.Parameter and p.isfinite().all() for p in module.parameters())
    make_trainer(ZeroStrategy(stage), max_epochs=1).fit(module)  # unshards the module
    assert all(type(p) is nn.Parameter and p.isfinite().all() for p in module.parameters())


@pytest.mark.exhaustive(but=2)
@STAGES
@pytest.mark.parametrize("when", ["read", "write"])
@pytest.mark.parametrize("at", [2, 3], ids=["in mid-run", "at the end"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_failing_disk_is_reported_and_nothing_is_left_of_the_run(run_on, tmp_path: Path, stage, when, at, size):
    run_on(size, fit_on_a_failing_disk, stage=stage, path=str(tmp_path), when=when, at=at)


class FailsAfterTwoSteps(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and rank() == 1:
            raise ZeroDivisionError("of the user's own")
        return super().training_step(batch, batch_idx)


class WeightsAtFirst(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = trainer.strategy.engine.full_state_dict()


def fit_after_a_failure(path: str, precision: str, **offload: Any) -> None:
    expected = fit("zero3", max_steps=2, precision=precision).weights
    torch.manual_seed(0)
    module, at_first = FailsAfterTwoSteps(), WeightsAtFirst()
    with pytest.raises(Exception, match="of the user's own"):
        make_trainer(moved(3, "nvme", f"{path}/{rank()}", **offload), precision=precision).fit(module)
    assert not os.listdir(f"{path}/{rank()}"), "files are left"
    make_trainer(ZeroStrategy(3), max_steps=1, precision=precision, callbacks=[at_first]).fit(module)
    same_values(dict(at_first.weights), expected, "after the failure")


@pytest.mark.parametrize("options", [{"parameters": "nvme"}, {"parameters": "cpu"}, {}], ids=str)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.exhaustive
def test_after_a_failure_the_next_run_finds_the_offloaded_weights(run_on, tmp_path: Path, options, precision):
    run_on(2, fit_after_a_failure, path=str(tmp_path), precision=precision, **options)


def resume_elsewhere(stage: int, path: str) -> None:
    """One epoch with and one without offload, in either order, equal two at a stretch; the checkpoints are equal."""
    whole = fit_without(stage, learner)
    kept = {}
    for name, make in (("plain", lambda: f"zero{stage}"), ("cpu", lambda: moved(stage, "cpu", path))):
        torch.manual_seed(0)
        trainer = make_trainer(make(), max_epochs=1)
        trainer.fit(learner())
        trainer.save_checkpoint(f"{path}/{name}.ckpt")
        trainer.strategy.barrier()
        kept[name] = torch.load(f"{path}/{name}.ckpt", weights_only=False)
    for part in ("state_dict", "optimizer_states"):
        same_values(kept["cpu"][part], kept["plain"][part], part, 0)
    for start, make in (("plain", lambda: moved(stage, "nvme", path)), ("cpu", lambda: f"zero{stage}")):
        resumed = fit(make(), learner, ckpt_path=f"{path}/{start}.ckpt")
        same_values(resumed.weights, whole.weights, f"from {start}", 0)


@pytest.mark.exhaustive(but=1)
@STAGES
def test_checkpoints_are_the_same_and_resume_with_or_without_offload(run_on, tmp_path: Path, stage):
    run_on(2, resume_elsewhere, stage=stage, path=str(tmp_path))


def fabric_with_and_without(stage: int, path: str) -> None:
    found = []
    for offload in (None, "cpu", {"optimizer": "nvme", "path": path}):
        fabric = make_fabric(lightning_zero.fabric.ZeroStrategy(stage, offload=offload))
        model, optimizer = set_up(fabric, Square)
        losses = train(fabric, model, optimizer, steps=4)
        found.append((losses, weights(model), state_of(optimizer)["state"]))
        fabric.strategy.teardown()
    for each in found[1:]:
        same_values(each, found[0], "with offload", 0)


@STAGES
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.exhaustive
def test_fabric_trains_with_offload_as_without(run_on, tmp_path: Path, stage, size):
    run_on(size, fabric_with_and_without, stage=stage, path=str(tmp_path))
