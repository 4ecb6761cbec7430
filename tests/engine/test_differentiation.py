"""Ways to differentiate other than one ``loss.backward()``: gradients by name, hooks, ``torch.func``."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import linear

import lightning_zero
from lightning_zero.engine import Engine
from tests.support import rank

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
CLOSE = {"rtol": 1e-6, "atol": 1e-7}
INPUTS = torch.arange(14.0).view(2, 7) / 7


class Penalised(nn.Module):
    """A loss that uses parameters both through their modules and directly."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh())
        self.head = nn.Linear(3, 2)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, inputs):
        return self.head(self.body(inputs)).square().sum() + 0.1 * self.body[0].weight.square().sum()


def make(stage, prepare=lambda module: None):
    """A sharded module, its engine, and the unsharded module; all ranks have the same data, so means are trivial."""
    torch.manual_seed(0)
    module = Penalised()
    reference = copy.deepcopy(module)
    prepared = [prepare(model) for model in (module, reference)]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, reference, Engine(module, [optimizer], stage=stage), prepared


def same(ours, theirs):
    assert type(ours) is type(theirs) or isinstance(ours, torch.Tensor)
    if theirs is None:
        assert ours is None
    else:
        value = ours.whole() if hasattr(ours, "whole") else ours
        torch.testing.assert_close(value.detach(), theirs.detach(), **CLOSE)


def same_gradients(module, reference):
    for (name, ours), theirs in zip(module.named_parameters(), reference.parameters()):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            same(ours.grad, theirs.grad)


def same_in_a_window(run, module, reference, engine):
    """The result of `run`, and the gradients afterwards, equal those of the unsharded module."""
    with engine.window():
        ours = run(module)
    same(ours, run(reference))
    same_gradients(module, reference)


def gradients_by_name(stage):
    module, reference, engine, _ = make(stage)

    def run(model):
        loss = model(INPUTS)
        trained = [p for name, p in model.named_parameters() if name != "unused"]
        first = torch.autograd.grad(loss, trained, retain_graph=True)
        second = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True, allow_unused=True)
        with pytest.raises(RuntimeError, match="allow_unused=True"):
            torch.autograd.grad(loss, [model.unused, model.head.weight], retain_graph=True)
        loss.backward()
        return [*first, *second]

    with engine.window():
        found = run(module)
    for ours, theirs in zip(found, run(reference), strict=True):
        assert theirs is None or type(ours) is torch.Tensor
        same(ours, theirs)
    same_gradients(module, reference)
    engine.close()


@pytest.mark.behaviour("The module", "`torch.autograd.grad(loss, parameters)`, with `retain_graph` and `allow_unused`")
@STAGES
@pytest.mark.parametrize("world_size", [1, 2])
def test_autograd_grad_gives_the_local_gradients_of_parameters_as_under_ddp(run_on, world_size, stage):
    run_on(world_size, gradients_by_name, stage=stage)


def second_derivatives(stage):
    module, reference, engine, _ = make(stage)

    def run(model):
        first = torch.autograd.grad(model(INPUTS), [model.head.weight, model.body[0].weight], create_graph=True)
        loss = sum(gradient.square().sum() for gradient in first)
        loss.backward()
        return loss

    same_in_a_window(run, module, reference, engine)
    engine.close()


@pytest.mark.behaviour("The module", "A penalty on parameter gradients, itself differentiated")
@STAGES
def test_a_penalty_on_parameter_gradients_can_be_differentiated(run_on, stage):
    run_on(2, second_derivatives, stage=stage)


def backward_to_some(stage):
    module, reference, engine, _ = make(stage)
    for model in (module, reference):
        for _ in range(2):
            model(INPUTS).backward(inputs=[model.head.weight, model.body[0].weight])
    same_gradients(module, reference)
    for model in (module, reference):
        model(INPUTS).backward()
    same_gradients(module, reference)
    engine.close()


@pytest.mark.behaviour("The module", "`loss.backward(inputs=[...])`")
@STAGES
def test_backward_with_inputs_gives_gradients_to_those_inputs_only(run_on, stage):
    run_on(2, backward_to_some, stage=stage)


def after_a_step_without_some(stage):
    module, reference, engine, _ = make(stage)
    found = []
    for model in (module, reference):
        model.body.requires_grad_(False)
        model(INPUTS).backward()
        model.body.requires_grad_(True)
        inputs = torch.ones(2, 3)
        found.append(torch.autograd.grad(model.head(inputs).sum(), list(model.parameters()), allow_unused=True))
        model.head(inputs).sum().backward(inputs=list(model.parameters()))
    for ours, theirs in zip(*found):
        same(ours, theirs)
    same_gradients(module, reference)
    engine.close()


@STAGES
def test_parameters_that_were_frozen_and_have_not_been_used_since_may_be_named(run_on, stage):
    run_on(2, after_a_step_without_some, stage=stage)


def halve(parameter):
    parameter.grad.mul_(0.5)


def hooks(stage, when):
    def register(model):
        seen = []
        handles = [
            model.head.weight.register_hook(lambda gradient: gradient * 2),
            model.body[2].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1)),
            model.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item())),
            model.unused.register_post_accumulate_grad_hook(lambda p: seen.append("unused")),
            model.body[0].weight.register_post_accumulate_grad_hook(halve),
        ]
        return seen, handles

    module, reference, engine, prepared = make(stage, register if when == "before" else lambda model: None)
    if when == "after":
        prepared = [register(model) for model in (module, reference)]
    for round in range(3):
        for model, (_, handles) in zip((module, reference), prepared):
            model.zero_grad()
            model(INPUTS).backward()
            if round == 1:
                for handle in handles:
                    handle.remove()
        same_gradients(module, reference)
    (ours, _), (theirs, _) = prepared
    assert len(theirs) == 2 and ours == pytest.approx(theirs)
    engine.close()
    for parameter in (module.head.bias, module.body[2].bias):
        parameter.register_post_accumulate_grad_hook(lambda p: ours.append("ordinary"))
    module(INPUTS).backward()
    assert ours[-2:] == ["ordinary", "ordinary"]


@pytest.mark.behaviour(
    "The module",
    "`p.register_hook` and `p.register_post_accumulate_grad_hook`, registered before or during a run, until removed",
)
@STAGES
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_parameters_fire_until_removed_whenever_they_were_registered(run_on, stage, when):
    run_on(2, hooks, stage=stage, when=when)


def drop_gradients_in_forward(stage):
    module, reference, engine, _ = make(stage)
    seen = {module: [], reference: []}

    def drop(head, _):
        model = module if head is module.head else reference
        seen[model].append(head.weight.grad is not None and head.weight._grad is not None)
        del head.weight.grad
        head.bias._grad = None

    for model in (module, reference):
        model.head.register_forward_pre_hook(drop)
        for _ in range(2):
            model(INPUTS).backward()
        seen[model].append(model.head.weight._grad is not None)
        del model.body[0].weight.grad, model.body[0].bias._grad
    assert seen[module] == seen[reference] == [False, True, True]
    same_gradients(module, reference)
    engine.close()


@STAGES
def test_gradients_can_be_deleted_in_forward_and_have_torchs_other_name(run_on, stage):
    run_on(2, drop_gradients_in_forward, stage=stage)


def hooks_registered_in_forward(stage):
    module, reference, engine, _ = make(stage)
    seen = {module: [], reference: []}
    for model in (module, reference):

        def register(layer, _, seen=seen[model]):
            once.remove()
            layer.weight.register_hook(lambda gradient: gradient * 2)
            layer.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))

        once = model.head.register_forward_pre_hook(register)
        for _ in range(2):
            model.zero_grad()
            model(INPUTS).backward()
    same_gradients(module, reference)
    assert len(seen[reference]) == 2 and seen[module] == pytest.approx(seen[reference])
    engine.close()


@STAGES
def test_hooks_that_a_layer_registers_on_its_parameters_in_forward_are_like_any_others(run_on, stage):
    run_on(2, hooks_registered_in_forward, stage=stage)


def hooks_that_keep_and_remove(stage):
    """A gradient that a hook keeps, or returns, stays as it is; a hook may remove itself before others run."""
    module, reference, engine, _ = make(stage)
    seen = []
    for model in (module, reference):
        kept, fixed = [], torch.ones(2)
        model.body[2].weight.register_hook(kept.append)
        model.head.bias.register_hook(lambda gradient, fixed=fixed: fixed)
        once = [model.body[2].weight.register_hook(lambda gradient: once[0].remove())]  # noqa: B023
        model.body[2].weight.register_hook(lambda gradient: gradient * 3)
        for _ in range(2):
            model(INPUTS).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert torch.equal(fixed, torch.ones(2))
        seen.append(kept)
    same_gradients(module, reference)
    for ours, theirs in zip(*seen, strict=True):
        same(ours, theirs)
    engine.close()


@STAGES
@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_may_keep_gradients_and_remove_themselves(run_on, world_size, stage):
    run_on(world_size, hooks_that_keep_and_remove, stage=stage)


def gradients_set_before(stage):
    """The user's gradients stay where no rank computes one, and are counted once where a second one comes late."""
    module, reference, engine, _ = make(stage)
    for penalty in (0.0, 0.1, 0.0, 0.1):  # the first one comes unexpectedly
        for model in (module, reference):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full(parameter.shape, 1.0 + number)
            late = model.head.weight.square().sum() if penalty else 0.0  # used first: its gradient comes last
            (model(INPUTS) + penalty * late).backward()
        same_gradients(module, reference)
    assert type(module.unused.grad) is torch.Tensor
    for parameter in module.parameters():
        parameter.grad = torch.ones(parameter.shape)
    with pytest.raises(RuntimeError, match="in the middle"), engine.window():
        last = Failing.apply(module.body[2].weight).square().sum()  # used first: fails when all else is computed
        late = module.head.weight.square().sum()
        (module(INPUTS) + late + last).backward()
    for model in (module, reference):
        model.zero_grad()
        model(INPUTS).backward()
    same_gradients(module, reference)  # nothing of the failed backward, nor what was set before it
    engine.close()


class Failing(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("in the middle")


@STAGES
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_set_before_backward_is_counted_once(run_on, world_size, stage):
    run_on(world_size, gradients_set_before, stage=stage)


def hooks_stay(stage):
    module, _, engine, _ = make(stage, lambda model: model.head.weight.register_hook(lambda gradient: gradient * 0))
    engine.close()
    module(INPUTS).backward()
    assert module.head.weight.grad.eq(0).all() and not module.head.bias.grad.eq(0).all()


@STAGES
def test_a_hook_on_a_parameter_is_kept_after_the_engine_is_closed(run_on, stage):
    run_on(2, hooks_stay, stage=stage)


def optimizer_in_backward(stage):
    torch.manual_seed(0)
    module = Penalised()
    reference = copy.deepcopy(module)

    def prepare(model):
        optimizers = {p: torch.optim.Adam([p], lr=0.05) for p in model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        return optimizers

    optimizers = prepare(module)
    engine = Engine(module, list(optimizers.values()), stage=stage)
    prepare(reference)
    for _ in range(3):
        for model in (module, reference):
            model(INPUTS).backward()
    for ours, theirs in zip(module.parameters(), reference.parameters()):
        assert ours.grad is None
        same(ours, theirs)
    engine.close()


@pytest.mark.behaviour("The module", "One optimizer per parameter, which steps in backward")
@STAGES
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_optimizer_per_parameter_may_step_during_backward(run_on, world_size, stage):
    run_on(world_size, optimizer_in_backward, stage=stage)


def transforms(stage):
    """A step of physics-informed, energy-based and per-sample methods."""
    module, reference, engine, _ = make(stage)

    def run(model):
        net = nn.Sequential(model.body, model.head)
        jacobian = jacrev(lambda x: net(x))(INPUTS[0])
        curvature = hessian(lambda x: net(x).sum())(INPUTS[0])
        _, pull = vjp(lambda x: model.body(x), INPUTS)
        slopes = vmap(grad(lambda x: model.body(x).sum()))(INPUTS)
        loss = jacobian.square().sum() + curvature.square().sum() + slopes.square().sum() + model(INPUTS)
        loss = loss + pull(torch.ones(2, 3))[0].square().sum()
        outputs, tangents = jvp(net, (INPUTS,), (torch.ones_like(INPUTS),))
        loss = loss + outputs.sum() + tangents.square().sum()
        loss = loss + vmap(net)(INPUTS).square().sum() + vmap(jacfwd(net))(INPUTS).sum()
        loss.backward()
        return loss

    for _ in range(2):
        same_in_a_window(run, module, reference, engine)
    engine.close()


@pytest.mark.behaviour(
    "The module",
    "`torch.func`: `jacrev`, `jacfwd`, `hessian`, `vjp`, `jvp`, `vmap` with respect to modules' inputs, in a loss",
)
@STAGES
@pytest.mark.parametrize("world_size", [1, 2])
def test_torch_func_differentiates_modules_with_respect_to_their_inputs(run_on, world_size, stage):
    run_on(world_size, transforms, stage=stage)


def outside_steps(stage):
    """The module itself is transformed, between its steps: its call is the outermost window."""
    module, reference, engine, _ = make(stage)
    for _ in range(2):
        same(jacrev(lambda x: module(x))(INPUTS), jacrev(lambda x: reference(x))(INPUTS))
        for model in (module, reference):
            model(INPUTS).backward()
    for ours, theirs in zip(module.parameters(), reference.parameters()):
        if theirs.grad is not None:
            same(lightning_zero.full_grad(ours), theirs.grad)
    engine.close()


@STAGES
@pytest.mark.parametrize("world_size", [1, 2])
def test_torch_func_differentiates_the_module_between_its_steps(run_on, world_size, stage):
    run_on(world_size, outside_steps, stage=stage)


def per_sample(stage):
    module, reference, engine, _ = make(stage)

    def run(model):
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters, sample):
            return functional_call(model, parameters, (sample[None],))

        return vmap(grad(loss), in_dims=(None, 0))(parameters, INPUTS)

    with engine.window():
        ours = run(module)
    theirs = run(reference)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        same(ours[name], theirs[name])
    engine.close()


@pytest.mark.behaviour("The module", "`torch.func`: per-sample gradients of the parameters")
@STAGES
@pytest.mark.parametrize("world_size", [1, 2])
def test_torch_func_gives_per_sample_gradients_of_the_parameters(run_on, world_size, stage):
    run_on(world_size, per_sample, stage=stage)


def along_parameters(stage):
    """The derivative along a direction of the parameters, by forward-mode AD, in the loss."""
    module, reference, engine, _ = make(stage)

    def run(model):
        parameters = {name: p for name, p in model.named_parameters() if name != "unused"}
        direction = {name: torch.ones_like(p) for name, p in parameters.items()}
        loss, slope = jvp(lambda parameters: functional_call(model, parameters, (INPUTS,)), (parameters,), (direction,))
        (loss + slope.square()).backward()
        return slope

    same_in_a_window(run, module, reference, engine)
    engine.close()


@pytest.mark.behaviour("The module", "`torch.func.jvp` with respect to parameters")
@STAGES
@pytest.mark.parametrize("merges_units", [False, True], ids=["units", "one unit"])
def test_forward_mode_differentiates_with_respect_to_parameters(run_on, stage, merges_units):
    run_on.func(2, along_parameters, stage=stage, merges_units=merges_units)


def functional(stage):
    """A step of gradient descent inside the loss, as in meta-learning."""
    module, reference, engine, _ = make(stage)

    def run(model):
        names, parameters = zip(*((n, p) for n, p in model.named_parameters() if n != "unused"))
        inner = model(INPUTS)
        gradients = torch.autograd.grad(inner, parameters, create_graph=True)
        adapted = {name: p - 0.01 * g for name, p, g in zip(names, parameters, gradients)}
        loss = functional_call(model, adapted, (INPUTS.flip(0),))
        loss.backward()
        return loss

    same_in_a_window(run, module, reference, engine)
    same(module(INPUTS), reference(INPUTS))
    engine.close()


@pytest.mark.behaviour("The module", "`torch.func.functional_call` with adapted parameters, as in meta-learning")
@STAGES
def test_a_functional_call_uses_the_given_parameters_and_propagates_their_gradients(run_on, stage):
    run_on(2, functional, stage=stage)


def inside_full_parameters(stage):
    module, reference, engine, _ = make(stage)
    with lightning_zero.full_parameters(module):
        loss = module(INPUTS)
        assert type(module.head.weight) is nn.Parameter
    loss.backward()
    reference(INPUTS).backward()
    same_gradients(module, reference)
    with lightning_zero.full_parameters(module, writeback=True), torch.no_grad():
        module.body[0].weight[1] = 3.0
        module(INPUTS)
        module.head.bias = nn.Parameter(torch.zeros_like(module.head.bias))  # a new object is written back, too
        module.body[0].bias = None  # nothing is written back
    with torch.no_grad():
        reference.body[0].weight[1] = 3.0
        reference.head.bias.zero_()
    same(module(INPUTS), reference(INPUTS))
    for ours, theirs in zip(module.parameters(), reference.parameters()):
        same(ours, theirs)
    engine.close()


@pytest.mark.behaviour("The module", "`full_parameters(module, writeback=True)`, with a forward inside")
@STAGES
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_within_full_parameters_uses_full_values_and_trains_the_parameters(run_on, world_size, stage):
    run_on(world_size, inside_full_parameters, stage=stage)


def under_autocast(stage):
    module, reference, engine, _ = make(stage)

    def run(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = linear(INPUTS, model.body[0].weight).square().sum() + model.head.weight.norm()
        loss.backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            other = model(INPUTS)
        other.backward()
        return loss + other

    same_in_a_window(run, module, reference, engine)
    engine.close()


@pytest.mark.behaviour("The module", "`torch.autocast` regions in user code")
@STAGES
def test_autocast_casts_parameters_wherever_they_are_used(run_on, stage):
    run_on(2, under_autocast, stage=stage)


def keep_a_graph_of_gradients(stage):
    module, reference, engine = make(stage)[:3]
    with pytest.warns(UserWarning, match=r"p\.grad .* without a graph.*torch\.autograd\.grad\(loss, parameters"):
        module(INPUTS).backward(create_graph=True)
    reference(INPUTS).backward()
    for ours, theirs in zip(module.parameters(), reference.parameters()):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(lightning_zero.full_grad(ours), theirs.grad, **CLOSE)


@STAGES
def test_a_backward_with_create_graph_warns_that_p_grad_has_no_graph(run_on, stage):
    run_on(2, keep_a_graph_of_gradients, stage=stage)


@torch.enable_grad()
def probe(inputs):
    nn.Linear(inputs.shape[-1], 1)(inputs.detach()).sum().backward()


def probe_on_one_rank(model):
    loss = model(INPUTS)
    if rank() == 0:
        probe(INPUTS)
    loss.backward()


def probe_in_a_thread(model):
    def in_a_thread(gradient):
        thread = threading.Thread(target=probe, args=(gradient,))
        thread.start()
        thread.join()

    handle = model.body[2].register_forward_hook(lambda layer, args, output: output.register_hook(in_a_thread) and None)
    model(INPUTS).backward()
    handle.remove()


def probe_in_a_hook(model):
    handle = model.body[0].weight.register_post_accumulate_grad_hook(lambda _: probe(INPUTS))
    model(INPUTS).backward()
    handle.remove()


def run_by_the_engine_of_autograd(model):
    loss = model(INPUTS)
    torch.autograd.Variable._execution_engine.run_backward((loss,), (torch.ones(()),), False, False, (), True, True)


def differentiate_something_else(case, stage):
    module, reference, engine, _ = make(stage)
    for _ in range(2):
        with engine.window():
            case(module)
        case(reference)
    same_gradients(module, reference)
    engine.close()


@STAGES
@pytest.mark.parametrize(
    "case",
    [probe_on_one_rank, probe_in_a_thread, probe_in_a_hook, run_by_the_engine_of_autograd],
    ids=lambda case: case.__name__,
)
def test_backwards_of_other_modules_and_by_other_means_change_no_gradient(run_on, case, stage):
    run_on(2, differentiate_something_else, case=case, stage=stage)


def compile_the_step():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))
    reference = copy.deepcopy(module)
    engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage=2)

    @torch.compile(backend="eager")
    def step(model):
        model(INPUTS).sum().backward()

    for _ in range(2):
        with engine.window():
            step(module)
        reference(INPUTS).sum().backward()
    same_gradients(module, reference)
    engine.close()


def test_a_compiled_function_may_call_backward(run_on):
    run_on(1, compile_the_step)
