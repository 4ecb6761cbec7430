"""Metrics on slices of the data, with a clone of torchmetrics metrics for each slice."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric, MetricCollection, SumMetric
from torchmetrics.utilities import dim_zero_cat

from lightning_zero.engine import process_group
from lightning_zero.strategies.lightning_internals import reductions_of


class SliceMetrics(Callback):
    """Logs metrics on each slice of the validation and test data, over all ranks, as ``NAME/SLICE/METRIC``.

    Args:
        metrics: torchmetrics metrics, cloned for each slice, for example accuracy and calibration error.
        slices: by slice name, a function of a batch that returns a 1-D boolean tensor, True for the samples in the
            slice. Slices may overlap.
        arguments: a function of a step's outputs and its batch that returns the arguments of the metrics'
            ``update``, such as predictions and targets; the first dimension of each tensor is the sample dimension.
        name: the first part of the names of logged values.
    """

    def __init__(
        self,
        metrics: MetricCollection,
        slices: Mapping[str, Callable[[Any], Tensor]],
        arguments: Callable[[Any, Any], tuple[Tensor, ...]],
        name: str = "slices",
    ) -> None:
        self._slices, self._arguments, self._name = dict(slices), arguments, name
        self._metrics = {each: metrics.clone() for each in slices}
        self._samples = {each: SumMetric() for each in slices}

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        every: list[Any] = [*self._metrics.values(), *self._samples.values()]
        for metric in every:
            metric.to(pl_module.device)
            metric.reset()

    def _update(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        given = self._arguments(outputs, batch)
        for each, slice_of in self._slices.items():
            members = slice_of(batch)
            self._samples[each].update(members.sum())
            if members.any():
                self._metrics[each].update(*(value[members] for value in given))

    def _end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for each, metrics in self._metrics.items():
            samples = self._samples[each].compute()
            pl_module.log(f"{self._name}/{each}/samples", samples, sync_dist=True)
            if samples:  # equal on all ranks, so that either all ranks or none join the collectives below
                if trainer.world_size > 1:
                    _fill_lists(metrics)
                for metric, value in metrics.compute().items():
                    pl_module.log(
                        f"{self._name}/{each}/{metric}", torch.as_tensor(value, device=pl_module.device), sync_dist=True
                    )

    on_validation_epoch_start = on_test_epoch_start = _start
    on_validation_batch_end = on_test_batch_end = _update
    on_validation_epoch_end = on_test_epoch_end = _end


def _fill_lists(metrics: MetricCollection) -> None:
    """Give states that are empty lists, on ranks without samples, the dtype and shape of other ranks'. Collective.

    Otherwise torchmetrics would gather an empty vector of floats for them, which fails if other ranks have integers
    or matrices.
    """
    parts = [part for part in metrics.modules() if isinstance(part, Metric)]
    own = [
        {
            name: (values[0].dtype, values[0].shape[1:])
            for name, values in part.metric_state.items()
            if isinstance(values, list) and values and reductions_of(part)[name] is dim_zero_cat
        }
        for part in parts
    ]
    for part, *known in zip(parts, *process_group.all_gather_objects(own)):
        for name, (dtype, shape) in ChainMap(*known).items():
            if not getattr(part, name):
                setattr(part, name, [torch.empty(0, *shape, dtype=dtype, device=part.device)])
