"""Quantities that a monitor reads: sums over measured steps, model states, traffic, gradient norm and loss scale."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn.utils import get_total_norm

from lightning_zero.engine import Engine, compat

MEGA = 1e6
_RANK_WAITS = {"wait for gather", "wait for reduction", "wait for the other ranks"}

Sums = Counter[Any]
"""Sums over optimizer steps, without validation.

``"seconds"``, ``"steps"``, ``"batches"`` (each accumulated micro-batch counts), ``"samples"`` and ``"items"`` (such as
tokens) are totals of this rank. Keys (``"seconds"``, phase, unit) have the seconds of phases such as waits, and keys
(``"elements"``, ``"bytes"`` or ``"calls"``, kind of collective, link) the traffic.
"""


def _parts(sums: Sums, *kinds: str) -> list[tuple[str, str, str, float]]:
    """The sums that are divided by phase and unit, or by kind of collective and link."""
    return [(*key, value) for key, value in sums.items() if isinstance(key, tuple) and key[0] in kinds]


def waited_for_ranks(sums: Sums) -> float:
    """Seconds that this rank waited for other ranks or for their data."""
    return sum(seconds for _, phase, _, seconds in _parts(sums, "seconds") if phase in _RANK_WAITS)


def waited_by_unit(sums: Sums) -> Counter[str]:
    found: Any = Counter()
    for _, phase, unit, seconds in _parts(sums, "seconds"):
        if phase.startswith("wait"):
            found[unit] += seconds
    return found


def elements(sums: Sums) -> float:
    """Number of communicated elements of parameters and gradients."""
    return sum(n for _, kind, _, n in _parts(sums, "elements") if kind in ("all_gather", "reduce_scatter"))


def metrics_per_step(sums: Sums, top_units: int) -> dict[str, float]:
    """Metrics per optimizer step: seconds, megabytes and calls."""
    steps = sums["steps"]
    found = {"throughput/step_s": sums["seconds"] / steps}
    for _, kind, link, nbytes in _parts(sums, "bytes"):
        found[f"communication/{kind}/{link}_MB"] = nbytes / steps / MEGA
    for _, kind, link, calls in _parts(sums, "calls"):
        found[f"communication/{kind}/{link}_calls"] = calls / steps
    for _, phase, _, seconds in _parts(sums, "seconds"):
        if phase.startswith("wait") or phase == "update":
            name = f"time/{phase.replace(' ', '_')}_s"
            found[name] = found.get(name, 0.0) + seconds / steps
    for unit, seconds in waited_by_unit(sums).most_common(top_units):
        found[f"wait/{unit.replace(' ', '_')}_s"] = seconds / steps
    return found


class MeasuredSteps:
    """Measures whole optimizer steps of a fit, between validations.

    Attributes:
        step: number of the last optimizer step.
        is_within_step: whether micro-batches have been trained on since the last optimizer step.
        total: sums over all measured steps.
    """

    def __init__(self) -> None:
        self.step = 0
        self.is_within_step = False
        self.total: Sums = Counter()
        self._taken: Sums = Counter()  # ``total`` at the last ``take``
        self._running: Any = None  # sums since ``begin``; None while nothing is measured

    @property
    def is_measuring(self) -> bool:
        return self._running is not None

    def add_batch(self, samples: int, items: int, step: int) -> None:
        """Count a micro-batch, after which the last optimizer step has the number ``step``."""
        self.is_within_step = step == self.step
        if (running := self._running) is not None:
            running["batches"] += 1
            running["samples"] += samples
            running["items"] += items
            running["steps"] += step - self.step
        self.step = step

    def begin(self, engine: Engine | None) -> None:
        """Begin to measure, at the end of a step."""
        self._running = Counter()
        if engine is not None:
            engine.phases.measures = True
            engine.phases.take()
            self._running.subtract(engine.traffic())
        self._running["seconds"] -= time.perf_counter()

    def end(self, engine: Engine | None) -> None:
        """End measuring. After a whole step, keep what was measured; within a step, discard it."""
        running, self._running = self._running, None
        if running is None:
            return
        running["seconds"] += time.perf_counter()
        if engine is not None:
            engine.phases.measures = False
            running.update({("seconds", *key): seconds for key, seconds in engine.phases.take().items()})
            running.update(engine.traffic())
        if running["steps"] and not self.is_within_step:
            self.total.update(running)

    def take(self) -> Sums:
        """Return the sums over the steps that were measured since the last call."""
        part, self._taken = self.total - self._taken, self.total.copy()
        return part


def engine_of_run(trainer: Trainer) -> Engine | None:
    """The ZeRO engine of a Trainer's run; None with other strategies."""
    return getattr(trainer.strategy, "engine", None)


def ranks_with_data(trainer: Trainer) -> int:
    """Number of ranks with different batches: all ranks, unless tensor-parallel ranks share batches."""
    sampled = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return sampled.get("num_replicas", trainer.world_size)


def model_state_bytes(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states that this rank holds now, by category."""
    engine = engine_of_run(trainer)
    if engine is not None:
        return dict(engine.report().at_rest)
    parameters = list(trainer.lightning_module.parameters())
    states = compat.tree_leaves([dict(optimizer.state) for optimizer in trainer.optimizers])
    return {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(compat.nbytes_of(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(compat.nbytes_of(value) for value in states if isinstance(value, Tensor)),
    }


def elements_of(tensor: Tensor) -> Tensor:
    """The elements that a tensor stores: of a sparse one (an embedding's gradient), its values by unique index."""
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def gradient_norm(trainer: Trainer) -> Tensor | None:
    """The norm of all gradients in ``p.grad``, after clipping. Collective with the ZeRO engine.

    None if there are no gradients, or if offloaded updates may be reading or releasing them in the background.
    """
    engine = engine_of_run(trainer)
    if engine is not None and engine.config.offload is not None:
        return None
    gradients = [elements_of(p.grad) for p in trainer.lightning_module.parameters() if p.grad is not None]
    with torch.no_grad():
        return get_total_norm(gradients) if gradients else None


def loss_scale(trainer: Trainer) -> float | None:
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    return scaler.get_scale() if scaler is not None else None
