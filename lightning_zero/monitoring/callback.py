"""Callback that monitors a fit: it logs figures, warns of outliers, and collects data for a report."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_zero.engine.compat import is_compiled, tree_leaves
from lightning_zero.engine.plan.placement import replicated_bytes
from lightning_zero.io.annotations import check_arguments
from lightning_zero.io.paths import read_json
from lightning_zero.monitoring.band import Band
from lightning_zero.monitoring.flops import FlopCounter
from lightning_zero.monitoring.measured import (
    MEGA,
    Measured,
    engine_of_run,
    gradient_norm,
    loss_scale,
    memory_metrics,
    model_state_bytes,
    ranks_with_data,
    traffic_of,
)

_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "64": torch.float64}


class _Copies(NamedTuple):
    """Values that are being copied to the host: some steps' losses, and the gradient norm after the last step."""

    steps: list[int]
    losses: Tensor
    norm: Tensor | None
    arrived: torch.Event | None  # recorded after the copies; None on the CPU


class _Rank(NamedTuple):
    """Figures that each rank sends to all others: its seconds without waits for other ranks, and its mean loss."""

    seconds: float
    loss: float | None


class Monitor:
    """Logs throughput, memory, communication, waits and stragglers; warns if throughput drops or the loss jumps.

    Every ``every_n_steps`` optimizer steps, rank 0 writes to all of the Trainer's loggers. The callback works with
    every strategy, but some figures require ZeRO: memory by category, traffic, waits and the slowest rank.

    A module may define a unit of throughput with a method ``count(batch) -> int`` and an attribute ``counted``, for
    example ``"tokens"``.

    Args:
        every_n_steps: number of optimizer steps between observations.
        batch_size_fn: returns the number of samples in a rank's batch; by default, the first tensor's length.
        length_fn: returns how many items (such as tokens) a rank's batch has, as for Lightning's ``ThroughputMonitor``.
        flops_per_batch: floating-point operations of a rank's micro-batch, forward and backward; by default, the
            module's attribute ``flops_per_batch`` or, if there is none, a count in the first micro-batch.
        available_flops: floating-point operations per second of one device, for the MFU (model FLOPs utilization),
            or a file from ``lightning-zero doctor --json``; by default, the figure in Lightning's table of GPUs.
        top_units: number of units whose waits are logged, starting with the longest wait.
        window: number of observations from which the bands (recent ranges) of throughput and loss are computed.
        band_width: half the width of a band, in robust standard deviations.

    Attributes:
        loss_curve: (step, this rank's training loss) of each optimizer step.
        validation_curve: (step, metrics) of each validation during the fit.
        counted: the unit of throughput that ``per_second`` counts: the module's ``counted``; ``"items"`` if only
            ``length_fn`` or the module's ``count`` is given; ``"steps"`` if neither is.
        per_second: throughput in ``counted`` per second, over all ranks, during training only.
        elements_per_step: elements that this rank communicates per optimizer step, during training only.
        peak_bytes: this rank's peak memory in bytes, by category.
        formula_bytes: bytes of model states according to the stage's formula for Adam.
        ddp_bytes: bytes of model states under DDP, which keeps all of them on every rank.
        units: number of elements of each unit (modules gathered and reduced together), by name; empty without ZeRO.
        waited: seconds per optimizer step that this rank waited for each unit, longest wait first.
        numel: number of elements of all parameters.
        metrics: the figures from the last observation, by name, on rank 0.

    Raises:
        ValueError: if an argument has a wrong type or is out of range, or the file does not state the FLOP/s.
        OSError: if the file cannot be read.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        flops_per_batch: float | None = None,
        available_flops: float | str | Path | None = None,
        top_units: int = 5,
        window: int = 50,
        band_width: float = 8.0,
    ) -> None:
        least = {"every_n_steps": 1, "top_units": 0, "window": 2, "band_width": 1}
        check_arguments(Monitor.__init__, locals(), "ZeroMonitor", **least)
        self.every_n_steps, self._top_units = every_n_steps, top_units
        self._batch_size_fn, self._length_fn = batch_size_fn or _first_dimension, length_fn
        self._given_flops, self._available_flops = flops_per_batch, _flops_a_second(available_flops)
        self._make_band = partial(Band, window, band_width)
        self._reset()

    def _reset(self) -> None:
        self.loss_curve: list[tuple[int, float]] = []
        self.validation_curve: list[tuple[int, dict[str, float]]] = []
        self.counted = "steps"
        self.per_second: float | None = None
        self.elements_per_step: float | None = None
        self.peak_bytes: dict[str, int] = {}
        self.formula_bytes: int | None = None
        self.ddp_bytes: int | None = None
        self.units: dict[str, int] = {}
        self.waited: dict[str, float] = {}
        self.numel = 0
        self.metrics: dict[str, float] = {}
        self._step = self._observed_at = 0
        self._began: float | None = None  # when measuring last resumed; None while paused
        self._part, self._total = Measured(), Measured()  # sums since the last observation, and sums up to it
        self._window = Measured()  # the micro-batches since the last optimizer step
        self._traffic: Counter[tuple[str, str, str]] = Counter()  # the engine's, up to where `_part` contains it
        self._loss: Tensor | None = None  # sum of the losses of the micro-batches since the last optimizer step
        self._summed = 0  # number of these losses
        self._losses: list[tuple[int, Tensor]] = []  # by step; on the device, since reading them would synchronize
        self._copied: _Copies | None = None
        self._count: Callable[[Any], int] | None = None  # how many items a batch has
        self._flops_per_second: float | None = None  # of a device
        self._flops_per_batch: float | None = None
        self._flop_counter: FlopCounter | None = None  # kept only until the first micro-batch has ended
        self._counts = False  # whether the counter's context has been entered
        self._time_band, self._loss_band = self._make_band(), self._make_band()

    # -- hooks ------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reset()
        count = getattr(pl_module, "count", None)
        if not callable(count) or isinstance(count, nn.Module):  # a number, a buffer or a metric of the project's own
            count = None
        self._count = self._length_fn or count
        self.counted = getattr(pl_module, "counted", "items") if self._count is not None else "steps"
        self.numel = sum(p.numel() for p in pl_module.parameters())
        if not trainer.loggers:
            rank_zero_info("ZeroMonitor: the Trainer has no logger, so values are only in the callback's `metrics`.")
        self._find_flops(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = self._observed_at = trainer.global_step  # not 0 in a run that resumes from a checkpoint

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._flop_counter is not None and not self._counts:
            self._flop_counter.__enter__()
            self._counts = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stop_counting()
        if (loss := _loss_in(outputs)) is not None:
            self._loss = loss if self._loss is None else self._loss + loss
            self._summed += 1
        window = self._window
        if self._began is not None:
            window.batches += 1
            window.samples += self._batch_size_fn(batch)
            window.items += self._count(batch) if self._count is not None else 0
        step = trainer.global_step
        if step == self._step:
            return  # no optimizer step: more micro-batches follow
        self._step = step
        # Lightning has divided each loss by the number of micro-batches in a whole step, except in manual optimization.
        divisor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        if self._loss is not None:
            # the last step of an epoch may have fewer micro-batches
            mean = self._loss if self._summed == divisor else self._loss * (divisor / self._summed)
            self._losses.append((step, mean))
            self._loss, self._summed = None, 0
        if self._began is None:
            if engine_of_run(trainer) is None:
                self._note_peak(model_state_bytes(trainer))  # noted now: Lightning drops gradients before validation
            self._resume(trainer)
        else:
            now, part = time.perf_counter(), self._part
            part.seconds += now - self._began
            part.steps += 1
            part.batches += window.batches
            part.samples += window.samples
            part.items += window.items
            window.batches = window.samples = window.items = 0
            self._began = now
            if trainer.accumulate_grad_batches > 1 or not pl_module.automatic_optimization:
                self._take_counts(trainer)  # validation may begin within the next step
        if step - self._observed_at >= self.every_n_steps:
            self._observed_at = step
            self._observe(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Measuring resumes only after the next step: at stages 1 and 2, validation may already have gathered the
        # parameters that the step would gather. A step within which validation begins is not measured at all.
        self._pause(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":  # the sanity check before the first step is the curve's first point
            metrics = {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("validation/")}
            self.validation_curve.append((trainer.global_step, metrics))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_counting()
        self._pause(trainer)
        self._read_losses()
        self._copy_losses(None)
        self._read_losses()
        total, engine = self._total, engine_of_run(trainer)
        total.add(self._part)
        if total.steps:
            self.per_second = self._rate(trainer, total)
        if engine is None:
            # Without ZeRO, every rank holds all parameters, gradients and two moments.
            self.formula_bytes = self.ddp_bytes = sum(
                replicated_bytes(p.numel(), p.element_size(), trains=p.requires_grad) for p in pl_module.parameters()
            )
            return
        report = engine.report()
        # Peaks within a step are recorded only by the engine.
        self.peak_bytes, self.formula_bytes, self.numel = dict(report.peak), report.formula, report.numel
        self.ddp_bytes, self.units = report.replicated, report.units
        if total.steps:
            self.elements_per_step = total.elements() / total.steps
            self.waited = {unit: seconds / total.steps for unit, seconds in total.waited_by_unit().most_common()}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_counting()

    # -- floating-point operations ----------------------------------------------------------------------------------

    def _find_flops(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the FLOP counts that the MFU requires, or log why no MFU is available."""
        dtype = _DTYPES.get(str(trainer.precision).partition("-")[0], torch.float32)
        available = self._available_flops or get_available_flops(trainer.strategy.root_device, dtype)
        self._flops_per_second = available
        self._flops_per_batch = self._given_flops or getattr(pl_module, "flops_per_batch", None)
        if available is None:
            rank_zero_info(
                "ZeroMonitor logs no MFU: the FLOP/s of this device are not known. Set "
                "ZeroMonitor(available_flops=...) to a number, or to a file from `lightning-zero doctor --json`."
            )
        elif self._flops_per_batch is None and any(map(is_compiled, pl_module.modules())):
            rank_zero_info(
                "ZeroMonitor logs no MFU: operations of compiled modules cannot be counted. Set "
                "ZeroMonitor(flops_per_batch=...)."
            )
        elif self._flops_per_batch is None and trainer.is_global_zero:
            self._flop_counter = FlopCounter()

    def _stop_counting(self) -> None:
        if self._flop_counter is not None and self._counts:
            self._flop_counter.__exit__(None, None, None)
            self._flops_per_batch, self._flop_counter = self._flop_counter.total, None

    # -- measured time ----------------------------------------------------------------------------------------------

    def _resume(self, trainer: Trainer) -> None:
        """Begin to measure, at the end of a step."""
        if (engine := engine_of_run(trainer)) is not None:
            engine.phases.measures = True
            self._traffic = traffic_of(engine)
        self._began = time.perf_counter()

    def _take_counts(self, trainer: Trainer) -> None:
        """Add the waits and the traffic up to now, the end of a step."""
        if (engine := engine_of_run(trainer)) is not None:
            self._part.waited.update(engine.phases.take())
            before, self._traffic = self._traffic, traffic_of(engine)
            self._part.traffic.update(self._traffic)
            self._part.traffic.subtract(before)

    def _pause(self, trainer: Trainer) -> None:
        """Stop measuring; discard what was measured of a step that has not ended."""
        if self._began is None:
            return
        self._began = None
        if (engine := engine_of_run(trainer)) is not None:
            engine.phases.measures = False
            if self._window.batches:
                engine.phases.take()
            else:
                self._take_counts(trainer)
        self._window = Measured()

    # -- observations -----------------------------------------------------------------------------------------------

    def _observe(self, trainer: Trainer) -> None:
        """Log what was measured since the last observation. Collective with the ZeRO engine.

        There are no rates if no step was measured, for example if a validation follows each step.
        """
        self._take_counts(trainer)
        part, self._part = self._part, Measured()  # time from here on counts for the next observation
        self._total.add(part)
        # Values copied from an accelerator are read at the next observation: they have arrived by then.
        read = self._read_losses()
        self._copy_losses(gradient_norm(trainer))
        if trainer.strategy.root_device.type == "cpu":
            read = self._read_losses()
        loss = read.get("training/loss")
        ranks = _exchanged(trainer, _Rank(part.seconds - part.waited_for_ranks(), loss))
        held, engine = model_state_bytes(trainer), engine_of_run(trainer)
        self._note_peak(held if engine is None else engine.ledger.peak)
        if not trainer.is_global_zero:
            return
        losses = [rank.loss for rank in ranks if rank.loss is not None]
        found = memory_metrics(trainer, held, self.peak_bytes) | read
        if part.steps:
            found |= self._throughput_of(trainer, part) | part.metrics(self._top_units) | _slowest(ranks)
        if losses:
            found["training/loss"] = loss = statistics.fmean(losses)
        if (scale := loss_scale(trainer)) is not None:
            found["training/loss_scale"] = scale
        self._warn(part, found)
        self.metrics = found
        for logger in trainer.loggers:
            logger.log_metrics(found, self._step)
        if trainer.progress_bar_callback is not None:
            shown = {f"{self.counted}/s": self._rate(trainer, part)} if part.steps else {}
            shown |= {"MB/rank": sum(held.values()) / MEGA} | ({"loss": loss} if loss is not None else {})
            # Not by `log`, which would also replace the module's metrics of these names, on this rank only: callbacks
            # and schedulers that monitor them would then decide differently from other ranks.
            trainer.progress_bar_metrics.update(shown)

    def _note_peak(self, held: dict[str, int]) -> None:
        if sum(held.values()) > sum(self.peak_bytes.values()):
            self.peak_bytes = dict(held)

    def _rate(self, trainer: Trainer, measured: Measured) -> float:
        """The throughput in ``counted`` per second, over all ranks."""
        count = measured.steps if self._count is None else measured.items * ranks_with_data(trainer)
        return count / measured.seconds

    def _throughput_of(self, trainer: Trainer, part: Measured) -> dict[str, float]:
        """Totals of this rank, and rates since the last observation, under the names of Lightning's ``Throughput``."""
        total, flops, counted = self._total, self._flops_per_batch, ranks_with_data(trainer)
        found: dict[str, float] = {"time": total.seconds, "batches": total.batches, "samples": total.samples}
        amounts = {"batches": (part.batches, counted), "samples": (part.samples, counted)}
        if self._length_fn is not None:
            found["lengths"] = total.items
            amounts["items"] = (part.items, counted)
        if flops is not None:
            # Tensor-parallel ranks have the same batch, but each computes its own operations.
            amounts["flops"] = (round(flops * part.batches), trainer.world_size)
        for name, (amount, ranks) in amounts.items():
            found[f"device/{name}_per_sec"] = amount / part.seconds
            if trainer.world_size > 1:
                found[f"{name}_per_sec"] = ranks * amount / part.seconds
        if flops is not None and self._flops_per_second is not None:
            found["device/mfu"] = found["device/flops_per_sec"] / self._flops_per_second
        if self._count is not None and self._length_fn is None:
            found[f"{self.counted}_per_sec"] = self._rate(trainer, part)
        return {f"throughput/{name}": value for name, value in found.items()}

    def _copy_losses(self, norm: Tensor | None) -> None:
        """Start to copy ``norm`` and the losses since the last observation to the host; do not wait for the device."""
        losses, self._losses = self._losses, []
        values = torch.stack([loss.float() for _, loss in losses]) if losses else torch.empty(0, device="cpu")
        arrived = None
        if values.device.type != "cpu":
            values = values.to("cpu", non_blocking=True)
            norm = norm.to("cpu", non_blocking=True) if norm is not None else None
            arrived = torch.accelerator.current_stream().record_event()
        self._copied = _Copies([step for step, _ in losses], values, norm, arrived)

    def _read_losses(self) -> dict[str, float]:
        """Add the losses of the latest copy to ``loss_curve``; return their mean, and the gradient norm, as metrics."""
        copied, self._copied = self._copied, None
        if copied is None:
            return {}
        if copied.arrived is not None:
            copied.arrived.synchronize()
        losses = copied.losses.tolist()
        self.loss_curve += zip(copied.steps, losses)
        found = {"training/loss": statistics.fmean(losses)} if losses else {}
        return found if copied.norm is None else found | {"training/gradient_norm": copied.norm.item()}

    def _warn(self, part: Measured, found: dict[str, float]) -> None:
        """Warn if throughput has just fallen below its band, or the loss has just risen above its band or to NaN."""
        # Time per sample is compared, not the rate: even a fall to 0 samples/s may lie within a noisy run's band.
        # Batches without samples have no such time.
        seconds = part.seconds / part.samples if part.samples else None
        if seconds is not None and (band := self._time_band.exceeded_by(seconds)) is not None:
            low, high = (1 / each if each > 0 else math.inf for each in reversed(band))
            slowest = ""
            if "straggler/rank" in found:
                times = 1 + found["straggler/slower"]
                slowest = f" Rank {found['straggler/rank']}'s compute time was {times:.2f} times the others' median."
            rank_zero_warn(
                f"ZeroMonitor: throughput fell to {1 / seconds:.4g} samples/s per rank at step {self._step}, below its "
                f"recent band of {low:.4g} to {high:.4g}.{slowest}"
            )
        loss = found.get("training/loss")
        if loss is not None and (band := self._loss_band.exceeded_by(loss)) is not None:
            low, high = band
            rank_zero_warn(
                f"ZeroMonitor: the training loss at step {self._step} is {loss:.4g}, outside its recent band of "
                f"{low:.4g} to {high:.4g}."
            )


class ZeroMonitor(Monitor, Callback):
    __doc__ = Monitor.__doc__


def _first_dimension(batch: Any) -> int:
    """Number of samples in a batch: the first dimension of its first non-scalar tensor; 1 without such a tensor."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def _loss_in(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss.detach().reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _flops_a_second(given: float | str | Path | None) -> float | None:
    """Return the given number, or the number in a file written by ``lightning-zero doctor --json``."""
    if not isinstance(given, (str, Path)):
        return given
    try:
        return float(read_json(given)["resources"]["flops"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"ZeroMonitor: the file {str(given)!r} does not state the FLOP/s: available_flops must be a number, or a "
            "file written by `lightning-zero doctor --json > FILE`."
        ) from None


def _exchanged(trainer: Trainer, own: _Rank) -> list[_Rank]:
    """All-gather the ranks' figures with the ZeRO engine; with other strategies, return only this rank's figures."""
    if (engine := engine_of_run(trainer)) is None:
        return [own]
    with engine.phases("wait for the other ranks", "the monitor"):
        return engine.communicator.everyone.control.gather_objects(own)


def _slowest(ranks: list[_Rank]) -> dict[str, float]:
    """Return the rank that computed longest, and by what fraction its time exceeds the other ranks' median."""
    if len(ranks) == 1:
        return {}
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].seconds)
    others = statistics.median(seconds for rank, (seconds, _) in enumerate(ranks) if rank != slowest)
    return {"straggler/rank": slowest, "straggler/slower": ranks[slowest].seconds / max(others, 1e-9) - 1}
