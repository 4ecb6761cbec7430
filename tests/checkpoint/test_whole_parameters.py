"""Checkpoints of optimizers that need whole parameters: DDP's files, in both forms, on any number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero import ZeroStrategy
from lightning_zero.commands.checkpoint import main
from tests.support import whole
from tests.support.trainer import Learner, fit, make_trainer
from tests.support.training import same_tensors, same_values
from tests.support.workers import world_size

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "adafactor": (whole.Layered, whole.adafactor),  # factors
    "shampoo": (whole.Layered, whole.shampoo),  # lists of matrices
    "soap": (whole.Layered, whole.soap),  # lists, some of whose items have no elements, and counts in groups
    "torchao": (whole.wide, whole.adamw_8bit_of_torchao),  # tensors composed of others
    "bitsandbytes": (whole.wide, whole.adamw_8bit_of_bitsandbytes),  # a state dict in its own format
}


def made(name: str) -> Learner:
    import torchao.optim  # noqa: F401  (as projects do, before a checkpoint is read)

    model, optimizer = OPTIMIZERS[name]
    return Learner(model, optimizer, batches=4)


def read(path: Path) -> dict[str, Any]:
    if world_size() > 1:
        dist.barrier()
    import torchao.optim  # noqa: F401  (registers its tensors as safe to load)

    checkpoint = torch.load(path, weights_only=True, map_location="cpu")
    return {"weights": dict(checkpoint["state_dict"]), "states": checkpoint["optimizer_states"]}


def strategy_of(kind: str, **options: Any) -> Any:
    return "ddp" if kind == "ddp" else ZeroStrategy(stage=int(kind[-1]), **options)


@torch.compiler.set_stance("force_eager")
def save(kind: str, name: str, path: Path, **options: Any) -> None:
    torch.manual_seed(0)
    module = made(name)
    trainer = make_trainer(strategy_of(kind, after_fit="sharded", **options) if kind != "ddp" else "ddp", max_epochs=1)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    trainer.strategy.teardown()


@torch.compiler.set_stance("force_eager")
def save_again(kind: str, name: str, path: Path, again: Path) -> None:
    """Resume a finished run, and write the loaded state as one file."""
    torch.manual_seed(1)
    module = made(name)
    trainer = make_trainer(strategy_of(kind), max_epochs=1)
    trainer.fit(module, ckpt_path=str(path))
    assert trainer.global_step == 4
    trainer.save_checkpoint(again)


def write_the_same_file(name: str, stage: int, folder: Path, async_save: bool) -> None:
    save("ddp", name, folder / "ddp.ckpt")
    save(f"zero{stage}", name, folder / "zero.ckpt", async_save=async_save)
    same_values(read(folder / "zero.ckpt"), read(folder / "ddp.ckpt"), "checkpoint")


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("async_save", [False, True], ids=["at once", "in the background"])
def test_the_checkpoint_file_equals_ddps(run_on, tmp_path, name, stage, async_save):
    run_on(2, write_the_same_file, name=name, stage=stage, folder=tmp_path, async_save=async_save)


MOVES = [(2, "zero3", 3, "zero3"), (4, "zero2", 2, "zero3"), (3, "zero3", 1, "zero3"), (2, "ddp", 2, "zero3")]
MOVES += [(2, "zero3", 2, "ddp"), (2, "zero1", 4, "zero2")]


def equal_files(one: Path, other: Path) -> None:
    same_values(read(one), read(other), "checkpoint")


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("form", "move"),
    [(form, move) for form in ("full", "sharded") for move in MOVES if form == "full" or move[1] != "ddp"],
)
def test_optimizer_states_move_to_any_number_of_ranks(run_on, tmp_path, name, form, move):
    before, saver, after, loader = move
    if (name, form, loader) == ("torchao", "full", "ddp"):
        loader = "zero1"  # Lightning's own strategies cannot load such a file, as torch's map_location cannot
    path, again, reference = tmp_path / "saved.ckpt", tmp_path / "again.ckpt", tmp_path / "reference.ckpt"
    options = {"checkpoint": form} if saver != "ddp" else {}
    run_on(before, save, kind=saver, name=name, path=path, **options)
    full = path
    if form == "sharded":
        run_on(before, save, kind=saver, name=name, path=reference)
        full = reference
    if form == "sharded" and loader == "ddp":
        assert main(["convert", str(path), str(again), "--to", "full"]) == 0
    else:
        run_on(after, save_again, kind=loader, name=name, path=path, again=again)
    run_on(1, equal_files, one=again, other=full)


def resume(kind: str, name: str, folder: Path, form: str) -> None:
    """A run stopped in the middle and resumed equals the uninterrupted run."""
    model, optimizer = OPTIMIZERS[name]
    learner = partial(Learner, model, optimizer, batches=4)
    with torch.compiler.set_stance("force_eager"):
        never = fit(strategy_of(kind, checkpoint=form), learner)
        save(kind, name, folder / "half.ckpt", checkpoint=form)
        resumed = fit(strategy_of(kind, checkpoint=form), learner, ckpt_path=str(folder / "half.ckpt"))
    same_tensors(resumed.weights, never.weights, bound=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.exhaustive
def test_training_resumes_exactly(run_on, tmp_path, name, stage, form):
    run_on(2, resume, kind=f"zero{stage}", name=name, folder=tmp_path, form=form)
