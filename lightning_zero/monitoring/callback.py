"""Callback that measures a fit: loss, throughput, memory of the model states, and communication volume."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_zero.engine.plan.placement import replicated_bytes


class Monitor:
    """Shows loss, throughput and memory in the progress bar, and collects the data for the report.

    A module defines the unit of throughput by a method ``count(batch) -> int`` and an attribute ``counted``, for
    example ``"tokens"``; otherwise optimizer steps are counted. Works with every strategy; values that only the ZeRO
    engine knows are None with others.

    Attributes:
        loss_curve: (step, training loss on rank 0) of each optimizer step.
        validation_curve: (step, metrics) of each validation during the fit.
        per_second: Throughput in ``counted`` per second, over all ranks, during training only.
        elements_per_step: Elements communicated by a rank per optimizer step, during training only.
        peak_bytes: Peak memory of a rank in bytes, by category.
        formula_bytes: Bytes of model states according to the stage's formula, with Adam as the optimizer.
        ddp_bytes: Bytes of model states under DDP, which keeps all of them on every rank.
        units: Number of elements of each unit (gathered and reduced together), by name; empty with other strategies.
        numel: Number of elements of all parameters.
    """

    def __init__(self) -> None:
        self.loss_curve: list[tuple[int, float]] = []
        self.validation_curve: list[tuple[int, dict[str, float]]] = []
        self.counted = "steps"
        self.per_second: float | None = None
        self.elements_per_step: float | None = None
        self.peak_bytes: dict[str, int] = {}
        self.formula_bytes: int | None = None
        self.ddp_bytes: int | None = None
        self.units: dict[str, int] = {}
        self.numel = 0
        self._losses: list[tuple[int, Tensor]] = []  # kept on the device: reading a value would synchronize
        self._step_began: tuple[float, int] | None = None
        self._measured: list[tuple[float, int, int]] = []  # seconds, count and elements of each measured step
        self._window_count = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.counted = getattr(pl_module, "counted", "steps")
        self.numel = sum(p.numel() for p in pl_module.parameters())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The step after a validation is not measured: the time since the last step includes the validation, and some of
        # its communication may be missing (at stages 1 and 2 the validation may have gathered the parameters already).
        self._step_began = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":  # includes the sanity check before the first step, as the curve's first point
            metrics = {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("validation/")}
            self.validation_curve.append((trainer.global_step, metrics))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        count = getattr(pl_module, "count", None)
        self._window_count += count(batch) if count is not None else 0
        step = trainer.global_step
        if step == (self._losses[-1][0] if self._losses else 0):
            return  # between micro-batches

        self._losses.append((step, outputs["loss"].detach()))
        pl_module.log("loss", outputs["loss"], prog_bar=True)
        counted = self._window_count * trainer.world_size if count is not None else 1
        self._window_count = 0
        now, elements = time.perf_counter(), _elements(trainer)
        if self._step_began is not None:
            began, elements_before = self._step_began
            self._measured.append((now - began, counted, elements - elements_before))
            pl_module.log(f"{self.counted}/s", counted / (now - began), prog_bar=True)
        self._step_began = now, elements

        held = model_state_bytes(trainer)
        if sum(held.values()) > sum(self.peak_bytes.values()):
            self.peak_bytes = held
        pl_module.log("MB/rank", sum(held.values()) / 1e6, prog_bar=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.loss_curve = [(step, loss.item()) for step, loss in self._losses]
        seconds, count, elements = map(sum, zip((0.0, 0, 0), *self._measured))
        if self._measured:
            self.per_second = count / seconds
        engine = getattr(trainer.strategy, "engine", None)
        if engine is None:
            # Every rank holds all parameters, gradients and two moments.
            self.formula_bytes = self.ddp_bytes = sum(
                replicated_bytes(p.numel(), p.element_size(), trains=p.requires_grad) for p in pl_module.parameters()
            )
        else:
            report = engine.report()
            # Only the engine sees peaks within a step.
            self.peak_bytes, self.formula_bytes, self.numel = dict(report.peak), report.formula, report.numel
            self.ddp_bytes, self.units = report.replicated, report.units
            self.elements_per_step = elements / len(self._measured) if self._measured else None


class ZeroMonitor(Monitor, Callback):
    __doc__ = Monitor.__doc__


def model_state_bytes(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states that this rank holds now, by category."""
    engine = getattr(trainer.strategy, "engine", None)
    if engine is not None:
        return dict(engine.report().at_rest)
    parameters = list(trainer.lightning_module.parameters())
    states = [value for o in trainer.optimizers for state in o.state.values() for value in state.values()]
    return {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "optimizer": sum(value.nbytes for value in states if isinstance(value, Tensor)),
    }


def _elements(trainer: Trainer) -> int:
    """Return the number of elements gathered and reduced so far; 0 with other strategies."""
    engine = getattr(trainer.strategy, "engine", None)
    if engine is None:
        return 0
    elements = engine.report().elements
    return elements.get("all_gather", 0) + elements.get("reduce_scatter", 0)
