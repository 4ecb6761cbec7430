"""A checkpoint of any stage is an ordinary Lightning file, as DDP writes it; any stage resumes from it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests.support import models
from tests.support.trainer import Learner, fit, make_trainer
from tests.support.training import same_tensors, same_values
from tests.support.workers import rank, world_size

SYSTEMS = ["ddp", "zero1", "zero2", "zero3"]
STAGES = ["zero1", "zero2", "zero3"]

# Torch creates state for parameters without elements too; one test has such parameters, the others do not.
OddModel = partial(models.OddModel, rows=2)

OPTIMIZERS = [
    models.adamw_with_decay_groups,
    models.adam_fused,
    models.adam_amsgrad,
    models.sgd_nesterov,
    models.adagrad_with_initial_accumulator,
    models.several_groups,
    models.with_an_empty_group,
]


class SaveAfter(Callback):
    """Write a checkpoint after a number of batches, on every rank: immediately, or at the end of that epoch."""

    def __init__(self, batches: int, path: Path, at_epoch_end: bool = False) -> None:
        self.batches, self.path, self.at_epoch_end, self.seen = batches, path, at_epoch_end, 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen += 1
        if self.seen == self.batches and not self.at_epoch_end:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.seen == self.batches and self.at_epoch_end:
            trainer.save_checkpoint(self.path)


def read(path: Path) -> dict[str, Any]:
    """Read rank 0's file, on any rank, without the package's own entry, which describes the writer."""
    if world_size() > 1:
        dist.barrier()
    checkpoint = torch.load(path, weights_only=True, map_location="cpu")
    ours = checkpoint.pop("lightning_zero", None)
    assert ours is None or ours["format"] == 1 and ours["written_by"]["lightning_zero"]
    return checkpoint


def write_the_same_file(
    strategy: str, folder: Path, optimizer: Any, batches: int, model: Any = OddModel, **options: Any
) -> None:
    learner = partial(Learner, model, optimizer)
    for system in ("ddp", strategy):
        fit(system, learner, callbacks=[SaveAfter(batches, folder / f"{system}.ckpt")], max_epochs=1, **options)
    checkpoint = read(folder / f"{strategy}.ckpt")
    same_values(checkpoint, read(folder / "ddp.ckpt"), "checkpoint")
    # An optimizer that loads the file counts each parameter's steps in place.
    counts = [state["step"] for state in checkpoint["optimizer_states"][0]["state"].values() if "step" in state]
    assert len({count.data_ptr() for count in counts}) == len(counts), "parameters share one count of steps"


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
def test_a_checkpoint_equals_ddps_with_full_weights_and_optimizer_state_in_torchs_format(
    run_on, tmp_path, strategy, optimizer
):
    run_on(2, write_the_same_file, strategy=strategy, folder=tmp_path, optimizer=optimizer, batches=3)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("strategy", STAGES)
def test_a_checkpoint_equals_ddps_with_parameters_without_elements(run_on, tmp_path, strategy):
    options = {"optimizer": models.adam, "batches": 3, "model": models.OddModel}
    run_on(2, write_the_same_file, strategy=strategy, folder=tmp_path, **options)


@pytest.mark.parametrize("strategy", STAGES)
def test_a_checkpoint_on_one_rank_equals_a_single_devices(run_on, tmp_path, strategy):
    run_on(1, write_the_same_file, strategy=strategy, folder=tmp_path, optimizer=models.adam, batches=3)


def write_the_same_file_before_any_step(strategy: str, folder: Path) -> None:
    write_the_same_file(strategy, folder, models.adam, 1, accumulate_grad_batches=3)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("strategy", STAGES)
def test_a_checkpoint_in_the_first_accumulation_window_has_no_optimizer_state_yet(run_on, tmp_path, strategy):
    run_on(2, write_the_same_file_before_any_step, strategy=strategy, folder=tmp_path)


def write_after_fit(strategy: str, folder: Path) -> None:
    files = []
    for system in ("ddp", strategy):
        torch.manual_seed(0)
        trainer = make_trainer(system, max_epochs=1)
        trainer.fit(Learner(OddModel))
        trainer.save_checkpoint(folder / f"{system}.ckpt")
        files.append(read(folder / f"{system}.ckpt"))
    same_values(files[1], files[0], "checkpoint")


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("strategy", STAGES)
def test_a_checkpoint_written_after_fit_equals_ddps(run_on, tmp_path, strategy):
    run_on(2, write_after_fit, strategy=strategy, folder=tmp_path)


def resume_everywhere(saver: str, folder: Path, precision: str, systems: list[str]) -> None:
    """Stop after the first of two epochs, resume under each system, and compare with the uninterrupted run."""
    learner = partial(Learner, OddModel, models.adamw_with_decay_groups)
    path = folder / "checkpoint.ckpt"
    saving = SaveAfter(5, path, at_epoch_end=True)
    whole = fit(saver, learner, callbacks=[saving], precision=precision)
    if world_size() > 1:
        dist.barrier()
    for system in systems:
        resumed = fit(system, learner, ckpt_path=str(path), precision=precision)
        assert len(resumed.losses) == 5
        later = {f"loss {index}": loss for index, loss in enumerate(whole.losses[5:], 5)}
        same_tensors({f"loss {index}": loss for index, loss in enumerate(resumed.losses, 5)}, later, bound=0)
        same_tensors(resumed.weights, whole.weights, bound=0)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("saver", SYSTEMS)
def test_every_stage_and_ddp_resume_exactly_from_any_others_checkpoint(run_on, tmp_path, saver):
    run_on(2, resume_everywhere, saver=saver, folder=tmp_path, precision="32-true", systems=SYSTEMS)


@pytest.mark.parametrize("saver", STAGES)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.exhaustive
def test_every_stage_resumes_exactly_in_bf16(run_on, tmp_path, saver, precision):
    run_on(2, resume_everywhere, saver=saver, folder=tmp_path, precision=precision, systems=STAGES)


def write_at_the_end_of_the_epoch(strategy: str, path: Path) -> None:
    learner = partial(Learner, OddModel, models.adam_with_large_eps, batches=3)
    fit(strategy, learner, max_epochs=1, callbacks=[SaveAfter(3, path, at_epoch_end=True)])


def write(strategy: str, path: Path) -> dict[str, Tensor]:
    """Stop in the middle of the second epoch; return the weights at that time, which the next step would change."""
    learner = partial(Learner, OddModel, models.adamw_with_decay_groups)
    return fit(strategy, learner, callbacks=[SaveAfter(7, path)], max_steps=7).weights


def load_alone(path: Path, weights: dict[str, Tensor]) -> None:
    """Load on a single device: into a module, a plain optimizer, and a Trainer, which continues training."""
    module = Learner.load_from_checkpoint(path, model=OddModel, optimizer=models.adamw_with_decay_groups)
    same_tensors(dict(module.state_dict()), weights, bound=0)
    checkpoint = read(path)
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert optimizer.state[p]["exp_avg"].shape == p.shape
            assert optimizer.state[p]["step"] == 7
    learner = partial(Learner, OddModel, models.adamw_with_decay_groups)
    reference = fit("ddp", learner, ckpt_path=str(path))
    assert not torch.equal(reference.weights["model.embed.weight"], weights["model.embed.weight"])
    for strategy in STAGES:
        resumed = fit(strategy, learner, ckpt_path=str(path))
        same_tensors(resumed.weights, reference.weights, bound=0)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("strategy", STAGES)
def test_a_single_device_loads_a_checkpoint_of_two_ranks_and_continues_training(run_on, tmp_path, strategy):
    weights, _ = run_on(2, write, strategy=strategy, path=tmp_path / "checkpoint.ckpt")
    run_on(1, load_alone, path=tmp_path / "checkpoint.ckpt", weights=weights)


def load_on_more_ranks(path: Path) -> None:
    learner = partial(Learner, OddModel, models.adam_with_large_eps, batches=3)
    runs = [fit(strategy, learner, ckpt_path=str(path), max_epochs=4) for strategy in SYSTEMS]
    for run in runs[1:]:
        assert [len(run.losses), len(runs[0].losses)] == [len(runs[0].losses)] * 2
        same_tensors(run.weights, runs[0].weights, bound=1e-6)


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.exhaustive
def test_four_ranks_resume_from_a_checkpoint_of_two_ranks(run_on, tmp_path, strategy):
    path = tmp_path / "checkpoint.ckpt"
    run_on(2, write_at_the_end_of_the_epoch, strategy=strategy, path=path)
    run_on(4, load_on_more_ranks, path=path)


def write_from_every_rank_once(strategy: str, folder: Path) -> list[str]:
    fit(strategy, partial(Learner, OddModel), callbacks=[SaveAfter(3, folder / "checkpoint.ckpt")], max_epochs=1)
    dist.barrier()
    return sorted(file.name for file in folder.iterdir()) if rank() == 0 else []


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("strategy", STAGES)
def test_one_checkpoint_is_one_file(run_on, tmp_path, strategy):
    assert run_on(2, write_from_every_rank_once, strategy=strategy, folder=tmp_path)[0] == ["checkpoint.ckpt"]
