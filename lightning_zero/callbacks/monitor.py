"""Callback that monitors a fit: it logs figures, and collects data for a report.

Rates and MFU are computed by Lightning's ``Throughput``. Its callback ``ThroughputMonitor`` is not used: it waits for
the device after each micro-batch, so that updates and gathers would no longer overlap with the next forward.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.throughput import Throughput, get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.utils import get_total_norm

from lightning_zero.engine import Engine, compat, layout

_MEGA = 1e6
_MOST_UNITS = 5  # maximum number of units whose waits are logged
_RANK_WAITS = {"wait for gather", "wait for reduction", "wait for the other ranks"}
_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "64": torch.float64}


class ZeroMonitor(Callback):
    """Logs throughput, memory, communication, waits, the slowest rank, loss and gradient norm during a fit.

    Rank 0 writes to all of the Trainer's loggers. The callback works with every strategy, but some figures require
    ZeRO: traffic, waits, the slowest rank, and memory other than parameters, gradients and optimizer states. If the
    module has an attribute ``flops_per_batch``, as for Lightning's ``ThroughputMonitor``, the MFU is logged.

    Args:
        every_n_steps: number of optimizer steps between observations; by default the Trainer's ``log_every_n_steps``.
        batch_size_fn: returns the number of samples in a rank's batch; by default, the first tensor's length.
        length_fn: returns how many items (such as tokens) a rank's batch has, as for Lightning's ``ThroughputMonitor``.
        available_flops: floating-point operations per second of one device, for the MFU (model FLOPs utilization); by
            default, the figure in Lightning's table of GPUs.

    Attributes:
        loss_curve: (step, this rank's mean training loss since the previous observation) of each observation.
        validation_curve: (step, metrics) of each validation during the fit.
        per_second: items per second over all ranks, or samples without ``length_fn``, during training only.
        elements_per_step: elements that this rank communicates per optimizer step, during training only.
        peak_bytes: this rank's peak memory in bytes, by category.
        formula_bytes: bytes of model states according to the stage's formula for Adam.
        ddp_bytes: bytes of model states under DDP, which keeps all of them on every rank.
        units: number of elements of each unit (modules gathered and reduced together), by name; empty without ZeRO.
        waited: seconds per optimizer step that this rank waited for each unit, longest wait first.
        numel: number of elements of all parameters.
        metrics: the figures from the last observation, by name, on rank 0.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        available_flops: float | None = None,
    ) -> None:
        self.every_n_steps = every_n_steps
        self.batch_size_fn, self.length_fn = batch_size_fn or _first_dimension, length_fn
        self.available_flops = available_flops
        self._reset()

    def _reset(self) -> None:
        self.loss_curve: list[tuple[int, float]] = []
        self.validation_curve: list[tuple[int, dict[str, float]]] = []
        self.per_second: float | None = None
        self.elements_per_step: float | None = None
        self.peak_bytes: dict[str, int] = {}
        self.formula_bytes: int | None = None
        self.ddp_bytes: int | None = None
        self.units: dict[str, int] = {}
        self.waited: dict[str, float] = {}
        self.numel = 0
        self.metrics: dict[str, float] = {}
        self._measured = MeasuredSteps()
        self._observed_at = 0
        self._losses: tuple[Tensor, int] | None = None  # their sum and number since the last observation
        self._throughput: Throughput | None = None

    # -- hooks ------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reset()
        self.numel = sum(p.numel() for p in pl_module.parameters())
        has_flops = getattr(pl_module, "flops_per_batch", None) is not None
        available = self.available_flops
        if has_flops and available is None:
            dtype = _DTYPES.get(str(trainer.precision).partition("-")[0], torch.float32)
            available = get_available_flops(trainer.strategy.root_device, dtype)
        replicas = ranks_with_data(trainer)
        if available is not None:
            available *= trainer.world_size / replicas  # tensor-parallel ranks compute a batch together
        self._throughput = Throughput(available, world_size=replicas, window_size=2)  # from observation to observation
        lengths = None if self.length_fn is None else 0
        self._throughput.update(time=0.0, batches=0, samples=0, lengths=lengths, flops=0 if has_flops else None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measured.step = self._observed_at = trainer.global_step  # not 0 in a run that resumes from a checkpoint

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (loss := _loss_in(outputs)) is not None:
            # Lightning has divided it by the number of micro-batches in a step, except in manual optimization.
            loss = loss * (trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1)
            before, number = self._losses or (0, 0)
            self._losses = before + loss, number + 1
        measured, items = self._measured, self.length_fn(batch) if self.length_fn is not None else 0
        measured.add_batch(self.batch_size_fn(batch), items, trainer.global_step)
        if measured.is_within_step:
            return
        every: int = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and measured.step - self._observed_at >= every:
            self._observe(trainer)
        elif not measured.is_measuring:
            engine = engine_of_run(trainer)
            measured.begin(engine)
            if engine is None:
                self._note_peak(model_state_bytes(trainer))  # noted now: Lightning drops gradients before validation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Measuring begins again only after the next step: at stages 1 and 2, validation may already have gathered the
        # parameters that the step would gather.
        self._measured.end(engine_of_run(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":  # the sanity check before the first step is the curve's first point
            metrics = {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("validation/")}
            self.validation_curve.append((trainer.global_step, metrics))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = engine_of_run(trainer)
        self._measured.end(engine)
        if not self.loss_curve:
            self._read_loss()
        total = self._measured.total
        if total["steps"]:
            count = total["samples" if self.length_fn is None else "items"]
            self.per_second = count * ranks_with_data(trainer) / total["seconds"]
        if engine is None:
            # Without ZeRO, every rank holds all parameters, gradients and two moments.
            self.formula_bytes = self.ddp_bytes = sum(
                layout.replicated_bytes(p.numel(), p.element_size(), trains=p.requires_grad)
                for p in pl_module.parameters()
            )
            return
        report = engine.report()
        # Peaks within a step are recorded only by the engine.
        self.peak_bytes, self.formula_bytes, self.numel = dict(report.peak), report.formula, report.numel
        self.ddp_bytes, self.units = report.replicated, report.units
        if total["steps"]:
            self.elements_per_step = elements(total) / total["steps"]
            self.waited = {unit: seconds / total["steps"] for unit, seconds in waited_by_unit(total).most_common()}

    # -- observations -----------------------------------------------------------------------------------------------

    def _observe(self, trainer: Trainer) -> None:
        """Log what was measured since the last observation. Collective with the ZeRO engine.

        There are no rates if no step was measured, for example if a validation follows each step.
        """
        engine, measured = engine_of_run(trainer), self._measured
        self._observed_at = measured.step
        loss = self._read_loss()  # waits for the device, so that the measured time includes the steps' own work there
        measured.end(engine)
        measured.begin(engine)
        part = measured.take()
        norm = gradient_norm(trainer)
        ranks = _exchanged(trainer, (part["seconds"] - waited_for_ranks(part), loss))
        held = model_state_bytes(trainer)
        self._note_peak(held if engine is None else engine.ledger.peak)
        if not trainer.is_global_zero:
            return
        found = {f"memory/{category}_MB": nbytes / _MEGA for category, nbytes in held.items()}
        found["memory/peak_MB"] = sum(self.peak_bytes.values()) / _MEGA
        if part["steps"]:
            rates = self._rates(trainer.lightning_module, part["batches"])
            found |= rates | metrics_per_step(part) | _slowest([seconds for seconds, _ in ranks])
        if losses := [each for _, each in ranks if each is not None]:
            found["training/loss"] = statistics.fmean(losses)
        if norm is not None:
            found["training/gradient_norm"] = norm.item()
        if (scale := loss_scale(trainer)) is not None:
            found["training/loss_scale"] = scale
        self.metrics = found
        for logger in trainer.loggers:
            logger.log_metrics(found, measured.step)

    def _note_peak(self, held: dict[str, int]) -> None:
        if sum(held.values()) > sum(self.peak_bytes.values()):
            self.peak_bytes = dict(held)

    def _rates(self, module: LightningModule, batches: int) -> dict[str, float]:
        """Rates since the last observation, and totals, under the names of Lightning's ``Throughput``."""
        if self._throughput is None:
            return {}
        flops, total = getattr(module, "flops_per_batch", None), self._measured.total
        try:
            self._throughput.update(
                time=total["seconds"],
                batches=total["batches"],
                samples=total["samples"],
                lengths=None if self.length_fn is None else total["items"],
                flops=None if flops is None else round(flops * batches),
            )
        except ValueError as error:  # batches without samples, or fewer items than samples
            step = self._measured.step
            rank_zero_warn(f"ZeroMonitor logs no throughput from step {step} on: {error}. Set batch_size_fn=...")
            self._throughput = None
            return {}
        return {f"throughput/{name}": value for name, value in self._throughput.compute().items()}

    def _read_loss(self) -> float | None:
        """Add the mean loss since the last observation to ``loss_curve``, and return it."""
        if self._losses is None:
            return None
        total, number = self._losses
        loss, self._losses = total.item() / number, None
        self.loss_curve.append((self._measured.step, loss))
        return loss


def _first_dimension(batch: Any) -> int:
    """Number of samples in a batch: the first dimension of its first non-scalar tensor; 1 without such a tensor."""
    return next((len(leaf) for leaf in compat.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def _loss_in(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss.detach().reshape(()).float() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _exchanged(trainer: Trainer, own: tuple[float, float | None]) -> list[tuple[float, float | None]]:
    """All-gather the ranks' figures with the ZeRO engine; with other strategies, return only this rank's figures."""
    if (engine := engine_of_run(trainer)) is None:
        return [own]
    with engine.phases("wait for the other ranks", "the monitor"):
        return engine.gather_objects(own)


def _slowest(ranks: list[float]) -> dict[str, float]:
    """Return the rank that computed longest, and by what fraction its seconds exceed the other ranks' median."""
    if len(ranks) == 1:
        return {}
    slowest = ranks.index(max(ranks))
    others = statistics.median(ranks[:slowest] + ranks[slowest + 1 :])
    return {"straggler/rank": slowest, "straggler/slower": ranks[slowest] / max(others, 1e-9) - 1}


# -- sums over measured steps ------------------------------------------------------------------------------------------

Sums = Counter[Any]
"""Sums over optimizer steps, without validation.

``"seconds"``, ``"steps"``, ``"batches"`` (each accumulated micro-batch counts), ``"samples"`` and ``"items"`` (such as
tokens) are totals of this rank. Keys (``"seconds"``, phase, unit) have the seconds of phases such as waits, and keys
(``"elements"``, ``"bytes"`` or ``"calls"``, kind of collective, link) the traffic.
"""


def _parts(sums: Sums, what: str) -> list[tuple[str, str, float]]:
    """The sums of one quantity, each with its phase and unit, or its kind of collective and link."""
    return [(*key[1:], value) for key, value in sums.items() if isinstance(key, tuple) and key[0] == what]


def waited_for_ranks(sums: Sums) -> float:
    """Seconds that this rank waited for other ranks or for their data."""
    return sum(seconds for phase, _, seconds in _parts(sums, "seconds") if phase in _RANK_WAITS)


def waited_by_unit(sums: Sums) -> Counter[str]:
    found: Any = Counter()
    for phase, unit, seconds in _parts(sums, "seconds"):
        if phase.startswith("wait"):
            found[unit] += seconds
    return found


def elements(sums: Sums) -> float:
    """Number of communicated elements of parameters and gradients."""
    return sum(n for kind, _, n in _parts(sums, "elements") if kind in ("all_gather", "reduce_scatter"))


def metrics_per_step(sums: Sums) -> dict[str, float]:
    """Metrics per optimizer step: seconds, megabytes and calls."""
    steps = sums["steps"]
    found = {"throughput/step_s": sums["seconds"] / steps}
    for kind, link, nbytes in _parts(sums, "bytes"):
        found[f"communication/{kind}/{link}_MB"] = nbytes / steps / _MEGA
    for kind, link, calls in _parts(sums, "calls"):
        found[f"communication/{kind}/{link}_calls"] = calls / steps
    for phase, _, seconds in _parts(sums, "seconds"):
        if phase.startswith("wait") or phase == "update":
            name = f"time/{phase.replace(' ', '_')}_s"
            found[name] = found.get(name, 0.0) + seconds / steps
    for unit, seconds in waited_by_unit(sums).most_common(_MOST_UNITS):
        found[f"wait/{unit.replace(' ', '_')}_s"] = seconds / steps
    return found


class MeasuredSteps:
    """Measures whole optimizer steps of a fit, between validations."""

    def __init__(self) -> None:
        self.step = 0  # number of the last optimizer step
        self.is_within_step = False  # whether micro-batches have been trained on since the last optimizer step
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


# -- figures of a run --------------------------------------------------------------------------------------------------


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
