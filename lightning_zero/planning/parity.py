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
        is_equal: whether all losses of all ranks, and all weights after each micro-batch, are bit-identical.
        step: the first micro-batch with a difference, counted from 0; None if nothing differs.
        loss: the ranks' losses for that micro-batch under DDP and under ZeRO; None if they are equal.
        weights: largest absolute difference in each parameter that differs after that micro-batch, by name.
    """

    stage: int
    is_equal: bool
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
    return [_compared(stage, ddp, recorded(strategy)) for stage, strategy in ours.items()]


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


def _compared(stage: int, theirs: list[_Step], ours: list[_Step]) -> Comparison:
    for number, (of_ddp, of_zero) in enumerate(zip(theirs, ours)):
        differing = [name for name, value in of_ddp.items() if not _has_same_bits(value, of_zero[name])]
        if differing:
            losses = (of_ddp[""].tolist(), of_zero[""].tolist()) if "" in differing else None
            weights = {
                name: (of_ddp[name].double() - of_zero[name].double()).abs().max().item() for name in differing if name
            }
            return Comparison(stage, False, number, losses, weights)
    return Comparison(stage, True, None, None, {})


def _has_same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
