"""Any stage, ranks, form, precision and offload saves; any other loads every bit, and goes on as if never stopped."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_zero import ZeroStrategy, load_weights
from lightning_zero.checkpoint.reading import open_checkpoint
from tests.support import models
from tests.support.trainer import Learner, fit
from tests.support.training import CLOSE, same_tensors, same_values
from tests.support.workers import rank, world_size

BATCHES = 3
learner = partial(Learner, partial(models.OddModel, rows=2), models.adam_with_large_eps, batches=BATCHES)

ON_DISK = {"optimizer": "nvme", "path": "swap", "sub_group": 1}
SYSTEMS = ["ddp", "zero1", "zero2", "zero3"]
SAVERS = {
    "ddp": lambda: "ddp",
    "zero1 full": lambda: "zero1",
    "zero3 full, in the background": lambda: ZeroStrategy(3, async_save=True),
    "zero1 sharded": lambda: ZeroStrategy(1, checkpoint="sharded"),
    "zero2 sharded, in the background": lambda: ZeroStrategy(2, checkpoint="sharded", async_save=True),
    "zero3 sharded": lambda: ZeroStrategy(3, checkpoint="sharded"),
    "zero2 full, from the CPU's memory": lambda: ZeroStrategy(2, offload="cpu"),
    "zero3 sharded, in the background, from a disk": lambda: ZeroStrategy(
        3, {**ON_DISK, "parameters": "nvme"}, checkpoint="sharded", async_save=True
    ),
}
LOADERS = {name: lambda name=name: name for name in SYSTEMS}
LOADERS |= {"zero3 to a disk": lambda: ZeroStrategy(3, {**ON_DISK, "parameters": "cpu"})}


class SaveAtTheEnd(Callback):
    """Of the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class SeeWhatWasLoaded(Callback):
    """Whole weights and optimizer state, on rank 0, before the first step."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = trainer.strategy.lightning_module_state_dict()
        state = trainer.strategy.optimizer_state(trainer.optimizers[0])
        self.seen = copy.deepcopy((weights, state))  # DDP's are live


def write(folder: Path, savers: list[str], precision: str) -> None:
    """A checkpoint of each saver, after the first of two epochs."""
    for name in savers:
        fit(SAVERS[name](), learner, callbacks=[SaveAtTheEnd(folder / f"{name}.ckpt")], precision=precision)


def load(folder: Path, files: list[str], systems: list[str], precision: str, before: int) -> None:
    """Load every file in every system.

    Arguments:
        precision: now.
        before: the number of ranks that saved. With more than two, systems add up in orders of their own.
    """
    runs: dict[str, Any] = {}
    for file in files:
        reference = file if "ddp" in file or "ddp" not in files else "zero1 full" if before > 2 else "ddp"
        whole = torch.load(folder / f"{reference if reference == 'ddp' else 'zero1 full'}.ckpt", weights_only=True)
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        masters = whole.get("lightning_zero", {}).get("masters", {}) if dtype is torch.float32 else {}
        expected = {name: masters.get(name, value).to(dtype) for name, value in whole["state_dict"].items()}
        # DDP reads files; what it makes of a folder, 'lightning-zero checkpoint convert' gives it
        for system in systems if "sharded" not in file else [each for each in systems if each != "ddp"]:
            seeing, what = SeeWhatWasLoaded(), f"{file} into {system}"
            run = fit(
                LOADERS[system](),
                learner,
                str(folder / f"{file}.ckpt"),
                callbacks=[seeing],
                precision=precision,
                max_epochs=2,
            )
            if rank() == 0:
                weights, state = seeing.seen
                same_tensors(weights, expected, bound=0)
                same_values(state, whole["optimizer_states"][0], f"optimizer state, {what}")
            assert len(run.losses) == BATCHES, what
            first = runs.setdefault("ddp" if before > 2 and file == "ddp" else "any", run)
            same_tensors(run.weights, first.weights, bound=0 if world_size() <= 2 else CLOSE)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 2), (2, 4), (3, 1), (1, 3)])
def test_any_stage_world_size_and_form_loads_what_any_other_saved(run_on, tmp_path, before, after):
    """In fp32, DDP (on one rank: a single device) among them."""
    run_on(before, write, folder=tmp_path, savers=list(SAVERS), precision="32-true")
    run_on(after, load, folder=tmp_path, files=list(SAVERS), systems=list(LOADERS), precision="32-true", before=before)


ZEROS = [name for name in SAVERS if name != "ddp"]


@pytest.mark.parametrize(
    ("before", "after", "saved", "loaded"),
    [
        (2, 2, "bf16-true", "bf16-true"),
        (3, 2, "bf16-true", "bf16-true"),
        (2, 1, "bf16-true", "32-true"),
        (2, 3, "32-true", "bf16-true"),
        (2, 2, "bf16-mixed", "bf16-mixed"),
        (2, 2, "32-true", "bf16-mixed"),
    ],
)
def test_any_precision_loads_what_any_other_saved(run_on, tmp_path, before, after, saved, loaded):
    """Where both have masters in fp32, these are kept too: the run goes on by the same digits."""
    run_on(before, write, folder=tmp_path, savers=ZEROS, precision=saved)
    run_on(
        after,
        load,
        folder=tmp_path,
        files=ZEROS,
        systems=["zero1", "zero3", "zero3 to a disk"],
        precision=loaded,
        before=before,
    )


def test_a_sharded_checkpoint_says_what_wrote_it(run_on, tmp_path):
    run_on(2, write, folder=tmp_path, savers=["zero3 sharded"], precision="32-true")
    opened = open_checkpoint(tmp_path / "zero3 sharded.ckpt")
    assert opened.form == "sharded"
    assert {key: opened.written_by[key] for key in ("stage", "world_size")} == {"stage": 3, "world_size": 2}
    assert opened.names_of_optimizers[0][0] == "model.temperature"
    run_on(1, load_alone, folder=tmp_path)


def load_alone(folder: Path) -> None:
    """`load_weights` reads a folder too: into an ordinary module, and into one on the meta device."""
    opened = open_checkpoint(folder / "zero3 sharded.ckpt").checkpoint["state_dict"]
    for device in ("cpu", "meta"):
        with torch.device(device):
            module = learner()
        load_weights(module, folder / "zero3 sharded.ckpt")
        same_tensors(dict(module.state_dict()), {name: value.clone() for name, value in opened.items()}, bound=0)
