"""Quantities that a monitor reads: sums over measured steps, model states, traffic, gradient norm and loss scale."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn.utils import get_total_norm

from lightning_zero.engine import Engine, compat

MEGA = 1e6
_RANK_WAITS = {"wait for gather", "wait for reduction", "wait for the other ranks"}


@dataclass
class Measured:
    """Sums over the steps in a part of a fit, without validation.

    Attributes:
        seconds, steps, batches, samples: this rank's totals; each accumulated micro-batch counts as a batch.
        items: number of items that the module or the user counts, such as tokens.
        waited: seconds that this rank spent in phases such as waits, by (phase, unit).
        traffic: counts by (``"elements"``, ``"bytes"`` or ``"calls"``, kind of collective, link).
    """

    seconds: float = 0.0
    steps: int = 0
    batches: int = 0
    samples: int = 0
    items: int = 0
    waited: Counter[tuple[str, str]] = field(default_factory=Counter)
    traffic: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def add(self, other: Measured) -> None:
        for each in fields(self):
            mine, others = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, Counter):
                mine.update(others)
            else:
                setattr(self, each.name, mine + others)

    def waited_for_ranks(self) -> float:
        """Seconds that this rank waited for other ranks or for their data."""
        return sum(seconds for (phase, _), seconds in self.waited.items() if phase in _RANK_WAITS)

    def waited_by_unit(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (phase, unit), seconds in self.waited.items():
            if phase.startswith("wait"):
                found[unit] += seconds
        return found

    def elements(self) -> int:
        """Number of communicated elements of parameters and gradients."""
        kinds = ("all_gather", "reduce_scatter")
        return sum(n for (what, kind, _), n in self.traffic.items() if what == "elements" and kind in kinds)

    def metrics(self, top_units: int) -> dict[str, float]:
        """Metrics per optimizer step: seconds, megabytes and calls."""
        found = {"throughput/step_s": self.seconds / self.steps}
        for (what, kind, link), count in self.traffic.items():
            if what == "bytes":
                found[f"communication/{kind}/{link}_MB"] = count / self.steps / MEGA
            elif what == "calls":
                found[f"communication/{kind}/{link}_calls"] = count / self.steps
        for (phase, _), seconds in self.waited.items():
            if phase.startswith("wait") or phase == "update":
                name = f"time/{phase.replace(' ', '_')}_s"
                found[name] = found.get(name, 0.0) + seconds / self.steps
        for unit, seconds in self.waited_by_unit().most_common(top_units):
            found[f"wait/{unit.replace(' ', '_')}_s"] = seconds / self.steps
        return found


class MeasuredSteps:
    """Measures whole optimizer steps of a fit, between validations.

    Attributes:
        step: number of the last optimizer step.
        is_within_step: whether micro-batches have been trained on since the last optimizer step.
        total: sums over the steps that ``take`` has returned.
    """

    def __init__(self) -> None:
        self.step = 0
        self.is_within_step = False
        self.total = Measured()
        self._part = Measured()  # since the last ``take``
        self._running = Measured()  # since ``begin``
        self._began: float | None = None
        self._traffic_before: Counter[tuple[str, str, str]] = Counter()

    @property
    def is_measuring(self) -> bool:
        return self._began is not None

    def add_batch(self, samples: int, items: int, step: int) -> None:
        """Count a micro-batch, after which the last optimizer step has the number ``step``."""
        self.is_within_step = step == self.step
        self._running.batches += 1
        self._running.samples += samples
        self._running.items += items
        self._running.steps += step - self.step
        self.step = step

    def begin(self, engine: Engine | None) -> None:
        """Begin to measure, at the end of a step."""
        if engine is not None:
            engine.phases.measures = True
            engine.phases.take()
            self._traffic_before = engine.traffic()
        self._running = Measured()
        self._began = time.perf_counter()

    def end(self, engine: Engine | None) -> None:
        """End measuring. After a whole step, keep what was measured; within a step, discard it."""
        if self._began is None:
            return
        running = self._running
        running.seconds = time.perf_counter() - self._began
        self._began = None
        if engine is not None:
            engine.phases.measures = False
            running.waited.update(engine.phases.take())
            running.traffic.update(engine.traffic())
            running.traffic.subtract(self._traffic_before)
        if running.steps and not self.is_within_step:
            self._part.add(running)

    def take(self) -> Measured:
        """Return the sums over the steps that were measured since the last call, and add them to ``total``."""
        part, self._part = self._part, Measured()
        self.total.add(part)
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
