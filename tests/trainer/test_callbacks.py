"""Lightning's own callbacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from torch import nn

from tests.support.trainer import make_trainer
from tests.support.workers import rank, world_size
from tests.trainer.cases import Net, behaviours, data, fit, observed, same_as_under_ddp, shared_folder, trained

# -------------------------------------------------------------------------------------------------------- checkpoints


def files_in(folder: Any) -> dict[str, Any]:
    """Each checkpoint's weights, optimizer state where it has any, and steps."""
    found = {}
    for path in sorted(folder.rglob("*.ckpt")):
        checkpoint = torch.load(path, weights_only=True)
        found[path.name] = [checkpoint.get(key) for key in ("state_dict", "optimizer_states", "global_step", "epoch")]
    return found


def save_checkpoints(strategy: str) -> Any:
    """`ModelCheckpoint`: the best k, the last, every n steps, weights only; `ckpt_path="best"` and `"last"`"""
    folder = shared_folder()
    callbacks = [
        ModelCheckpoint(folder / "best", "{epoch}-{step}", monitor="val", save_top_k=2, save_last=True),
        ModelCheckpoint(folder / "steps", "s{step}", every_n_train_steps=2, save_top_k=-1),
        ModelCheckpoint(folder / "weights", "w{epoch}", save_weights_only=True, save_on_train_epoch_end=True),
    ]
    options = {"enable_checkpointing": True, "max_epochs": 3}
    trainer, module = fit(strategy, callbacks=callbacks, **options)
    names = [str(callbacks[0].best_model_path).rsplit("/", 1)[-1], float(callbacks[0].best_model_score)]
    tested = [trainer.test(module, data(16), ckpt_path=which, verbose=False) for which in ("best", "last")]
    return names, tested, [files_in(folder / name) for name in ("best", "steps", "weights")]


def resume_with_callbacks(strategy: str) -> Any:
    """Resuming restores the callbacks' own state as well"""
    folder = shared_folder()

    def callbacks() -> list[Any]:
        return [
            ModelCheckpoint(folder, "{epoch}", monitor="val", save_top_k=-1),
            EarlyStopping("val", patience=10),
            Counting(),
        ]

    first = callbacks()
    fit(strategy, callbacks=first, enable_checkpointing=True, max_epochs=2)
    again = callbacks()
    path = folder / "epoch=0.ckpt"
    trainer, module = fit(strategy, ckpt_path=path, callbacks=again, enable_checkpointing=True, max_epochs=3)
    return observed(trainer, module), again[2].count, float(again[1].best_score), again[0].best_model_path[-9:]


class Counting(Callback):
    count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class FailsLater(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 4:
            raise KeyError("user error")
        return super().training_step(batch, batch_idx)


def stop_early(strategy: str) -> Any:
    """`EarlyStopping`, and `trainer.should_stop` set by a callback"""
    stopping = EarlyStopping("val", min_delta=10.0, patience=2)

    def stop(trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 4

    return [
        trained(strategy, callbacks=[stopping], max_epochs=20),
        stopping.stopped_epoch,
        trained(strategy, callbacks=[LambdaCallback(on_train_batch_end=stop)], max_epochs=20),
    ]


# ----------------------------------------------------------------------------------------------------------- averages


class WithBatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))


def average_at_the_end(strategy: str) -> Any:
    """`StochasticWeightAveraging`, with BatchNorm statistics recomputed"""
    averaging = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=2)
    return trained(strategy, WithBatchNorm(), callbacks=[averaging], max_epochs=4)


def average_exponentially(strategy: str) -> Any:
    """`EMAWeightAveraging`: used in validation, in checkpoints, when resuming, and left in the module at the end"""
    folder = shared_folder()
    results = []
    for epochs, path in ((2, None), (3, folder / "epoch=0.ckpt")):
        saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        averaging = EMAWeightAveraging(decay=0.7, update_starting_at_step=1)
        options = {"callbacks": [averaging, saving], "enable_checkpointing": True, "max_epochs": epochs}
        results.append(observed(*fit(strategy, WithBatchNorm(), ckpt_path=path, **options)))
    return results, files_in(folder)


class OwnAverage(Callback):
    """A hand-written average: a copy of the weights, moved towards them after each batch and used in validation."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = [p.detach().clone() for p in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for mean, p in zip(self.average, pl_module.parameters()):
                mean.lerp_(p, 0.3)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = [p.detach().clone() for p in pl_module.parameters()]
        for mean, p in zip(self.average, pl_module.parameters()):
            p.data.copy_(mean)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for kept, p in zip(self.kept, pl_module.parameters()):
            p.data.copy_(kept)


def average_by_hand(strategy: str) -> Any:
    """An average of the weights, kept by a project's callback and swapped in for validation"""
    callback = OwnAverage()
    trainer, module = fit(strategy, callbacks=[callback], num_sanity_val_steps=0)
    return observed(trainer, module), [torch.tensor(mean.tolist()) for mean in callback.average]


# --------------------------------------------------------------------------------------------------------- finetuning


class Frozen(BaseFinetuning):
    """BatchNorm is trained while the rest of the blocks is frozen."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks, train_bn=True)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[-1], optimizer, train_bn=False)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.blocks[:-1], optimizer)


class Backboned(WithBatchNorm):
    """The optimizer begins with the head and BatchNorm's parameters; the rest is added when it is unfrozen."""

    @property
    def backbone(self) -> Any:
        return self.blocks

    def configure_optimizers(self) -> Any:
        normalisation = self.blocks[-1][1].parameters()
        return torch.optim.SGD([*self.head.parameters(), self.scale, *normalisation], lr=0.05, momentum=0.9)


def after_wrapping(kind: Any) -> Any:
    """Freeze after DDP has wrapped the module, since DDP never reduces parameters that were frozen at wrapping."""

    class Later(kind):  # type: ignore[misc]
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            pass

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.freeze_before_training(pl_module)
            super().on_fit_start(trainer, pl_module)

    return Later


def unfreeze_later(strategy: str) -> Any:
    """`BaseFinetuning`: frozen before training, unfrozen group by group in mid-run, BatchNorm trained throughout"""
    return finetune(strategy, Frozen)


def unfreeze_a_backbone(strategy: str) -> Any:
    """`BackboneFinetuning`"""
    return finetune(strategy, BackboneFinetuning, unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)


def finetune(strategy: str, kind: Any, **options: Any) -> Any:
    if strategy == "ddp":
        strategy, kind = "ddp_find_unused_parameters_true", after_wrapping(kind)
    return trained(strategy, Backboned(), callbacks=[kind(**options)], max_epochs=3)


# ---------------------------------------------------------------------------------------- callbacks that only observe


class Sizes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, 6)
        self.head.bias.requires_grad_(False)


class KeptSummary(ModelSummary):
    shown: Any = None

    @staticmethod
    def summarize(summary_data: Any, total_parameters: int, trainable_parameters: int, *_: Any, **__: Any) -> None:
        KeptSummary.shown = [summary_data, total_parameters, trainable_parameters]


def summarise(strategy: str) -> Any:
    """`ModelSummary`: full counts and sizes at any depth, before, during and after a run"""
    module = Sizes()
    seen: list[Any] = []

    def look(trainer: Any, pl_module: Any) -> None:
        for depth in (1, -1):
            summary = summarize(pl_module, max_depth=depth)
            seen.append([summary.param_nums, summary.total_parameters, summary.trainable_parameters])
            seen.append([summary.model_size, summary.layer_names, summary.in_sizes, summary.out_sizes, str(summary)])

    looking = LambdaCallback(on_fit_start=look, on_train_epoch_end=look, on_fit_end=look)
    fit(strategy, module, callbacks=[KeptSummary(max_depth=-1), looking], enable_model_summary=True, max_epochs=1)
    return seen, KeptSummary.shown if rank() == 0 else None


def monitor(strategy: str) -> Any:
    """`DeviceStatsMonitor`, `ThroughputMonitor` and `Timer`"""
    folder = shared_folder()
    throughput = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    callbacks = [DeviceStatsMonitor(cpu_stats=True), throughput, Timer("00:01:00:00")]
    logger = CSVLogger(folder)
    trainer, module = fit(strategy, callbacks=callbacks, logger=logger, log_every_n_steps=1)
    names = sorted({name for row in logger.experiment.metrics for name in row}) if rank() == 0 else []
    return observed(trainer, module), [name.replace(type(trainer.strategy).__name__, "") for name in names]


def find_a_rate(strategy: str) -> Any:
    """`LearningRateFinder` and `Tuner.lr_find`, which load a checkpoint in mid-run; the next fit starts afresh"""
    module = Net()
    trainer = make_trainer(strategy)
    found = Tuner(trainer).lr_find(module, data(), num_training=12, early_stop_threshold=None, update_attr=True)
    trainer.fit(module, data())
    finder = LearningRateFinder(num_training_steps=10, early_stop_threshold=None)
    other = Net()
    trained_other = trained(strategy, other, callbacks=[finder])
    return [found.results, module.lr, observed(trainer, module), finder.optimal_lr.results, other.lr, trained_other]


def find_a_batch_size(strategy: str) -> Any:
    """`BatchSizeFinder` and `Tuner.scale_batch_size` are refused by Lightning, as under DDP; a later fit trains"""
    module = Net()
    trainer = make_trainer(strategy, callbacks=[BatchSizeFinder()])
    errors = []
    for run in (lambda: trainer.fit(module, data()), lambda: Tuner(make_trainer(strategy)).scale_batch_size(module)):
        with pytest.raises(Exception, match="(?i)batch size") as error:
            run()
        errors.append(str(error.value).replace(trainer.strategy.__class__.__name__, ""))
    assert world_size() > 1
    return errors, trained(strategy, module)


def save_on_an_exception(strategy: str) -> Any:
    """`OnExceptionCheckpoint` and `ModelCheckpoint(save_on_exception=True)` when every rank fails the same way"""
    folder = shared_folder()
    for callback in (
        OnExceptionCheckpoint(folder / "a", "a"),
        ModelCheckpoint(folder / "b", "b", save_on_exception=True),
    ):
        with pytest.raises(KeyError, match="user error"):
            fit(strategy, FailsLater(), callbacks=[callback], enable_checkpointing=True)
    return files_in(folder)


@pytest.mark.exhaustive(but=2)
@behaviours(
    "The Trainer",
    save_checkpoints,
    resume_with_callbacks,
    stop_early,
    average_at_the_end,
    average_exponentially,
    average_by_hand,
    unfreeze_later,
    unfreeze_a_backbone,
    summarise,
    monitor,
    find_a_rate,
    find_a_batch_size,
    save_on_an_exception,
)
def test_a_callback_works_as_under_ddp(run_on, case):
    run_on(2, same_as_under_ddp, case=case)
