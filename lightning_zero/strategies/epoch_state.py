"""What the running epoch has accumulated, and what its first hooks have set: state that checkpoints do not contain."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_zero.engine.compat import tree_map_only

EpochState = dict[str, Any]

_LOGGED = "_callback_metrics", "_logged_metrics", "_progress_bar_metrics"
_ARGUMENTS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
"""Arguments of ``log`` that are plain values."""


def epoch_state(trainer: Trainer, *, with_sums: bool) -> EpochState:
    """Return this rank's state. Tensors are copied to CPU memory.

    It contains the metrics logged so far, which parameters are frozen, which modules are in evaluation mode, whether
    training should stop, and sums: unfinished means over the epoch and the states of torchmetrics.

    Args:
        with_sums: False if the fit will continue before batches that are already part of the sums.
    """
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    # Lightning puts all modules into evaluation mode for a validation, and keeps their modes from before.
    modes = loop.val_loop._module_mode.mode if trainer.validating else {}
    frozen, evaluating, metrics = [], [], {}
    for name, part in module.named_modules():
        frozen += [f"{name}.{key}" for key, p in part._parameters.items() if p is not None and not p.requires_grad]
        if not modes.get(name, part.training):
            evaluating.append(name)
        if isinstance(part, MetricCollection):
            part.values(copy_state=False)  # metrics that are computed from the same sums then refer to them
        elif isinstance(part, Metric):
            metrics[name] = _state_of(part)
    state = {
        "should_stop": trainer.should_stop,
        "logged": {name: dict(getattr(trainer._logger_connector, name)) for name in _LOGGED},
        "frozen": frozen,
        "evaluating": evaluating,
        "reloaded": trainer.fit_loop._last_train_dl_reload_epoch,
    }
    if with_sums:
        results = {
            key: _result_of(each)
            for key, each in loop._results.items()
            if not each.has_reset and each.meta.sync.group is None
        }
        state["sums"] = {"results": results, "metrics": metrics}
    copied: EpochState = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
    return copied


def _state_of(metric: Any) -> dict[str, Any]:
    """The state of a metric, and other numbers that it has, such as the extrema of a ``MinMaxMetric``."""
    kept = bool, int, float, Tensor
    return {key: value for key, value in vars(metric).items() if key in metric._defaults or isinstance(value, kept)}


def _result_of(result: Any) -> dict[str, Any]:
    """What has been logged under one key: the arguments of ``log``, and the sum so far."""
    sync = result.meta.sync
    return {
        "arguments": {name: getattr(result.meta, name) for name in _ARGUMENTS},
        "reduce": (result.meta.reduce_fx.__name__, result.meta.reduce_fx in (sum, min, max)),
        "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only},
        "is_tensor": result.is_tensor,
        "state": _state_of(result) if result.is_tensor else {"_update_count": result._update_count},
    }


def set_logged(trainer: Trainer, state: EpochState) -> None:
    """Restore the metrics logged so far, which callbacks and schedulers monitor."""
    for name, logged in state["logged"].items():
        getattr(trainer._logger_connector, name).update(_on(trainer.lightning_module, logged))


def set_modules(module: LightningModule, state: EpochState, *, same_ranks: bool) -> None:
    """Restore which parameters are frozen, modes of modules, and states of torchmetrics.

    Args:
        same_ranks: whether the job has as many ranks as before. Otherwise a rank's own sums are not restored.
    """
    metrics = _on(module, state["sums"]["metrics"]) if same_ranks and "sums" in state else {}
    frozen, evaluating = set(state["frozen"]), set(state["evaluating"])
    for name, part in module.named_modules():
        part.training = name not in evaluating
        for key, parameter in part._parameters.items():
            if parameter is not None:
                parameter.requires_grad_(f"{name}.{key}" not in frozen)
        vars(part).update(metrics.get(name, {}))


def set_epoch(trainer: Trainer, state: EpochState, *, same_ranks: bool) -> None:
    """Restore what belongs to the epoch that is about to continue.

    Args:
        same_ranks: as for ``set_modules``, which must be called before.
    """
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    trainer.fit_loop._last_train_dl_reload_epoch = state["reloaded"]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(cls.__name__ == "StochasticWeightAveraging" for cls in type(callback).__mro__):
            with _unchanged(trainer):  # it prepares the epoch again, but the loaded state is already changed by it
                callback.on_train_epoch_start(trainer, module)
    if not same_ranks or "sums" not in state:
        return
    parts = dict(module.named_modules())
    for key, saved in _on(module, state["sums"]["results"]).items():
        result = _new_result(trainer, saved)
        if not result.is_tensor:
            result.value = parts.get(saved["arguments"]["metric_attribute"])
        if result.is_tensor or result.value is not None:
            loop._results[key] = result
    done = loop.batch_progress.current.ready
    trainer._logger_connector._first_loop_iter = done == 1 if done else None  # otherwise the next batch resets sums


def _new_result(trainer: Trainer, saved: dict[str, Any]) -> Any:
    lightning: Any = sys.modules[type(trainer.fit_loop.epoch_loop._results).__module__]  # or pytorch_lightning
    name, is_builtin = saved["reduce"]
    meta = lightning._Metadata(**saved["arguments"], reduce_fx=getattr(builtins if is_builtin else torch, name))
    meta.sync = lightning._Sync(fn=trainer.strategy.reduce, **saved["sync"])
    result = lightning._ResultMetric(meta, saved["is_tensor"]).to(trainer.lightning_module.device)
    vars(result).update(saved["state"])
    return result


@contextmanager
def _unchanged(trainer: Trainer) -> Iterator[None]:
    """Context that leaves the options of optimizers and the buffers of the module as they were."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    buffers = {name: buffer.clone() for name, buffer in trainer.lightning_module.named_buffers()}
    yield
    for group, before in zip(groups, options):
        group.update(before)
    with torch.no_grad():
        for name, buffer in trainer.lightning_module.named_buffers():
            buffer.copy_(buffers[name])


def _on(module: LightningModule, values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(module.device), values)
