"""``torch.compile`` on blocks and on the whole module: Dynamo traces around the engine's hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_zero.engine import Engine
from tests.support import rank


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def compile_blocks(module):
    for number, block in enumerate(module.blocks):
        module.blocks[number] = torch.compile(block, backend="aot_eager")
    return module


def compile_in_place(module):
    for block in module.blocks:
        block.compile(backend="aot_eager")
    return module


def compile_whole(module):
    return torch.compile(module, backend="aot_eager")


def train(model, optimizer):
    losses = []
    for step in range(3):
        torch.manual_seed(2 * step + rank())
        loss = model(torch.randn(4, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def compare(stage, compiled):
    torch.manual_seed(0)
    reference = Net()
    module = copy.deepcopy(reference)
    expected = train(DistributedDataParallel(reference), torch.optim.Adam(reference.parameters(), lr=0.01))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    model = compiled(module)
    engine = Engine(module, [optimizer], stage=stage)
    torch.testing.assert_close(train(model, optimizer), expected, rtol=1e-6, atol=1e-7)
    engine.close()


@pytest.mark.behaviour("The module", "`torch.compile` on blocks, in place or not, and on the whole module")
@pytest.mark.parametrize("compiled", [compile_blocks, compile_in_place, compile_whole], ids=lambda c: c.__name__)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_of_a_compiled_module_equal_ddps(run_on, stage, compiled):
    run_on(2, compare, stage=stage, compiled=compiled)
