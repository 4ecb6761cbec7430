"""What the running epoch has accumulated, and what its first hooks have set: state that checkpoints do not contain."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_zero.engine.compat import tree_map_only
from lightning_zero.strategies.loops import Around

EpochState = dict[str, Any]

_LOGGED = "_callback_metrics", "_logged_metrics", "_progress_bar_metrics"
_OF_MEANS = "value", "cumulated_batch_size"


def epoch_state(trainer: Trainer, *, with_sums: bool) -> EpochState:
    """Return this rank's state. Tensors are copied to CPU memory.

    It contains the metrics logged so far, which parameters are frozen, which modules are in evaluation mode, whether
    training should stop, and sums: unfinished means over the epoch and the states of torchmetrics.

    Args:
        with_sums: False if the fit will continue before batches that are already part of the sums.
    """
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    modes = {name: part.training for name, part in module.named_modules()}
    if trainer.validating:
        modes |= loop.val_loop._module_mode.mode  # those before the validation
    state = {
        "should_stop": trainer.should_stop,
        "logged": {name: dict(getattr(trainer._logger_connector, name)) for name in _LOGGED},
        "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        "evaluating": [name for name, is_training in modes.items() if not is_training],
        "sums": None,
    }
    if with_sums:
        means = {
            key: {name: getattr(mean, name) for name in _OF_MEANS if hasattr(mean, name)}
            for key, mean in loop._results.items()
            if mean.is_tensor and mean.meta.on_epoch and not mean.has_reset
        }
        metrics = {name: (metric._update_count, metric.metric_state) for name, metric in _metrics_of(module)}
        state["sums"] = {"means": means, "metrics": metrics}
    copied: EpochState = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
    return copied


def set_logged(trainer: Trainer, state: EpochState) -> None:
    """Restore the metrics logged so far, which callbacks and schedulers monitor."""
    for name, logged in state["logged"].items():
        getattr(trainer._logger_connector, name).update(_on(trainer.lightning_module, logged))


def set_epoch_state(trainer: Trainer, state: EpochState, *, same_ranks: bool) -> None:
    """Restore the other parts of what ``epoch_state`` returned, in a fit that is about to continue that epoch.

    Args:
        same_ranks: whether the job has as many ranks as before. Otherwise a rank's own sums are not restored.
    """
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    frozen, evaluating = set(state["frozen"]), set(state["evaluating"])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    for name, part in module.named_modules():
        part.training = name not in evaluating
    if state["sums"] is None or not same_ranks or not loop.batch_progress.current.ready:
        return
    sums = _on(module, state["sums"])
    for name, metric in _metrics_of(module):
        if name in sums["metrics"]:
            count, values = sums["metrics"][name]
            metric._update_count, metric._computed = count, None
            for key, value in values.items():
                setattr(metric, key, value)
    trainer._logger_connector._first_loop_iter = False  # otherwise the first batch would begin new means
    progress: Any = trainer.fit_loop.epoch_progress.current
    epoch = progress.processed

    def update(method: Any, key: str, *args: Any) -> None:
        if progress.processed == epoch:
            vars(loop._results[key]).update(sums["means"].pop(key, {}))
        method(key, *args)

    Around.put(loop._results, "update_metrics", update)


def forget(trainer: Trainer) -> None:
    """Undo what ``set_epoch_state`` has put around a method of Lightning's."""
    Around.take_off(trainer.fit_loop.epoch_loop._results, "update_metrics")


def _metrics_of(module: nn.Module) -> list[tuple[str, Metric]]:
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.values(copy_state=False)  # metrics that are computed from the same sums then refer to them
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


def _on(module: LightningModule, values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(module.device), values)
