"""Programs on which the engine once gave numbers other than averaged gradients, made as short as possible."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lightning_zero
from lightning_zero.engine import Engine
from tests.search.execution import execute
from tests.search.programs import Backward, Check, Fail, Gradient, NewEngine, Program, Setup, Step, Uneven, ZeroGrad
from tests.support.workers import rank

A, B = ((("a",), ("a",)),), ((("b",), ("b",)),)
"""One forward pass, with layer ``a`` or ``b`` of the only block, on both ranks."""

LAYER_A, LAYER_B = (1, 2), (3, 4)
"""Indices of the layers' weights and biases."""

SETUP = Setup(
    ranks=2,
    stage=2,
    blocks=1,
    units="merged",
    overlap=True,
    offload=None,
    bucket_numel=2**25,
    optimizers=("sgd", "sgd"),
    owner_of=(None, 0, 0, 1, 1),
)


def of_each(parameters: tuple[int, ...], action: str) -> tuple[Gradient, ...]:
    return tuple(Gradient(parameter, action) for parameter in parameters)


FOUND = {
    "two optimizers zero, backward and step in turn": (
        *(ZeroGrad(0), Backward(A), Step(0), ZeroGrad(1), Backward(B), Step(1), Check()) * 3,
    ),
    "a gradient is dropped while a neighbour's stays, and comes again": (
        Backward(A),
        *of_each(LAYER_A, "drop"),
        Backward(B),
        Backward(A),
    ),
    "a gradient is replaced by a copy before a backward without it": (
        Backward(A),
        *of_each(LAYER_A, "clone"),
        Backward(B),
        Backward(A),
    ),
    "a gradient that somebody keeps is dropped and put back": (
        Backward(A),
        *of_each(LAYER_A, "keep"),
        *of_each(LAYER_A, "drop"),
        Backward(A),
        *of_each(LAYER_A, "put back"),
        Backward(B),
        Backward(A),
    ),
    "a kept gradient goes on as p.grad does": (Backward(A), *of_each(LAYER_A, "keep"), Backward(B), Backward(A)),
    "a gradient of the user's own is added to where it was used outside of its module": (
        Backward(A),
        Gradient(1, "twice"),
        Backward(A, direct=1),
    ),
    "a backward without synchronisation after one with it": (Backward(A), Backward(A, sync=False), Backward(A)),
    "what was accumulated without synchronisation is replaced": (
        Backward(A, sync=False),
        Gradient(1, "twice"),
        Backward(A),
    ),
    "an ordinary tensor in the place of a gradient": (
        Gradient(1, "plain"),
        Backward(A),
        Gradient(3, "plain"),
        Backward(A, sync=False),
        Backward(B),
    ),
    "what was accumulated without synchronisation is averaged by a backward without it": (
        Backward(B, direct=0, sync=False),
        Backward(A, scaled=True),
    ),
}


def test_ranks_that_use_different_layers_of_a_block_do_not_wait_for_each_other(run_on):
    """Without overlap, where a reduction is awaited before backward gathers the next unit."""
    setup = replace(SETUP, stage=3, units="single", overlap=False, blocks=2, bucket_numel=12, owner_of=(0,) * 9)
    once = ((("a", "ab"), ("a", "a")),)
    twice = ((("a", "ab"), ("ab", "a")),) * 2
    for uses in (once, twice):
        found = run_on(2, execute, program=Program(setup, (Backward(uses), Step(0), Backward(uses), Check())))
        assert found == [None, None], "\n".join(filter(None, found))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_from_another_parameter_updates_a_parameter_held_by_one_rank(run_on, stage):
    """Every rank takes part in gathering that gradient, also ranks that hold no part of the updated parameter."""
    setup = replace(SETUP, stage=stage, blocks=3, optimizers=("sgd",), owner_of=(*[None] * 3, 0, *[None] * 13))
    program = Program(setup, (Backward(((("a",) * 3,) * 2,)), Gradient(3, "other"), Step(0), Check()))
    found = run_on(2, execute, program=program)
    assert found == [None, None], "\n".join(filter(None, found))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backward_adds_to_a_gradient_that_came_from_another_parameter(run_on, stage):
    """Autograd adds to the tensor in ``p.grad``, which refers to another parameter."""
    nothing = ((("",) * 4,) * 2,)
    program = Program(
        replace(SETUP, stage=stage, blocks=4, optimizers=("sgd",), owner_of=(*[0] * 8, *[None] * 8, 0)),
        (Backward(nothing, scaled=True), Gradient(4, "other"), Backward(nothing, direct=4), Step(0), Check()),
    )
    found = run_on(2, execute, program=program)
    assert found == [None, None], "\n".join(filter(None, found))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_layer_may_be_used_again_together_with_its_neighbour_on_one_rank(run_on, stage):
    """Its neighbour's gradient arrives after that of the layer, which was used alone before, has been taken."""
    program = Program(replace(SETUP, ranks=1, stage=stage), (Backward(((("b",),),)), Backward(((("ab",),),)), Check()))
    assert run_on(1, execute, program=program) == [None]


def test_ranks_may_use_different_layers_of_a_unit_although_a_validation_comes_before_backward(run_on):
    """A rank whose backward needs no weights does not gather them again; so they must stay gathered."""
    setup = replace(SETUP, stage=3, owner_of=(0,) * 5)
    program = Program(setup, (Backward(((("a",), ("ab",)),), evaluated=0), Step(0), Check()))
    assert run_on(2, execute, program=program) == [None, None]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_several_engines_end_a_backward_in_the_same_order_on_every_rank(run_on, stage):
    """The first gradient comes from block 0 on one rank and from block 1 on the other."""
    setup = replace(SETUP, stage=stage, blocks=2, several=True, owner_of=(0,) * 9)
    uses = ((("b", "b"), ("b", "b")), (("ab", "b"), ("b", "ab")))
    found = run_on(2, execute, program=Program(setup, (Backward(uses), Step(0), Check())))
    assert found == [None, None], "\n".join(filter(None, found))


def fail_at_the_end_of_one_engine(stage):
    def fail(parameter):
        raise KeyError("of a hook")

    torch.manual_seed(0)
    modules = [torch.nn.Linear(3, 3) for _ in range(2)]
    engines = [Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage=stage) for module in modules]
    inputs = torch.ones(2, 3)
    loss = sum(module(inputs).sum() for module in modules)
    handle = modules[0].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError) as kept:
        loss.backward(retain_graph=True)
    handle.remove()
    for module in modules:
        module.zero_grad()
    loss.backward()
    assert kept.value.__traceback__ is not None
    for module, engine in zip(modules, engines):
        gradient = lightning_zero.full_grad(module.weight)
        torch.testing.assert_close(gradient, torch.full((3, 3), 2.0))
        engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_error_that_is_kept_from_the_end_of_one_engines_backward_does_not_end_anothers_next_one(run_on, stage):
    run_on(2, fail_at_the_end_of_one_engine, stage=stage)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_layer_that_a_rank_uses_for_the_first_time_makes_no_rank_wait_for_ever(run_on, overlap):
    """In the second backward a gradient comes after its bucket's reduction, since the first one had none there."""
    setup = replace(
        SETUP, stage=3, blocks=3, units="single", overlap=overlap, owner_of=(0,) * 13, bucket_numel=40, prefetch=1
    )
    first, second = (("", "b", "a"),) * 2, (("a", "a", "a"), ("a", "ab", "a"))
    backwards = [Backward((uses,), window=True) for uses in (first, second) * 2]
    found = run_on(2, execute, program=Program(setup, (*backwards, Check())))
    assert found == [None, None], "\n".join(filter(None, found))


class Block(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))


class TwoHeads(torch.nn.Module):
    """The heads belong to the root unit; each of their layers has a bucket of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(6))
        layers = {name: [torch.nn.Linear(16, 16) for _ in range(3)] for name in "ab"}
        self.heads = torch.nn.ModuleDict({name: torch.nn.Sequential(*each) for name, each in layers.items()})

    def forward(self, step, rank, head):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
        for block in self.blocks:
            x = x + block(x)
        return (self.heads[head](x) if head else x).square().mean()


HEADS = [("a", "a"), ("a", "b"), ("b", "a"), ("b", "b"), ("a", "b"), ("a", "a"), ("b", "a")]


def train_with_a_head_by_rank(overlap, reduction_buffers):
    torch.manual_seed(0)
    module, reference = TwoHeads().double(), TwoHeads().double()
    reference.load_state_dict(module.state_dict())
    optimizer, expected = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (module, reference))
    options = {"overlap": overlap, "reduction_buffers": reduction_buffers, "bucket_numel": 300, "unit_numel": 1000}
    engine = Engine(module, [optimizer], stage=3, **options)
    for step, heads in enumerate(HEADS):
        module(step, rank(), heads[rank()]).backward()
        sum(reference(step, r, head) / 2 for r, head in enumerate(heads)).backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-9, atol=1e-9)
    engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(("overlap", "reduction_buffers"), [(True, 1), (True, 2), (False, 2)])
def test_ranks_that_use_different_heads_do_not_wait_for_each_other(run_on, overlap, reduction_buffers):
    """A rank that has all gradients of a head's buckets waits until the other one starts their reductions."""
    run_on(2, train_with_a_head_by_rank, overlap=overlap, reduction_buffers=reduction_buffers)


def repeat_a_backward_that_failed(head):
    def fail(gradient):
        raise KeyError("of a hook")

    torch.manual_seed(0)
    module, reference = TwoHeads().double(), TwoHeads().double()
    reference.load_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], stage=3, bucket_numel=300, unit_numel=1000)
    for step in range(3):
        loss = module(step, rank(), head)
        handle = module.blocks[2][0].weight.register_hook(fail)
        with pytest.raises(KeyError):
            loss.backward(retain_graph=True)
        handle.remove()
        for each in (module, reference):
            each.zero_grad()
        loss.backward()
        sum(reference(step, r, head) / 2 for r in range(2)).backward()
        for parameter, expected in zip(module.parameters(), reference.parameters()):
            if expected.grad is not None:
                torch.testing.assert_close(lightning_zero.full_grad(parameter), expected.grad, rtol=1e-9, atol=1e-9)
    engine.close()


TWICE = Backward(uses=((("a", "a", "a"),) * 2, (("a", "a", "a"), ("b", "ab", "ab"))))
"""Two forward passes before one backward pass. In the second one, ranks use different layers of each block."""

LIKE_TWICE = replace(TWICE, uses=(TWICE.uses[0], (("b", "ab", ""), ("a", "a", ""))))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ops", [(TWICE,) * 3, (LIKE_TWICE, Backward(uses=LIKE_TWICE.uses[1:]))], ids=["all", "parts"])
@pytest.mark.parametrize("optimizers", [0, None], ids=["one bucket", "two buckets"])
def test_ranks_that_use_different_layers_in_two_forwards_do_not_wait_for_each_other(run_on, ops, overlap, optimizers):
    """A rank whose gradients all come from both forwards has none when the first unit's backward has ended."""
    owner_of = (0,) * 4 + (optimizers,) * 4 + (0,) * 5
    setup = replace(SETUP, stage=3, blocks=3, units="single", overlap=overlap, optimizers=("sgd",), owner_of=owner_of)
    assert run_on(2, execute, program=Program(setup, ops)) == [None, None]


@pytest.mark.parametrize("second", ["ab,,b,a", "a,a,b,a"])
@pytest.mark.parametrize("has_number", [True, False])
def test_ranks_that_use_a_tied_weight_in_different_forwards_do_not_wait_for_each_other(run_on, has_number, second):
    """Its gradient, in the root unit, is complete on one rank while the other one turns to a unit for a second time."""
    owner_of = (1,) * 3 + (0,) * 15
    setup = replace(
        SETUP, stage=3, blocks=4, units="single", overlap=False, is_tied=True, has_number=has_number, owner_of=owner_of
    )
    uses = ((("b", "a", "a", "a"), ("a",) * 4), (tuple(second.split(",")),) * 2)
    assert run_on(2, execute, program=Program(setup, (Backward(uses), Backward(uses), Check()))) == [None, None]


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(("ranks", "shard_within"), [(2, None), (4, 2)])
@pytest.mark.parametrize("counts", [(2, 0, 0, 2), (0, 1, 1, 0)])
def test_ranks_without_a_forward_after_a_backward_that_failed_stay_in_step(run_on, ranks, shard_within, counts):
    """Only ranks that run a forward open a window, where a failed backward is cleaned up."""
    owner_of = (0,) * 9
    setup = replace(SETUP, ranks=ranks, stage=3, blocks=2, shard_within=shard_within, owner_of=owner_of)
    ordinary = Backward(((("a", "a"),) * ranks,))
    failed = Fail(at="backward", parts=("a", "a"), block=0)
    program = Program(setup, (ordinary, failed, Uneven(counts[:ranks])))
    found = run_on(ranks, execute, program=program)
    assert found == [None] * ranks, "\n".join(filter(None, found))


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("head", ["a", None])
def test_a_backward_that_failed_can_be_repeated_over_the_same_graph(run_on, head):
    """Without a head, the first unit's backward begins before the first gradient."""
    run_on(2, repeat_a_backward_that_failed, head=head)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_second_engine_averages_gradients_of_parameters_used_outside_of_their_module(run_on, stage):
    program = Program(replace(SETUP, stage=stage), (NewEngine(stage, "merged", None), Backward(A, direct=0), Check()))
    found = run_on(2, execute, program=program)
    assert found == [None, None], "\n".join(filter(None, found))


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("units", ["merged", "single", "resident"])
@pytest.mark.parametrize("name", FOUND)
def test_gradients_equal_averaged_gradients_where(run_on, name, units, stage):
    program = Program(replace(SETUP, stage=stage, units=units), (*FOUND[name], Check()))
    found = run_on(2, execute, program=program)
    assert found == [None, None], "\n".join(filter(None, found))
