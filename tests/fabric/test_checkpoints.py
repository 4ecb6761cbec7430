"""`fabric.save` and `fabric.load`: ordinary files, which DDP and a single device can read and write too."""

from __future__ import annotations

import gc
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam

from lightning_zero.fabric import ZeroStrategy
from tests.fabric.training import STRATEGIES, make_fabric, set_up, state_of, train, weights
from tests.support.models import OddModel
from tests.support.patience import little_patience
from tests.support.training import same_values
from tests.support.workers import rank


def shared_folder() -> Path:
    holder = [str(Path.cwd())]
    dist.broadcast_object_list(holder)
    return Path(holder[0])


def saved_and_loaded() -> None:
    """Each strategy writes the same file after two steps, and reads every other's: the third step is the same."""
    folder = shared_folder()
    files, ends = {}, {}
    for strategy in ("ddp", *STRATEGIES):
        fabric = make_fabric(strategy)
        model, optimizer = set_up(fabric)
        train(fabric, model, optimizer, steps=2)
        state = {"model": model, "optimizer": optimizer, "step": 2, "notes": {"seen": torch.ones(2)}}
        fabric.save(folder / strategy, state)
        fabric.save(folder / f"{strategy}-part", state, filter={"model": lambda name, value: "blocks" in name})
        files[strategy] = torch.load(folder / strategy, weights_only=True)
        part = torch.load(folder / f"{strategy}-part", weights_only=True)
        assert part["model"] and all("blocks" in name for name in part["model"])
        assert list(part) == list(state)
        ends[strategy] = train(fabric, model, optimizer, steps=1, first=2), weights(model), state_of(optimizer)
    for strategy in STRATEGIES:
        same_values(files[strategy], files["ddp"], f"the file of {strategy}")
        same_values(ends[strategy], ends["ddp"], strategy)
    for strategy, file in [*((s, "ddp") for s in STRATEGIES), ("ddp", "zero3"), ("zero3", "zero1"), ("zero1", "zero3")]:
        fabric = make_fabric(strategy)
        model, optimizer = set_up(fabric)
        train(fabric, model, optimizer, steps=1, first=20)  # a live engine with other weights, state and order of units
        state = {"model": model, "optimizer": optimizer, "step": 0}
        remainder = fabric.load(folder / file, state)
        assert list(remainder) == ["notes"] and state["step"] == 2 and state["model"] is model
        end = train(fabric, model, optimizer, steps=1, first=2), weights(model), state_of(optimizer)
        same_values(end, ends["ddp"], f"{strategy} from {file}")


@pytest.mark.exhaustive
@pytest.mark.behaviour("Fabric", "`save` and `load`: the same file as DDP's, read by DDP and by each stage; `filter=`")
def test_every_strategy_writes_the_same_file_and_reads_the_files_of_all_others(run_on):
    run_on(2, saved_and_loaded)


def read_otherwise() -> None:
    """Missing entries are named in an error or left unchanged; raw files; a part of a module; state_dict()."""
    folder = shared_folder()
    fabric = make_fabric("zero3")
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, steps=1)
    before = weights(model)
    fabric.save(folder / "whole", {"model": model, "head": model.module.head})
    whole = torch.load(folder / "whole", weights_only=True)
    same_values(dict(whole["head"]), {n[5:]: v for n, v in before.items() if n.startswith("head.")}, "a part")
    with pytest.raises(KeyError, match="'other'"):
        fabric.load(folder / "whole", {"model": model, "other": 1})
    fabric.load(folder / "whole", {"model": model, "other": 1}, strict=False)
    lacking = {name: value + 1 for name, value in before.items() if name != "temperature"}
    if rank() == 0:
        torch.save(lacking, folder / "raw")
        torch.save({"model": lacking}, folder / "lacking")
        torch.save(optimizer.optimizer.__class__([torch.zeros(1)]).state_dict(), folder / "optimizer")
    fabric.barrier()
    with pytest.raises(RuntimeError, match="temperature"):
        fabric.load(folder / "lacking", {"model": model})
    fabric.load(folder / "lacking", {"model": model}, strict=False)
    with pytest.raises(RuntimeError, match="temperature"):
        fabric.load_raw(folder / "raw", model)
    fabric.load_raw(folder / "raw", model, strict=False)
    same_values(weights(model), {**before, **lacking}, "after load_raw")
    with pytest.raises(ValueError, match="doesn't match the size"):
        fabric.load_raw(folder / "optimizer", optimizer)
    fabric.save(folder / "without", {"step": 3})
    assert fabric.load(folder / "without") == {"step": 3}
    state = optimizer.state_dict()  # whole on every rank, as under DDP
    assert state["state"][1]["exp_avg"].shape == before["embed.weight"].shape
    assert state["state"][1]["exp_avg"].device.type == "cpu"


def test_a_file_is_read_strictly_or_loosely_raw_or_in_part(run_on):
    run_on(2, read_otherwise)


def with_masters() -> None:
    """A run in bf16 resumes exactly from its file; a file without an optimizer contains no masters."""
    folder = shared_folder()
    for strategy in STRATEGIES:
        fabric = make_fabric(strategy, precision="bf16-true")
        model, optimizer = set_up(fabric)
        train(fabric, model, optimizer, steps=2)
        fabric.save(folder / strategy, {"model": model, "optimizer": optimizer}, filter={"model": lambda n, v: True})
        fabric.save(folder / "weights", {"model": model})
        end = train(fabric, model, optimizer, steps=2, first=2), weights(model)
        file = torch.load(folder / strategy, weights_only=True)
        assert file["model"]["embed.weight"].dtype == torch.bfloat16
        assert file["lightning_zero"]["masters"]["model"]["embed.weight"].dtype == torch.float32
        assert list(torch.load(folder / "weights", weights_only=True)) == ["model"]
        model, optimizer = set_up(fabric)
        assert fabric.load(folder / strategy, {"model": model, "optimizer": optimizer}) == {}
        same_values((train(fabric, model, optimizer, steps=2, first=2), weights(model)), end, strategy)
        shutil.rmtree(folder / strategy, ignore_errors=True)


@pytest.mark.behaviour(
    "Fabric", '`precision="bf16-true"`: the file contains the fp32 masters too; training resumes from it'
)
def test_bf16_training_resumes_from_its_file_bit_for_bit(run_on):
    run_on(2, with_masters)


@little_patience()
def saved_on_one_rank(strategy: str) -> None:
    fabric = make_fabric(strategy)
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, steps=1)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"what fabric.save\(\) writes.*rank 1 waits for .*barrier"):
        if rank() == 0:
            fabric.save("never", {"model": model, "optimizer": optimizer})
        fabric.barrier("after it")
    assert time.monotonic() - begin < 20
    assert not Path("never").exists()


def test_saving_on_one_rank_only_raises_an_error_within_seconds(run_on):
    run_on(2, saved_on_one_rank, strategy="zero1")  # at which every rank has whole weights


def test_a_file_written_on_two_ranks_is_read_on_one_and_vice_versa(run_on, tmp_path):
    run_on(2, save_alone, strategy="zero3", path=str(tmp_path / "two"))
    run_on(1, load_alone, strategy="ddp", path=str(tmp_path / "two"))
    run_on(1, load_alone, strategy="zero3", path=str(tmp_path / "two"))
    run_on(1, save_alone, strategy="zero2", path=str(tmp_path / "one"))
    run_on(2, load_alone, strategy="zero3", path=str(tmp_path / "one"))


def save_alone(strategy: str, path: str) -> None:
    fabric = make_fabric(strategy)
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, steps=1)
    fabric.save(path, {"model": model, "optimizer": optimizer})


def load_alone(strategy: str, path: str) -> None:
    fabric = make_fabric(strategy)
    model, optimizer = set_up(fabric)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    file: Any = torch.load(path, weights_only=True)
    same_values(weights(model), dict(file["model"]), "weights")
    same_values(state_of(optimizer)["state"], file["optimizer"]["state"], "the optimizer's state")


def test_an_unsupported_optimizer_is_refused_when_it_is_set_up(run_on):
    run_on(2, refused_optimizer)


def refused_optimizer() -> None:
    fabric = make_fabric("zero3")
    module = OddModel()
    with pytest.raises(TypeError, match="LBFGS cannot be used with ZeRO"):
        fabric.setup(module, torch.optim.LBFGS(module.parameters()))
    assert fabric.strategy.engines == []
    fabric.setup(module, Adam(module.parameters()))


def with_a_loss(form: str) -> None:
    folder, state = shared_folder(), {}
    for number in range(2):
        fabric = make_fabric(ZeroStrategy(3, checkpoint=form))
        model, optimizer = set_up(fabric)
        state = {"model": model, "optimizer": optimizer, "loss": nn.CrossEntropyLoss()}
        if number == 0:
            train(fabric, model, optimizer, steps=2)
            expected = weights(model)
            fabric.save(folder / "with a loss", state)
    assert fabric.load(folder / "with a loss", state) == {}
    same_values(weights(model), expected, form)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_modules_without_state_are_saved_and_loaded(run_on, form):
    run_on(2, with_a_loss, form=form)


class InACycle(OddModel):
    """A module that refers to itself, so that only a garbage collection frees it."""

    def __init__(self) -> None:
        super().__init__()
        self.group = [self]


def folds(options: dict[str, Any]) -> None:
    """The first fold's module is freed on rank 0 only, before the second fold's is saved, loaded and torn down."""
    folder = shared_folder()
    fabric = make_fabric(ZeroStrategy(3, timeout=30, **options))
    gc.collect()
    gc.disable()
    try:
        for fold in range(2):
            model, optimizer = set_up(fabric, InACycle)
            train(fabric, model, optimizer, steps=1 + fold)
            fabric.save(folder / f"fold {fold}", {"model": model, "optimizer": optimizer, "fold": fold})
            before = weights(model)
            train(fabric, model, optimizer, steps=1)
            state = {"model": model, "optimizer": optimizer, "fold": None}
            fabric.load(folder / f"fold {fold}", state)
            assert state["fold"] == fold
            same_values(weights(model), before, f"fold {fold}")
            del model, optimizer, state
            if rank() == 0:
                gc.collect()
        assert len(fabric.strategy.engines) == (0 if rank() == 0 else 2)
        fabric.strategy.teardown()
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{}, {"checkpoint": "sharded"}, {"async_save": True}], ids=str)
def test_a_deleted_module_may_be_freed_at_different_times_on_the_ranks(run_on, options):
    run_on(2, folds, options=options)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = OddModel()

    def forward(self, *batch: Any) -> Any:
        return self.net(*batch)


def with_masters_of_a_part(form: str) -> None:
    """A file of a submodule contains its masters, by the submodule's own names. The submodule alone reads it, too."""
    folder = shared_folder()
    fabric = make_fabric(ZeroStrategy(3, checkpoint=form), precision="bf16-true")
    model, optimizer = set_up(fabric, Wrapped)
    train(fabric, model, optimizer, steps=2)
    fabric.save(folder / form, {"net": model.module.net, "optimizer": optimizer}, filter={"net": lambda n, v: True})
    end = train(fabric, model, optimizer, steps=2, first=2), dict(weights(model.module.net))
    if form == "full":
        file = torch.load(folder / form, weights_only=True)
        masters = file["lightning_zero"]["masters"]["net"]
        assert list(map(sorted, (masters, file["net"]))) == [sorted(dict(OddModel().named_parameters()))] * 2
        for name, master in masters.items():
            assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), file["net"][name])
    for whole in (Wrapped, OddModel):
        model, optimizer = set_up(fabric, whole)
        net = model.module.net if whole is Wrapped else model
        assert fabric.load(folder / form, {"net": net, "optimizer": optimizer}) == {}
        same_values((train(fabric, model, optimizer, steps=2, first=2), weights(net)), end, whole.__name__)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_bf16_training_resumes_bit_for_bit_from_a_file_of_a_submodule(run_on, form):
    run_on(2, with_masters_of_a_part, form=form)
