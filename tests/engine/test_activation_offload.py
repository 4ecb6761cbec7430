"""Offloaded activations: the same numbers while inputs of checkpointed modules are offloaded until backward."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import namedtuple
from functools import partial, partialmethod

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_zero.engine import Engine
from lightning_zero.engine.runtime.activations import LEAST, Kept, _Form
from lightning_zero.zoo.gpt import GPT
from tests.support import rank, world_size
from tests.support.training import CLOSE, same_tensors

WIDTH, ROWS = 64, 256
assert WIDTH * ROWS * 4 == LEAST, "a hidden state is just large enough to be moved"

OFFLOAD = {"optimizer": None, "activations": "cpu"}


# -- the GPT of the zoo, compared with DDP ----------------------------------------------------------------------------

MICRO_BATCHES = 2


def gpt():
    torch.manual_seed(0)
    return GPT(width=WIDTH, depth=3, heads=4, context=WIDTH)


def loss_of(model, seed):
    tokens = torch.randint(256, (4, WIDTH + 1), generator=torch.Generator().manual_seed(10 * seed + rank()))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train_gpt(model, optimizer, no_sync, steps=3):
    losses = {}
    for seed in range(steps * MICRO_BATCHES):
        last = seed % MICRO_BATCHES == MICRO_BATCHES - 1
        with contextlib.nullcontext() if last else no_sync():
            loss = loss_of(model, seed) / MICRO_BATCHES
            loss.backward()
        losses[f"loss {seed}"] = loss.detach()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train_sharded(stage, moved=0, **options):
    module = gpt()
    optimizer = torch.optim.Adam(module.parameters())
    engine = Engine(module, [optimizer], stage=stage, activation_checkpointing="units", **options)
    no_sync = engine.no_sync if stage == 1 else contextlib.nullcontext
    with counting() as counted:
        found = train_gpt(module, optimizer, no_sync) | engine.full_state_dict()
    assert counted["out"] == moved, "each block's input once a forward"
    assert counted["in"] == moved * 2 // 3, "the last block's is still there"
    engine.close()
    return found


def beside_ddp():
    module = gpt()
    model = DistributedDataParallel(module) if world_size() > 1 else module
    no_sync = model.no_sync if world_size() > 1 else contextlib.nullcontext
    expected = train_gpt(model, torch.optim.Adam(module.parameters()), no_sync) | module.state_dict()
    for stage in (1, 3):
        found = train_sharded(stage, offload=OFFLOAD, moved=3 * 3 * MICRO_BATCHES)
        same_tensors(found, train_sharded(stage), bound=0)
        # stage 3 sums over ranks first, then over micro-batches
        same_tensors(found, expected, bound=CLOSE if stage == 3 and world_size() > 1 else 0)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_with_offloaded_activations_equals_ddp(run_on, world_size):
    run_on(world_size, beside_ddp)


# -- what modules do with their inputs --------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "rest"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    """A chain of blocks; subclasses differ in `run` and in their blocks."""

    block = Block

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, data):
        return self.last(self.run(self.first(data))).square().mean()


class Keywords(Net):
    """Inputs in lists, tuples and dictionaries, positional and keyword, next to small tensors and other objects."""

    class block(Block):
        def forward(self, numbers, pair, *, options):
            x = pair.x + options["more"][0] * numbers[0]
            return {"out": [x + self.inner(pair.rest[1]), options["name"]]}

    def run(self, x):
        half = x.new_tensor([0.5])
        for block in self.blocks:
            options = {"more": (x * 2, None), "name": "x"}
            x = block([half], Pair(x, ["y", torch.tanh(x)]), options=options)["out"][0]
        return x


class Views(Net):
    """Views of one memory: with gaps between elements, transposed, unaligned and overlapping each other."""

    class block(Block):
        def forward(self, left, right, turned, shifted):
            wide = torch.cat([left, right], -1)[:, WIDTH // 2 : -WIDTH // 2]
            return left + self.inner(wide) @ turned[:, :WIDTH] / ROWS + shifted[: ROWS * WIDTH].view(ROWS, WIDTH)

    def run(self, x):
        for block in self.blocks:
            both = torch.cat([x, x.sin(), x[:1].repeat(ROWS, 1)], -1)
            left, right, _ = both.chunk(3, -1)
            x = block(left, right, both.t()[:WIDTH], both.flatten()[3:])
        return x


class Shared(Net):
    """One input that all blocks share, and one whose rows all view the same memory."""

    class block(Block):
        def forward(self, x, mask, many):
            return x + self.inner(x * mask) + many.mean(0)

    def run(self, x):
        mask, many = x.new_ones(ROWS, WIDTH).tril(), x.new_ones(WIDTH).expand(ROWS, WIDTH)
        for block in self.blocks:
            x = block(x, mask, many)
        return x


class Twice(Net):
    """The same tensor as two arguments; a block that is called twice in a forward."""

    class block(Block):
        def forward(self, x, again):
            return x + self.inner(again) + again

    def run(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, x)
        return x


class Data(Net):
    """The data, which require no gradient, are the input of the first block."""

    def forward(self, data):
        return self.last(self.run(data)).square().mean()


class Leaf(Net):
    """An input that is a leaf and requires a gradient, which the caller may read."""

    def forward(self, data):
        data = data.requires_grad_()
        return self.last(self.run(data)).square().mean()


class Outputs(Net):
    """Several outputs, of which one is the input itself and one has no gradient."""

    class block(Block):
        def forward(self, x):
            return x + self.inner(x), x, x.detach().sum()

    def run(self, x):
        for block in self.blocks:
            new, old, _ = block(x)
            x = new + old
        return x


class Nested(Net):
    """Modules within modules, all of them checkpointed."""

    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.inner:
                x = block(x)
            return x


class Doubly(Net):
    """Blocks that the user checkpoints as well: one reentrant, the others not."""

    def run(self, x):
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=number == 0)
        return x


class WrittenInside(Net):
    """A block that writes to its input, which nothing else reads."""

    class block(Block):
        def forward(self, x):
            x.mul_(0.5)
            return x + self.inner(x)


class WrittenAfter(Net):
    """An input that is written to after its block has run, which plain autograd refuses if backward needs it."""

    def run(self, x):
        for block in self.blocks:
            before = x * 1.0
            x = block(before)
            before.detach().zero_()
        return x


class Differentiating(Net):
    """A forward that differentiates, as force fields do."""

    class block(Block):
        def forward(self, x):
            with torch.enable_grad():
                y = self.inner[0](x).sin()
                (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return x + self.inner(x) + slope


# How many inputs are offloaded in one forward pass with gradients; the docstrings above explain the numbers.
NETS = {
    Net: 3,
    Keywords: 9,
    Views: 12,
    Shared: 4,  # including the mask once, before it is found to be shared
    Twice: 4,
    Data: 3,
    Leaf: 2,
    Outputs: 3,
    Nested: 3,
    Doubly: 0,
    Differentiating: 3,
}


@contextlib.contextmanager
def counting():
    """Count the tensors that are offloaded and loaded within the context."""
    moved = {"out": 0, "in": 0}
    with pytest.MonkeyPatch.context() as patch:
        for cls, method, kind in ((Kept, "__init__", "out"), (_Form, "empty", "in")):

            def count(*args, call, kind=kind):
                moved[kind] += 1
                return call(*args)

            patch.setattr(cls, method, partialmethod(count, call=getattr(cls, method)))
        yield moved


def outlived():
    """Moved tensors that are still alive."""
    return [each for each in gc.get_objects() if type(each) is Kept]


def batch(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def step_of(model, optimizer, step, device="cpu"):
    torch.manual_seed(100 + step)  # for dropout
    loss = model(batch(step).to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(model, steps=(0, 1, 2)):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return {f"loss {step}": step_of(model, optimizer, step) for step in steps}


def made(kind):
    torch.manual_seed(0)
    return kind()


def engine_for(model, stage=3, offload=OFFLOAD, **options):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    wanted = [type(model).block, Block] if isinstance(model, Nested) else type(model).block
    engine = Engine(model, [optimizer], stage=stage, activation_checkpointing=wanted, offload=offload, **options)
    return engine, optimizer


def same_training(kind, moved):
    for stage in (1, 3):
        reference = made(kind)
        model = copy.deepcopy(reference)
        expected = train(reference)
        engine, optimizer = engine_for(model, stage)
        with counting() as counted:
            found = {f"loss {step}": step_of(model, optimizer, step) for step in (0, 1, 2)}
        assert counted["out"] == 3 * moved, counted
        same_tensors(found | engine.full_state_dict(), expected | reference.state_dict(), bound=0)
        assert not outlived(), "something outlived its graph"
        engine.close()


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_every_kind_of_module_trains_the_same_with_offloaded_inputs(run_on, kind):
    run_on(1, same_training, kind=kind, moved=NETS[kind])


def written():
    for kind in (WrittenInside, WrittenAfter):
        for offload in (None, OFFLOAD):
            model = made(kind)
            engine, optimizer = engine_for(model, offload=offload)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step_of(model, optimizer, 0)
            engine.close()


def test_an_input_that_is_written_to_raises_autograds_error_as_without_offload(run_on):
    run_on(1, written)


def test_a_loaded_tensor_keeps_its_strides_and_alignment():
    memory = torch.randn(100_000)
    for tensor in (
        memory[:65_536].view(256, 256),
        memory[:65_536].view(256, 256).t(),
        memory[3:65_539].view(16, 64, 64).permute(1, 2, 0),
        memory[5:].as_strided((100, 50, 4), (600, 10, 2)),
        memory[:65_536].view(4, 16, 32, 32).to(memory_format=torch.channels_last),
        memory[:65_536].view(256, 256).bfloat16()[:, 1:200],
    ):
        form = _Form(tensor)
        host = form.kept_of(tensor).clone()
        assert len(host) == form.numel
        back = form.empty()
        form.kept_of(back).copy_(host)
        assert torch.equal(back, tensor)
        assert (back.stride(), back.dtype) == (tensor.stride(), tensor.dtype)
        assert back.data_ptr() % 64 == tensor.data_ptr() % 64


def shared_by_all():
    model = made(Shared)
    engine, optimizer = engine_for(model)
    loss = model(batch(0))
    with counting() as moved:
        loss.backward()
    assert moved["in"] == 3, "the hidden states of two blocks, and once the mask"
    engine.close()


def test_an_input_shared_by_all_modules_is_not_fetched_for_each(run_on):
    run_on(1, shared_by_all)


# -- memory and order -------------------------------------------------------------------------------------------------


class Deep(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))


def memory():
    model = made(Deep)
    engine, optimizer = engine_for(model, stage=1)
    inputs = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
    step_of(model, optimizer, 0)
    inputs.clear()
    loss = model(batch(1))
    found = [storage.expired() for storage in inputs]
    assert found == [True] * 11 + [False], "all but the last, which backward asks for first"
    loss.backward()
    assert all(storage.expired() for storage in inputs)
    engine.close()


def test_memory_of_offloaded_inputs_is_free_between_forward_and_backward(run_on):
    run_on(1, memory)


def order():
    with pytest.MonkeyPatch.context() as patch:
        fetch_in_order(patch)


def fetch_in_order(patch):
    model = made(Deep)
    engine, optimizer = engine_for(model)
    step_of(model, optimizer, 0)
    events, forms = [], []
    create, empty = _Form.__init__, _Form.empty

    def leaving(form, *args):
        forms.append(form)
        create(form, *args)

    def coming(form):
        events.append(f"fetch {forms.index(form)}")
        return empty(form)

    patch.setattr(_Form, "__init__", leaving)
    patch.setattr(_Form, "empty", coming)
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: events.append(f"compute {index}"))
    loss = model(batch(1))
    assert events == [f"compute {index}" for index in range(12)]
    events.clear()
    loss.backward()
    expected = [event for index in range(11, 0, -1) for event in (f"fetch {index - 1}", f"compute {index}")]
    assert events == [*expected, "compute 0"]
    engine.close()


def test_each_input_is_fetched_before_the_following_module_is_recomputed(run_on):
    run_on(1, order)


# -- ways to run a step -----------------------------------------------------------------------------------------------


def twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


def penalty(model, data):
    data = data.requires_grad_()
    loss = model(data)
    (gradient,) = torch.autograd.grad(loss, data, create_graph=True)
    return loss + gradient.square().sum()


def two_at_once(model, data):
    return model(data) + model(data * 2)


def first_then_second(model, data):
    first, second = model(data), model(data * 2)
    first.backward()
    return second


def second_then_first(model, data):
    first, second = model(data), model(data * 2)
    second.backward()
    return first


def with_evaluation_between(model, data):
    loss = model(data)
    with torch.no_grad():
        model(data)
    with torch.inference_mode():
        model(data)
    return loss


def without_its_backward(model, data):
    model(data)
    return model(data)


def own_hooks(model, data):
    with save_on_cpu():
        return model(data)


# The function that computes the loss, the one that runs backward, and how many tensors are offloaded in a step.
WAYS = {
    "backward twice": (lambda model, data: model(data), twice, 3),
    "a gradient penalty": (penalty, torch.Tensor.backward, 3),
    "two forwards, one backward": (two_at_once, torch.Tensor.backward, 6),
    "two forwards, the first's backward first": (first_then_second, torch.Tensor.backward, 6),
    "two forwards, the second's backward first": (second_then_first, torch.Tensor.backward, 6),
    "forwards without gradients": (with_evaluation_between, torch.Tensor.backward, 3),
    "a forward without a backward": (without_its_backward, torch.Tensor.backward, 6),
    "within save_on_cpu": (own_hooks, torch.Tensor.backward, 0),
}


def train_by(way, model, optimizer, window=contextlib.nullcontext):
    make, backward, _ = WAYS[way]
    losses = {}
    for step in (0, 1, 2):
        torch.manual_seed(100 + step)
        with window():
            loss = make(model, batch(step))
            backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[f"loss {step}"] = loss.detach()
    return losses


def same_by(way):
    reference = made(Net)
    copies = [copy.deepcopy(reference) for _ in range(2)]
    expected = train_by(way, reference, torch.optim.Adam(reference.parameters(), lr=0.01)) | reference.state_dict()
    for stage, model in zip((1, 3), copies):
        engine, optimizer = engine_for(model, stage)
        with counting() as moved:
            found = train_by(way, model, optimizer, engine.window) | engine.full_state_dict()
        assert moved["out"] == 3 * WAYS[way][2]
        same_tensors(found, expected, bound=0)
        assert not outlived(), "something outlived its graph"
        engine.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.exhaustive
def test_offloading_changes_no_numbers_however_a_step_runs(run_on, way):
    run_on(1, same_by, way=way)


def without_and_with(change, context, rows=ROWS):
    found = []
    for offload in (None, OFFLOAD):
        model = made(Net)
        change(model)
        engine, optimizer = engine_for(model, offload=offload, compute_dtype=context)
        losses = {}
        with counting() as moved:
            for step in (0, 1):
                torch.manual_seed(step)
                with torch.autocast("cpu", torch.bfloat16, enabled=context is not None):
                    loss = model(torch.randn(rows, WIDTH))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[f"loss {step}"] = loss.detach()
        assert moved["out"] == (6 if offload else 0)
        found.append(losses | engine.full_state_dict())
        engine.close()
    same_tensors(found[1], found[0], bound=0)


def transformed():
    block, x = made(Net).blocks[0].eval(), batch(0)

    def transforms_of(function):
        yield lambda: torch.func.vmap(function)(torch.stack([x, x]))
        yield lambda: torch.stack(torch.func.jvp(function, (x,), (x,)))

    expected = [transform() for transform in transforms_of(block)]
    checkpointed = partial(checkpoint, block, use_reentrant=False)
    model = made(Net).eval()
    engine, _ = engine_for(model)
    with counting() as moved:
        for transform, value, torchs in zip(transforms_of(model.blocks[0]), expected, transforms_of(checkpointed)):
            if torch.__version__ >= (2, 12):
                assert torch.equal(transform(), value)
            else:  # torch's own checkpoint has no rules for these transforms
                with pytest.raises(RuntimeError) as refused:
                    torchs()
                with pytest.raises(type(refused.value)):
                    transform()
    assert moved["out"] == 0
    engine.close()


def test_torch_func_transforms_are_right_and_offload_nothing(run_on):
    run_on(1, transformed)


def compile_blocks(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")


def leave(model):
    pass


def test_offloading_changes_no_numbers_under_autocast(run_on):
    run_on(1, without_and_with, change=leave, context=torch.bfloat16, rows=2 * ROWS)


def test_offloading_changes_no_numbers_with_compiled_blocks(run_on):
    run_on(1, without_and_with, change=compile_blocks, context=None)


def fail(in_backward, kind):
    def forward(x):
        if (torch._C._current_graph_task_id() != -1) is in_backward:
            raise kind("this forward fails")
        return Block.forward(block, x)

    for stage in (1, 3):
        reference = made(Net)
        model = copy.deepcopy(reference)
        engine, optimizer = engine_for(model, stage)
        block = model.blocks[1]
        block.forward = forward
        with pytest.raises(kind, match="this forward fails"), engine.window():
            model(batch(0)).backward()
        del block.forward
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        optimizer.zero_grad()
        found = {f"loss {step}": step_of(model, optimizer, step) for step in (1, 2)}
        expected = train(reference, steps=(1, 2))
        same_tensors(found | engine.full_state_dict(), expected | reference.state_dict(), bound=0)
        gc.collect()  # exceptions keep the frames of their traceback alive
        assert not outlived(), "something outlived its graph"
        engine.close()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.exhaustive
def test_after_an_exception_the_next_step_is_right(run_on, in_backward, kind):
    run_on(1, fail, in_backward=in_backward, kind=kind)


# -- the option -------------------------------------------------------------------------------------------------------


def test_offload_without_checkpointed_modules_is_refused_before_the_module_is_sharded():
    model = made(Net)
    with pytest.raises(ValueError, match="offload: activations='cpu' offloads the inputs of checkpointed modules"):
        Engine(model, offload=OFFLOAD)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
