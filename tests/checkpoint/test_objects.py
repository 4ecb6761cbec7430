"""Objects in a checkpoint (modules, callbacks, optimizers, configurations) are saved as under DDP."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from omegaconf import OmegaConf

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.converting import write_full, write_sharded
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.fabric import ZeroStrategy as FabricStrategy
from tests.checkpoint import holders
from tests.fabric.training import make_fabric
from tests.support import rank
from tests.support.trainer import make_trainer
from tests.support.warm import warm_python
from tests.trainer.cases import Net, data

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
    callbacks = [module.hparams.watching, saving] if "watching" in module.hparams else [saving]
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


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The Trainer", "`save_hyperparameters()` with modules, callbacks and bound methods")
@KINDS
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_objects_are_saved_as_under_ddp_and_load_without_the_package(run_on, tmp_path, ranks, kind):
    paths = run_on(ranks, saved, stages=[1, 2, 3], forms=list(FORMS), kind=kind, folder=tmp_path)
    compare(paths[0])


def weights_in_16_bits(stage: int, folder: Path) -> None:
    module = holders.make()
    path = folder / f"{stage}.ckpt"
    fitted(ZeroStrategy(stage), module, path, precision="bf16-true")
    if rank() == 0:
        found = holders.held_in(str(path))
        held = found["hyper_parameters"]["net"].state_dict()
        assert held.keys() == {name.removeprefix("net.") for name in found["state_dict"]}
        for name, value in held.items():
            assert torch.equal(value, found["state_dict"][f"net.{name}"])
        assert held["0.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_a_module_in_16_bits_has_the_values_of_the_state_dict(run_on, tmp_path, stage):
    run_on(2, weights_in_16_bits, stage=stage, folder=tmp_path)


# ------------------------------------------------------------------------------------------- ranks that differ


class Different(holders.Holding):
    """A module whose hyperparameters differ between ranks: rank 0's contain objects, and layers in another order."""

    def on_fit_start(self) -> None:
        self.hparams.kept = holders.Kept([self.net[3], self.net[0]]) if rank() == 0 else threading.Lock()


def objects_on_rank_0(form: str, folder: Path) -> None:
    path = folder / f"{form}.ckpt"
    module = holders.make(Different)
    fitted(ZeroStrategy(3, **FORMS[form]), module, path)
    if rank() == 0:
        kept = holders.held_in(str(path))["hyper_parameters"]["kept"].values
    for number, layer in enumerate((module.net[3], module.net[0])):
        assert rank() != 0 or torch.equal(kept[number].weight, layer.weight)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("form", FORMS)
def test_rank_0_decides_which_objects_are_saved(run_on, tmp_path, form):
    run_on(2, objects_on_rank_0, form=form, folder=tmp_path)


class Derived(holders.Holding):
    def on_fit_start(self) -> None:
        if rank() == 0:
            self.hparams.kept = holders.Kept(self.net[0].weight.detach() * 2)


class WithLock(holders.Holding):
    def on_fit_start(self) -> None:
        self.hparams.kept = holders.Kept([self.net[0], threading.Lock()])


def refused(form: str, module: Any, errors: Any, why: str, folder: Path) -> None:
    made = holders.make(module)
    with pytest.raises(errors, match=why):
        fitted(ZeroStrategy(3, **FORMS[form]), made, folder / f"{form}.ckpt")
    assert not list(folder.iterdir())
    fitted(ZeroStrategy(3, **FORMS[form]), holders.make(), folder / f"{form}.ckpt")


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("module", "errors", "why"),
    [
        (WithLock, TypeError, "cannot pickle '_thread.lock' object"),
        (Derived, (OSError, RuntimeError), "not every rank has it"),
    ],
)
def test_an_object_that_cannot_be_saved_is_refused_on_every_rank(run_on, tmp_path, form, module, errors, why):
    run_on(2, refused, form=form, module=module, errors=errors, why=why, folder=tmp_path)


# ---------------------------------------------------------------------------------------------- other ways to save


class OwnIO(TorchCheckpointIO):
    """A project's plugin."""


class InAThread(AsyncCheckpointIO):
    """Lightning's plugin, which pickles in a thread, but within the hook that saves: objects show which hook runs."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        assert self._executor is not None
        self._executor.submit(int).result()  # its only thread is then idle


def by_a_plugin(plugin: Any, folder: Path) -> None:
    for strategy in ("ddp", "zero3"):
        fitted(strategy, holders.make(), folder / f"{strategy}.ckpt", plugins=[plugin()])


def by_fabric(options: dict[str, Any], folder: Path) -> None:
    for strategy in ("ddp", FabricStrategy(3, **options)):
        torch.manual_seed(0)
        fabric = make_fabric(strategy)
        net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
        for _ in range(2):
            fabric.backward(model(torch.ones(2, 6)).sum())
            optimizer.step()
        objects = {"net": net, "optimizer": optimizer.optimizer}
        name = "ddp" if strategy == "ddp" else "zero3"
        fabric.save(folder / f"{name}.ckpt", {"model": model, "added": holders.Kept(objects)})
        fabric.strategy.teardown()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("plugin", [OwnIO, InAThread])
def test_a_plugin_receives_objects_that_it_can_pickle(run_on, tmp_path, plugin):
    run_on(2, by_a_plugin, plugin=plugin, folder=tmp_path)
    compare([f"{tmp_path}/ddp.ckpt", f"{tmp_path}/zero3.ckpt"])


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("form", FORMS)
def test_fabric_saves_objects_as_under_ddp(run_on, tmp_path, form):
    run_on(2, by_fabric, options=FORMS[form], folder=tmp_path)
    compare([f"{tmp_path}/ddp.ckpt", f"{tmp_path}/zero3.ckpt"])


# -------------------------------------------------------------------------------------------------------- loading


class Acting:
    """Holds a bound method, which a pickle creates with a call of ``getattr``."""

    def __init__(self) -> None:
        self.act = self.acted

    def acted(self) -> int:
        return 3


class WithBoundMethod(holders.Holding):
    def on_fit_start(self) -> None:
        self.hparams.kept = Acting()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["hyper_parameters"]["kept"].act()

    validation_step = test_step = predict_step = holders.Holding.training_step


def loaded(form: str, folder: Path) -> None:
    path = folder / f"{form}.ckpt"
    fitted(ZeroStrategy(3, **FORMS[form]), holders.make(WithBoundMethod), path)
    for name in ("fit", "validate", "test", "predict"):
        module = holders.make(WithBoundMethod)
        run = getattr(make_trainer(ZeroStrategy(3), max_steps=3), name)
        with pytest.raises(ValueError, match=r"unless you trust its source; if you do, pass weights_only=False\."):
            run(module, data(), ckpt_path=path)
        run(module, data(), ckpt_path=path, weights_only=False)
        assert module.found == 3


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_objects_are_loaded_only_with_weights_only_false(run_on, tmp_path, form):
    run_on(2, loaded, form=form, folder=tmp_path)


# ------------------------------------------------------------------------------------------------- configurations

SECRET = "not for any file"


def configured() -> Any:
    return OmegaConf.create({"a": "${oc.env:SECRET}", "list": ["${oc.env:SECRET}", {"b": "${a}"}], "missing": "???"})


class Configured(Net):
    """A module that puts OmegaConf's containers wherever a checkpoint may have values."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"configuration": configured()})

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.parameters()), "configuration": configured(), "list": configured().list}]
        return torch.optim.SGD(groups, lr=0.1)

    def get_extra_state(self) -> Any:
        return {"configuration": configured(), "within": [configured().list]}

    def set_extra_state(self, state: Any) -> None:
        self.found = [state]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = {"list": [configured(), self.scale], "top": configured()}
        checkpoint["optimizer_1"] = configured()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.added = [checkpoint["added"]["list"][0], checkpoint["added"]["top"], checkpoint["optimizer_1"]]


def with_configurations(form: str, folder: Path) -> None:
    os.environ["SECRET"] = SECRET
    path = folder / f"{form}.ckpt"
    fitted(ZeroStrategy(3, **FORMS[form]), Configured(), path)
    paths = [path, folder / "to full.ckpt", folder / "to sharded.ckpt"]
    write_full(open_checkpoint(path), str(paths[1]))
    write_sharded(open_checkpoint(path), str(paths[2]))
    for file in (file for file in folder.rglob("*") if file.is_file()):
        assert SECRET.encode() not in file.read_bytes(), file
    for each in paths:
        module = Configured()
        trainer = make_trainer(ZeroStrategy(3), max_steps=3)
        trainer.fit(module, data(), ckpt_path=each)
        group = trainer.optimizers[0].param_groups[0]
        found = [group["configuration"], module.found[0]["configuration"], *module.added]
        assert [OmegaConf.to_container(one) for one in found] == [OmegaConf.to_container(configured())] * 5
        for one in (group["list"], module.found[0]["within"][0]):
            assert OmegaConf.to_container(one) == OmegaConf.to_container(configured().list)


@pytest.mark.parametrize("form", FORMS)
def test_configurations_are_saved_converted_and_loaded_unresolved(run_on, tmp_path, form):
    run_on(1, with_configurations, form=form, folder=tmp_path)


RESOLVING = OmegaConf.create({"a": "${oc.env:SECRET}"})


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("lightning_zero", OmegaConf.create({"format": "${oc.env:SECRET}"})),
        ("lightning_zero", {"written_by": RESOLVING}),
        ("state_dict", RESOLVING),
        ("optimizer_states", OmegaConf.create(["${oc.env:SECRET}"])),
        ("optimizer_states", [RESOLVING]),
        ("optimizer_states", [{"state": {}, "param_groups": [{"params": OmegaConf.create(["${oc.env:SECRET}"])}]}]),
    ],
)
def test_a_configuration_in_place_of_a_part_of_the_checkpoint_is_refused(tmp_path, monkeypatch, entry, value):
    monkeypatch.setenv("SECRET", SECRET)
    torch.save({"state_dict": {}, "epoch": 0, entry: value}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=f"{entry} has a (Dict|List)Config") as refused:
        open_checkpoint(tmp_path / "x.ckpt")
    assert SECRET not in str(refused.value)
