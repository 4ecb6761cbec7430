"""Copies, pickles, averages and weak references of a sharded module, during training and after it."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

import lightning_zero
from lightning_zero.engine import Engine, ShardedTensor
from lightning_zero.engine.tensor.sharded_tree import whole
from tests.support import rank

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
WORLDS = pytest.mark.parametrize("world_size", [1, 2])


def example() -> torch.Tensor:
    """A module's input, on the default device."""
    return torch.arange(14.0).view(2, 7) / 7


def make(stage, module=None, **options):
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    reference = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, reference, optimizer, Engine(module, [optimizer], stage=stage, **options)


def train(module, optimizer):
    module(example()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(ours, theirs):
    value = ours.whole() if hasattr(ours, "whole") else ours
    torch.testing.assert_close(value.detach(), theirs.detach(), rtol=0, atol=0)


def hooks_of(module):
    return [value for inner in module.modules() for name, value in vars(inner).items() if "_hooks" in name and value]


def copied_modules(stage):
    module, reference, optimizer, engine = make(stage)
    module(example())
    copied, unpickled = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    train(module, optimizer)
    gathers = engine.report().calls.get("all_gather", 0)
    for other in (copied, unpickled):
        assert not hooks_of(other)
        same(other(example()), reference(example()))
        other(example()).sum().backward()
    assert all(type(p) is nn.Parameter and p.grad is not None for p in unpickled.parameters())
    assert engine.report().calls.get("all_gather", 0) == gathers, "a copy gathered the original's units"
    assert all(p.grad is None for p in module.parameters())
    engine.close()


@pytest.mark.behaviour("The module", "`copy.deepcopy` and `pickle` of a module in mid-run")
@STAGES
@WORLDS
def test_copies_and_pickles_of_a_module_have_its_values_and_nothing_of_the_engine(run_on, world_size, stage):
    run_on(world_size, copied_modules, stage=stage)


def copied_optimizers(stage):
    """A copy has the state of that moment, by its own parameters, and does not change when training continues."""
    module, reference, _, engine = make(stage)
    engine.close()
    optimizer, other = torch.optim.Adam(module.parameters()), torch.optim.Adam(reference.parameters())
    engine = Engine(module, [optimizer], stage=stage)
    train(module, optimizer)
    train(reference, other)
    copies = [copy.deepcopy((module, optimizer)), pickle.loads(pickle.dumps((module, optimizer)))]
    train(module, optimizer)
    for of_module, of_optimizer in copies:
        states = of_optimizer.state_dict()["state"]
        for ours, theirs, saved in zip(of_module.parameters(), reference.parameters(), states.values(), strict=True):
            assert of_optimizer.state[ours].keys() == saved.keys() == other.state[theirs].keys()
            for key, value in other.state[theirs].items():
                same(of_optimizer.state[ours][key], value)
                same(saved[key], value)
    engine.close()


@STAGES
@WORLDS
def test_copies_and_pickles_of_an_optimizer_have_its_state_by_their_own_parameters(run_on, world_size, stage):
    run_on(world_size, copied_optimizers, stage=stage)


def convert_copies(stage):
    module, reference, optimizer, engine = make(stage)
    whole = copy.deepcopy(reference)
    converted = copy.deepcopy(module).double()
    halved = copy.deepcopy(module[0]).requires_grad_(False).to(torch.bfloat16)
    train(module, optimizer)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    same(module(example()), reference(example()))
    same(converted(example().double()), copy.deepcopy(whole).double()(example().double()))
    converted(example().double()).sum().backward()
    assert all(p.grad.dtype == torch.float64 for p in converted.parameters())
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    trained = copy.deepcopy(module).requires_grad_(True)
    trained(example()).sum().backward()
    gradients = [p.grad.double() for p in trained.parameters()]
    for parameter, gradient in zip(trained.double().parameters(), gradients):
        same(parameter.grad, gradient)
    average, given = module[0].weight.detach().clone(), module[0].weight.detach().half()
    average.data = given
    assert average.dtype == given.dtype == torch.float16
    engine.close()
    assert not any(p.requires_grad for p in halved.parameters())
    for kept, original, dtype in ((converted, whole, torch.float64), (halved, whole[0], torch.bfloat16)):
        for ours, theirs in zip(kept.parameters(), original.parameters()):
            assert type(ours) is nn.Parameter
            same(ours, theirs.to(dtype))


def count_calls(module, *_):
    module.calls = getattr(module, "calls", 0) + 1


class Copying(nn.Linear):
    """Copies its attributes one by one, as projects' own ``__deepcopy__`` do."""

    def __deepcopy__(self, memo):
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        vars(other).update((name, copy.deepcopy(value, memo)) for name, value in vars(self).items())
        return other


class CopiedInForward(nn.Linear):
    def forward(self, x):
        self.weight.gain = 2
        self.found = copy.deepcopy(self), pickle.dumps(self)
        return super().forward(x)


def copies_in_forward(stage):
    module, reference, optimizer, engine = make(stage, nn.Sequential(CopiedInForward(7, 5), nn.Linear(5, 3)))
    expected = nn.functional.linear(example(), reference[0].weight, reference[0].bias)
    module(example()).sum().backward()
    copied, pickled = module[0].found
    assert b"lightning_zero" not in pickled and len(pickled) < 9000, "the engine or its buffer was pickled"
    unpickled = pickle.loads(pickled)
    assert unpickled.weight.gain == 2
    optimizer.step()
    for other in (copied, unpickled):
        assert type(other.weight) is nn.Parameter
        other.weight.data = other.weight.data.clone()
        same(nn.functional.linear(example(), other.weight, other.bias), expected)
    engine.close()


@STAGES
@WORLDS
def test_copies_made_in_a_layers_own_forward_are_ordinary(run_on, world_size, stage):
    run_on(world_size, copies_in_forward, stage=stage)


class CopyingInEvaluation(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)

    def forward(self, x):
        if not self.training:
            self.found = copy.deepcopy(self.layer), pickle.dumps(self.layer)
        return self.layer(x)


def copies_in_evaluation(stage):
    module, reference, _, engine = make(stage, CopyingInEvaluation())
    inputs = torch.ones(1, 3, 8)
    with torch.no_grad():
        ours, theirs = module.eval()(inputs), reference.eval()(inputs)
        same(ours, theirs)
        copied, pickled = module.found
        assert b"lightning_zero" not in pickled
        for other in (copied, pickle.loads(pickled)):
            assert not any(
                value for inner in other.modules() for name, value in vars(inner).items() if "_hooks" in name
            )
            same(other(inputs), theirs)
    engine.close()


@STAGES
@WORLDS
def test_copies_made_in_an_evaluation_are_ordinary(run_on, world_size, stage):
    run_on(world_size, copies_in_evaluation, stage=stage)


def copies_with_own_hooks(stage):
    module, reference, _, engine = make(stage, nn.Sequential(Copying(7, 5), nn.Tanh(), nn.Linear(5, 3)))
    module[2].handle = module[2].register_forward_hook(count_calls)
    pickled = pickle.dumps(module)
    assert b"lightning_zero" not in pickled and b"lightning_zero" not in pickle.dumps(copy.deepcopy(module)[0])
    for other in (copy.deepcopy(module), pickle.loads(pickled)):
        for _ in range(2):
            same(other(example()), reference(example()))
        other[2].handle.remove()
        other(example())
        assert other[2].calls == 2 and not other[2]._forward_hooks
        other[2].register_forward_hook(count_calls)
        other(example())
        assert other[2].calls == 3
    module(example())
    assert module[2].calls == 1
    engine.close()


@STAGES
@WORLDS
def test_copies_keep_the_users_hooks_and_their_handles(run_on, world_size, stage):
    run_on(world_size, copies_with_own_hooks, stage=stage)


@pytest.mark.behaviour("The module", "`copy.deepcopy` and `pickle` of a module in mid-run")
@STAGES
@WORLDS
def test_a_copy_of_a_module_may_be_converted_to_another_dtype(run_on, world_size, stage):
    run_on(world_size, convert_copies, stage=stage)


def compile_with_torchscript(stage):
    module, reference, _, engine = make(stage)
    expected = reference(example())
    copied = copy.deepcopy(module)
    with lightning_zero.full_parameters(module):
        traced = torch.jit.trace(module, example())
        for each in (module, module[0]):
            with pytest.raises(AttributeError, match=r"torch\.jit\.script after the run"):
                torch.jit.script(each)
    for each in (copied, copy.deepcopy(module)):
        same(torch.jit.script(each)(example()), expected)
    same(traced(example()), expected)
    engine.close()
    same(torch.jit.script(module)(example()), expected)
    same(traced(example()), expected)


@STAGES
@WORLDS
def test_torchscript_can_trace_a_sharded_module_and_script_it_afterwards(run_on, world_size, stage):
    run_on(world_size, compile_with_torchscript, stage=stage)


def export(stage):
    module, reference, optimizer, engine = make(stage)
    expected = reference(example())
    exported = torch.export.export(module, (example(),)).module()
    with lightning_zero.full_parameters(module):
        whole = torch.export.export(module, (example(),))
    same(exported(example()), expected)
    assert all(type(value) is nn.Parameter for value in whole.state_dict.values())
    for model, optimizes in ((module, optimizer), (reference, torch.optim.SGD(reference.parameters(), lr=0.1))):
        train(model, optimizes)
    same(module(example()), reference(example()))
    same(whole.module()(example()), expected)
    engine.close()


@STAGES
@WORLDS
def test_a_sharded_module_can_be_exported_in_mid_run(run_on, world_size, stage):
    """``torch.export`` runs the module with fake parameters in place of its own."""
    run_on(world_size, export, stage=stage)


def train_a_copy_in_full(stage):
    """The copy's gradients are its own and this rank's, as outside of `full_parameters`."""
    module, reference, _, engine = make(stage)
    copied, alias = copy.deepcopy(module), nn.Linear(7, 5)
    alias.weight = nn.Parameter(module[0].weight.detach())
    other = copy.deepcopy(reference)
    for _ in range(2):
        with lightning_zero.full_parameters(copied):
            loss = copied(example() * (1 + rank())).square().sum()
        loss.backward()
        other(example() * (1 + rank())).square().sum().backward()
    with lightning_zero.full_parameters(alias):
        alias(example()).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    for ours, theirs in zip(copied.parameters(), other.parameters()):
        assert type(ours.grad) is torch.Tensor
        torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(alias.weight.grad, example().sum(0).expand(5, 7))
    engine.close()


@STAGES
@WORLDS
def test_a_backward_of_a_copy_in_full_parameters_leaves_the_original_alone(run_on, world_size, stage):
    run_on(world_size, train_a_copy_in_full, stage=stage)


def accumulate_in_a_copy(stage):
    module, reference, _, engine = make(stage)
    module.zero_grad()
    module(example()).sum().backward()
    copied = copy.deepcopy(module)
    copied[0].weight.grad = module[0].weight.grad.clone()
    before = lightning_zero.full_grad(module[0].weight).clone()
    copied(example()).sum().backward()
    same(lightning_zero.full_grad(module[0].weight), before)
    same(lightning_zero.full_grad(copied[0].weight), 2 * before)
    engine.close()


@STAGES
@WORLDS
def test_a_gradient_is_accumulated_in_the_copy_that_it_belongs_to(run_on, world_size, stage):
    run_on(world_size, accumulate_in_a_copy, stage=stage)


def write_each_ranks_own(stage, dtype):
    """Local steps (Reptile), Fisher information, perturbed copies: what ranks write to copies may differ."""
    module, reference, optimizer, engine = make(stage, nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(dtype))
    inputs = (example() * (1 + rank())).to(dtype)
    results, kept_copies = [], []
    for model in (module, reference):
        copied = copy.deepcopy(model)
        kept_copies.append(copied)
        local = torch.optim.SGD(copied.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            local.zero_grad()
            copied(inputs).square().mean().backward()
            local.step()
        again = copy.deepcopy(copied)
        fisher = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for values, gradient in zip(
            fisher.values(), torch.autograd.grad(model(inputs).sum(), list(model.parameters()))
        ):
            values += gradient**2
            values.mul_(0.5)
        weight = model[0].weight
        kept = weight.detach().clone()
        alias = kept.detach()
        kept[rank()] = 1
        kept.add_(weight)
        noise = copy.deepcopy(weight)
        noise.data = torch.full((5, 7), float(rank()), dtype=dtype)
        other = copy.deepcopy(weight)
        other.data = noise.detach().clone()
        with torch.no_grad():
            noise.lerp_(weight, 0.25)
            nn.init.normal_(drawn := weight.clone(), generator=torch.Generator().manual_seed(rank()))
            average = copy.deepcopy(copied)
            average.load_state_dict(model.state_dict())
            for mean, own in zip(average.parameters(), copied.parameters()):
                mean.lerp_(own, 0.5)
            far = torch._foreach_sub(list(model.parameters()), list(copied.parameters()))
            means = copy.deepcopy(list(model.parameters()))
            torch._foreach_lerp_(means, list(copied.parameters()), 0.5)
        output = copied(inputs)
        found = [
            *copied.parameters(),
            *again.parameters(),
            *fisher.values(),
            *far,
            *means,
            kept,
            alias,
            noise,
            other,
            drawn,
            output,
        ]
        results.append(
            [whole(each).detach() for each in (*found, *average.parameters(), kept.norm(), kept * 2, alias - weight)]
        )
    torch.testing.assert_close(*results)
    for ours, theirs in zip(module.parameters(), reference.parameters()):
        same(ours, theirs)
    engine.close()
    for ours, theirs in zip(*(each.parameters() for each in kept_copies)):
        assert type(ours) is nn.Parameter
        torch.testing.assert_close(ours, theirs)


@STAGES
@WORLDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_may_write_its_own_values_to_copies(run_on, world_size, stage, dtype):
    run_on(world_size, write_each_ranks_own, stage=stage, dtype=dtype)


def kept_after_the_end(stage):
    module, reference, optimizer, engine = make(stage)
    start = copy.deepcopy(reference)
    weight = module[0].weight
    with torch.no_grad():
        kept = {
            "copy of the module": copy.deepcopy(module),
            "average": {name: p.detach().clone() for name, p in module.named_parameters()},
            "alias": weight.detach(),
            "data": weight.data,
            "row": weight[1],
            "half": weight.half(),
            "state": module.state_dict(),
        }
        if rank() == 0:
            kept["an alias that rank 0 alone has"] = module[2].weight.detach()
        for value in kept["average"].values():
            value.mul_(0.5)
    train(module, optimizer)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    engine.close()

    if rank() == 0:  # without the other ranks: all tensors are ordinary
        assert all(type(p) is nn.Parameter for p in [*module.parameters(), *kept["copy of the module"].parameters()])
        for name, value in start.named_parameters():
            assert type(kept["average"][name]) is torch.Tensor
            same(kept["average"][name], value * 0.5)
            same(dict(kept["copy of the module"].named_parameters())[name], value)
        same(kept["half"], start[0].weight.half())
        for name in ("alias", "data"):
            assert type(kept[name]) is torch.Tensor
            same(kept[name], reference[0].weight)
            kept[name].zero_()
            assert not weight.detach().any(), "what shared the parameter's memory shares it in the end, too"
            with torch.no_grad():
                weight.copy_(reference[0].weight)
        same(kept["an alias that rank 0 alone has"], reference[2].weight)
        same(kept["row"], reference[0].weight[1])
        same(kept["state"]["0.weight"], reference[0].weight)


@pytest.mark.behaviour(
    "The module", "Copies, averages and aliases of parameters that user code keeps are ordinary tensors after the run"
)
@STAGES
@WORLDS
def test_copies_and_averages_of_parameters_are_ordinary_after_the_engine_is_closed(run_on, world_size, stage):
    run_on(world_size, kept_after_the_end, stage=stage)


def kept_in_bf16(stage):
    module, reference, _, engine = make(stage, nn.Linear(7, 5).bfloat16())
    copied = copy.deepcopy(module)
    with torch.no_grad():
        average = module.weight.detach().clone().mul_(0.5)
    engine.close()
    for ours, theirs in zip((*copied.parameters(), average), (*reference.parameters(), reference.weight * 0.5)):
        assert ours.dtype == torch.bfloat16
        same(ours, theirs)


@STAGES
@WORLDS
def test_copies_of_parameters_with_wider_masters_keep_their_dtype_after_the_engine_is_closed(run_on, world_size, stage):
    run_on(world_size, kept_in_bf16, stage=stage)


def weakly_referred(stage):
    """References to parameters as torch_ema's averages and ``nn.LSTM`` hold them."""
    recurrent = nn.LSTM(7, 5)
    references = [weakref.ref(p) for p in recurrent.parameters()]
    module, reference, optimizer, engine = make(stage, recurrent)
    for _ in range(2):
        assert all(reference() is p for reference, p in zip(references, module.parameters()))
        same(module(example())[0], reference(example())[0])
        if engine is not None:
            engine.close()
            engine = None
    assert all(reference() is p for reference, p in zip(references, module.parameters()))


@pytest.mark.behaviour("The module", "Weak references to parameters")
@STAGES
@WORLDS
def test_weak_references_to_parameters_stay_valid(run_on, world_size, stage):
    run_on(world_size, weakly_referred, stage=stage)


def replaced(stage):
    module, reference, optimizer, engine = make(stage)
    whole = reference.state_dict()
    with engine.window():
        same(module(example()), reference(example()))
    module.load_state_dict(whole, assign=True)
    with pytest.raises(RuntimeError, match=r"'0\.weight' was replaced.*without assign=True"):
        optimizer.step()
    module[0].weight = nn.Parameter(torch.zeros(5, 7))
    with engine.window():
        module(example()).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"'0\.weight' was replaced.*configure_model"):
        optimizer.step()


def replaced_in_a_plain_loop(stage):
    """Only a replacement that stays in place is refused, and only where it would be trained."""
    module, reference, optimizer, engine = make(stage)
    others = {name: nn.Parameter(value + 1) for name, value in reference.state_dict().items()}
    same(functional_call(module, others, example()), functional_call(reference, others, example()))
    some = {"0.weight": others["0.weight"]}
    same(functional_call(module, some, example()), functional_call(reference, some, example()))
    for part in (module, module[0]):
        with lightning_zero.full_parameters(part):
            same(module(example()), reference(example()))
    original = module[0].weight
    module[0].weight = others["0.weight"]
    with torch.no_grad():
        same(module(example()), functional_call(reference, some, example()))
    module(example()).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"'0\.weight' was replaced.*configure_model"):
        optimizer.step()
    module[0].weight = original
    optimizer.zero_grad()
    train(module, optimizer)
    module.load_state_dict(reference.state_dict(), assign=True)
    module(example()).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"'0\.weight' was replaced.*without assign=True"):
        optimizer.step()


@STAGES
def test_replacing_a_parameter_in_a_plain_loop_raises_an_error_in_the_next_step(run_on, stage):
    run_on(2, replaced_in_a_plain_loop, stage=stage)


@pytest.mark.behaviour(
    "The module",
    "A parameter replaced in mid-run: `load_state_dict(assign=True)`, `m.weight = nn.Parameter(...)`",
    notes=dict.fromkeys((1, 2, 3), "refused; the error says what to write"),
)
@STAGES
def test_replacing_a_parameter_while_it_is_sharded_raises_an_error(run_on, stage):
    run_on(2, replaced, stage=stage)


def fitted_twice(stage):
    module, reference, optimizer, engine = make(stage)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(3):
            train(module, optimizer)
            train(reference, other)
        engine.close()
        engine = Engine(module, [optimizer], stage=stage)
    with lightning_zero.full_parameters(module):
        for ours, theirs in zip(module.parameters(), reference.parameters()):
            same(ours, theirs)
    engine.close()


@STAGES
@WORLDS
def test_a_module_may_be_sharded_repeatedly(run_on, world_size, stage):
    run_on(world_size, fitted_twice, stage=stage)


def copies_of_different_origins():
    """Rank 0 has made more copies of a parameter than the others: copies are not confused between ranks."""
    module, _, _, engine = make(3)
    weight = module[0].weight
    if rank() == 0:
        early = [weight.detach().clone() for _ in range(2)]
    with torch.no_grad():
        first = copy.deepcopy(weight)
        weight.add_(1)
        second = copy.deepcopy(weight)
    expected = [plain(each) for each in (first, second)]
    if rank() == 0:
        del early
    engine.close()
    for kept, value in zip((first, second), expected):
        if isinstance(kept, ShardedTensor):
            with pytest.raises(RuntimeError, match="a copy made on only some ranks stays sharded"):
                kept.sum()
        else:
            same(kept, value)


def plain(tensor):
    return tensor.whole().detach().clone()


def test_copies_are_never_mixed_up_when_ranks_have_made_different_numbers_of_them(run_on):
    run_on(2, copies_of_different_origins)
