"""``torch.compile``: correct values, and no more graphs and breaks than with FSDP2 around the same modules."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_zero.engine import Engine
from tests.support import rank, world_size
from tests.support.graphs import CountingBackend
from tests.support.selection import exhaustive_but


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """A loop over blocks, with a layer of the root unit at the end."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Interleaved(nn.Module):
    """Layers and a root-unit parameter between blocks: a hook on each would break the graph there."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = self.middle(self.blocks[0](self.first(x))) * self.scale
        return self.head(self.blocks[1](x)).square().mean()


def compile_blocks(module, backend):
    for number, block in enumerate(module.blocks):
        module.blocks[number] = torch.compile(block, backend=backend)
    return module


def compile_blocks_in_place(module, backend):
    for block in module.blocks:
        block.compile(backend=backend)
    return module


def compile_whole(module, backend):
    return torch.compile(module, backend=backend)


def compile_whole_in_place(module, backend):
    module.compile(backend=backend)
    return module


def compile_forward(module, backend):
    module.forward = torch.compile(module.forward, backend=backend)
    return module


WAYS = [compile_blocks, compile_blocks_in_place, compile_whole, compile_whole_in_place, compile_forward]


def train(model, optimizer):
    """Three steps, with a forward pass without gradients after each."""
    losses = []
    for step in range(3):
        torch.manual_seed(2 * step + rank())
        loss = model(torch.randn(4, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        with torch.no_grad():
            losses.append(model(torch.randn(4, 8)))
    return losses


def count(model, way, shard, first):
    """Compile and shard a copy of a model, in either order, and train it; returns losses and Dynamo's counts."""
    backend = CountingBackend()
    module = copy.deepcopy(model)
    if first == "compile":
        compiled = way(module, backend)
        optimizer, end = shard(module)
    else:
        optimizer, end = shard(module)
        compiled = way(module, backend)
    losses = train(compiled, optimizer)
    end()
    return losses, backend.counts()


def with_fsdp2(module):
    mesh = init_device_mesh("cpu", (world_size(),))
    for block in module.blocks:
        fully_shard(getattr(block, "_orig_mod", block), mesh=mesh)
    fully_shard(module, mesh=mesh)
    return torch.optim.Adam(module.parameters(), lr=0.01), lambda: None


def with_zero(stage):
    def shard(module):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        return optimizer, Engine(module, [optimizer], stage=stage, units=is_block).close

    return shard


def is_block(name, module):
    return isinstance(getattr(module, "_orig_mod", module), Block)


def compare(kind, way):
    torch.manual_seed(0)
    model = kind()
    reference = copy.deepcopy(model)
    expected = train(DistributedDataParallel(reference), torch.optim.Adam(reference.parameters(), lr=0.01))
    for first, stages in (("compile", [1, 2, 3]), ("shard", [3])):
        _, allowed = count(model, way, with_fsdp2, first)
        assert allowed["graphs"] > 0, "nothing was compiled"
        for stage in stages:
            losses, found = count(model, way, with_zero(stage), first)
            torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-7)
            where = f"stage {stage}, first {first}: {found}, with FSDP2 {allowed}"
            assert found["operators"] >= allowed["operators"], where
            for what in ("graphs", "unique graphs", "breaks"):
                assert found[what] <= allowed[what], where


@pytest.mark.exhaustive
@pytest.mark.behaviour("The module", "`torch.compile` on blocks, in place or not, and on the whole module")
@pytest.mark.parametrize(
    "way",
    exhaustive_but([compile_blocks], WAYS),
    ids=lambda way: way.__name__,
)
def test_a_compiled_module_has_ddps_losses_and_no_more_graphs_than_with_fsdp2(run_on, way):
    run_on(2, compare, kind=Interleaved, way=way)


@pytest.mark.exhaustive
def test_a_compiled_loop_over_blocks_has_no_more_graphs_than_with_fsdp2(run_on):
    run_on(2, compare, kind=Net, way=compile_whole)


class Shared(nn.Module):
    """Calls a compiled module, and some of its layers directly."""

    def __init__(self):
        super().__init__()
        self.net = Interleaved()

    def forward(self, x):
        net = self.net
        return net(x) + net.head(net.middle(net.first(x))).square().mean()


def call_past_the_forward():
    torch.manual_seed(0)
    model = Shared()
    reference = copy.deepcopy(model)
    expected = train(DistributedDataParallel(reference), torch.optim.Adam(reference.parameters(), lr=0.01))
    for stage in (1, 3):
        torch._dynamo.reset()
        module = copy.deepcopy(model)
        module.net.compile(backend="aot_eager")
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        engine = Engine(module, [optimizer], stage=stage, units=is_block)
        torch.testing.assert_close(train(module, optimizer), expected, rtol=1e-6, atol=1e-6)
        engine.close()


def test_layers_of_a_compiled_module_may_be_called_directly(run_on):
    run_on(2, call_past_the_forward)


def read_gradients_in_compiled_code():
    torch.manual_seed(0)
    module, batch = Net(), torch.randn(4, 8)
    reference = copy.deepcopy(module)
    engine = Engine(module, stage=3, units=is_block)

    def squares(parameters):
        return sum(p.grad.square().sum() for p in parameters)  # of several shapes, each of which is gathered

    compiled = torch.compile(squares, backend="eager")
    for _ in range(3):
        for model in (module, reference):
            model(batch).backward()
        expected = squares(reference.parameters())
        torch.testing.assert_close(compiled(list(module.parameters())), expected, rtol=1e-6, atol=0)
    engine.close()


def test_a_compiled_function_reads_gradients_of_several_shapes(run_on):
    run_on(2, read_gradients_in_compiled_code)


def compile_with_inductor():
    torch._inductor.config.compile_threads = 1
    torch.manual_seed(0)
    model = Interleaved()
    reference = copy.deepcopy(model)
    expected = train(DistributedDataParallel(reference), torch.optim.Adam(reference.parameters(), lr=0.01))
    model.blocks[0].compile(backend="inductor")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = Engine(model, [optimizer], stage=3)
    torch.testing.assert_close(train(model, optimizer), expected, rtol=1e-5, atol=1e-6)
    engine.close()


@pytest.mark.exhaustive
def test_a_block_compiled_by_inductor_trains_as_under_ddp(run_on):
    run_on(2, compile_with_inductor, timeout=170)
