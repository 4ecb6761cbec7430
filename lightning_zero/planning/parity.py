"""The parity probe: check that a few steps under DDP and ZeRO are bit-identical, or report where they differ."""

from __future__ import annotations

import copy
import itertools
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero.engine import full_parameters
from lightning_zero.planning.fake_run import package_of, quiet, zero_strategy_of
from lightning_zero.planning.projects import Project


@dataclass(frozen=True)
class Comparison:
    """A ZeRO stage compared with DDP.

    Attributes:
        is_equal: whether losses and weights differ by ``tolerance`` at most, on all ranks and after each micro-batch.
        tolerance: 0 if every bit was compared; above 0 if bits differ and sums are taken in another order.
        step: the first micro-batch with a difference, counted from 0; None if nothing differs.
        loss: the ranks' losses for that micro-batch under DDP and under ZeRO; None if they are equal.
        weights: largest absolute difference in each parameter that differs after that micro-batch, by name.
    """

    stage: int
    is_equal: bool
    tolerance: float
    step: int | None
    loss: tuple[list[float], list[float]] | None
    weights: dict[str, float]


@quiet()
def probe(
    project: Project,
    *,
    ranks: int,
    stages: list[int],
    steps: int,
    accumulate: int = 1,
    precision: Any = "32-true",
    clip: float | None = None,
    **options: Any,
) -> list[Comparison]:
    """Train a project for a few steps under DDP and each stage, in forked processes on the CPU.

    Every run starts with the same weights and seeds, and divides the same batches among the ranks. Only the project's
    module and batches are used: callbacks and validation do not run.

    Args:
        project: the project; its module is built once, not on the meta device.
        ranks, stages, steps: number of processes, the ZeRO stages, number of optimizer steps.

    Raises:
        ValueError: if the project has too few batches.
    """
    seed_everything(0, verbose=False)
    module = project.make_module()
    package = package_of(module)
    recorder, zero = type("Recorder", (_Recorder, package.Callback), {}), zero_strategy_of(package)
    left_out = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    needed = steps * accumulate * ranks
    batches = list(itertools.islice(project.batches(), needed))
    if len(batches) < needed:
        raise ValueError(
            f"Too few batches for steps={steps} and ranks={ranks}: {needed} are needed, the loader has {len(batches)}."
        )

    def recorded(strategy: Any) -> list[_Step]:
        with tempfile.NamedTemporaryFile() as file:
            trainer = package.Trainer(
                strategy=strategy,
                accelerator="cpu",
                devices=ranks,
                max_steps=steps if module.automatic_optimization else -1,
                max_epochs=1,
                precision=precision,
                accumulate_grad_batches=accumulate,
                gradient_clip_val=clip,
                callbacks=[recorder(file.name)],
                limit_val_batches=0,
                **left_out,
            )
            trainer.fit(copy.deepcopy(module), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
            return torch.load(file.name, weights_only=True)

    ours = {stage: zero(stage=stage, start_method="fork", **options) for stage in stages}
    ddp = recorded(package.strategies.DDPStrategy(start_method="fork", find_unused_parameters=True))
    is_in_order = ranks <= 2 and clip is None
    return [
        _compared(stage, ddp, recorded(strategy), 0 if is_in_order and (accumulate == 1 or stage == 1) else _REORDERED)
        for stage, strategy in ours.items()
    ]


_REORDERED, _MOST = 1e-6, 0.01
"""Allowed difference, absolute and relative, if sums are taken in another order than DDP's: of gradients of three
ranks or more, of norms, and of micro-batches, which stages 2 and 3 reduce one by one. One weight in a hundred may
differ by more: where a gradient is zero but for rounding, as of the bias of attention's keys, Adam divides by it."""


_Step = dict[str, Tensor]
"""The record of a micro-batch: the losses of all ranks, under ``""``, and the weights afterwards, by name."""


class _Recorder:
    """Mixin for a callback with which rank 0 saves the losses and weights of each micro-batch to a file."""

    def __init__(self, file: str) -> None:
        self._file, self._steps = file, list[_Step]()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.manual_seed(trainer.global_rank)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        loss = loss.detach().reshape(()) if isinstance(loss, Tensor) else torch.zeros((), device="cpu")
        losses = trainer.strategy.all_gather(loss).reshape(-1)
        with full_parameters(pl_module):
            if trainer.is_global_zero:
                weights = {name: parameter.detach().clone() for name, parameter in pl_module.named_parameters()}
                self._steps.append({"": losses, **weights})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            torch.save(self._steps, self._file)


def _compared(stage: int, theirs: list[_Step], ours: list[_Step], allowed: float) -> Comparison:
    for tolerance in sorted({0.0, allowed}):
        found = _first_difference(stage, theirs, ours, tolerance)
        if found.is_equal:
            break
    return found


def _first_difference(stage: int, theirs: list[_Step], ours: list[_Step], tolerance: float) -> Comparison:
    for number, (of_ddp, of_zero) in enumerate(zip(theirs, ours)):
        outside = {name: _outside(value, of_zero[name], tolerance) for name, value in of_ddp.items()}
        differing = [name for name, count in outside.items() if count]
        most = (_MOST if tolerance else 0) * sum(value.numel() for name, value in of_ddp.items() if name)
        if outside[""] or sum(outside.values()) > most:
            losses = (of_ddp[""].tolist(), of_zero[""].tolist()) if outside[""] else None
            weights = {
                name: (of_ddp[name].double() - of_zero[name].double()).abs().max().item() for name in differing if name
            }
            return Comparison(stage, False, tolerance, number, losses, weights)
    return Comparison(stage, True, tolerance, None, None, {})


def _outside(a: Tensor, b: Tensor, tolerance: float) -> int:
    """The number of values that differ by more than ``tolerance`` or, if it is 0, of bytes that differ."""
    if a.dtype != b.dtype:
        return a.numel()
    if tolerance:
        return int((~a.isclose(b, tolerance, tolerance, equal_nan=True)).sum())
    return int((a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)).sum())
