"""Ways in which modules use their parameters, at every stage on two ranks, bit-equal to DDP."""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
import time
import weakref
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.engine import Engine
from lightning_zero.engine.state.bucket import BucketState
from tests.support import rank, world_size
from tests.support.transports import cross_memory

WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two layers; variants override a method."""

    options = {}  # of the engine

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, step):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = self.run(block, x, number, step)
        return self.last(x).square().mean()

    def run(self, block, x, number, step):
        return block(x)


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.last.weight = nn.Parameter(self.first.weight[:3].detach().clone())


class Reused(Net):
    def run(self, block, x, number, step):
        return block(block(x))


class Branches(Net):
    """A unit that some steps skip, the same steps on all ranks."""

    def run(self, block, x, number, step):
        return x if number == 1 and step % 2 else block(x)


class BranchInside(Net):
    """A branch inside a block that is chosen by rank and step."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.forward = lambda x, own=block: self.inside(own, x)
        self.step = 0

    def inside(self, block, x):
        if (rank() + self.step) % 2:
            return x + block.down(F.gelu(block.up(x)))
        return block.norm(x)

    def forward(self, x, step):
        self.step = step
        return super().forward(x, step)


class Experts(Net):
    """Each rank's tokens go to a different expert; some experts get none on any rank."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH) for i in range(4)})])

    def run(self, block, x, number, step):
        return block[str((rank() + step) % 3)](x)


class LayersInLists(Net):
    """The layers of each block are in a list without a forward, as in vit-pytorch and x-transformers."""

    options = {"unit_numel": 0}  # otherwise a tiny model's units stay gathered for the step

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Sequential(Block()), Block()]) for _ in range(3))

    def run(self, block, x, number, step):
        one, two = block
        return two(x + one(x))


class ExpertsInContainers(Net):
    """A mixture of experts without a class of its own; each rank's tokens go to a different expert."""

    options = {"unit_numel": 0}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"gate": nn.Linear(WIDTH, 3), "experts": nn.ModuleList(Block() for _ in range(3))})
            for _ in range(2)
        )

    def run(self, block, x, number, step):
        chosen = (rank() + step + number) % 3
        return x + block["gate"](x).softmax(-1)[:, chosen, None] * block["experts"][chosen](x)


class ReadOutside(Net):
    """Parameters read outside the module that owns them, in a unit and in the root."""

    def run(self, block, x, number, step):
        return block(x) + F.linear(x, self.first.weight) + self.blocks[0].up.bias[:WIDTH]


class Penalty(Net):
    def forward(self, x, step):
        return super().forward(x, step) + 0.01 * sum((p**2).sum() for p in self.parameters())


class PenaltyByRank(Net):
    """A penalty whose weight differs by rank: its gradient differs too, and is averaged."""

    def forward(self, x, step):
        loss = super().forward(x, step)
        return loss + loss.detach() * sum(p.abs().sum() for p in self.parameters())


class OwnParameter(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(3))

    def run(self, block, x, number, step):
        return self.scale * block(x)


class EmptyApart(Net):
    """A parameter without elements, the only one of its dtype."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH, dtype=torch.float64))

    def run(self, block, x, number, step):
        return block(x) + self.nothing.sum().float()


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, 2), nn.GRU(WIDTH, WIDTH, bidirectional=True)])
        self.last = nn.Linear(2 * WIDTH, 3)

    def run(self, block, x, number, step):
        return block(x)[0]


class Normed(Net):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.first)
        nn.utils.parametrizations.spectral_norm(self.last)
        torch.nn.utils.weight_norm(self.blocks[1].up)


class Checkpointed(Net):
    reentrant = False

    def run(self, block, x, number, step):
        return checkpoint(block, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class FrozenCheckpointed(Checkpointed):
    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].norm.requires_grad_(False)


class Frozen(Net):
    """A frozen backbone with trained biases and one trained block."""

    def __init__(self):
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("bias" in name or name.startswith("blocks.1"))


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: dict


class StructuredBlock(Block):
    def forward(self, state):
        hidden = super().forward(state.hidden)
        return Output(hidden, {"kept": [hidden.detach(), state.extra.get("kept")], "name": "block"})


class Structured(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(StructuredBlock() for _ in range(3))

    def run(self, block, x, number, step):
        state = x if isinstance(x, Output) else Output(x, {})
        state = block(state)
        return state.hidden if number == 2 else state


class Auxiliary(Net):
    """A loss that leaves a block as an attribute, not in its output."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, out: setattr(module, "aux", module.up(out).mean()))

    def forward(self, x, step):
        return super().forward(x, step) + sum(block.aux for block in self.blocks)


class Buffers(Net):
    """Statistics that differ by rank until the next forward pass, and an integer buffer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def run(self, block, x, number, step):
        self.count += 1 + rank()
        return self.norm(block(x))


class InPlace(Net):
    def run(self, block, x, number, step):
        x = block(x)
        x.mul_(1.5).relu_()
        return x


class Sparse(Net):
    """An embedding whose gradient is sparse."""

    optimizer = staticmethod(lambda module: torch.optim.SGD(module.parameters(), lr=0.1))

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, sparse=True)

    def run(self, block, x, number, step):
        return block(x) + self.embedding(torch.arange(len(x)) + rank() + step)


class Returned(Net):
    """A block whose output includes its parameter."""

    def __init__(self):
        super().__init__()
        self.blocks[1].query = nn.Parameter(torch.randn(WIDTH))
        self.blocks[1].register_forward_hook(lambda module, args, out: (out, module.query.expand(5, -1), module.query))

    def run(self, block, x, number, step):
        if number != 1:
            return block(x)
        x, expanded, query = block(x)
        return x * expanded + query


@dataclasses.dataclass(frozen=True)
class Frame:
    hidden: torch.Tensor
    row: torch.Tensor


class Record(dict):
    pass


class ReturnedInObjects(Net):
    """Blocks that return rows of their parameters in dataclasses, dicts of a class of their own and sets."""

    def __init__(self):
        super().__init__()
        make = (Frame, lambda out, row: Record(hidden=out, row=row), lambda out, row: [out, {row}])
        for block, make_output in zip(self.blocks, make):
            block.register_buffer("last", torch.zeros(WIDTH), persistent=False)
            block.register_forward_hook(lambda block, _, out, make=make_output: self.keep(block, out, make))

    def keep(self, block, out, make):
        block.last = block.up.weight.detach()[0]
        return make(out, block.up.weight[0])

    def forward(self, x, step):
        x, rows = self.first(x), []
        for block in self.blocks:
            output = block(x)
            output = vars(output) if isinstance(output, Frame) else output
            x = output["hidden"] if isinstance(output, dict) else output[0]
            rows.append(output["row"] if isinstance(output, dict) else output[1].pop())
        assert all(tensor.untyped_storage().nbytes() for tensor in (*rows, *self.buffers())), "a row cannot be read"
        return self.last(x).square().mean() + torch.stack([*rows, *self.buffers()]).square().sum()


class SparseProduct(Net):
    """A sparse tensor is saved for backward."""

    def run(self, block, x, number, step):
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), block(x))


class Tuples(Net):
    """Blocks that take and return tuples, named tuples and dicts, some of whose tensors need no grad."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, out: {"out": out, "all": (out, Pair(out.detach(), None))})

    def run(self, block, x, number, step):
        output = block(x)
        return output["out"] + output["all"][0] + output["all"][1].first


class Pair(NamedTuple):
    first: torch.Tensor
    second: None


CASES = {
    "Blocks, biases, LayerNorm, GELU, custom losses": [Net, InPlace, LayersInLists],
    "Tied weights, within a block and across blocks": [Tied],
    "A block called twice in one forward": [Reused],
    "A branch unused in some steps, the same on all ranks or different by rank; experts chosen by rank": [
        Branches,
        BranchInside,
        Experts,
        ExpertsInContainers,
    ],
    "A parameter read outside its module": [ReadOutside],
    "A penalty over `self.parameters()` inside the loss": [Penalty, PenaltyByRank],
    "Parameters of a container, and unused ones": [OwnParameter, EmptyApart],
    "Modules that cache parameters: `nn.LSTM`, `nn.GRU`": [Recurrent],
    "`weight_norm`, `spectral_norm`, parametrizations and pruning, of both kinds": [Normed],
    "Activation checkpointing, reentrant and not, with frozen parameters too": [
        Checkpointed,
        CheckpointedReentrant,
        FrozenCheckpointed,
    ],
    "A frozen backbone; biases only; adapters next to frozen layers, merged at the end": [Frozen],
    "Outputs that are tensors, tuples, dicts or dataclasses, with and without grad": [
        Structured,
        Tuples,
        Returned,
        ReturnedInObjects,
    ],
    "A loss that leaves a block as an attribute": [Auxiliary],
    "Buffers follow rank 0's, as under DDP: BatchNorm, counters, buffers that are not saved": [Buffers],
    "Sparse gradients of an embedding, and sparse products": [Sparse, SparseProduct],
}
KINDS = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.__name__, marks=pytest.mark.behaviour("The module", words))
        for words, kinds in CASES.items()
        for kind in kinds
    ],
)
# Sums over parts, and gradients that reach a parameter through its module and directly, are added in another order.
OTHER_ORDER = {Penalty, PenaltyByRank, ReadOutside}


def inputs(step):
    generator = torch.Generator().manual_seed(100 * step + rank())
    return torch.randn(5, WIDTH, generator=generator)


def train(module, forward, optimizer, steps=6):
    losses = []
    for step in range(steps):
        loss = forward(inputs(step), step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


def adam(module):
    return torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=1e-2)


def compare_with_ddp(kind):
    torch.manual_seed(0)
    reference = kind()
    modules = {stage: kind() for stage in (1, 2, 3)}
    for module in modules.values():
        module.load_state_dict(reference.state_dict())
    wrapped = DistributedDataParallel(reference, find_unused_parameters=kind is not CheckpointedReentrant)
    make_optimizer = getattr(kind, "optimizer", adam)
    expected = train(reference, wrapped, make_optimizer(reference))
    bound = {"rtol": 2e-6, "atol": 1e-7} if kind in OTHER_ORDER else {"rtol": 0, "atol": 0}
    for stage, module in modules.items():
        optimizer = make_optimizer(module)
        engine = Engine(module, [optimizer], stage=stage, **kind.options)
        losses = train(module, module, optimizer)
        torch.testing.assert_close(losses, expected, **bound, msg=lambda m: f"stage {stage}: losses: {m}")
        weights = engine.full_state_dict()
        assert all(b.is_replicated or not b.is_ready for b in engine.buckets), "something was left gathered"
        engine.close()
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(weights[name], value, **bound, msg=lambda m: f"stage {stage}: {name}: {m}")
            torch.testing.assert_close(module.state_dict()[name], value, **bound, msg=lambda m: f"{stage} {name}: {m}")


@pytest.mark.exhaustive(but=1)
@KINDS
def test_losses_and_weights_equal_ddps_at_every_stage(run_on, kind):
    run_on(2, compare_with_ddp, kind=kind)


def count_calls(units):
    torch.manual_seed(0)
    module = LayersInLists()
    engine = Engine(module, [optimizer := adam(module)], stage=3, units=units, unit_numel=0)
    train(module, module, optimizer, steps=2)
    engine.reset_counters()
    train(module, module, optimizer, steps=8)
    calls = engine.report().calls
    engine.close()
    return calls


def test_layers_in_lists_are_gathered_like_units_that_are_named(run_on):
    calls, _ = run_on(2, count_calls, units="auto")
    assert calls == run_on(2, count_calls, units=(nn.Sequential, Block))[0]
    assert calls["reduce_scatter"] == 8 * 7 and calls["control"] < 100, "six units and the root unit; a few messages"


def compare_two_backwards():
    torch.manual_seed(0)
    reference = Net()
    modules = {stage: copy.deepcopy(reference) for stage in (1, 2, 3)}

    def step(module, forward, optimizer):
        for number in range(3):
            once = module.blocks[0](inputs(number)).sum()  # a block used alone, outside the module's forward
            twice = forward(inputs(number), number) + forward(inputs(number + 50), number)
            optimizer.zero_grad()
            twice.backward(retain_graph=True)
            twice.backward()
            once.backward()
            optimizer.step()

    # DDP's reducer does not support this, but its definition applies: the mean over ranks of local gradients.
    optimizer = adam(reference)

    def average():
        for parameter in reference.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= 2

    optimizer.register_step_pre_hook(lambda *_: average())
    step(reference, reference, optimizer)
    for stage, module in modules.items():
        optimizer = adam(module)
        engine = Engine(module, [optimizer], stage=stage)
        step(module, module, optimizer)
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6)
        engine.close()


@pytest.mark.behaviour(
    "The module", "Two forward passes before one backward pass; two backward passes with `retain_graph`"
)
def test_gradients_of_two_forward_passes_and_two_backward_passes_add_up(run_on):
    run_on(2, compare_two_backwards)


def flatten_as_on_a_gpu(module):
    """What cuDNN's flattening does to weights, which it moves into one block of memory."""
    with torch.no_grad():
        weights = list(module.parameters())
        flat = torch.cat([weight.detach().flatten() for weight in weights])
        for weight, part in zip(weights, flat.split([weight.numel() for weight in weights])):
            weight.set_(part.view(weight.shape))


class Flattened(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.out = nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.recurrent.flatten_parameters()
        return self.out(self.recurrent(x)[0])


def flatten_weights_in_forward(stage, compiled):
    def losses(shards):
        torch.manual_seed(0)
        module = nn.Sequential(Flattened(), Flattened())
        for block in module if compiled else ():
            block.compile(backend="eager", fullgraph=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        engine = Engine(module, [optimizer], stage=stage, units=[Flattened]) if shards else None
        found = []
        for _ in range(3):
            loss = module(torch.ones(2, 3, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        if engine is not None:
            engine.close()
        return found

    gc.collect()  # an engine of an earlier case holds the patch until it is collected
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(allow_rnn=True):
        if not compiled:
            patch.setattr(nn.RNNBase, "flatten_parameters", flatten_as_on_a_gpu)
        flatten = nn.RNNBase.flatten_parameters
        assert losses(shards=True) == losses(shards=False)
        assert nn.RNNBase.flatten_parameters is flatten


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_a_forward_flattens_for_cudnn_are_still_updated(run_on, stage, compiled):
    run_on(2, flatten_weights_in_forward, stage=stage, compiled=compiled)


def accumulate_sparse_gradients(stage):
    torch.manual_seed(0)
    module = Sparse()
    reference = copy.deepcopy(module)
    engine = Engine(module, [Sparse.optimizer(module)], stage=stage)
    for step in range(2):
        for number in range(3):
            with engine.no_sync() if number < 2 else nullcontext():
                module(inputs(number), number).backward()
            reference(inputs(number), number).backward()
        for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
            expected = theirs.grad.to_dense()
            torch.distributed.all_reduce(expected)
            torch.testing.assert_close(ours.grad.whole(), expected / world_size(), msg=lambda m: f"{step} {name}: {m}")
        module.zero_grad()
        reference.zero_grad()
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sparse_gradients_are_accumulated_under_no_sync(run_on, stage):
    run_on(2, accumulate_sparse_gradients, stage=stage)


def raise_in_forward():
    torch.manual_seed(0)

    class Failing(Net):
        def run(self, block, x, number, step):
            if step == 1 and number == 1:
                raise KeyError("user error")
            return block(x)

    for stage in (1, 2, 3):
        module = Failing()
        optimizer = adam(module)
        engine = Engine(module, [optimizer], stage=stage)
        before = {name: id(p) for name, p in module.named_parameters()}
        for step in range(3):
            if step == 1:
                with pytest.raises(KeyError, match="user error"):
                    module(inputs(step), step)
                continue
            optimizer.zero_grad()
            module(inputs(step), step).backward()
            optimizer.step()
        assert {name: id(p) for name, p in module.named_parameters()} == before
        engine.close()
        assert all(type(p) is nn.Parameter for p in module.parameters())


@pytest.mark.behaviour("The module", "An error in a forward or backward pass leaves the module able to train")
def test_an_error_in_the_users_forward_leaves_the_module_able_to_train(run_on):
    run_on(2, raise_in_forward)


class Wide(BranchInside):
    """Many blocks, whose norms are used by rank 0 only after the first step; the forward may fail halfway."""

    def __init__(self):
        super().__init__()
        self.blocks.extend(Block() for _ in range(9))
        for block in self.blocks:
            block.forward = lambda x, own=block: self.inside(own, x)
        self.fails = False

    def inside(self, block, x):
        inner = block.norm(x) if rank() == 0 or self.step == 0 else x
        return x + block.down(F.gelu(block.up(inner)))

    def run(self, block, x, number, step):
        if self.fails and number == 6:
            raise KeyError("user error")
        return block(x)


def other_forwards(module, way):
    """Return a function that runs another forward, whose graph is never differentiated, before the module's own."""
    kept = []

    def forward(x, step):
        module.fails = way == "failed"
        with pytest.raises(KeyError) if module.fails else nullcontext():
            result = module(x, step + 1)
            kept[:] = [result] if way == "kept" else []
        module.fails = False
        return module(x, step)

    return forward


def beside_other_graphs(way, in_window):
    """Without overlap, a rank waits for each reduction before it gathers the next unit."""
    torch.manual_seed(0)
    reference, module = Wide(), Wide()
    module.load_state_dict(reference.state_dict())
    wrapped = DistributedDataParallel(reference, find_unused_parameters=True)
    expected = train(reference, wrapped, adam(reference))
    optimizer = adam(module)
    engine = Engine(module, [optimizer], stage=3, units=Block, overlap=False)
    forward = other_forwards(module, way)

    def step(x, number):
        with engine.window() if in_window else nullcontext():
            return forward(x, number)

    losses = train(module, step, optimizer)
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=0, atol=0)
    engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("way", ["kept", "dropped", "failed"])
def test_a_graph_that_is_never_differentiated_does_not_affect_training(run_on, way, in_window):
    run_on(2, beside_other_graphs, way=way, in_window=in_window)


def delete_everything(stage):
    gc.collect()
    gc.disable()
    try:
        module = Net()
        optimizer = adam(module)
        engine = Engine(module, [optimizer], stage=stage)
        train(module, module, optimizer, steps=2)
        optimizer.zero_grad()
        assert all(optimizer.state[p] for p in module.parameters())
        watched = [weakref.ref(engine), weakref.ref(module), *(weakref.ref(b) for b in engine.buckets)]
        watched += [weakref.ref(p) for p in module.parameters()]
        del engine, module, optimizer
        assert [reference() for reference in watched if reference() is not None] == []
    finally:
        gc.enable()


@pytest.mark.behaviour(
    "The module", "Deleting the module and the trainer frees the memory without a garbage collection"
)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deleting_the_module_frees_its_memory_without_a_garbage_collection(run_on, world_size, stage):
    run_on(world_size, delete_everything, stage=stage)


def delete_while_another_rank_still_reads(stage):
    from lightning_zero.engine.comm.cross_memory import process_memory

    read, ignored = process_memory.read_memory, []
    hook, sys.unraisablehook = sys.unraisablehook, lambda what: ignored.append(what.exc_value)

    def read_slowly(*arguments):
        time.sleep(0.01)
        read(*arguments)

    if rank() == 1:
        process_memory.read_memory = read_slowly
    try:
        with cross_memory():
            for _ in range(3):
                delete_everything(stage)
    finally:
        process_memory.read_memory, sys.unraisablehook = read, hook
    assert ignored == []


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_module_may_be_deleted_while_another_rank_reads_its_memory(run_on, stage):
    run_on(2, delete_while_another_rank_still_reads, stage=stage)


# ----------------------------------------------------------------------------------- what ranks do differently


class LayerDrop(Net):
    """Each rank skips a different block in each step."""

    def run(self, block, x, number, step):
        return x if number == 1 + (rank() + step) % 2 else block(x)


def skip_units_by_rank(stage):
    torch.manual_seed(0)
    reference, module = LayerDrop(), LayerDrop()
    module.load_state_dict(reference.state_dict())
    expected = train(reference, DistributedDataParallel(reference, find_unused_parameters=True), adam(reference))
    optimizer = adam(module)
    engine = Engine(module, [optimizer], stage=stage, reduction_buffers=1)
    torch.testing.assert_close(train(module, module, optimizer), expected, rtol=0, atol=0)
    engine.close()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=0, msg=lambda m: f"{name}: {m}")


@pytest.mark.behaviour("The module", "Whole blocks skipped, different ones on each rank")
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_skip_different_units_train_as_under_ddp_at_stages_1_and_2(run_on, stage):
    run_on(2, skip_units_by_rank, stage=stage)


def fail_in_backward(stage):
    torch.manual_seed(0)
    reference, module = Net(), Net()
    module.load_state_dict(reference.state_dict())
    forward = DistributedDataParallel(reference) if torch.distributed.is_initialized() else reference
    expected = train(reference, forward, adam(reference), steps=3)
    optimizer = adam(module)
    engine = Engine(module, [optimizer], stage=stage)
    x = module.first(inputs(0))
    x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module.last(module.blocks[0](x)).sum().backward()
    torch.testing.assert_close(train(module, module, optimizer, steps=3), expected, rtol=0, atol=0)
    engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_training_after_an_error_in_a_backward_pass_equals_ddps(run_on, world_size, stage):
    run_on(world_size, fail_in_backward, stage=stage)


def fail_and_go_on(stage, between, kind):
    """A backward that the user's own code ends with an error, and the next one in the same step."""
    torch.manual_seed(0)
    module = kind()
    reference = copy.deepcopy(module)
    optimizer = adam(module)
    engine = Engine(module, [optimizer], stage=stage, units=[Block, nn.Linear])

    def fail(_):
        if fails:
            raise ZeroDivisionError

    def graph(model, x, block):
        hidden = model.first(x)
        if hidden.requires_grad:
            hidden.register_hook(fail)  # called after the gradients of all other layers have been computed
        return model.last(model.run(block, hidden, 0, 0))

    for model in (module, reference):
        with engine.window() if model is module and between == "forward in a window" else nullcontext():
            fails = True
            outputs = graph(model, inputs(0), model.blocks[0])
            with pytest.raises(ZeroDivisionError):
                outputs.sum().backward(retain_graph=between == "nothing")
            fails = False
            model.zero_grad()
            if between == "forward in a window":
                model(inputs(1), 1).backward()
            elif between == "forward of a block":
                graph(model, inputs(1), model.blocks[1]).square().sum().backward()
            else:
                outputs.square().sum().backward()
    for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
            continue
        if world_size() > 1:
            torch.distributed.all_reduce(theirs.grad)
        torch.testing.assert_close(ours.grad.whole(), theirs.grad / world_size(), rtol=1e-6, atol=1e-7)
    optimizer.step()
    engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", [Net, CheckpointedReentrant])
@pytest.mark.parametrize("between", ["forward in a window", "forward of a block", "nothing"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_pass_after_one_that_failed_in_the_same_step_has_its_own_gradients(
    run_on, world_size, kind, between, stage
):
    run_on(world_size, fail_and_go_on, stage=stage, between=between, kind=kind)


def penalise_gradients(stage, is_in_window, times):
    """A gradient penalty, as for a Wasserstein critic: the gradient with respect to inputs is part of the loss."""
    torch.manual_seed(0)
    reference, module = Net(), Net()
    module.load_state_dict(reference.state_dict())
    engine = Engine(module, [adam(module)], stage=stage, units=Block)
    for model in (reference, module):
        for step in range(3):
            x = inputs(step).requires_grad_()
            with engine.window() if is_in_window else nullcontext():
                (by_input,) = torch.autograd.grad(model(x, 0), x, create_graph=True)
                loss = ((by_input.norm(2, 1) - 1) ** 2).mean() + model(x, 0)
                for time in range(times):
                    loss.backward(retain_graph=time + 1 < times)
    for theirs, ours in zip(reference.parameters(), module.parameters()):
        if theirs.grad is not None:  # local gradients, to be averaged as the engine does
            torch.distributed.all_reduce(theirs.grad)
            torch.testing.assert_close(ours.grad.whole(), theirs.grad / 2, rtol=1e-6, atol=1e-7)
    if stage == 3 and not is_in_window:  # a window's resident units stay gathered
        assert all(bucket.state is BucketState.SHARDED for bucket in engine.buckets)
    engine.close()


@pytest.mark.behaviour(
    "The module",
    "A gradient penalty: `autograd.grad` with respect to inputs, with `create_graph=True`",
)
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("is_in_window", [True, False], ids=["in a window", "outside"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_double_backward_is_right(run_on, stage, is_in_window, times):
    run_on(2, penalise_gradients, stage=stage, is_in_window=is_in_window, times=times)


class Energy(Net):
    """Returns an energy and its gradient with respect to the inputs; the blocks pass on an object of a plain class."""

    class State:
        def __init__(self, x):
            self.x = x

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.forward = lambda state, own=block: self.State(Block.forward(own, state.x))

    def forward(self, x):
        with torch.enable_grad():
            state = self.State(x := x.clone().requires_grad_())
            for block in self.blocks:
                state = block(state)
            energy = self.last(state.x).square().sum()
            return energy.detach(), *torch.autograd.grad(energy, x)


def differentiate_without_grad(stage):
    reference, module = Energy(), Energy()
    module.load_state_dict(reference.state_dict())
    engine = Engine(module, [adam(module)], stage=stage, units=Block, overlap=False)
    for context in (torch.no_grad(), nullcontext(), torch.no_grad()):
        with context:
            torch.testing.assert_close(module(inputs(0)), reference(inputs(0)), rtol=0, atol=0)
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_may_be_computed_inside_a_forward_that_is_called_without_grad(run_on, stage):
    run_on(2, differentiate_without_grad, stage=stage, seed=1)


def interrupt_a_forward(stage, checkpointing, in_window):
    torch.manual_seed(0)
    module = Net()
    reference = copy.deepcopy(module)
    optimizer = adam(module)
    engine = Engine(module, [optimizer], stage=stage, activation_checkpointing=checkpointing)
    names = {id(p): name for name, p in module.named_parameters()}
    for error in (KeyboardInterrupt, SystemExit):
        handle = module.blocks[1].down.register_forward_pre_hook(raises(error))
        with pytest.raises(error), engine.window() if in_window else nullcontext():
            module(inputs(0), 0)
        if not in_window:  # the next forward makes up for the hooks that torch has not called
            with pytest.raises(error):
                module.blocks[1](inputs(0))
        handle.remove()
        if not in_window:
            module(inputs(0), 0)
        assert {id(p): name for name, p in module.named_parameters()} == names, "something else is in their place"
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None

    for _ in range(2):
        with engine.window() if in_window else nullcontext():
            loss = module(inputs(0), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    wrapped = DistributedDataParallel(reference)
    expected = train(reference, lambda *_: wrapped(inputs(0), 0), adam(reference), steps=2)
    torch.testing.assert_close(loss.detach(), expected[-1], rtol=0, atol=0)
    engine.close()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=0)


def raises(error):
    def hook(*_):
        raise error

    return hook


@pytest.mark.behaviour("The module", "Ctrl-C and `sys.exit` during a forward pass leave the module able to train")
@pytest.mark.parametrize("in_window", [True, False])
@pytest.mark.parametrize("checkpointing", [None, "units"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_interrupt_during_a_forward_pass_leaves_the_module_as_it_was(run_on, stage, checkpointing, in_window):
    run_on(2, interrupt_a_forward, stage=stage, checkpointing=checkpointing, in_window=in_window)


class WritesInForward(nn.Module):
    """Constraints, codebooks and averages that a module keeps in its own parameters."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Constrained(), Block())
        self.last = Constrained()

    def forward(self, x, step):
        return self.last(self.blocks(self.first(x))).square().mean()


class Constrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.codes = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(4, WIDTH), requires_grad=False)
        self.kept, self.row, self.column, self.first, self.count = [], False, 0.0, None, 0

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.clamp_(min=-0.1)
        self.linear.bias.data.clamp_(max=0.05)
        self.codes.data.lerp_(x.detach().mean(0).expand(4, WIDTH) * 0, 0.1)
        self.kept, self.row = [self.linear.weight], self.linear.weight[0].detach()
        if self.count:
            self.column = self.linear.weight[:, 0].detach()
        if self.count == 1:
            del self.first  # as many attributes as before, with another name
            self.second = self.linear.weight[1].detach()
        self.count += 1
        return x + self.linear(x) + self.codes.sum(0)

    def __len__(self):  # such a module is false
        return 0


def write_in_forward():
    torch.manual_seed(0)
    reference = WritesInForward()
    modules = {stage: copy.deepcopy(reference) for stage in (1, 2, 3)}
    wrapped = DistributedDataParallel(reference) if world_size() > 1 else reference
    expected = train(reference, wrapped, adam(reference))
    seen = [(part.kept[0] + 0).detach() for part in (reference.blocks[1], reference.last)]
    for stage, module in modules.items():
        optimizer = adam(module)
        engine = Engine(module, [optimizer], stage=stage)
        losses = train(module, module, optimizer)
        torch.testing.assert_close(losses, expected, rtol=0, atol=0)
        for part, theirs in zip((module.blocks[1], module.last), seen):
            assert part.kept[0].shape == theirs.shape, "what a forward has kept is not read"
            for view in (part.row, part.column, part.second):
                assert view.untyped_storage().nbytes() and view.isfinite().all(), "what a forward has kept is not read"
        weights = engine.full_state_dict()
        engine.close()
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=0, msg=lambda m: f"{stage}: {name}: {m}")


@pytest.mark.behaviour("The module", "A module that writes to its own parameters in its forward, also through `data`")
@pytest.mark.parametrize("size", [1, 2])
def test_writes_of_a_module_to_its_own_parameters_in_its_forward_are_kept(run_on, size):
    run_on(size, write_in_forward)


class ReadsWhatItKept(nn.Linear):
    """Multiplies by a row of its weight that it has kept in a forward under `inference_mode`."""

    def forward(self, x, step):
        if torch.is_inference_mode_enabled():
            self.row, self.doubled = self.weight[0], self.weight[0] * 2
        return (super().forward(x) * self.row).square().mean()


def keep_under_inference_mode():
    torch.manual_seed(0)
    reference = ReadsWhatItKept(WIDTH, WIDTH)
    wrapped = DistributedDataParallel(reference) if world_size() > 1 else reference
    modules = {stage: copy.deepcopy(reference) for stage in (1, 2, 3)}
    expected = evaluate_and_train(reference, wrapped, adam(reference))
    for stage, module in modules.items():
        optimizer = adam(module)
        engine = Engine(module, [optimizer], stage=stage)
        losses = evaluate_and_train(module, module, optimizer)
        torch.testing.assert_close(losses, expected, rtol=0, atol=0)
        assert module.doubled.is_inference() == reference.doubled.is_inference()
        engine.close()


def evaluate_and_train(module, wrapped, optimizer):
    with torch.inference_mode():
        wrapped(inputs(0), 0)
    return train(module, wrapped, optimizer, steps=1)  # afterwards, the row follows the weight under DDP only


@pytest.mark.parametrize("size", [1, 2])
def test_a_view_of_a_weight_kept_under_inference_mode_can_be_used_in_training(run_on, size):
    run_on(size, keep_under_inference_mode)


def drop_a_graph():
    module = Net()
    engine = Engine(module, [adam(module)], stage=3)
    gc.disable()
    try:
        with engine.window():
            loss = module.blocks[0](inputs(0)).exp().sum()
            node = weakref.ref(loss.grad_fn.next_functions[0][0].metadata.setdefault("kept", Marker()))
        del loss
        assert node() is None, "the graph is in a cycle"
    finally:
        gc.enable()
    engine.close()


class Marker:
    pass


def test_a_graph_that_is_dropped_without_a_backward_is_freed_at_once(run_on):
    run_on(2, drop_a_graph)


class Conjugate(nn.Module):
    """The gradient of its weight, and its buffer, are lazy conjugates: their bytes are of the conjugate values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, 128, dtype=torch.complex64))
        self.register_buffer("phases", torch.polar(torch.ones(4), torch.arange(4.0) + rank()).conj())

    def forward(self, x):
        return (self.weight.conj() @ x).real.sum() + (self.weight[:4, 0] * self.phases).real.sum()


def train_conjugates(stage):
    torch.manual_seed(0)
    module = Conjugate()
    reference, phases = copy.deepcopy(module), torch.polar(torch.ones(4), torch.arange(4.0)).conj()
    reference.phases = phases
    engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage=stage)
    torch.testing.assert_close(module.phases.resolve_conj(), phases.resolve_conj())
    xs = [torch.randn(128, 3, dtype=torch.complex64) for _ in range(world_size())]
    module(xs[rank()]).backward()
    (sum(map(reference, xs)) / len(xs)).backward()
    torch.testing.assert_close(lightning_zero.full_grad(module.weight), reference.weight.grad.resolve_conj())
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lazy_conjugates_are_sent_as_the_values_that_they_show(run_on, stage):
    run_on(2, train_conjugates, stage=stage)
