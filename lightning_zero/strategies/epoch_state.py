"""What the running epoch has accumulated, and what its first hooks have set: state that checkpoints do not contain."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from lightning_zero.engine.compat import tree_map_only

EpochState = dict[str, Any]

_CACHES = "_computed", "_forward_cache"
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


_NUMBERS = "_update_count", "_num_vals_seen"
"""Attributes of torchmetrics that are neither states nor settings."""

_MOST_TENSORS, _MOST_BYTES = 64, 2**24
"""A metric whose lists are longer or larger, after concatenation, is left out: states are kept after each step."""


def epoch_state(trainer: Trainer, *, with_sums: bool, counts: Mapping[str, int] = MappingProxyType({})) -> EpochState:
    """Return this rank's state. Tensors are copied to CPU memory.

    It contains the metrics logged so far, which parameters are frozen, which modules are in evaluation mode, whether
    training should stop, and sums: unfinished means over the epoch and the states of torchmetrics.

    Args:
        with_sums: False if the fit will continue before batches that are already part of the sums.
        counts: within a validation, the result of ``update_counts`` at its start. Metrics that this validation was the
            first to update are left out, since it will not be continued.
    """
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    # Lightning puts all modules into evaluation mode for a validation, and keeps their modes from before.
    modes = loop.val_loop._module_mode.mode if trainer.validating else {}
    trained: dict[str, bool] = {}
    training: dict[str, bool] = {}
    metrics: dict[str, Any] = {}
    for name, part in module.named_modules():
        trained |= {f"{name}.{key}": p.requires_grad for key, p in part._parameters.items() if p is not None}
        training[name] = modes.get(name, part.training)
        if isinstance(part, MetricCollection):
            part.values(copy_state=False)  # metrics that are computed from the same sums then refer to them
        elif isinstance(part, Metric) and (counts.get(name) != 0 or not part._update_count):
            metrics[name] = _state_of(part)
    logged = {name: dict(getattr(trainer._logger_connector, name)) for name in _LOGGED}
    state: EpochState = {
        "should_stop": trainer.should_stop,
        "logged": _copied(logged),
        "trained": trained,
        "training": training,
        "reloaded": trainer.fit_loop._last_train_dl_reload_epoch,
    }
    if with_sums:
        results = {
            key: _result_of(each)
            for key, each in loop._results.items()
            if not each.has_reset and each.meta.sync.group is None
        }
        state["sums"] = _copied({"results": results, "metrics": metrics})
    return state


def _copied(values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), values)


def update_counts(module: LightningModule) -> dict[str, int]:
    """How often each metric of torchmetrics has been updated since it was reset."""
    return {name: part._update_count for name, part in module.named_modules() if isinstance(part, Metric)}


def _state_of(metric: Any) -> dict[str, Any]:
    """The state of a metric, and tensors that it has as attributes, such as the extrema of a ``MinMaxMetric``."""
    state = {
        key: value
        for key, value in vars(metric).items()
        if key in metric._defaults or key in _NUMBERS or (isinstance(value, Tensor) and key not in _CACHES)
    }
    for key, values in state.items():
        if isinstance(values, list) and len(values) > 1 and metric._reductions.get(key) is dim_zero_cat:
            state[key] = [dim_zero_cat(values)]  # one tensor is much faster to pickle than many
    lists = [value for values in state.values() if isinstance(values, list) for value in values]
    tensors = [value for value in lists if isinstance(value, Tensor)]
    if len(lists) > _MOST_TENSORS or sum(value.nbytes for value in tensors) > _MOST_BYTES:
        return {}
    return state


def _result_of(result: Any) -> dict[str, Any]:
    """What has been logged under one key: the arguments of ``log``, and the sum so far."""
    sync = result.meta.sync
    return {
        "arguments": {name: getattr(result.meta, name) for name in _ARGUMENTS},
        "reduce": (result.meta.reduce_fx.__name__, result.meta.reduce_fx in (sum, min, max)),
        "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only},
        "is_tensor": result.is_tensor,
        "state": _state_of(result) | {"_forward_cache": result._forward_cache} if result.is_tensor else {},
    }


def set_logged(trainer: Trainer, state: EpochState) -> None:
    """Restore the metrics logged so far, which callbacks and schedulers monitor."""
    for name, logged in state["logged"].items():
        getattr(trainer._logger_connector, name).update(_to_device(trainer.lightning_module, logged))


def set_modules(module: LightningModule, state: EpochState, *, same_ranks: bool) -> None:
    """Restore which parameters are frozen, modes of modules, and states of torchmetrics.

    Args:
        same_ranks: whether the job has as many ranks as before. Otherwise a rank's own sums are not restored.
    """
    metrics = _to_device(module, state["sums"]["metrics"]) if same_ranks and "sums" in state else {}
    for name, part in module.named_modules():
        part.training = state["training"].get(name, part.training)
        for key, parameter in part._parameters.items():
            if parameter is not None and f"{name}.{key}" in state["trained"]:
                parameter.requires_grad_(state["trained"][f"{name}.{key}"])
        if metrics.get(name):
            vars(part).update(metrics[name] | {"_computed": None})


def set_epoch(trainer: Trainer, state: EpochState, *, same_ranks: bool) -> None:
    """Restore what belongs to the epoch that is about to continue.

    Args:
        same_ranks: as for ``set_modules``, which must be called before.
    """
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    trainer.fit_loop._last_train_dl_reload_epoch = state["reloaded"]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(cls.__name__ == "StochasticWeightAveraging" for cls in type(callback).__mro__):
            with _preserved(trainer):  # the loaded options and buffers already contain what its setup changes
                callback.on_train_epoch_start(trainer, module)
    if not same_ranks or "sums" not in state:
        return
    parts = dict(module.named_modules())
    for key, saved in _to_device(module, state["sums"]["results"]).items():
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
def _preserved(trainer: Trainer) -> Iterator[None]:
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


def _to_device(module: LightningModule, values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(module.device), values)
