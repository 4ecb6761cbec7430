"""What the running epoch has accumulated, and what its first hooks have set: state that checkpoints do not contain."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
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
            metrics[name] = part._update_count, part.metric_state
    logged = {name: dict(getattr(trainer._logger_connector, name)) for name in _LOGGED}
    state = {"should_stop": trainer.should_stop, "logged": logged, "frozen": frozen, "evaluating": evaluating}
    if with_sums:
        means = {
            key: {name: getattr(mean, name) for name in _OF_MEANS if hasattr(mean, name)}
            for key, mean in loop._results.items()
            if mean.is_tensor and mean.meta.on_epoch and not mean.has_reset
        }
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
    sums = _on(module, state.get("sums") if same_ranks and loop.batch_progress.current.ready else None)
    frozen, evaluating = set(state["frozen"]), set(state["evaluating"])
    for name, part in module.named_modules():
        part.training = name not in evaluating
        for key, parameter in part._parameters.items():
            if parameter is not None:
                parameter.requires_grad_(f"{name}.{key}" not in frozen)
        if sums is not None and name in sums["metrics"]:
            count, values = sums["metrics"][name]
            vars(part).update({"_update_count": count, "_computed": None, **values})
    if sums is None:
        return
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


def _on(module: LightningModule, values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(module.device), values)
