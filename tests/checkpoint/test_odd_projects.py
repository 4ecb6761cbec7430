"""Projects whose modules and hooks save unusual values save and resume as they do under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.reading import open_checkpoint
from tests.support.allowed import nested_allowed
from tests.support.training import same_values
from tests.support.workers import world_size
from tests.trainer.cases import Net, fit, observed

FORMS = pytest.mark.parametrize("form", ["full", "sharded"])


def trained(form: str, module: Any, stage: int = 3, is_async: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    strategy = "ddp" if form == "ddp" else ZeroStrategy(stage, checkpoint=form, async_save=is_async)
    return fit(strategy, module(), **options)


def saved_by(form: str, module: Any, folder: Path, **options: Any) -> Path:
    """The checkpoint of the first epoch of a run."""
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trained(form, module, callbacks=[saving], enable_checkpointing=True, **options)
    if world_size() > 1:
        dist.barrier()
    return folder / "epoch=0.ckpt"


# --------------------------------------------------------------------------------- values that change during a save


class Counts(Net):
    """Large tensors filled with the number of steps, in all places where a checkpoint may have tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(8_000_000))
        self.own = torch.zeros(8_000_000)
        self.lr = torch.tensor(0.01)

    def get_extra_state(self) -> Any:
        return {"own": self.own}

    def set_extra_state(self, state: Any) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.own += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["put_in"] = self.own
        checkpoint["own"] = [self.own]


def values_of_the_time(form: str, stage: int, folder: Path) -> None:
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer, module = trained(form, Counts, stage, True, callbacks=[saving], enable_checkpointing=True)
    trainer.save_checkpoint(folder / "after.ckpt")
    with torch.no_grad():
        for tensor in (*module.parameters(), module.steps, module.own):
            tensor.zero_()
    trainer.strategy._files.saver.finish()
    if world_size() > 1:
        dist.barrier()
    paths = list(folder.glob("*.ckpt"))
    assert len(paths) == 1 + 12 // world_size()
    for path in paths:
        checkpoint = open_checkpoint(path).checkpoint
        weights, step = checkpoint["state_dict"], checkpoint["global_step"]
        for value in (weights["steps"], weights["put_in"], checkpoint["own"][0], weights["_extra_state"]["own"]):
            assert (value.clone() == step).all(), path.name
        assert all(state["step"] == step for state in checkpoint["optimizer_states"][0]["state"].values())
        assert weights["scale"] != 0


@FORMS
@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (1, 3), (2, 1), (2, 3)])
@pytest.mark.exhaustive
def test_a_background_save_writes_the_values_at_the_time_of_the_call(run_on, tmp_path, form, ranks, stage):
    run_on(ranks, values_of_the_time, form=form, stage=stage, folder=tmp_path)


# ---------------------------------------------------------------------------------------------- versions of modules


class Versioned(nn.Linear):
    """A layer that can be loaded only with its version, as layers do whose names or shapes have changed."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") != self._version:
            raise ValueError(f"{prefix} has the version {local_metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


class WithVersions(Net):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.head = Versioned(6, classes)
        self.norm = nn.BatchNorm1d(6)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["copies"] = [self.state_dict()]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.copies = checkpoint["copies"]


def resumed_with_versions(form: str, folder: Path) -> None:
    path = saved_by(form, WithVersions, folder)
    _, module = trained(form, WithVersions, ckpt_path=path)
    versions = {name: each["version"] for name, each in module.state_dict()._metadata.items()}
    assert versions["head"] == versions["norm"] == 2
    found = open_checkpoint(path).checkpoint["state_dict"]._metadata
    assert {name: each["version"] for name, each in found.items()} == versions
    assert module.copies[0]._metadata == found
    other = WithVersions(classes=4)
    with pytest.raises(RuntimeError, match="size mismatch for head"):
        fit(ZeroStrategy(3), other, ckpt_path=path)


@pytest.mark.exhaustive(but=1)
@FORMS
def test_modules_receive_the_version_with_which_they_were_saved(run_on, tmp_path, form):
    run_on(2, resumed_with_versions, form=form, folder=tmp_path)


# -------------------------------------------------------------------------------------- what modules and hooks add


class Shadow(Net):
    """Keeps an average of its weights, as many projects do, in tensors computed from the parameters."""

    def on_fit_start(self) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def get_extra_state(self) -> Any:
        scale = self.scale.detach() * 2
        return {0: scale, 1: {"a": {}, 5: (1, 2)}, "empty": {}, "none": None, "list": [scale, []], "pair": (scale,)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = ordinary(state)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weight = self.shadow["head.weight"]
        checkpoint["shadow"] = dict(self.shadow)
        checkpoint["odd"] = {
            (1, 2): weight,
            3: [weight, {4: weight}],
            None: weight.t(),
            2.5: weight,
            True: {"": weight[0]},
        }
        checkpoint["state_dict"]["half"] = weight.half()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["half"]
        self.loaded = ordinary({name: checkpoint[name] for name in ("shadow", "odd")})


def ordinary(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: ordinary(item) for key, item in value.items()}
    return list(map(ordinary, value)) if isinstance(value, (list, tuple)) else value


def what_was_put_in(form: str, is_async: bool, folder: Path) -> None:
    found = []
    for each in ("ddp", form):
        path = saved_by(each, Shadow, folder / each, is_async=is_async)
        _, module = trained(each, Shadow, ckpt_path=path)
        found.append({**module.loaded, "extra": module.extra})
    assert found[1].keys() == found[0].keys()
    for name, expected in found[0].items():
        assert found[1][name] == expected, name


@FORMS
@pytest.mark.parametrize("is_async", [False, True], ids=["", "in the background"])
def test_parameter_values_that_hooks_add_are_loaded_where_they_were_added(run_on, tmp_path, form, is_async):
    run_on(2, what_was_put_in, form=form, is_async=is_async, folder=tmp_path)


class WithUnusualBuffers(Net):
    """Buffers whose values are computed from their memory when they are read, and tensors of other layouts."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.tensor([1 + 2j, 3 - 4j])
        self.register_buffer("conj", values.conj())
        self.register_buffer("one", values.conj()[0])
        self.register_buffer("neg", torch._neg_view(torch.arange(3.0)))
        self.register_buffer("sparse", torch.eye(3).to_sparse_csr())

    def get_extra_state(self) -> Any:
        return {"nested": torch.nested.as_nested_tensor([torch.ones(2), torch.zeros(3)])}

    def set_extra_state(self, state: Any) -> None:
        self.nested = state["nested"]


@nested_allowed()
def with_unusual_buffers(form: str, is_async: bool, folder: Path) -> None:
    path = saved_by(form, WithUnusualBuffers, folder, is_async=is_async)
    other = WithUnusualBuffers()
    for buffer in (other.conj, other.one, other.neg, other.sparse.values()):
        buffer.zero_()
    torch.manual_seed(0)
    fit(ZeroStrategy(3, checkpoint=form), other, ckpt_path=path)
    expected = WithUnusualBuffers()
    for name in ("conj", "one", "neg"):
        assert torch.equal(getattr(other, name), getattr(expected, name)), name
    assert torch.equal(other.sparse.to_dense(), torch.eye(3))
    assert [part.tolist() for part in other.nested.unbind()] == [[1, 1], [0, 0, 0]]


@pytest.mark.parametrize("is_async", [False, True])
@FORMS
def test_buffers_of_any_layout_are_saved_and_loaded(run_on, tmp_path, form, is_async):
    run_on(1, with_unusual_buffers, form=form, is_async=is_async, folder=tmp_path)


class OnRank0(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.is_global_zero:
            checkpoint["only"] = {name: value.detach().clone() for name, value in self.named_parameters()}


def put_in_on_rank_0(form: str, folder: Path) -> None:
    why = "lacks some ranks' shards of" if form == "sharded" else "rank 0 waits for the rendezvous for 'scale'"
    with pytest.raises((OSError, RuntimeError, ValueError), match=why):
        saved_by(form, OnRank0, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.exhaustive(but=1)
@FORMS
def test_parameter_values_that_only_one_rank_adds_are_refused(run_on, tmp_path, form):
    run_on(2, put_in_on_rank_0, form=form, folder=tmp_path)


# ------------------------------------------------------------------------------------------------------- optimizers


class Untrained(Net):
    def configure_optimizers(self) -> Any:
        return None


class WithGroupsOfAllKinds(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.parameters()), "tags": [], "own": {}, 1: {2: "two"}}, {"params": []}]
        return [torch.optim.SGD(groups, lr=torch.tensor(0.01)), torch.optim.Adam(self.blocks.parameters())]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


def resumed_optimizers(form: str, module: Any, folder: Path) -> None:
    found = []
    for each in ("ddp", form):
        path = saved_by(each, module, folder / each)
        found.append(observed(*trained(each, module, ckpt_path=path)))
    same_values(found[1]["weights"], found[0]["weights"], form)
    same_values(found[1]["optimizers"], found[0]["optimizers"], form)


@FORMS
@pytest.mark.parametrize("module", [Untrained, WithGroupsOfAllKinds])
def test_optimizers_resume_whatever_their_groups_hold(run_on, tmp_path, form, module):
    run_on(2, resumed_optimizers, form=form, module=module, folder=tmp_path)
