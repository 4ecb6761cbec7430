"""Logging, communication between ranks by user code, and callbacks that only observe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from tensorboard.backend.event_processing import event_accumulator
from torch import nn
from torchmetrics import Accuracy, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.functional import accuracy

from tests.support.trainer import make_trainer
from tests.support.workers import rank
from tests.trainer.cases import Net, behaviours, data, fit, observed, same_as_under_ddp, shared_folder, trained


class Logs(Net):
    """Logs with every reduction, in steps and epochs, on one rank and on all."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
        for reduction in ("mean", "sum", "min", "max"):
            self.log(reduction, loss, on_epoch=True, sync_dist=True, reduce_fx=reduction)
        self.log("rank zero", loss, rank_zero_only=True)
        self.log_dict({"norm": self.head.weight.norm(), "a float": 1.5}, sync_dist=True, prog_bar=True)
        self.log("sized", batch[0].sum(), on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("at the end", self.scale.detach(), sync_dist=True)
        self.seen.append({name: value.clone() for name, value in self.trainer.callback_metrics.items()})


def log_everything(strategy: str) -> Any:
    """`self.log` with `sync_dist=True`, every `reduce_fx`, `on_step` and `on_epoch`, `log_dict`, `rank_zero_only`"""
    return trained(strategy, Logs())


class Metrics(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy(task="multiclass", num_classes=3)
        self.collection = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)], prefix="val/")
        self.lists = nn.ModuleList([MeanMetric()])
        self.apart = {"mean": MeanMetric()}  # not a submodule

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        self.log("accuracy", self.accuracy(scores, batch[1]), on_step=True)
        self.lists[0].update(scores.abs().mean())
        self.apart["mean"].update(scores.abs().mean())
        self.log("mean", self.lists[0], on_step=False, on_epoch=True)
        self.log("functional", accuracy(scores, batch[1], task="multiclass", num_classes=3), sync_dist=True)
        return nn.functional.cross_entropy(scores, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.collection.update(self(batch[0]), batch[1])
        self.log_dict(self.collection)

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.apart["mean"].compute())
        self.log("by hand", self.accuracy.compute())
        self.accuracy.reset()


def use_metrics(strategy: str) -> Any:
    """torchmetrics as attributes, in lists, collections and dicts, logged as objects or values, and functional ones"""
    return trained(strategy, Metrics())


class Talks(Net):
    """Uses Lightning's collectives in every hook in which projects do."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        everywhere = self.all_gather(loss, sync_grads=True)
        nested = self.all_gather({"x": batch[0], "rank": [torch.tensor(rank())]})
        self.seen.append([everywhere.detach().clone(), nested])
        return everywhere.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.outputs.append(self(batch[0]))

    def on_validation_epoch_end(self) -> None:
        strategy = self.trainer.strategy
        outputs = self.all_gather(torch.cat(self.outputs))
        self.outputs.clear()
        mine = torch.tensor([float(rank() + 1)])
        self.seen += [outputs, strategy.reduce(mine.clone()), strategy.reduce(mine.clone(), reduce_op="sum")]
        self.seen += [strategy.broadcast({"from": rank()}), strategy.broadcast([rank()], src=1)]
        self.seen += [strategy.reduce_boolean_decision(rank() == 0), strategy.reduce_boolean_decision(True)]
        self.seen.append(strategy.reduce_boolean_decision(rank() == 0, all=False))
        strategy.barrier("here")
        self.seen += [strategy.is_global_zero, strategy.world_size, self.global_rank, self.local_rank]
        self.seen += [self.trainer.world_size, self.trainer.num_devices, self.trainer.num_nodes, str(self.device)]
        self.seen += [self.head.weight.sum().detach(), torch.tensor(self.all_gather(self.head.bias.detach()).tolist())]


def talk(strategy: str) -> Any:
    """`self.all_gather` (with gradients too), `trainer.strategy.reduce`, `broadcast`, `barrier` and the like"""
    return trained(strategy, Talks())


class CommunicatesByHand(Net):
    """Calls torch.distributed on its own parameters and gradients, synchronously and asynchronously."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(2)

    def on_train_epoch_end(self) -> None:
        weight = self.head.weight
        dist.broadcast(self.scale.data, 0)
        dist.all_reduce(weight.data, dist.ReduceOp.MAX)
        pieces = [torch.zeros_like(weight.data) for _ in range(2)]
        work = dist.all_gather(pieces, weight.detach(), async_op=True)
        work.wait()
        joined = torch.empty(6, 6)
        dist.all_gather_into_tensor(joined, weight.detach())
        copies: list[Any] = [None, None]
        dist.all_gather_object(copies, weight.detach())
        self.seen += [torch.stack(pieces).tolist(), joined, [copy.clone() for copy in copies]]
        self.seen.append([x.tolist() for x in torch.distributed.nn.all_gather(weight)])


def communicate_by_hand(strategy: str) -> Any:
    """`torch.distributed` called on parameters and gradients: `all_reduce`, `broadcast`, `all_gather`"""
    return trained(strategy, CommunicatesByHand())


class Configured(Net):
    def __init__(self, width: int = 6, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def write_logs(strategy: str) -> Any:
    """A logger with hyperparameters: the files of a `CSVLogger`"""
    folder = shared_folder()
    logger = CSVLogger(folder, name="logs", version=0, flush_logs_every_n_steps=1)
    trainer, module = fit(strategy, Configured(depth=2), logger=logger, log_every_n_steps=1)
    files = {path.name: path.read_text() for path in sorted(folder.rglob("*.*")) if rank() == 0}
    assert rank() or ("metrics.csv" in files and "width: 6" in files["hparams.yaml"])
    return observed(trainer, module), files, dict(module.hparams)


class Drawn(Net):
    example_input_array = torch.ones(2, 6)


def draw_graphs(strategy: str) -> Any:
    """`TensorBoardLogger(log_graph=True)`"""
    folder = shared_folder()
    runs = []
    for fits in range(2):
        logger = TensorBoardLogger(folder, name="logs", version=fits, log_graph=True)
        runs.append(trained(strategy, Drawn(), logger=logger, max_epochs=1))
        events = event_accumulator.EventAccumulator(logger.log_dir).Reload() if rank() == 0 else None
        runs.append(sorted(node.name for node in events.Graph().node) if events is not None else None)
        assert events is None or any("head" in name for name in runs[-1])
    return runs


class Charted(Net):
    def on_train_epoch_end(self) -> None:
        for name, parameter in self.named_parameters():
            self.logger.experiment.add_histogram(name, parameter, self.current_epoch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            self.logger.experiment.add_histogram(f"{name}.grad", values=parameter.grad, global_step=self.global_step)


def draw_histograms(strategy: str) -> Any:
    """`self.logger.experiment.add_histogram(name, p)`, also of `p.grad`"""
    folder = shared_folder()
    run = trained(strategy, Charted(), logger=TensorBoardLogger(folder, name="logs", version=0), max_epochs=2)
    if rank():
        return run
    events = event_accumulator.EventAccumulator(str(folder / "logs" / "version_0")).Reload()
    tags = sorted(events.Tags()["histograms"])
    assert "head.weight" in tags and "head.weight.grad" in tags
    return run, {tag: [(e.step, e.histogram_value.bucket) for e in events.Histograms(tag)] for tag in tags}


def profile(strategy: str) -> Any:
    """The simple, advanced and PyTorch profilers, `detect_anomaly`, `benchmark` and `deterministic`"""
    options: list[dict[str, Any]] = [
        {"profiler": SimpleProfiler(shared_folder())},
        {"profiler": AdvancedProfiler(shared_folder())},
        {"profiler": PyTorchProfiler(shared_folder(), record_module_names=True, group_by_input_shapes=True)},
        {"detect_anomaly": True, "deterministic": True, "benchmark": True},
        {"barebones": True},
    ]
    return [trained(strategy, max_epochs=1, **option) for option in options]


def show_progress(strategy: str) -> Any:
    """The progress bar, `inference_mode=False` and `use_distributed_sampler=False`"""
    trainer = make_trainer(strategy, inference_mode=False, use_distributed_sampler=False)
    module = Net()
    result = trainer.validate(module, data(16))
    return result, trained(strategy, module, enable_progress_bar=True, use_distributed_sampler=False)


@pytest.mark.exhaustive(but=1)
@behaviours(
    "The Trainer",
    log_everything,
    use_metrics,
    talk,
    communicate_by_hand,
    write_logs,
    draw_graphs,
    draw_histograms,
    profile,
    show_progress,
)
def test_logging_and_communication_by_user_code_are_as_under_ddp(run_on, case):
    run_on(2, same_as_under_ddp, case=case)
