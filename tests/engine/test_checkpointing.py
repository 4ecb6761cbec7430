"""``activation_checkpointing``: the same numbers, with the chosen modules' forward recomputed in backward."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_zero.engine import Engine
from tests.support import rank, world_size

WIDTH = 8


class Block(nn.Module):
    """With dropout, which must be the same in the recomputation, and with a keyword argument."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.5))
        self.forwards = 0
        self.fail_at = 0

    def forward(self, x, *, scale):
        self.forwards += 1
        if self.forwards == self.fail_at:
            raise ValueError("this forward fails")
        return {"x": x + scale * self.inner(x)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)["x"]
        return self.last(x).square().mean()


class Other(Block):
    pass


class InLists(Net):
    """The blocks are in lists without a forward."""

    def __init__(self):
        nn.Module.__init__(self)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(nn.ModuleList([Block(), Other()]) for _ in range(3))

    @property
    def blocks(self):
        return [block for layer in self.layers for block in layer]


class Doubly(Net):
    """All blocks but the first are checkpointed by the user as well."""

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = (checkpoint(block, x, scale=0.5, use_reentrant=False) if number else block(x, scale=0.5))["x"]
        return self.last(x).square().mean()


def train(model, module, optimizer, steps=3):
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * step + rank())
        loss = model(torch.randn(4, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(value.clone() for value in module.state_dict().values())]


CHOICES = {
    "units": ("units", 3),
    "a class": (Block, 3),
    "classes": ([Block, nn.Linear], 3),
    "modules within units": ([nn.Sequential], 0),
    "a predicate": (lambda name, module: name == "blocks.1", 1),
}


def compare(kind, choice, blocks=None):
    wanted, newly = CHOICES[choice]
    newly = newly if blocks is None else blocks
    torch.manual_seed(0)
    reference = kind()
    modules = {stage: copy.deepcopy(reference) for stage in (1, 2, 3)}
    wrapped = DistributedDataParallel(reference) if world_size() > 1 else reference
    expected = train(wrapped, reference, torch.optim.Adam(reference.parameters()))
    plain = [block.forwards for block in reference.blocks]
    for stage, module in modules.items():
        optimizer = torch.optim.Adam(module.parameters())
        engine = Engine(module, [optimizer], stage=stage, activation_checkpointing=wanted)
        found = train(module, module, optimizer)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.whole() if hasattr(ours, "whole") else ours, theirs, rtol=0, atol=0)
        again = sum(block.forwards > before for block, before in zip(module.blocks, plain))
        assert again == newly, [block.forwards for block in module.blocks]
        assert all(b.is_replicated or not b.is_ready for b in engine.buckets), "something was left gathered"
        engine.close()
        for block in module.blocks:
            block.forwards = 0
        train(module, module, torch.optim.Adam(module.parameters()), steps=1)
        if kind is Net:
            assert [block.forwards for block in module.blocks] == [1, 1, 1], "still checkpointed after the end"


@pytest.mark.behaviour("The module", "`activation_checkpointing=`: units, classes or a predicate, with dropout")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("choice", CHOICES)
def test_chosen_modules_are_recomputed_in_backward_and_training_equals_ddp(run_on, world_size, choice):
    run_on(world_size, compare, kind=Net, choice=choice)


@pytest.mark.behaviour("The module", "`activation_checkpointing=`: units, classes or a predicate, with dropout")
def test_units_in_lists_without_a_forward_are_recomputed(run_on):
    run_on(2, compare, kind=InLists, choice="units", blocks=6)


@pytest.mark.behaviour("The module", "`activation_checkpointing=`: units, classes or a predicate, with dropout")
def test_activation_checkpointing_composes_with_the_modules_own_checkpointing(run_on):
    run_on(2, compare, kind=Doubly, choice="units", blocks=1)


def fail_in_recomputation(stage):
    torch.manual_seed(0)
    module = Net()
    reference = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], stage=stage, activation_checkpointing="units")
    module.blocks[1].fail_at = 2  # the first call is the forward pass, the second the recomputation
    with pytest.raises(ValueError, match="this forward fails"):
        module(torch.ones(2, WIDTH)).backward()
    optimizer.zero_grad()
    found = train(module, module, optimizer, steps=2)
    expected = train(
        DistributedDataParallel(reference), reference, torch.optim.SGD(reference.parameters(), lr=0.1), steps=2
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.whole() if hasattr(ours, "whole") else ours, theirs, rtol=0, atol=0)
    engine.close()


@pytest.mark.behaviour("The module", "An error while activations are recomputed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_error_in_recomputation_reaches_the_user_and_the_next_step_is_right(run_on, stage):
    run_on(2, fail_in_recomputation, stage=stage)


def backward_twice(stage):
    torch.manual_seed(0)
    module = Net()
    reference = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], stage=stage, activation_checkpointing="units")
    for net, step in ((module, optimizer), (reference, torch.optim.SGD(reference.parameters(), lr=0.1))):
        torch.manual_seed(1)
        loss = net(torch.ones(2, WIDTH))
        loss.backward(retain_graph=True)
        loss.backward()
        step.step()
    for ours, theirs in zip(engine.full_state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_backward_passes_recompute_activations_twice(run_on, stage):
    run_on(1, backward_twice, stage=stage)


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        ("unit", TypeError, "activation_checkpointing='unit' must be 'units', a module class"),
        (nn.LSTM, ValueError, "activation_checkpointing: no submodule .* matches LSTM. The model contains: Block, "),
        ("units", ValueError, r"only unit is the root.*activation_checkpointing=\[Block\]"),
    ],
)
def test_a_wrong_choice_is_refused_before_the_module_is_sharded(wanted, error, message):
    module = nn.Linear(2, 2) if wanted == "units" else Net()
    with pytest.raises(error, match=message):
        Engine(module, activation_checkpointing=wanted)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


def call_submodules(own, stage):
    """The root module's forward is never called, and a second block runs after a backward."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Block(), Other()])
    expected = copy.deepcopy(model)
    engine = Engine(model, stage=stage, activation_checkpointing=None if own else Block)
    for each in (expected, model):
        torch.manual_seed(1)  # the same on both ranks
        first, middle, last = each
        call = partial(checkpoint, use_reentrant=False) if own and each is model else nn.Module.__call__
        outputs = [call(middle, first(torch.randn(4, WIDTH)), scale=0.5)["x"] for _ in range(2)]
        for x in outputs:
            call(last, x, scale=0.5)["x"].square().mean().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.whole(), theirs.grad)
    engine.close()


@pytest.mark.parametrize("own", [False, True], ids=["option", "the module's own"])
def test_modules_called_without_the_root_are_recomputed(run_on, own):
    run_on(2, call_submodules, own=own, stage=3)


class Plain(nn.Module):
    """Blocks that `torch.compile` captures as one graph."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def compiled():
    x = torch.ones(2, 4)
    for around in (True, False):
        torch.manual_seed(0)
        module = Plain()
        expected = copy.deepcopy(module)
        expected(x).backward()
        for inner in [module] if around else module.blocks:
            inner.compile(backend="aot_eager")
        engine = Engine(module, stage=3, activation_checkpointing="units")
        if around:
            with pytest.raises(RuntimeError, match="Sequential cannot be checkpointed inside compiled code. Compile"):
                module(x)
        else:
            module(x).backward()
            for ours, theirs in zip(module.parameters(), expected.parameters()):
                torch.testing.assert_close(ours.grad.whole(), theirs.grad)
        engine.close()


def test_compiled_modules_are_checkpointed_and_modules_inside_compiled_code_refused(run_on):
    run_on(1, compiled)
