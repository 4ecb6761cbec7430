"""Saved at any stage, world size, form, precision and offload, a checkpoint is loaded exactly at any other.

Each saver writes once per number of ranks and precision, and one test shows that the contents of the full and of the
sharded checkpoints are bit-identical for all savers. So a loader need not read every saver's checkpoint in every case:
each case reads every saver's checkpoint, and every loader reads a full and a sharded one; which loader reads which
saver's checkpoint changes from case to case, until all pairs have occurred.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._pytree import tree_map

from lightning_zero import ZeroStrategy, load_weights
from lightning_zero.checkpoint.reading import open_checkpoint
from tests.support import WorkerPools, models
from tests.support.selection import exhaustive_but
from tests.support.trainer import Learner, fit
from tests.support.training import CLOSE, same_tensors, same_values
from tests.support.workers import rank, world_size

BATCHES = 3
learner = partial(Learner, partial(models.OddModel, rows=2), models.adam_with_large_eps, batches=BATCHES)

ON_DISK = {"optimizer": "nvme", "path": "swap"}
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
        3, offload={**ON_DISK, "parameters": "nvme"}, checkpoint="sharded", async_save=True
    ),
}
LOADERS = {name: lambda name=name: name for name in SYSTEMS}
LOADERS |= {"zero3 to a disk": lambda: ZeroStrategy(3, offload={**ON_DISK, "parameters": "cpu"})}


class SaveAtTheEnd(Callback):
    """Saves a checkpoint at the end of the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class SeeWhatWasLoaded(Callback):
    """Records full weights and optimizer state on rank 0, before the first step."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = trainer.strategy.lightning_module_state_dict()
        state = trainer.strategy.optimizer_state(trainer.optimizers[0])
        self.seen = copy.deepcopy((weights, state))  # DDP's tensors are live


def write(folder: Path, precision: str) -> None:
    """Write a checkpoint with each saver, after the first of two epochs."""
    for name in savers(precision):
        fit(SAVERS[name](), learner, callbacks=[SaveAtTheEnd(folder / f"{name}.ckpt")], precision=precision)


def savers(precision: str) -> list[str]:
    return [name for name in SAVERS if name != "ddp" or precision == "32-true"]


Saved = Callable[[int, str], Path]


@pytest.fixture(scope="module")
def saved(worker_pools: WorkerPools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of every saver's checkpoint for a world size and a precision; written on first use."""

    @cache
    def folder(ranks: int, precision: str) -> Path:
        path = tmp_path_factory.mktemp("saved")
        worker_pools.run_on(ranks, write, folder=path, precision=precision)
        return path

    return folder


# -------------------------------------------------------------------------------------------------------- what is saved


def content(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint's contents without its writer's description, and the memory layout of a file's tensors."""
    opened = open_checkpoint(path)
    whole = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, opened.checkpoint)
    whole.get("lightning_zero", {}).pop("written_by", None)
    lie = {name: (t.stride(), t.storage_offset()) for name, t in opened.tensors.items() if opened.form == "full"}
    return whole, lie


def without_ours(values: dict[str, Any]) -> dict[str, Any]:
    """Without the entries that DDP does not write."""
    return {name: value for name, value in values.items() if name.split(".")[0] != "lightning_zero"}


@pytest.mark.parametrize(
    ("ranks", "precision"),
    [*((ranks, "32-true") for ranks in (1, 2, 3, 4)), (2, "bf16-true"), (3, "bf16-true"), (2, "bf16-mixed")],
)
@pytest.mark.exhaustive
def test_all_savers_write_the_same_contents(saved: Saved, ranks: int, precision: str) -> None:
    """Whole files and whole folders are compared; on more than two ranks, DDP adds up in a different order."""
    folder = saved(ranks, precision)
    for form in ("full", "sharded"):
        names = [name for name in savers(precision) if name != "ddp" and ("sharded" in name) is (form == "sharded")]
        first, *others = [content(folder / f"{name}.ckpt") for name in names]
        for name, other in zip(names[1:], others, strict=True):
            same_values(other, first, name)
        if form == "full" and precision == "32-true" and ranks <= 2:
            expected = tuple(without_ours(each) for each in first)
            same_values(content(folder / "ddp.ckpt"), expected, "ddp")


# ------------------------------------------------------------------------------------------------------- who reads what


def meetings(savers: list[str], loaders: list[str], turn: int) -> list[tuple[str, str]]:
    """Pairs of saver and loader for one case: each loader reads one checkpoint of each form, the next at each turn."""
    met = []
    for form in (False, True):
        files = [name for name in savers if ("sharded" in name) is form]
        # DDP reads full checkpoints only; 'lightning-zero checkpoint convert' makes one of a sharded checkpoint.
        systems = [name for name in loaders if name != "ddp" or not form]
        for number in range(max(len(files), len(systems))):
            met.append((files[(number + turn) % len(files)], systems[number % len(systems)]))
    return met


def load(folder: Path, files: list[tuple[str, str]], precision: str, before: int) -> None:
    """Load each file into the system paired with it.

    Arguments:
        precision: the loading run's precision.
        before: the number of ranks that saved. With more than two, systems add up in different orders.
    """
    runs: dict[str, Any] = {}
    for file, system in files:
        whole = torch.load(folder / f"{'ddp' if file == 'ddp' else 'zero1 full'}.ckpt", weights_only=True)
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        masters = whole.get("lightning_zero", {}).get("masters", {}) if dtype is torch.float32 else {}
        expected = {name: masters.get(name, value).to(dtype) for name, value in whole["state_dict"].items()}
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


# Numbers of ranks that saved and of ranks that load, in fp32; both include DDP (on one rank: a single device).
SIZES = [(2, 2), (4, 2), (2, 4), (3, 1), (1, 3)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before", "after"),
    exhaustive_but([(1, 3)], SIZES),
)
def test_any_stage_world_size_and_form_loads_what_any_other_saved(run_on, saved: Saved, before: int, after: int):
    files = meetings(list(SAVERS), list(LOADERS), SIZES.index((before, after)))
    run_on(after, load, folder=saved(before, "32-true"), files=files, precision="32-true", before=before)


ZEROS = [name for name in SAVERS if name != "ddp"]
ZERO_LOADERS = ["zero1", "zero3", "zero3 to a disk"]
PRECISIONS = [
    (2, 2, "bf16-true", "bf16-true"),
    (3, 2, "bf16-true", "bf16-true"),
    (2, 1, "bf16-true", "32-true"),
    (2, 3, "32-true", "bf16-true"),
    (2, 2, "bf16-mixed", "bf16-mixed"),
    (2, 2, "32-true", "bf16-mixed"),
]


@pytest.mark.parametrize(("before", "after", "was", "now"), PRECISIONS)
@pytest.mark.exhaustive
def test_any_precision_loads_what_any_other_saved(run_on, saved: Saved, before: int, after: int, was: str, now: str):
    """If both have fp32 masters, these are restored, too, so the run continues with the same precision."""
    files = meetings(ZEROS, ZERO_LOADERS, PRECISIONS.index((before, after, was, now)))
    run_on(after, load, folder=saved(before, was), files=files, precision=now, before=before)


@pytest.mark.parametrize(
    ("savers", "loaders", "cases"), [(list(SAVERS), list(LOADERS), SIZES), (ZEROS, ZERO_LOADERS, PRECISIONS)]
)
def test_every_loader_meets_every_saver_in_some_case(savers: list[str], loaders: list[str], cases: list[Any]):
    """Each case includes every saver, and every loader reads a file and a folder, except that DDP reads no folder."""
    able = {
        (saver, loader) for saver, loader in product(savers, loaders) if (loader != "ddp") or "sharded" not in saver
    }
    met = [meetings(savers, loaders, turn) for turn in range(len(cases))]
    assert {each for case in met for each in case} == able
    for case in met:
        assert {saver for saver, _ in case} == set(savers)
        assert {("sharded" in s, loader) for s, loader in case} == {("sharded" in s, loader) for s, loader in able}


@pytest.mark.exhaustive
def test_a_sharded_checkpoint_records_what_wrote_it(run_on, saved: Saved):
    path = saved(2, "32-true") / "zero3 sharded.ckpt"
    opened = open_checkpoint(path)
    assert opened.form == "sharded"
    assert {key: opened.written_by[key] for key in ("stage", "world_size")} == {"stage": 3, "world_size": 2}
    assert opened.names_of_optimizers[0][0] == "model.temperature"
    run_on(1, load_alone, path=path)


def load_alone(path: Path) -> None:
    """`load_weights` reads a folder too: into an ordinary module, and into one on the meta device."""
    opened = open_checkpoint(path).checkpoint["state_dict"]
    for device in ("cpu", "meta"):
        with torch.device(device):
            module = learner()
        load_weights(module, path)
        same_tensors(dict(module.state_dict()), {name: value.clone() for name, value in opened.items()}, bound=0)
