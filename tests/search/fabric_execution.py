"""Runs a random program by Fabric's calls, on one or several modules that are set up with it."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.fabric.training import make_fabric
from tests.search.averaged import make_net
from tests.search.execution import NORMS, Execution
from tests.search.programs import LIGHTNING_PRECISIONS, Clip, Program, SaveAndLoad


class FabricExecution(Execution):
    """The run of a program whose modules and optimizers are set up with Fabric, one by one."""

    path: Path | None = None  # of the checkpoint

    def make_engines(self) -> None:
        from lightning_zero.fabric import ZeroStrategy

        setup = self.setup
        form = "sharded" if setup.has_number else "full"
        strategy = ZeroStrategy(**self.engine_options, checkpoint=form, async_save=setup.is_tied)
        self.fabric = make_fabric(strategy, precision=LIGHTNING_PRECISIONS[setup.precision])
        optimizers_first = setup.prefetch == 1
        if optimizers_first:
            self.wrapped_optimizers = [self.fabric.setup_optimizers(each) for each in self.optimizers]
        self.wrapped = [self.fabric.setup_module(part) for part in self.parts]
        if not optimizers_first:
            self.wrapped_optimizers = [self.fabric.setup_optimizers(each) for each in self.optimizers]
        self.engines = strategy.engines

    def close_engines(self) -> None:
        self.engines = []
        self.fabric.strategy.teardown()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._in_all(self.fabric.no_backward_sync(module) for module in self.wrapped)

    def run_backward(self, loss: Tensor, **options: Any) -> None:
        self.fabric.backward(loss, **options)

    def step(self, number: int, *closure: Any) -> None:
        self.wrapped_optimizers[number].step(*closure)

    def clip(self, op: Clip) -> None:
        if op.optimizer is None:
            super().clip(op)
        else:
            how = {"clip_val": 0.125} if op.by == "value" else {"max_norm": 0.5, "norm_type": NORMS[op.by]}
            self.fabric.clip_gradients(self.wrapped[0], self.wrapped_optimizers[op.optimizer], **how)

    def _saveandload(self, op: SaveAndLoad, index: int) -> None:
        """Write a file, or read back the newest one."""
        state = {f"module {i}": module for i, module in enumerate(self.wrapped)}
        state |= {f"optimizer {i}": optimizer for i, optimizer in enumerate(self.wrapped_optimizers)}
        reference = (self.reference.net, *self.reference.optimizers)
        sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in self.optimizers]
        if op.load and self.saved is not None and self.saved[0] == sizes:
            self.fabric.load(self.path, state)
            for each, values in zip(reference, copy.deepcopy(self.saved[1])):
                each.load_state_dict(values)
        else:
            if self.path is None:
                self.files = tempfile.TemporaryDirectory()
                self.path = Path(self.fabric.broadcast(self.files.name)) / "a.ckpt"
            self.fabric.save(self.path, state)
            self.saved = sizes, [copy.deepcopy(each.state_dict()) for each in reference]


def execute_in_fabric(program: Program) -> str | None:
    """Run a program on this rank through Fabric. Collective.

    Returns:
        The first difference on this rank, or None.
    """
    return FabricExecution(program, make_net(program.setup)).run()
