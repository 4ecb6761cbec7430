"""User code's access to sharded parameters and gradients: DDP's answer, or an error within seconds."""

from __future__ import annotations

import copy
import io
import pickle
import time
import weakref
from contextlib import nullcontext

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_zero
from lightning_zero.engine import Engine, ShardedTensor
from tests.support import rank
from tests.support.patience import little_patience
from tests.support.workers import world_size

CLOSE = {"rtol": 1e-6, "atol": 1e-7}


def make(stage, dtype=None, **options):
    """A sharded module after backward passes, its optimizer and engine, and the unsharded module with its gradients."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    reference = copy.deepcopy(module)
    optimizer = torch.optim.Adam(module.parameters())
    engine = Engine(module, [optimizer], stage=stage, **options)
    for inputs in (torch.ones(2, 7, dtype=dtype), torch.arange(14.0).view(2, 7).to(dtype) / 7):
        for model in (module, reference):
            model(inputs).square().abs().mean().backward()  # alike on both ranks, so the mean is each rank's gradient
    return module, reference, optimizer, engine


def pairs(module, reference):
    yield from zip(module.parameters(), reference.parameters())


READS = {
    "arithmetic": lambda p: p + 1,
    "two of them": lambda p: p * p.detach() - p / 2,
    "norm": lambda p: p.norm(),
    "norm 1": lambda p: p.norm(1),
    "norm inf": lambda p: p.norm(float("inf")),
    "norm by rows": lambda p: p.norm(dim=0),
    "sum": lambda p: p.sum(),
    "mean": lambda p: p.mean(),
    "sum by rows": lambda p: p.sum(dim=0),
    "max": lambda p: p.max(),
    "min": lambda p: p.min(),
    "argmax": lambda p: p.argmax(),
    "std": lambda p: p.std(),
    "all finite": lambda p: torch.isfinite(p).all(),
    "any": lambda p: (p > 0).any(),
    "comparison": lambda p: p > 0.1,
    "equal": lambda p: torch.equal(p, p.clone()),
    "allclose": lambda p: torch.allclose(p, p + 1e-9),
    "item": lambda p: p.flatten()[1].item(),
    "row": lambda p: p[0],
    "slice": lambda p: p[1:, ...],
    "mask": lambda p: p[p > 0],
    "transpose": lambda p: p.t() if p.dim() == 2 else p,
    "matrix product": lambda p: p.t() @ p if p.dim() == 2 else p @ p,
    "chunks": lambda p: torch.cat([part * 2 for part in p.chunk(2)]),
    "iteration": lambda p: [row.sum() for row in p],
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "double": lambda p: p.double(),
    "cpu": lambda p: p.cpu(),
    "numpy": lambda p: p.detach().numpy(),
    "asarray": lambda p: numpy.asarray(p.detach()),
    "list": lambda p: p.tolist(),
    "where": lambda p: torch.where(p > 0, p, torch.zeros(())),
    "stack": lambda p: torch.stack([p, p]),
    "sort": lambda p: p.sort(dim=-1)[0],
    "svd": lambda p: torch.linalg.svdvals(p) if p.dim() == 2 else p,
    "histogram": lambda p: torch.histc(p.detach(), 5),
    "vector": lambda p: torch.nn.utils.parameters_to_vector([p]),
    "with a whole tensor": lambda p: p * torch.ones(p.shape) * 3,
    "copy": lambda p: copy.deepcopy(p.detach()),
    "shallow copy": lambda p: copy.copy(p.detach()),
    "new parameter": lambda p: nn.Parameter(p),
    "as tensor": lambda p: torch.as_tensor(p),
    "expand": lambda p: p.expand(2, *p.shape),
    "permute": lambda p: p.permute(*reversed(range(p.dim()))),
    "contraction": lambda p: torch.einsum("...i,...i->...", p, p),
    "rows by number": lambda p: p[[0, 2]],
    "rows by index": lambda p: p.index_select(0, torch.tensor([2, 0])),
    "largest": lambda p: p.topk(2),
    "extremes": lambda p: torch.aminmax(p),
    "quantile": lambda p: torch.quantile(p, 0.5),
    "norm 0": lambda p: p.norm(0),
    "norm -inf": lambda p: p.norm(-float("inf")),
    "norm 3": lambda p: torch.linalg.vector_norm(p, 3),
    "spectral norm": lambda p: torch.linalg.matrix_norm(p, 2) if p.dim() == 2 else p,
    "variance": lambda p: p.var(),
    "product": lambda p: p.prod(),
    "nonzero": lambda p: torch.count_nonzero(p),
    "cumulative sum": lambda p: p.cumsum(0),
    "softmax": lambda p: p.softmax(-1),
    "mean square error": lambda p: nn.functional.mse_loss(p, torch.zeros(p.shape)),
    "distance": lambda p: torch.dist(p, torch.zeros(p.shape)),
    "unbind": lambda p: p.unbind(),
    "Fourier transform": lambda p: torch.fft.fft(p).abs(),
    "quantisation": lambda p: torch.fake_quantize_per_tensor_affine(p, 0.1, 0, -128, 127),
    "of a scalar": lambda p: [1 - p, 2**p, 1 / (p.abs() + 1)],
    "batched": lambda p: torch.vmap(lambda x: (p * x).sum())(torch.ones(2, *p.shape)),
    "strided": lambda p: p.as_strided((2, 2), (1, 1), 0),
    "strided from an offset": lambda p: torch.as_strided(p, (2, 1), (1, 1), 1),
    "without ones": lambda p: p.detach().squeeze_(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "two to the power": lambda p: torch._foreach_pow(2.0, [p, p.detach()]),
    "with the same noise": lambda p: (torch.manual_seed(3), p + torch.randn_like(p))[1],
}


def plain(value):
    """The result of a read, for comparison."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if not hasattr(value, "whole") else value.whole().detach().clone()
    return torch.as_tensor(value)


def read_everywhere(stage):
    module, reference, _, engine = make(stage)
    for name, read in READS.items():
        for ours, theirs in pairs(module, reference):
            for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with context():
                    got, expected = plain(read(ours)), plain(read(theirs))
                torch.testing.assert_close(got, expected, **CLOSE, msg=lambda m: f"{name}: {m}")
            torch.testing.assert_close(
                plain(read(ours.grad)), plain(read(theirs.grad)), **CLOSE, msg=lambda m: f"{name} of the gradient: {m}"
            )
    engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The module", "74 ways to read a parameter or a gradient, also under `no_grad` and `inference_mode`"
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reading_a_parameter_or_a_gradient_gives_ddps_value(run_on, world_size, stage):
    run_on(world_size, read_everywhere, stage=stage)


OF_COMPLEX = {
    "conjugate": lambda p: p.conj(),
    "square of the magnitude": lambda p: (p * p.conj()).real,
    "imaginary part": lambda p: p.conj().imag,
    "minus the imaginary part": lambda p: p.conj().imag * 2 + p.imag,
    "magnitude": lambda p: p.abs(),
    "angle": lambda p: p.angle(),
    "exponential": lambda p: p.exp().real,
    "sum of squares": lambda p: (p**2).sum().abs(),
    "root": lambda p: (p + 2).sqrt(),
    "adjoint": lambda p: (p.mH @ p).real if p.dim() == 2 else p,
    "with a whole tensor": lambda p: p * torch.full(p.shape, 1 + 2j).conj(),
    "of real numbers": lambda p: torch.view_as_real(p.conj().resolve_conj()),
}


def read_complex(stage):
    module, reference, _, engine = make(stage, torch.complex64)
    for name, read in OF_COMPLEX.items():
        for ours, theirs in pairs(module, reference):
            got, expected = read(ours), read(theirs)
            torch.testing.assert_close(plain(got), plain(expected), **CLOSE, msg=lambda m: f"{name}: {m}")
            (found,) = torch.autograd.grad(got.abs().sum(), ours)
            (gradient,) = torch.autograd.grad(expected.abs().sum(), theirs)
            torch.testing.assert_close(plain(found), gradient, **CLOSE, msg=lambda m: f"gradient of {name}: {m}")
            got, expected = plain(read(ours.grad)), plain(read(theirs.grad))
            torch.testing.assert_close(got, expected, **CLOSE, msg=lambda m: f"{name} of the gradient: {m}")
    engine.close()


@pytest.mark.behaviour("The module", "Complex parameters outside of their module's forward, and their gradients")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_complex_parameters_have_ddps_values_and_gradients(run_on, world_size, stage):
    run_on(world_size, read_complex, stage=stage)


class Toeplitz(nn.Module):
    """Multiplies by a matrix with constant diagonals."""

    def __init__(self):
        super().__init__()
        self.other, self.diagonals = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return x @ self.diagonals.as_strided((3, 3), (1, 1), 0) + self.other * self.diagonals.as_strided((3,), (1,), 2)


def stride_in_forward(stage):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), Toeplitz())
    reference = copy.deepcopy(module)
    engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage=stage)
    for model in (module, reference):
        model(torch.ones(2, 3)).square().sum().backward()
    for ours, theirs in pairs(module, reference):
        torch.testing.assert_close(plain(ours.grad), theirs.grad, **CLOSE)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_as_strided_in_forward_begins_at_the_parameter(run_on, stage):
    run_on(2, stride_in_forward, stage=stage)


def reset_moments(stage):
    module, reference, optimizer, engine = make(stage)
    other = torch.optim.Adam(reference.parameters())
    other.step()
    optimizer.step()
    for ours, theirs in pairs(module, reference):
        for state, p in ((optimizer.state[ours], ours), (other.state[theirs], theirs)):
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = state["exp_avg_sq"] * 2
            state["step"] = torch.tensor(7.0)
        if world_size() > 1:
            with pytest.raises(TypeError, match=r"'more' cannot be set .*in a dict by parameter \(kept\[p\] ="):
                optimizer.state[ours]["more"] = 1
    other.step()
    optimizer.step()
    for ours, theirs in pairs(module, reference):
        torch.testing.assert_close(plain(ours), theirs.detach(), **CLOSE)
    engine.close()


@pytest.mark.behaviour("The module", "`optimizer.state[p]['exp_avg'] = tensor`")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tensors_may_be_set_in_a_parameters_optimizer_state(run_on, world_size, stage):
    run_on(world_size, reset_moments, stage=stage)


class Wrapper(torch.optim.Optimizer):
    """As in pytorch_optimizer: torch's constructor is not called, and hooks are in plain dicts."""

    def __init__(self, optimizer):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure=None):
        return self.optimizer.step(closure)


def wrap_an_optimizer(stage):
    module, reference, _, engine = make(stage)
    engine.close()
    optimizer = Wrapper(torch.optim.SGD(module.parameters(), lr=0.1))
    engine = Engine(module, [optimizer], stage=stage, whole_parameters=False)
    for model in (module, reference):
        model.zero_grad()
        model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for ours, theirs in pairs(module, reference):
        torch.testing.assert_close(plain(ours), theirs.detach(), **CLOSE)
    engine.close()


def test_a_wrapper_that_has_not_called_torchs_constructor_is_hooked(run_on):
    run_on(2, wrap_an_optimizer, stage=3)


class Half(nn.Module):
    def forward(self, x):
        return x / 2

    def right_inverse(self, x):
        return x * 2


def parametrize_in_mid_run(stage):
    module, reference, optimizer, engine = make(stage)
    for model, steps in ((module, optimizer), (reference, torch.optim.Adam(reference.parameters()))):
        for turn in range(4):
            if turn == 1:
                register_parametrization(model[0], "weight", Half())
            if turn == 3:
                remove_parametrizations(model[0], "weight", leave_parametrized=False)
            model(torch.ones(2, 7) * turn).square().sum().backward()
            steps.step()
            steps.zero_grad()
    for ours, theirs in pairs(module, reference):
        torch.testing.assert_close(plain(ours), theirs.detach(), **CLOSE)
    engine.close()


@pytest.mark.behaviour("The module", "A parametrization that is registered and removed in mid-run")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_weight_may_be_parametrized_in_mid_run(run_on, stage):
    run_on(2, parametrize_in_mid_run, stage=stage)


def change_shapes(stage):
    module, _, _, engine = make(stage)
    with torch.no_grad():
        for change in (lambda p: p.unsqueeze_(0), lambda p: p.t_(), lambda p: p[None].squeeze_(0)):
            with pytest.raises(
                RuntimeError, match="would change the shape of a sharded tensor in place: use the operator"
            ):
                change(module[0].weight)
    assert module[0].weight.shape == (5, 7)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_change_of_a_parameters_shape_in_place_is_refused(run_on, stage):
    run_on(2, change_shapes, stage=stage)


WRITES = {
    "multiply": lambda p: p.mul_(0.5),
    "clamp": lambda p: p.clamp_(-0.1, 0.1),
    "zero": lambda p: p.zero_(),
    "fill": lambda p: p.fill_(3),
    "add a whole tensor": lambda p: p.add_(torch.ones(p.shape)),
    "add one of its kind": lambda p: p.add_(p.detach() * 2, alpha=0.1),
    "average": lambda p: p.lerp_(p.detach() + 1, 0.25),
    "copy": lambda p: p.copy_(torch.arange(float(p.numel())).view(p.shape)),
    "a row": lambda p: p[0].zero_(),
    "an element": lambda p: p.view(-1).__setitem__(2, 7.0),
    "a mask": lambda p: p.__setitem__(p > 0, 0.5),
    "data": lambda p: p.data.mul_(2),
    "all of data": lambda p: setattr(p, "data", torch.full(p.shape, 2.0, dtype=p.dtype)),
    "a transpose": lambda p: p.t().add_(1) if p.dim() == 2 else p.add_(1),
    "chunks": lambda p: p.chunk(2)[0].mul_(3),
    "initialise": lambda p: nn.init.constant_(p, 0.3),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "a rule of two": lambda p: p.sub_(p.grad, alpha=0.1),
    "initialise at random": lambda p: (torch.manual_seed(3), nn.init.uniform_(p)),
    "initialise by fan": lambda p: (torch.manual_seed(3), nn.init.xavier_normal_(p) if p.dim() == 2 else p),
    "noise": lambda p: (torch.manual_seed(3), p.add_(torch.randn_like(p))),
    "rows by number": lambda p: p.index_fill_(0, torch.tensor([1]), 2.0),
    "bounded rows": lambda p: p.renorm_(2, 0, 0.1) if p.dim() == 2 else p,
    "a vector": lambda p: torch.nn.utils.vector_to_parameters(torch.arange(float(p.numel())).to(p.dtype), [p]),
    "foreach average": lambda p: torch._foreach_lerp_([p], [torch.zeros_like(p)], 0.5),
    "a function": lambda p: p.data.apply_(lambda x: 2 * x + 1),
    "a function of two": lambda p: p.data.map_(p.detach() * 3, lambda x, y: x + y),
    "a function of three": lambda p: p.data.map2_(
        p.detach(), torch.ones(p.shape, dtype=p.dtype), lambda x, y, z: x - 3 * y + z
    ),
    "foreach copy": lambda p: torch._foreach_copy_([p], [torch.ones(p.shape)]),
}


def write_everywhere(stage):
    for name, write in WRITES.items():
        module, reference, optimizer, engine = make(stage)
        with torch.no_grad():
            for ours, theirs in pairs(module, reference):
                write(ours)
                write(theirs)
                torch.testing.assert_close(plain(ours), plain(theirs), **CLOSE, msg=lambda m: f"{name}: {m}")
        inputs = torch.ones(2, 7)
        torch.testing.assert_close(
            module(inputs), reference(inputs), **CLOSE, msg=lambda m: f"{name}, seen by forward: {m}"
        )
        optimizer.step()
        torch.optim.Adam(reference.parameters()).step()
        for ours, theirs in pairs(module, reference):
            torch.testing.assert_close(plain(ours), plain(theirs), **CLOSE, msg=lambda m: f"{name}, then a step: {m}")
        engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The module", "29 ways to write to a parameter")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_write_to_a_parameter_is_seen_by_forward_and_by_the_optimizer(run_on, world_size, stage):
    run_on(world_size, write_everywhere, stage=stage)


def write_everywhere_in_bf16(stage):
    for name, write in WRITES.items():
        module, reference, _, engine = make(stage, torch.bfloat16)
        with torch.no_grad():
            for ours, theirs in pairs(module, reference):
                write(ours)
                write(theirs)
                # masters have more digits, so a result may be rounded differently
                torch.testing.assert_close(
                    plain(ours), plain(theirs), rtol=2**-7, atol=2**-7, msg=lambda m: f"{name}: {m}"
                )
        engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_with_a_wider_master_can_be_written_in_each_way(run_on, stage):
    run_on(2, write_everywhere_in_bf16, stage=stage)


def write_to_gradients(stage):
    for name, write in WRITES.items():
        if "data" in name or "rule" in name:
            continue
        module, reference, optimizer, engine = make(stage)
        with torch.no_grad():
            for ours, theirs in pairs(module, reference):
                write(ours.grad)
                write(theirs.grad)
                torch.testing.assert_close(plain(ours.grad), plain(theirs.grad), **CLOSE, msg=lambda m: f"{name}: {m}")
        optimizer.step()
        torch.optim.Adam(reference.parameters()).step()
        for ours, theirs in pairs(module, reference):
            torch.testing.assert_close(plain(ours), plain(theirs), **CLOSE, msg=lambda m: f"{name}, then a step: {m}")
        engine.close()


def compute_with_lists():
    """Operators on lists return what operators on single tensors return, also where local ranges are in fp32."""
    for stage in (1, 2, 3):
        module, _, _, engine = make(stage, torch.bfloat16)
        parameters = list(module.parameters())
        gradients = [p.grad for p in parameters]
        cases = {
            "scaled": (torch._foreach_mul(gradients, 0.3), [g * 0.3 for g in gradients]),
            "added": (torch._foreach_add(gradients, parameters), [g + p for g, p in zip(gradients, parameters)]),
        }
        for name, (found, expected) in cases.items():
            for ours, theirs in zip(found, expected):
                assert ours.dtype == torch.bfloat16
                torch.testing.assert_close(plain(ours), plain(theirs), rtol=0, atol=0, msg=lambda m: f"{name}: {m}")
        for p, scaled in zip(parameters, cases["scaled"][0]):
            p.grad = scaled
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_operators_on_lists_compute_in_the_dtype_of_the_tensors(run_on, world_size):
    run_on(world_size, compute_with_lists)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The module", "Writes to a gradient")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_write_to_a_gradient_is_what_the_optimizer_uses(run_on, stage):
    run_on(2, write_to_gradients, stage=stage)


class Signs(nn.Linear):
    """Computes with the signs of its weight, and then puts the weight back. Halves its bias in each forward."""

    def forward(self, x):
        full, self.kept = self.weight.data, self.bias.data
        self.weight.data, self.bias.data = full.sign(), self.kept / 2
        y = super().forward(x)
        self.weight.data = full
        return y


def keep_and_restore(p, q, copied):
    kept = p.data
    p.data = torch.zeros_like(p)
    seen = p.detach() + 0
    p.data = kept
    return seen


def keep_twice(p, q, copied):
    first = p.detach()
    p.data = p.data + 1
    second = p.data
    p.data = first * 3
    seen = [first + 0, second + 0, p.detach() + 0]
    p.data = second
    return [*seen, first + 0]


def change_what_was_kept(p, q, copied):
    kept = p.data
    p.data.mul_(2)  # seen by both
    seen = kept + 0
    p.data = q.detach() * 2
    kept.zero_()  # seen by neither
    return [seen, kept + 0]


def swap(p, q, copied):
    p.data, q.data = q.data, p.data


def swap_by_a_third(p, q, copied):
    third = q.data
    q.data = p.data
    p.data = third
    return third + 0


def swap_with_a_copy(p, q, copied):
    p.data, copied.data = copied.data, p.data
    third = q.data
    q.data = copied.data
    copied.data = third


def restore_a_copy(p, q, copied):
    kept = copied.data
    copied.data = p.data * 2
    seen = copied + 0
    copied.data = kept
    return [seen, kept + 0]


def itself(p, q, copied):
    kept = p.data
    p.data = p.data
    p.data.add_(1)
    return kept + 0


def replace_a_views_data(p, q, copied):
    row, column = p[0], q[:, 1]
    row.data = torch.full_like(row, 7)
    column.data = p[1]
    row.add_(1), column.mul_(2)  # the parameter's second row changes, nothing else
    return [row + 0, column + 0]


REPLACEMENTS = [
    keep_and_restore,
    keep_twice,
    change_what_was_kept,
    swap,
    swap_by_a_third,
    swap_with_a_copy,
    restore_a_copy,
    itself,
    replace_a_views_data,
]


def replace_data(stage, dtype, **options):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), Signs(5, 3)).to(dtype)
    for replace in REPLACEMENTS:
        module, reference = copy.deepcopy(first), copy.deepcopy(first)
        engine = Engine(module, [optimizer := torch.optim.SGD(module.parameters(), lr=0.1)], stage=stage, **options)
        results = {}
        for model, steps in ((module, optimizer), (reference, torch.optim.SGD(reference.parameters(), lr=0.1))):
            copied = copy.deepcopy(model)
            for turn in range(2):
                model(torch.ones(2, 5, dtype=dtype) * (turn + 1)).square().mean().backward()
                steps.step()
                steps.zero_grad()
                with torch.no_grad():
                    found = replace(model[0].weight, model[2].weight, copied[0].weight)
                results.setdefault(model, []).append(
                    plain([[] if found is None else found, [*model.parameters()], copied[0].weight, model[3].kept])
                )
        torch.testing.assert_close(
            results[module], results[reference], **CLOSE, msg=lambda m: f"{replace.__name__}: {m}"
        )
        engine.close()
        for ours, theirs in pairs(module, reference):
            torch.testing.assert_close(ours, theirs, **CLOSE, msg=lambda m: f"{replace.__name__}, at the end: {m}")


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The module",
    "`p.data = tensor`, after which an earlier `p.data` still has the former values: backups, swaps, copies",
)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}], ids=["", "offload"])
def test_what_a_parameters_data_was_stays_what_it_was_when_data_is_replaced(run_on, world_size, stage, options):
    run_on(world_size, replace_data, stage=stage, dtype=torch.float32, **options)


class Clipped(nn.Linear):
    """Replaces its weight by a clipped one in each forward, for good."""

    def forward(self, x):
        self.weight.data = self.weight.data.clamp(-0.2, 0.2)
        return super().forward(x)


def several_forwards_replace_data(stage):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Signs(5, 5), Clipped(5, 3))
    del module[2].bias  # halved for good in each forward, which autograd would refuse here
    module[2].bias = torch.zeros(5)
    reference = copy.deepcopy(module)
    engine = Engine(module, [optimizer := torch.optim.SGD(module.parameters(), lr=0.1)], stage=stage)
    for model, steps in ((module, optimizer), (reference, torch.optim.SGD(reference.parameters(), lr=0.1))):
        for turn in range(3):
            kept = model[3].weight.data, model[2].weight.data
            first = [each + 0 for each in plain([*kept])]
            losses = [model[:3](torch.ones(2, 5) * (turn + time)).square().mean() for time in (1, 2)]
            with torch.no_grad():
                model(torch.ones(2, 5))
            sum(losses).backward()
            torch.testing.assert_close(plain([*kept]), first)
            steps.step()
            steps.zero_grad()
    for ours, theirs in pairs(module, reference):
        torch.testing.assert_close(plain(ours), theirs.detach(), **CLOSE)
    engine.close()


class SignsOfConvolution(nn.Conv1d):
    """Autograd saves this weight itself, not a transposition, so that backward uses what ``data`` is by then."""

    def forward(self, x):
        full = self.weight.data if self.in_channels == 3 else self.weight.detach()
        self.weight.data = full.sign()
        y = super().forward(x)
        self.weight.data = full * 1.5 if self.in_channels == 3 else full
        return y


def backward_uses_what_data_is(stage):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(3, 2, 2), SignsOfConvolution(2, 3, 2), nn.Tanh(), SignsOfConvolution(3, 3, 2))
    reference = copy.deepcopy(module)
    engine = Engine(module, [optimizer := torch.optim.SGD(module.parameters(), lr=0.1)], stage=stage)
    for _ in range(3):
        for model, steps in ((module, optimizer), (reference, torch.optim.SGD(reference.parameters(), lr=0.1))):
            model.zero_grad()
            model(torch.ones(2, 3, 8)).square().mean().backward()
            steps.step()
        for ours, theirs in pairs(module, reference):
            torch.testing.assert_close(plain(ours.grad), theirs.grad, **CLOSE)
            torch.testing.assert_close(plain(ours), theirs.detach(), **CLOSE)
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_uses_what_a_weights_data_is_by_then(run_on, stage):
    run_on(2, backward_uses_what_data_is, stage=stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_forwards_that_replace_data_may_come_before_the_backward_of_another(run_on, stage):
    run_on(2, several_forwards_replace_data, stage=stage)


def give_the_parameters_data(stage):
    module, reference, optimizer, engine = make(stage)
    other = torch.optim.Adam(reference.parameters())
    for model, steps in ((module, optimizer), (reference, other)):
        steps.step()
        for p in model.parameters():
            p.grad.data = p.data
            steps.state[p]["exp_avg"].data = p.data.clone() if model is reference else p.data
    for ours, theirs in pairs(module, reference):
        torch.testing.assert_close(plain(ours.grad), theirs.detach(), **CLOSE)
        torch.testing.assert_close(plain(optimizer.state[ours]["exp_avg"]), theirs.detach(), **CLOSE)
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_or_a_state_may_be_given_the_parameters_data(run_on, stage):
    run_on(2, give_the_parameters_data, stage=stage)


def share_memory_with_an_ordinary_tensor(stage):
    module, _, _, engine = make(stage)
    ours, ordinary = module[0].weight, nn.Parameter(torch.ones(5, 7))
    for tensor in (ordinary, torch.zeros(5, 7), plain(ours)):
        before = tensor.detach().clone()
        for value in (ours, ours.data, ours[:], ours.grad):
            with pytest.raises(RuntimeError, match=r"shape \(5, 7\).*write tensor\.data\.copy_\(value\)"):
                tensor.data = value
        assert torch.equal(tensor, before)
        tensor.data = 0.25 * ours.data + 0.75 * tensor.data  # a target network that no engine shards
        assert torch.equal(tensor, 0.25 * plain(ours) + 0.75 * before)
        tensor.data.copy_(ours)
        assert torch.equal(tensor, plain(ours))
    engine.close()
    ordinary.data = module[0].weight.data
    assert torch.equal(ordinary, module[0].weight)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_ordinary_tensors_data_cannot_be_a_sharded_tensor(run_on, stage):
    run_on(2, share_memory_with_an_ordinary_tensor, stage=stage)


def low_precision_writes(stage):
    module, reference, _, engine = make(stage, dtype=torch.bfloat16)
    with torch.no_grad():
        for ours, theirs in pairs(module, reference):
            assert ours.dtype == ours.grad.dtype == torch.bfloat16
            ours.mul_(0.5), theirs.mul_(0.5)
            ours[0].fill_(0.25), theirs[0].fill_(0.25)
            assert lightning_zero.shard_of(ours).dtype == torch.float32
            torch.testing.assert_close(plain(ours), plain(theirs), rtol=0, atol=0)
    inputs = torch.ones(2, 7, dtype=torch.bfloat16)
    torch.testing.assert_close(module(inputs), reference(inputs), rtol=0, atol=0)
    engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_write_to_a_low_precision_parameter_is_carried_to_the_master(run_on, world_size, stage):
    run_on(world_size, low_precision_writes, stage=stage)


def keep_identity(stage):
    module = nn.Linear(5, 3)
    module.weight.no_decay, module.weight.keep = True, 0.9
    weight, listed = module.weight, list(module.parameters())
    engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage=stage)
    for _ in range(2):
        assert module.weight is weight and all(a is b for a, b in zip(module.parameters(), listed))
        assert isinstance(weight, nn.Parameter) and weight.no_decay and weight.keep == 0.9
        assert weight.shape == (3, 5) and weight.dtype == torch.float32 and weight.is_leaf and weight.requires_grad
        assert weight.numel() == 15 and weight.stride() == (5, 1)
        assert str(weight).startswith("Parameter containing:")
        if engine is not None:
            engine.close()
            engine = None
    assert type(weight) is nn.Parameter


@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_keeps_its_identity_attributes_shape_and_dtype(run_on, stage):
    run_on(2, keep_identity, stage=stage)


def copies(stage):
    module, reference, _, engine = make(stage)
    average = copy.deepcopy(module)
    with torch.no_grad():
        for mean, ours in zip(average.parameters(), module.parameters()):
            assert mean is not ours and isinstance(mean, nn.Parameter)
            ours.mul_(2)
    for mean, theirs in zip(average.parameters(), reference.parameters()):
        torch.testing.assert_close(plain(mean), theirs.detach(), rtol=0, atol=0)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    pickled = pickle.loads(pickle.dumps(list(module.parameters())))
    for name, theirs in reference.named_parameters():
        assert type(saved[name]) is torch.Tensor
        torch.testing.assert_close(saved[name], 2 * theirs.detach(), rtol=0, atol=0)
    for ours, theirs in zip(pickled, reference.parameters()):
        assert type(ours) is nn.Parameter
        torch.testing.assert_close(ours.detach(), 2 * theirs.detach(), rtol=0, atol=0)
    module.load_state_dict(reference.state_dict())
    torch.testing.assert_close(module(torch.ones(2, 7)), reference(torch.ones(2, 7)), rtol=0, atol=0)
    engine.close()


@pytest.mark.behaviour("The module", "`state_dict()`, `torch.save`, `pickle` and `deepcopy` of parameters during a run")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_pickles_and_state_dicts_hold_the_values(run_on, stage):
    run_on(2, copies, stage=stage)


def look_inside(stage):
    module, reference, optimizer, engine = make(stage)
    assert not any(p in optimizer.state for p in module.parameters())
    optimizer.step()
    other = torch.optim.Adam(reference.parameters())
    other.step()
    for ours, theirs in pairs(module, reference):
        torch.testing.assert_close(lightning_zero.full_grad(ours), theirs.grad, rtol=0, atol=0)
        state = lightning_zero.full_optimizer_state(ours)
        assert ours in optimizer.state and torch.zeros(1) not in optimizer.state
        for found in (state, optimizer.state[ours], optimizer.state.get(ours)):
            assert found.keys() == other.state[theirs].keys()
            for key, value in found.items():
                torch.testing.assert_close(plain(value), other.state[theirs][key], rtol=0, atol=0)
        pieces = [None, None]
        dist.all_gather_object(pieces, lightning_zero.shard_of(ours).detach().clone())
        torch.testing.assert_close(torch.cat(pieces).view(ours.shape), theirs.detach(), rtol=0, atol=0)
    with lightning_zero.full_parameters(module, writeback=True):
        assert all(type(p) is nn.Parameter for p in module.parameters())
        with torch.no_grad():
            module[0].weight.t()[0] = 9.0
    with lightning_zero.full_parameters(module), torch.no_grad():
        module[2].weight.zero_()
    with torch.no_grad():
        reference[0].weight.t()[0] = 9.0
    for ours, theirs in pairs(module, reference):
        torch.testing.assert_close(plain(ours), theirs.detach(), rtol=0, atol=0)
    engine.close()


def reset_the_state_of_a_parameter(stage, **options):
    """Each rank resets one parameter's state in mid-run, as if it were trained anew, in two ways."""
    module, reference, _, engine = make(stage)
    engine.close()
    optimizer, other = torch.optim.Adam(module.parameters(), lr=0.1), torch.optim.Adam(reference.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], stage=stage, **options)
    for number in range(6):
        optimizer.zero_grad()
        other.zero_grad()
        for each in (module, reference):
            each(torch.full((2, 7), 1.0 + number)).square().sum().backward()
        optimizer.step()
        other.step()
        if number == 1:
            for each in (optimizer.state[module[0].bias], other.state[reference[0].bias]):
                for value in each.values():
                    value.zero_()
        if number == 3:
            optimizer.state.clear()
            other.state.clear()
        for ours, theirs in pairs(module, reference):
            state = {key: plain(value) for key, value in optimizer.state[ours].items()}
            torch.testing.assert_close(state, dict(other.state[theirs]), **CLOSE)
            torch.testing.assert_close(plain(ours), theirs.detach(), **CLOSE)
    engine.close()


@pytest.mark.behaviour("The module", "`full_grad`, `full_optimizer_state`, `shard_of`, `optimizer.state[p]`")
@pytest.mark.parametrize(("stage", "options"), [(1, {}), (3, {}), (3, {"offload": "cpu"}), (3, {"offload": "nvme"})])
def test_writes_to_a_parameters_state_concern_this_parameter_alone(run_on, stage, options):
    run_on(2, reset_the_state_of_a_parameter, stage=stage, **options)


class Replacing(torch.optim.Optimizer):
    """SGD with momentum that puts a new tensor into its state at each step."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["momentum"] = self.state[p].get("momentum", torch.zeros_like(p)) * 0.5 + p.grad
            p.sub_(self.state[p]["momentum"], alpha=0.125)


def look_at_replaced_state(stage):
    module, reference, _, engine = make(stage)
    engine.close()
    optimizer, other = Replacing(module.parameters()), Replacing(reference.parameters())
    engine = Engine(module, [optimizer], stage=stage, whole_parameters=False)
    replaced = []
    for number in range(5):
        optimizer.zero_grad()
        other.zero_grad()
        for each in (module, reference):
            each(torch.full((2, 7), 1.0 + number)).sum().backward()
        optimizer.step()
        assert number < 2 or all(reference() is None for reference in replaced), "replaced tensors take memory"
        other.step()
        for ours, theirs in pairs(module, reference):
            state = {key: plain(value) for key, value in optimizer.state[ours].items()}
            torch.testing.assert_close(state, dict(other.state[theirs]), rtol=0, atol=0)
        replaced = [weakref.ref(state["momentum"]) for state in dict.values(optimizer.state)]
    engine.close()


@pytest.mark.behaviour("The module", "`full_grad`, `full_optimizer_state`, `shard_of`, `optimizer.state[p]`")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_state_of_an_optimizer_that_replaces_its_tensors_is_shown_and_not_kept(run_on, stage):
    run_on(2, look_at_replaced_state, stage=stage)


@pytest.mark.behaviour("The module", "`full_grad`, `full_optimizer_state`, `shard_of`, `optimizer.state[p]`")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_inspection_shows_whole_values_gradients_and_state_and_writes_back_on_request(run_on, stage):
    run_on(2, look_inside, stage=stage)


def read_on_rank_0_while_others_wait_in(where):
    module, _, _, engine = make(3)
    dist.barrier()
    begin = time.monotonic()
    if rank() == 0:
        with pytest.raises(RuntimeError) as error:
            module[0].weight.norm() if where != "another parameter" else module[0].weight.sort()
        text = str(error.value)
        waits = "rank(s) [1]" if where == "another parameter" else "rank 1 waits for the barrier of this test"
        assert "'0.weight'" in text and waits in text and "every rank" in text, text
    elif where == "another parameter":
        with pytest.raises(RuntimeError, match=r"'2\.bias'.*\[0\].*'0\.weight'"):
            module[2].bias.sort()
    else:
        with pytest.raises(RuntimeError, match="barrier of this test.*rank 0 waits for.*'0.weight'"):
            with engine.communicator.everyone.waiting("the barrier of this test"):
                dist.barrier()
    assert time.monotonic() - begin < 15


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("where", ["a collective", "another parameter"])
def test_a_read_on_some_ranks_only_fails_in_seconds_and_names_the_parameter_and_the_ranks(run_on, where):
    run_on(2, read_on_rank_0_while_others_wait_in, where=where)


LOOKS = {
    "full_parameters": (lambda m, _: lightning_zero.full_parameters(m).__enter__(), "'0.weight'"),
    "full_grad": (lambda m, _: lightning_zero.full_grad(m[2].weight), "'2.weight'"),
    "full_optimizer_state": (lambda m, _: lightning_zero.full_optimizer_state(m[0].bias), "the state of Adam"),
    "copy.deepcopy": (lambda _, optimizer: copy.deepcopy(optimizer), "the state of Adam"),
}


@little_patience()
def look_on_rank_0_while_others_train_on(what):
    look, name = LOOKS[what]
    module, _, optimizer, engine = make(3)
    optimizer.step()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 0 waits for .*{name}.*rank 1 waits for .*unit '0'.*need every rank"):
        if rank() == 0:
            look(module, optimizer)
        module(torch.ones(2, 7)).sum().backward()
    assert time.monotonic() - begin < 15
    engine.close(communicate=False)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("what", LOOKS)
def test_inspection_on_one_rank_alone_fails_in_seconds_on_every_rank(run_on, what):
    run_on(2, look_on_rank_0_while_others_train_on, what=what)


def sharded_gradients_stage_1():
    module, _, optimizer, engine = make(1)
    assert all(isinstance(p.grad, ShardedTensor) for p in module.parameters())
    held = engine.report().at_rest["gradients"]
    optimizer.zero_grad()
    assert held > 0 and engine.report().at_rest["gradients"] == 0
    engine.close()


def test_gradients_are_sharded_at_every_stage_and_freed_by_zero_grad(run_on):
    run_on(2, sharded_gradients_stage_1)


def write_in_a_window_of_bf16(stage):
    torch.manual_seed(0)
    module = nn.Linear(7, 5)
    exact = module.weight.detach().clone()
    engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage=stage, compute_dtype=torch.bfloat16)
    with engine.window(), torch.no_grad():
        module.weight.clamp_(-10, 10)
        module.weight[0].zero_()
        module.weight.data[1].mul_(1)
    exact[0] = 0
    torch.testing.assert_close(plain(module.weight), exact, rtol=0, atol=0)
    engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_write_in_a_bf16_mixed_step_keeps_the_precision_of_the_masters(run_on, world_size, stage):
    run_on(world_size, write_in_a_window_of_bf16, stage=stage)


def write_a_row_of_bf16(stage):
    torch.manual_seed(0)
    module = nn.Linear(7, 5).bfloat16()
    engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage=stage)
    with torch.no_grad():
        lightning_zero.shard_of(module.weight).add_(1e-5)  # less than bf16 resolves
        digits = lightning_zero.shard_of(module.weight).clone()
        module.weight[0].zero_()
        kept = lightning_zero.shard_of(module.weight)
    changed = int((kept != digits).sum())
    assert changed == (7 if rank() == 0 else 0), changed
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_write_to_a_row_in_bf16_leaves_the_masters_of_other_rows_unchanged(run_on, stage):
    run_on(2, write_a_row_of_bf16, stage=stage)


@little_patience()
def stall():
    """One rank is late, and the other announces that; when both then meet, the notice is outdated."""
    module, _, _, engine = make(3)
    if rank() == 0:
        time.sleep(2)
    dist_input = torch.ones(2, 7)
    module(dist_input).sum().backward()
    if rank() == 1:
        time.sleep(0.2)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    engine.close()


def test_a_rank_that_was_late_does_not_make_the_next_handshake_fail(run_on):
    run_on(2, stall)


class Counted:
    """A store that lists its requests."""

    def __init__(self, store):
        self._store, self.requests = store, []

    def __getattr__(self, name):
        self.requests.append(name)
        return getattr(self._store, name)


def meetings_by_step():
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], stage=3, unit_numel=0)
    assert len(engine.units) > 4
    meetings = []
    for step in range(12):
        before = engine.communicator.rendezvous.meetings
        with engine.window():
            loss = module(torch.ones(2, 3)).sum() + module(torch.zeros(2, 3)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            with torch.no_grad(), engine.window():
                module(torch.ones(2, 3))
        meetings.append(engine.communicator.rendezvous.meetings - before)
    engine.close()
    return meetings


def test_ranks_stop_meeting_where_networks_run_twice_in_a_step_or_are_evaluated_in_between(run_on):
    for meetings in run_on(2, meetings_by_step):
        assert meetings[0] > 0 and meetings[6:] == [0] * 6, meetings


def count_requests():
    _, _, _, engine = make(3)
    engine.communicator.rendezvous._store = store = Counted(engine.communicator.rendezvous._store)
    requests = []
    for turn in range(20):
        dist.barrier()
        store.requests.clear()
        engine.communicator.rendezvous.meet(f"meeting {turn}")
        requests.append(len(store.requests))
        # its own arrival and the sum of all, neither of which grows with the ranks
        assert set(store.requests) <= {"add", "delete_key"}
    assert min(requests) <= 3 + 4, requests  # with the polls that were needed
    engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("size", [2, 4])
def test_a_handshakes_requests_do_not_grow_with_the_number_of_ranks(run_on, size):
    run_on(size, count_requests)


def replace_gradients(stage):
    module, reference, _, engine = make(stage)
    for ours, theirs in pairs(module, reference):
        ours.grad = ours.grad * 0.5
        theirs.grad = theirs.grad * 0.5
    for model in (module, reference):
        model(torch.ones(2, 7)).square().mean().backward()
    for ours, theirs in pairs(module, reference):
        torch.testing.assert_close(plain(ours.grad), theirs.grad, **CLOSE)
    engine.close()


@pytest.mark.behaviour("The module", "The next backward pass adds to a gradient that user code replaced")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_next_backward_pass_adds_to_a_gradient_that_the_user_replaced(run_on, world_size, stage):
    run_on(world_size, replace_gradients, stage=stage)


def convert_after_setup():
    module, _, _, engine = make(3)
    with pytest.raises(TypeError, match=r"'?0\.weight.* keeps its dtype, torch\.float32"):
        module.double()
    engine.close()


def test_converting_a_sharded_module_is_refused_with_advice(run_on):
    run_on(2, convert_after_setup)


def replace_memory():
    module, reference, _, engine = make(1)
    for tensor in (module[0].weight, module[0].weight.data, module[0].weight.grad):
        with pytest.raises(RuntimeError, match=r"set_\(\).*parameter\.data\.copy_\(values\)"), torch.no_grad():
            tensor.set_(torch.ones(5, 7), 0, (5, 7))
        with pytest.raises(ValueError, match=r"data of shape \(5, 7\) cannot be replaced"), torch.no_grad():
            tensor.set_(torch.ones(7, 5))
    torch.testing.assert_close(plain(module[0].weight), reference[0].weight.detach(), rtol=0, atol=0)
    engine.close()


def test_replacing_the_memory_of_a_sharded_tensor_is_refused_with_advice(run_on):
    run_on(2, replace_memory)


NEED_MEMORY = {
    "share_memory_": lambda t: t.share_memory_(),
    "storage": lambda t: t.storage(),
    "share_memory_ of the storage": lambda t: t.untyped_storage().share_memory_(),
    "data_ptr of the storage": lambda t: t.untyped_storage().data_ptr(),
    "copy_": lambda t: t.untyped_storage().copy_(torch.ones(5, 7).untyped_storage()),
    "clone of the storage": lambda t: t.untyped_storage().clone(),
    "byteswap": lambda t: t.untyped_storage().byteswap(t.dtype),
    "fill_": lambda t: t.untyped_storage().fill_(0),
    "resize_": lambda t: t.untyped_storage().resize_(0),
    "pickle of the storage": lambda t: pickle.dumps(t.untyped_storage()),
    "an element of the storage": lambda t: t.untyped_storage()[0],
    "an element written to the storage": lambda t: t.untyped_storage().__setitem__(0, 1),
    "list of the storage": lambda t: t.untyped_storage().tolist(),
    "double of the storage": lambda t: t.untyped_storage().double(),
    "file of the storage": lambda t: torch.save(t.untyped_storage(), io.BytesIO()),
}


def count_by_address(stage):
    """Which tensors have one address is as with the unsharded module, so that a tied weight counts once."""
    module, reference, _, engine = make(stage)
    copied, copied_reference = copy.deepcopy(module), copy.deepcopy(reference)

    def addresses(model, copied):
        tensors = [*model.parameters(), *(p.data for p in model.parameters()), *(p.grad for p in model.parameters())]
        found = [t.data_ptr() for t in (*tensors, *copied.parameters(), model[0].weight.detach().clone())]
        return [found.index(address) for address in found]

    assert addresses(module, copied) == addresses(reference, copied_reference)
    assert len({p.data.data_ptr() for p in module.parameters()}) == 4
    with pytest.raises(RuntimeError, match="no memory of its own"):
        module[0].weight[1:].data_ptr()
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_are_told_apart_by_their_addresses(run_on, stage):
    run_on(2, count_by_address, stage=stage)


def give_memory_to_code_in_c(stage):
    weight = make(stage)[0][0].weight
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(weight.detach())
    alone = [dist.new_group([each]) for each in range(2)][rank()]
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        dist.scatter(torch.empty(5, 7), [weight.detach()], src=rank(), group=alone)  # a list within a list, to torch


@pytest.mark.parametrize("stage", [1, 3])
def test_code_that_asks_no_operator_gets_an_error_instead_of_a_null_pointer(run_on, stage):
    run_on(2, give_memory_to_code_in_c, stage=stage)


def need_memory(stage):
    module, reference, _, engine = make(stage)
    weight = module[0].weight
    tensors = [weight, weight.detach(), module.state_dict()["0.weight"], weight.t(), weight.grad, copy.deepcopy(weight)]
    for tensor in tensors:
        for name, need in NEED_MEMORY.items():
            with pytest.raises(RuntimeError, match=r"no memory of its own.*full_parameters\(module\)"):
                pytest.fail(f"{name}: {need(tensor)}")
        assert not tensor.is_shared() and tensor.untyped_storage().nbytes() == tensor.nbytes
    for net in (module, copy.deepcopy(module)):
        with pytest.raises(RuntimeError, match=r"shape \(5, 7\) .* shared between processes.*full_parameters"):
            net.share_memory()
    with lightning_zero.full_parameters(module):
        assert all(parameter.is_shared() for parameter in module.share_memory().parameters())
    for parameter, other in pairs(module, reference):
        torch.testing.assert_close(plain(parameter), other.detach(), rtol=0, atol=0)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_access_to_the_memory_of_a_sharded_tensor_is_refused_with_advice(run_on, stage):
    run_on(2, need_memory, stage=stage)


def step_hooks(with_closure):
    module, _, optimizer, engine = make(2)
    seen = []
    expected = list(module.parameters())
    optimizer.register_step_pre_hook(lambda own, *_: seen.append(own.param_groups[0]["params"]))
    optimizer.register_step_post_hook(lambda own, *_: seen.append(own.param_groups[0]["params"]))
    optimizer.step(lambda: torch.zeros(())) if with_closure else optimizer.step()
    assert [[id(p) for p in parameters] for parameters in seen] == 2 * [[id(p) for p in expected]]
    engine.close()


@pytest.mark.parametrize("with_closure", [False, True])
def test_step_hooks_of_the_user_see_the_modules_parameters(run_on, with_closure):
    run_on(2, step_hooks, with_closure=with_closure)


def keep_gradients(stage):
    """Multi-task methods: one loss after the other, with each loss's gradients kept."""
    module, reference, _, engine = make(stage)
    kept = {model: [] for model in (module, reference)}
    for scale in (1, 10, 100):
        for model in (module, reference):
            model.zero_grad()
            (scale * model[:2](torch.ones(2, 7)).square().mean()).backward()  # the last layer gets no gradient
            kept[model].append([p.grad for p in model[0].parameters()])
    for ours, theirs in zip(kept[module], kept[reference], strict=True):
        torch.testing.assert_close(plain(ours), plain(theirs), **CLOSE)
    for model in (module, reference):
        model[2].weight.grad = None
        model(torch.ones(2, 7)).square().mean().backward()
    for ours, theirs in pairs(module, reference):
        torch.testing.assert_close(plain(ours.grad), plain(theirs.grad), **CLOSE)
    engine.close()


@pytest.mark.behaviour("The module", "Gradients kept across `zero_grad`, as in multi-task methods")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_user_code_keeps_are_not_overwritten_by_the_next_backward_pass(run_on, world_size, stage):
    run_on(world_size, keep_gradients, stage=stage)


def keep_local_gradients(as_views, dropped, last_is_synchronised):
    module, reference, _, engine = make(1)
    kept = {model: [] for model in (module, reference)}
    for model in (module, reference):
        model.zero_grad()
        for scale in (1, 10, 100):
            is_last = scale == 100
            with nullcontext() if model is reference or (is_last and last_is_synchronised) else engine.no_sync():
                (scale * model(torch.ones(2, 7)).square().mean()).backward()
            if not is_last:
                gradients = [model[index].weight.grad for index in dropped]
                kept[model] += [(g.detach().view(-1) if as_views else g, g.clone()) for g in gradients]
                for index in dropped:
                    model[index].weight.grad = None
    for (ours, _), (_, theirs) in zip(kept[module], kept[reference], strict=True):
        torch.testing.assert_close(ours.view(theirs.shape), theirs, **CLOSE)
    for ours, theirs in pairs(module, reference):
        torch.testing.assert_close(plain(ours.grad), plain(theirs.grad), **CLOSE)
    engine.close()


@pytest.mark.behaviour("The module", "Gradients kept across `zero_grad`, as in multi-task methods")
@pytest.mark.parametrize("last_is_synchronised", [True, False])
@pytest.mark.parametrize("dropped", [(0,), (0, 2)], ids=["one parameter", "two parameters"])
@pytest.mark.parametrize("as_views", [False, True])
def test_local_gradients_that_user_code_keeps_are_not_overwritten(run_on, as_views, dropped, last_is_synchronised):
    run_on(2, keep_local_gradients, as_views=as_views, dropped=dropped, last_is_synchronised=last_is_synchronised)


def extremes_and_norms_of_odd_values():
    module, _, _, engine = make(3)
    weight = module[0].weight
    for element in (0, -1):  # of rank 0's part, and of the last rank's
        for value in (float("nan"), float("inf"), -float("inf")):
            whole = torch.linspace(-1, 1, weight.numel()).view(weight.shape)
            whole.view(-1)[element] = value
            with torch.no_grad():
                weight.copy_(whole)
            for read in (
                lambda p: p.max(),
                lambda p: p.min(),
                lambda p: p.norm(float("inf")),
                lambda p: p.norm(-float("inf")),
                lambda p: torch.nn.utils.get_total_norm([p.detach()], float("inf")),
                lambda p: (p > 0).max(),
                lambda p: (p > 0).min(),
                lambda p: p.isnan().any(),
            ):
                torch.testing.assert_close(plain(read(weight)), plain(read(whole)), rtol=0, atol=0, equal_nan=True)
    engine.close()
    module, reference, _, engine = make(3, dtype=torch.float16)
    for ours, theirs in pairs(module, reference):
        for read in (lambda p: (1e3 * p.detach()).norm(), lambda p: (p.detach() * 1e-4).norm()):
            torch.testing.assert_close(plain(read(ours)), plain(read(theirs)), rtol=2e-3, atol=0)
    engine.close()


def test_nan_and_infinity_are_seen_in_any_ranks_shard_and_norms_stay_in_range(run_on):
    run_on(2, extremes_and_norms_of_odd_values)


class Filled(TorchDispatchMode):
    """Counts tensors that are filled with a value."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, ShardedTensor) for kind in types):
            return NotImplemented  # so that the operators on local ranges are counted
        self.number += "full" in str(func) or "zeros" in str(func)
        return func(*args, **(kwargs or {}))


def clip_many_parameters(stage):
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    engine = Engine(module, [], stage=stage)
    module(torch.ones(2, 8)).sum().backward()
    assert sum(parameter.grad.local.numel() == 0 for parameter in module.parameters()) >= 19
    with Filled() as filled:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    assert filled.number <= 3  # the norms of absent ranges, and of other ranks
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_needs_no_kernel_for_each_parameter_of_other_ranks(run_on, stage):
    run_on(2, clip_many_parameters, stage=stage, merges_units=True)


def edit_optimizer_state(stage):
    module, reference, optimizer, engine = make(stage)
    other = torch.optim.Adam(reference.parameters())
    for each, parameters in ((optimizer, module.parameters()), (other, reference.parameters())):
        each.step()
        for p in parameters:
            each.state[p]["exp_avg"].mul_(0.5)
            each.state[p]["exp_avg_sq"].add_(1e-3)
        each.step()
    for ours, theirs in pairs(module, reference):
        torch.testing.assert_close(plain(ours), theirs.detach(), **CLOSE)
        if world_size() == 1:  # nothing is sharded
            optimizer.state[ours] = {"step": torch.tensor(1.0)}
            assert list(optimizer.state[ours]) == ["step"]
            del optimizer.state[ours]
            assert ours not in optimizer.state
            continue
        with pytest.raises(TypeError, match=r"state of '.*' is sharded together.*optimizer\.state\.clear\(\)"):
            optimizer.state[ours] = {}
        with pytest.raises(TypeError, match="cannot be replaced or removed alone"):
            del optimizer.state[ours]
        with pytest.raises(TypeError):
            optimizer.state[ours]["exp_avg"] = torch.zeros(())
    engine.close()


@pytest.mark.behaviour("The module", "`optimizer.state[p]` read, and its tensors written to")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_writes_to_optimizer_state_tensors_take_effect_and_sharded_states_stay_sharded(run_on, world_size, stage):
    run_on(world_size, edit_optimizer_state, stage=stage)


def use_optimizer_state_as_a_dict(stage):
    """Every method of `optimizer.state` finds the state of a parameter, or says that it cannot be replaced alone."""
    module, reference, optimizer, engine = make(stage)
    other = torch.optim.Adam(reference.parameters())
    optimizer.step()
    other.step()
    for ours, theirs in pairs(module, reference):
        default = {}
        found = optimizer.state.setdefault(ours, default)
        assert found is not default and found.keys() == other.state[theirs].keys()
        if world_size() == 1:  # nothing is sharded
            optimizer.state.update({ours: default})
            assert optimizer.state[ours] is default
            optimizer.state |= {ours: found}
            assert optimizer.state[ours] is found and optimizer.state.setdefault(ours, default) is found
            continue
        for replace in (lambda p: optimizer.state.update({p: {}}), lambda p: optimizer.state.__ior__({p: {}})):
            with pytest.raises(TypeError, match="cannot be replaced or removed alone"):
                replace(ours)
        torch.testing.assert_close(plain(optimizer.state[ours]["exp_avg"]), other.state[theirs]["exp_avg"])
    optimizer.state.update({"mine": {"count": 1}})
    assert optimizer.state["mine"] == {"count": 1}
    optimizer.state.clear()
    assert "mine" not in optimizer.state
    for p in module.parameters():
        assert p not in optimizer.state and optimizer.state.get(p) is None
    optimizer.step()
    for p in module.parameters():
        assert p in optimizer.state and optimizer.state[p]["step"] == 1
    engine.close()


@pytest.mark.behaviour("The module", "`optimizer.state[p]` read, and its tensors written to")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_all_methods_of_optimizer_state_find_the_state_of_a_parameter(run_on, world_size, stage):
    run_on(world_size, use_optimizer_state_as_a_dict, stage=stage)
