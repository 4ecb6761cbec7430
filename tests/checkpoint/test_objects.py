"""Objects in a checkpoint that refer to modules, tensors or optimizers are saved as under DDP, with the same values."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero import ZeroStrategy
from tests.checkpoint import holders
from tests.support.trainer import make_trainer
from tests.support.warm import warm_python
from tests.trainer.cases import data

ROOT = Path(__file__).parents[2]
FORMS = {
    "full": {},
    "sharded": {"checkpoint": "sharded"},
    "full async": {"async_save": True},
    "sharded async": {"checkpoint": "sharded", "async_save": True},
}
KINDS = pytest.mark.parametrize("kind", [holders.Holding, holders.HoldingMore])


def fitted(strategy: Any, module: Any, path: Path, **options: Any) -> Trainer:
    saving = ModelCheckpoint(path.parent, path.stem, save_top_k=1, every_n_train_steps=2)
    callbacks = [module.hparams.watching, saving]
    trainer = make_trainer(strategy, callbacks=callbacks, max_steps=2, enable_checkpointing=True, **options)
    trainer.fit(module, data())
    return trainer


def saved(stages: list[int], forms: list[str], kind: Any, folder: Path, **options: Any) -> list[str]:
    paths = [folder / "ddp.ckpt"]
    fitted("ddp", holders.make(kind), paths[0], **options)
    for stage in stages:
        for form in forms:
            paths.append(folder / f"{stage} {form}.ckpt")
            fitted(ZeroStrategy(stage, **FORMS[form]), holders.make(kind), paths[-1], **options)
    return list(map(str, paths))


def compare(paths: list[str]) -> None:
    """Compare in a process in which the package cannot be imported."""
    command = [warm_python(), "-m", "tests.checkpoint.holders", *paths]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, cwd=ROOT)
    assert done.stdout.strip() == f"equal {len(paths) - 1}", done.stdout + done.stderr


@pytest.mark.behaviour("The Trainer", "`save_hyperparameters()` with modules, callbacks and bound methods")
@KINDS
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_objects_are_saved_as_under_ddp_and_load_without_the_package(run_on, tmp_path, ranks, kind):
    paths = run_on(ranks, saved, stages=[1, 2, 3], forms=list(FORMS), kind=kind, folder=tmp_path)
    compare(paths[0])
