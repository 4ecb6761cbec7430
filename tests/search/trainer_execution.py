"""Runs a random program inside of a LightningModule's ``training_step``, by manual optimization."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from tests.search.averaged import make_net
from tests.search.execution import Execution
from tests.search.programs import LIGHTNING_PRECISIONS, AddGroup, Program, Setup
from tests.support.trainer import make_trainer

STEPS = 3
"""The number of batches over which a program's steps are spread."""


class TrainerExecution(Execution):
    """The run of a program in a module's ``training_step``, which is a window."""

    module: ProgramModule

    def window(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.module.trainer.strategy.block_backward_sync()

    def renew(self, setup: Setup) -> None:
        pass

    def _addgroup(self, op: AddGroup, index: int) -> None:
        if not self.setup.whole:  # such a group is resharded before the next step, when it must have no gradients
            super()._addgroup(op, index)

    def run_backward(self, loss: Tensor, **options: Any) -> None:
        self.module.manual_backward(loss, **options)

    def step(self, number: int, *closure: Any) -> None:
        optimizers = self.module.optimizers()
        optimizer = optimizers[number] if isinstance(optimizers, list) else optimizers
        optimizer.step(**({"closure": closure[0]} if closure else {}))


class ProgramModule(LightningModule):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = make_net(program.setup)
        self.execution = TrainerExecution(program, self.net)
        self.execution.module = self
        self.execution.parts = [self.net]
        self.difference: str | None = None

    def configure_optimizers(self) -> Any:
        return self.execution.optimizers

    def training_step(self, batch: Tensor, index: int) -> None:
        count = len(self.execution.program.ops)
        self.execution.engines = [self.trainer.strategy.engine]
        start, stop = (count * step // STEPS for step in (index, index + 1))
        self.difference = self.difference or self.execution.run_ops(start, stop)
        if index == STEPS - 1:
            self.difference = self.difference or self.execution.compare_at_end()


def execute_in_trainer(program: Program) -> str | None:
    """Run a program on this rank through a Trainer. Collective.

    Returns:
        The first difference on this rank, or None.
    """
    from lightning_zero import ZeroStrategy

    program = replace(program, setup=replace(program.setup, several=False))  # a strategy has one engine
    module = ProgramModule(program)
    loader = DataLoader(torch.zeros(STEPS * program.setup.ranks, 1), batch_size=1)
    strategy = ZeroStrategy(**module.execution.engine_options)
    precision = LIGHTNING_PRECISIONS[program.setup.precision]
    make_trainer(strategy, max_epochs=1, precision=precision).fit(module, loader)
    return module.difference or module.execution.compare_ordinary()
