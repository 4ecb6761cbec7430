"""What a step costs on a device, beside DDP's: its operators, and that the host never waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_zero.engine import Engine, WrapperTensor
from tests.emulated.device import NAME
from tests.support.training import Recipe, batch, prepare

READ_BY_HOST = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero"}


class Operators(TorchDispatchMode):
    """Records the operators on a device, without views, and those that the host must wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.on_device: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, WrapperTensor) for kind in types):
            return NotImplemented  # its own operators follow
        out = func(*args, **(kwargs or {}))
        name, inputs = func.overloadpacket.__name__, tree_leaves((args, kwargs))
        outputs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if any(isinstance(each, Tensor) and each.device.type == NAME for each in inputs):
            leaves = any(each.device.type == "cpu" and not each.is_pinned() for each in outputs)
            if name in READ_BY_HOST or leaves:
                self.waits.append(name)
            if not func.is_view:
                self.on_device.append(name)
        return out


def operators_of(step: Callable[[int], None]) -> Operators:
    for index in range(3):  # until the order of reductions is known
        step(index)
    with Operators() as operators:
        step(3)
    return operators


def compare_with_ddp(stage: int, clips: bool) -> None:
    def run(module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer) -> Operators:
        def step(index: int) -> None:
            model(*batch(index, device=NAME)).backward()
            if clips:
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return operators_of(step)

    module, optimizer = prepare(Recipe(device=NAME))
    expected = run(module, DistributedDataParallel(module), optimizer)
    module, optimizer = prepare(Recipe(device=NAME))
    engine = Engine(module, [optimizer], stage=stage)
    found = run(module, module, optimizer)
    engine.close()
    assert found.waits == expected.waits == []
    assert len(found.on_device) <= len(expected.on_device), f"{found.on_device}, under DDP {expected.on_device}"


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_has_at_most_ddps_operators_and_never_waits_for_the_device(run_on_device, stage, clips):
    run_on_device(2, compare_with_ddp, stage=stage, clips=clips, merges_units=True)
