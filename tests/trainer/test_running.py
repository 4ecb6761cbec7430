"""Fitting and evaluating in any order, and using the module afterwards."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import nn

from tests.support.trainer import make_trainer
from tests.trainer.cases import Net, behaviours, data, fit, observed, same_as_under_ddp, shared_folder, trained, weights


def train(strategy: str) -> Any:
    """`fit`: losses, weights, logged values and optimizer state."""
    return trained(strategy)


def evaluate_in_every_order(strategy: str) -> Any:
    """`validate`, `test` and `predict` before, after and between fits, in any order."""
    module = Net()
    results: list[Any] = []
    for order in (["predict", "validate", "fit", "test"], ["validate", "fit", "predict"], ["fit", "test", "validate"]):
        trainer = make_trainer(strategy, max_epochs=1)
        for step in order:
            if step == "fit":
                trainer.fit(module, data())
            elif step == "predict":
                results.append(trainer.predict(module, data(16)))
            else:
                results.append(getattr(trainer, step)(module, data(16), verbose=False))
        results.append(weights(module))
    return results


def fit_again(strategy: str) -> Any:
    """A second `fit`, with another Trainer or the same one and more epochs, continues from the first one's weights."""
    trainer, module = fit(strategy, max_epochs=1)
    first = observed(trainer, module)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data())
    return [first["metrics"], observed(trainer, module), trained(strategy, module)]


class UsedEverywhere(Callback):
    """Calls the module, reads a weight and saves wherever a project might at the end."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def use(self, where: str, trainer: Any, module: Any) -> None:
        was_training = module.training
        with torch.no_grad():
            self.seen[where] = [module.eval()(torch.ones(2, 6)).clone(), module.head.weight.norm().clone()]
        module.train(was_training)
        self.seen[f"{where} state"] = [value.float().abs().max() for value in module.state_dict().values()]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.use("on_train_end", trainer, pl_module)
        trainer.save_checkpoint(shared_folder() / "train_end.ckpt")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.use("on_fit_end", trainer, pl_module)
        trainer.save_checkpoint(shared_folder() / "fit_end.ckpt")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.use("teardown", trainer, pl_module)
        trainer.save_checkpoint(shared_folder() / "teardown.ckpt")


def use_after_training(strategy: str) -> Any:
    """The module is usable, and can be saved, in `on_train_end`, `on_fit_end`, `teardown` and after `fit`."""
    callback = UsedEverywhere()
    trainer, module = fit(strategy, callbacks=[callback])
    callback.use("after", trainer, module)
    trainer.save_checkpoint(shared_folder() / "after.ckpt")
    files = {}
    for path in sorted(shared_folder().iterdir()):
        checkpoint = torch.load(path, weights_only=True)
        files[path.name] = [checkpoint["state_dict"], checkpoint["optimizer_states"], checkpoint["global_step"]]
    assert len(files) == 4 and all(type(p) is nn.Parameter for p in module.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules()), "hooks are left behind"
    module.trainer = None
    return callback.seen, files, weights(pickle.loads(pickle.dumps(module)))


def go_on_by_hand(strategy: str) -> Any:
    """After `fit` the module and its optimizer continue in a plain loop."""
    trainer, module = fit(strategy, max_epochs=1)
    optimizer = trainer.optimizers[0]
    for batch in data():
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
    return observed(trainer, module)


def evaluate_between_epochs(strategy: str) -> Any:
    """Validation with `num_sanity_val_steps`, `val_check_interval`, `check_val_every_n_epoch`, several loaders."""
    results = [
        trained(strategy, num_sanity_val_steps=2, val_check_interval=1),
        trained(strategy, num_sanity_val_steps=-1, check_val_every_n_epoch=2),
    ]

    class Two(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log(f"val{dataloader_idx}", self.loss(batch), sync_dist=True, add_dataloader_idx=False)

    module, trainer = Two(), make_trainer(strategy)
    trainer.fit(module, data(), [data(16), data(8)])
    return [*results, observed(trainer, module)]


def short_runs(strategy: str) -> Any:
    """`fast_dev_run`, `overfit_batches`, `limit_train_batches`, `max_steps`, `min_epochs` and `max_time`."""
    options = [
        {"fast_dev_run": True},
        {"fast_dev_run": 2},
        {"overfit_batches": 1, "max_epochs": 4},
        {"limit_train_batches": 2, "limit_val_batches": 0},
        {"max_steps": 4, "max_epochs": -1},
        {"max_epochs": 3, "min_epochs": 2, "max_time": "00:01:00:00"},
    ]
    return [trained(strategy, **option) for option in options]


class TrainEvalTrain(Net):
    """Layers that behave differently in training: dropout and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(6)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.eval()
        with torch.no_grad():
            self.seen.append(self(batch[0]).clone())
        self.train()
        return loss


def switch_modes(strategy: str) -> Any:
    """`train()` and `eval()` in turn, with dropout and BatchNorm, also inside a training step."""
    return trained(strategy, TrainEvalTrain())


class Numbers(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"samples": 24})
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(str(stage.value))

    def train_dataloader(self) -> Any:
        return data()

    def val_dataloader(self) -> Any:
        return data(16)

    def test_dataloader(self) -> Any:
        return data(8)

    def predict_dataloader(self) -> Any:
        return data(8)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def state_dict(self) -> dict[str, Any]:
        return {"calls": list(self.calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")


def use_a_datamodule(strategy: str) -> Any:
    """A LightningDataModule with its hooks, state and hyperparameters, also when resuming."""
    numbers, trainer, module = Numbers(), make_trainer(strategy), Net()
    trainer.fit(module, datamodule=numbers)
    results = [trainer.test(module, datamodule=numbers, verbose=False), trainer.predict(module, datamodule=numbers)]
    path = shared_folder() / "data.ckpt"
    trainer.save_checkpoint(path)
    trainer = make_trainer(strategy, max_epochs=3)
    trainer.fit(module, datamodule=numbers, ckpt_path=path)
    return [results, observed(trainer, module), numbers.calls[1:]]


class OtherMethods(Net):
    """Its steps bypass the module's own `forward`."""

    def forward(self, *args: Any) -> Any:
        raise AssertionError("not called")

    def loss(self, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(self.classify(self.encode(batch[0])), batch[1])

    def encode(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x

    def classify(self, x: Any) -> Any:
        return torch.nn.functional.linear(x, self.head.weight, self.head.bias) * self.scale


def call_other_methods(strategy: str) -> Any:
    """A module whose steps call methods other than `forward`, and weights read outside their layer."""
    return trained(strategy, OtherMethods())


def read_any_iterable(strategy: str) -> Any:
    """Batches from any iterable instead of a `DataLoader`: one without attributes, one read once, a dict of two."""

    def view(samples: int = 24) -> Any:
        return dict(enumerate(data(samples))).values()

    class Two(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([torch.cat(part) for part in zip(batch["a"], batch["b"])], batch_idx)

    results = []
    for module, batches, epochs in (
        (Net(), view(), 2),
        (Net(), iter(list(data())), 1),
        (Two(), {"a": view(), "b": view(8)}, 2),
    ):
        trainer = make_trainer(strategy, max_epochs=epochs)
        trainer.fit(module, batches, view(16))
        results.append(observed(trainer, module))
    return results


@pytest.mark.exhaustive(but=2)
@behaviours(
    "The Trainer",
    train,
    read_any_iterable,
    evaluate_in_every_order,
    fit_again,
    use_after_training,
    go_on_by_hand,
    evaluate_between_epochs,
    short_runs,
    use_a_datamodule,
)
def test_fitting_and_evaluating_are_as_under_ddp(run_on, case):
    run_on(2, same_as_under_ddp, case=case)


@behaviours("The module", switch_modes, call_other_methods)
def test_a_module_is_used_as_under_ddp(run_on, case):
    run_on(2, same_as_under_ddp, case=case)
