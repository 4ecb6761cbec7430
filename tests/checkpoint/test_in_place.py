"""Common uses of checkpoints work the same for full and sharded checkpoints, and the same as under DDP."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.reading import open_checkpoint
from tests.support.training import same_values
from tests.support.workers import rank, world_size
from tests.trainer.cases import Net, fit, observed, weights

FORMS = pytest.mark.parametrize("form", ["full", "sharded"])


def wait_for_rank_0() -> None:
    if world_size() > 1:
        dist.barrier()


def strategy_of(form: str, stage: int = 3, **options: Any) -> Any:
    return "ddp" if form == "ddp" else ZeroStrategy(stage, checkpoint=form, **options)


def trained(form: str, module: Any = Net, stage: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    return fit(strategy_of(form, stage, **options.pop("strategy", {})), module(), **options)


def contents(path: Any) -> list[Any]:
    checkpoint = open_checkpoint(path).checkpoint
    state = {name: value.clone() for name, value in checkpoint["state_dict"].items()}
    return [state, checkpoint["global_step"], len(checkpoint.get("optimizer_states", []))]


class FailsLater(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 4:
            raise KeyError("user error")
        return super().training_step(batch, batch_idx)


def save_by_callbacks(form: str, folder: Path) -> None:
    found = {}
    for each in ("ddp", form):
        place = folder / each
        callbacks = [
            ModelCheckpoint(place / "best", "{epoch}", monitor="val", save_top_k=1, save_last="link"),
            ModelCheckpoint(place / "steps", "{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max"),
            ModelCheckpoint(place / "weights", "w{epoch}", save_weights_only=True, save_last=True),
            OnExceptionCheckpoint(place / "failed", "failed"),
            ModelCheckpoint(place / "failed", "too", save_on_exception=True, every_n_epochs=5),
        ]
        with pytest.raises(KeyError, match="user error"):
            trained(each, FailsLater, callbacks=callbacks, enable_checkpointing=True)
        wait_for_rank_0()
        paths = sorted(path for path in place.glob("*/*"))
        assert (place / "best" / "last.ckpt").is_symlink()
        assert all(path.is_dir() == (each == "sharded") for path in paths)
        found[each] = {str(path.relative_to(place)): contents(path) for path in paths}
    assert {name.split("/")[0] for name in found[form]} == {"best", "steps", "weights", "failed"}
    same_values(found[form], found["ddp"], form)
    path = folder / form / "failed" / "failed.ckpt"
    resumed, whole = (trained(form, ckpt_path=which) for which in (path, None))
    same_values(observed(*resumed)["weights"], observed(*whole)["weights"], "after the exception")


@pytest.mark.exhaustive(but=1)
@FORMS
def test_callbacks_save_the_best_the_last_and_on_exceptions(run_on, tmp_path, form):
    run_on(2, save_by_callbacks, form=form, folder=tmp_path)


def save_elsewhere(form: str) -> None:
    saving = ModelCheckpoint("memory://there", "{epoch}", save_top_k=-1)
    whole = observed(*trained(form, callbacks=[saving], enable_checkpointing=True))
    resumed = trained(form, ckpt_path="memory://there/epoch=0.ckpt")
    same_values(observed(*resumed)["weights"], whole["weights"], form)


@FORMS
def test_a_run_saves_to_an_fsspec_url_and_resumes_from_it(run_on, form):
    run_on(1, save_elsewhere, form=form)


class Frozen(Net):
    """A frozen body with a trainable head."""

    def __init__(self, strict: bool = True) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)
        self.strict_loading = strict

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


def leave_frozen_out(form: str, folder: Path) -> None:
    without = {"exclude_frozen_parameters": True}
    saving = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    options: dict[str, Any] = {"strategy": without, "callbacks": saving, "enable_checkpointing": True}
    whole = weights(trained(form, Frozen, **options)[1])
    wait_for_rank_0()
    path = folder / "epoch=0.ckpt"
    assert list(open_checkpoint(path).checkpoint["state_dict"]) == ["scale", "head.weight", "head.bias"]
    for stage, strict in ((1, True), (3, True), (3, False)):
        same_values(
            weights(trained(form, partial(Frozen, strict), stage, strategy=without, ckpt_path=path)[1]), whole, form
        )

    class WithMore(Frozen):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Parameter(torch.ones(2))

    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: .*"more"'):
        trained(form, WithMore, strategy=without, ckpt_path=path)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "blocks'):
        trained(form, Frozen, ckpt_path=path)


class FrozenLater(Net):
    """The body is frozen after Lightning has restored the module."""

    def configure_optimizers(self) -> Any:
        self.blocks.requires_grad_(False)
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


def leave_frozen_out_later(form: str, folder: Path) -> None:
    def options() -> dict[str, Any]:
        callbacks = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
        without = {"exclude_frozen_parameters": True}
        return {"strategy": without, "callbacks": callbacks, "enable_checkpointing": True}

    whole = weights(trained(form, FrozenLater, **options())[1])
    wait_for_rank_0()
    resumed = weights(trained(form, FrozenLater, **options(), ckpt_path=folder / "epoch=0.ckpt")[1])
    same_values(resumed, whole, form)


@FORMS
def test_a_run_resumes_without_the_parameters_that_were_frozen_when_it_started(run_on, tmp_path, form):
    run_on(2, leave_frozen_out_later, form=form, folder=tmp_path)


@pytest.mark.exhaustive(but=1)
@FORMS
def test_frozen_parameters_are_left_out_on_request_and_nothing_else_may_be_missing(run_on, tmp_path, form):
    run_on(2, leave_frozen_out, form=form, folder=tmp_path)


def save_after_fit(form: str, folder: Path, stage: int) -> None:
    whole = observed(*trained(form, stage=stage, precision="bf16-true"))
    trainer, module = trained(form, stage=stage, precision="bf16-true", max_epochs=1)
    trainer.save_checkpoint(folder / "after.ckpt")
    masters = open_checkpoint(folder / "after.ckpt").checkpoint["lightning_zero"]["masters"]
    assert all(value.dtype == torch.float32 for value in masters.values()) and list(masters) != []
    resumed = trained(form, stage=stage, precision="bf16-true", ckpt_path=folder / "after.ckpt")
    same_values(observed(*resumed), whole, "resumed")
    assert rank() == 0 or all(m["scale"].is_meta for m in trainer.strategy.checkpoints.masters_after_fit.values()), (
        "one rank needs them"
    )


@FORMS
@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_written_after_fit_has_the_masters_too(run_on, tmp_path, form, stage):
    run_on(2, save_after_fit, form=form, folder=tmp_path, stage=stage)
