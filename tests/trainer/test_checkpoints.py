"""Checkpoints that projects edit, load partially, or load with other tools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn

from tests.support.trainer import make_trainer
from tests.support.training import CLOSE
from tests.trainer.cases import Net, behaviours, data, fit, observed, same_as_under_ddp, shared_folder, trained, weights


class Edits(Net):
    """Looks at the whole checkpoint, adds to it, and changes it when it is loaded."""

    extra: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["names"] = sorted(checkpoint["state_dict"])
        checkpoint["extra"] = torch.arange(3)
        checkpoint["state_dict"] = {f"old.{name}": value.cpu() for name, value in checkpoint["state_dict"].items()}
        assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())
        for state in checkpoint.get("optimizer_states", [{"state": {}}])[0]["state"].values():
            self.seen.append(float(state["exp_avg"].norm()))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.extra = checkpoint["extra"]
        state = {name.removeprefix("old."): value for name, value in checkpoint["state_dict"].items()}
        state["head.bias"] = torch.zeros_like(state["head.bias"])
        checkpoint["state_dict"] = state


def edit_checkpoints(strategy: str) -> Any:
    """`on_save_checkpoint` and `on_load_checkpoint` edit the whole checkpoint"""
    path = shared_folder() / "edited.ckpt"
    saving = LambdaCallback(on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint(path))
    trainer, module = fit(strategy, Edits(), callbacks=[saving], max_epochs=1)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint.pop("lightning_zero", None)  # records what wrote the file
    seen = list(module.seen)
    trainer, module = fit(strategy, Edits(), ckpt_path=path)
    loaded = Edits.load_from_checkpoint(path)
    return checkpoint, seen, observed(trainer, module), module.extra, weights(loaded)


class AddsInFit(Net):
    """Saves during a run, while weights are sharded, and edits the checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["only the blocks"] = {name: state[name] for name in state if name.startswith("blocks")}
        del state["scale"]

    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(shared_folder() / "inside.ckpt", weights_only=self.current_epoch == 0)


def edit_in_mid_run(strategy: str) -> Any:
    """A checkpoint saved and edited in mid-run, with `weights_only`, and loaded with `strict=False`"""
    trainer, module = fit(strategy, AddsInFit())
    path = shared_folder() / "inside.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    with pytest.raises(RuntimeError, match="Missing key.*scale"):
        AddsInFit.load_from_checkpoint(path)
    loaded = AddsInFit.load_from_checkpoint(path, strict=False)
    return observed(trainer, module), checkpoint["state_dict"], checkpoint["only the blocks"], weights(loaded)


class Loose(Net):
    """Leaves some weights out of its checkpoint, as with a frozen backbone that is stored elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("blocks")}


def load_in_part(strategy: str) -> Any:
    """`strict_loading=False`, with a `state_dict` that leaves weights out"""
    trainer, module = fit(strategy, Loose(), max_epochs=1)
    path = shared_folder() / "part.ckpt"
    trainer.save_checkpoint(path)
    names = list(torch.load(path, weights_only=True)["state_dict"])
    torch.manual_seed(1)
    trainer, module = fit(strategy, Loose(), ckpt_path=path)
    return names, observed(trainer, module), [p.detach().clone() for p in module.parameters()]


class Hyper(Net):
    def __init__(self, width: int, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.more = nn.Linear(width, 2)
        self.lr = lr

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.more.weight.sum() + self.more.bias.sum()


def load_from_checkpoint(strategy: str) -> Any:
    """`load_from_checkpoint` with hyperparameters, before and after more training, in every loop's `ckpt_path`"""
    trainer, module = fit(strategy, Hyper(5, lr=0.02), max_epochs=1)
    path = shared_folder() / "hyper.ckpt"
    trainer.save_checkpoint(path)
    loaded = Hyper.load_from_checkpoint(path, map_location="cpu")
    other = Hyper.load_from_checkpoint(path, lr=0.5)
    results = [weights(loaded), dict(loaded.hparams), dict(other.hparams), trained(strategy, loaded)]
    trainer = make_trainer(strategy)
    for evaluate in ("validate", "test"):
        results.append(getattr(trainer, evaluate)(Hyper(5), data(16), ckpt_path=path, verbose=False))
    results.append(trainer.predict(Hyper(5), data(16), ckpt_path=path))
    return results


def load_by_hand(strategy: str) -> Any:
    """Weights loaded with `load_state_dict` before a run, in `setup`, in `on_fit_start` and in mid-run"""

    class Pretrained(Net):
        where = ""

        def load(self, where: str) -> None:
            if where == self.where:
                self.seen.append(str(self.load_state_dict(state)))
                self.head.load_state_dict({"weight": state["head.weight"], "bias": state["head.bias"] + 1})

        def setup(self, stage: str) -> None:
            self.load("setup")

        def on_fit_start(self) -> None:
            self.load("on_fit_start")

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.load("mid-run")

    state = weights(Net())
    results = []
    for where in ("before", "setup", "on_fit_start", "mid-run"):
        module = Pretrained()
        module.where = where
        module.load("before")
        results.append(trained(strategy, module))
    return results


def resume_with_more(strategy: str) -> Any:
    """Resuming in mid-epoch, with another batch size, more epochs, and `weights_only=True`"""
    path = shared_folder() / "middle.ckpt"
    trainer, module = fit(strategy, max_steps=4)
    trainer.save_checkpoint(path)
    dist.barrier()
    results = [trained(strategy, ckpt_path=path, max_epochs=3)]
    module, trainer = Net(), make_trainer(strategy, max_epochs=4)
    trainer.fit(module, data(48), ckpt_path=path, weights_only=True)
    return [*results, observed(trainer, module)]


class SavesAnywhere(Net):
    """Saves at any point: in a step, between backward and update, in validation."""

    def save(self, where: str) -> None:
        self.trainer.save_checkpoint(shared_folder() / f"{self.global_step} {where}.ckpt")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.save("training_step")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.save("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.save("on_before_optimizer_step")

    def on_validation_start(self) -> None:
        self.save("on_validation_start")


def save_anywhere(strategy: str) -> Any:
    """`trainer.save_checkpoint` inside `training_step`, between backward and update, during accumulation"""
    trainer, module = fit(strategy, SavesAnywhere(), max_epochs=1, accumulate_grad_batches=2)
    files = {path.name: torch.load(path, weights_only=True) for path in sorted(shared_folder().iterdir())}
    states = {name: [file["state_dict"], file["optimizer_states"]] for name, file in files.items()}
    assert len(states) > 4
    return observed(trainer, module), states


class Elsewhere(TorchCheckpointIO):
    """Writes a second copy of the weights next to the file, as an uploader does."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        super().save_checkpoint({"copy": checkpoint["state_dict"]}, f"{path}.copy")


class SavesOften(Net):
    """Saves after each batch; an asynchronous write may overlap the next batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.save_checkpoint(shared_folder() / f"{self.global_step}.ckpt")


def write_elsewhere(strategy: str) -> Any:
    """`CheckpointIO` plugins: a project's own, and `AsyncCheckpointIO`, which writes while training continues"""
    results = []
    for plugin in (Elsewhere(), AsyncCheckpointIO()):
        trainer, module = fit(strategy, SavesOften(), plugins=[plugin], max_epochs=1)
        dist.barrier()
        files = {path.name: torch.load(path, weights_only=True) for path in sorted(shared_folder().iterdir())}
        results += [observed(trainer, module), {name: file.get("state_dict", file) for name, file in files.items()}]
    return results


@pytest.mark.exhaustive(but=2)
@behaviours(
    "The Trainer",
    save_anywhere,
    write_elsewhere,
    edit_checkpoints,
    edit_in_mid_run,
    load_in_part,
    load_from_checkpoint,
    load_by_hand,
    resume_with_more,
)
def test_a_checkpoint_is_handled_as_under_ddp(run_on, case):
    run_on(2, same_as_under_ddp, case=case, bound=CLOSE if case is save_anywhere else 0)  # save_anywhere accumulates
