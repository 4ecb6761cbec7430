"""A lazy tensor behaves as an ordinary tensor in user code; an engine reads only what its rank needs of it."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine
from lightning_zero.engine.init.deferred_param import (
    give_values,
    is_on_meta,
    taking_values,
    values_may_wait,
)
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from tests.support import rank, world_size
from tests.support.models import OddModel
from tests.support.training import Recipe, batch, prepare, same_tensors

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


class Store:
    """Values, and how many elements of each have been read."""

    def __init__(self, values, origin=True):
        self.values, self.origin, self.read = values, origin, dict.fromkeys(values, 0)

    def tensor(self, name):
        value = self.values[name]

        def read(start, stop):
            self.read[name] += stop - start
            return value.reshape(-1)[start:stop]

        return LazyTensor(name, value.shape, value.dtype, read, ("store", name) if self.origin else None)

    def tensors(self):
        return {name: self.tensor(name) for name in self.values}

    @property
    def total(self):
        return sum(self.read.values())


def stored(value):
    store = Store({"x": value})
    return store.tensor("x"), store


OPERATORS = {
    "a sum": lambda x: x.sum(),
    "addition": lambda x: x + 1,
    "with an ordinary one": lambda x: torch.ones(3, 4) * x,
    "a product": lambda x: x @ x.T,
    "a view": lambda x: x.view(4, 3)[1:, ::2].t(),
    "a clone": lambda x: x.clone(),
    "a cast": lambda x: x.to(torch.float64),
    "no cast": lambda x: x.to(torch.float32) + 0,
    "contiguous": lambda x: x.contiguous() + 0,
    "parts": lambda x: torch.cat(x.split(1)),
    "a list of them": lambda x: torch._foreach_add([x, x], 1)[1],
    "a norm": lambda x: torch.linalg.vector_norm(x),
    "numpy": lambda x: torch.tensor(x.numpy()),
    "a list": lambda x: torch.tensor(x.tolist()),
    "a pickle": lambda x: torch.load(_saved(x)),
    "a copy into another": lambda x: torch.empty(3, 4).copy_(x),
    "a copy into a cast one": lambda x: torch.empty(3, 4, dtype=torch.float16).copy_(x),
    "one element": lambda x: torch.tensor(x[1, 2].item()),
    "where": lambda x: torch.where(x > 3, x, 0.0),
    "under inference mode": lambda x: torch.inference_mode()(lambda: x.reshape(2, 6).clone())(),
}


def _saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_see_the_values_of_a_lazy_tensor(operator):
    value = torch.arange(12.0).view(3, 4)
    tensor, store = stored(value)
    assert torch.equal(OPERATORS[operator](tensor), OPERATORS[operator](value))
    assert store.total and torch.equal(value, torch.arange(12.0).view(3, 4))


def test_operations_that_need_no_values_read_none():
    tensor, store = stored(torch.arange(12.0).view(3, 4))
    assert (tensor.shape, tensor.dtype, tensor.device.type, tensor.is_meta) == ((3, 4), torch.float32, "cpu", False)
    assert tensor.is_contiguous() and tensor.numel() == 12 and not tensor.requires_grad
    assert "LazyTensor('x', shape=(3, 4)" in repr(tensor)
    alias = tensor.detach()
    parameter = nn.Parameter(tensor)
    for each in (alias, parameter, copy.deepcopy(tensor), tensor.data):
        assert isinstance(each, LazyTensor) and each.lazy_values.origin == ("store", "x")
    assert torch.equal(torch.zeros_like(tensor), torch.zeros(3, 4)) and tensor.new_ones(2).tolist() == [1, 1]
    assert torch.empty_like(parameter, device="meta").shape == (3, 4)
    assert parameter.requires_grad and store.total == 0
    assert torch.equal(tensor.shown(3, 7), torch.arange(3.0, 7.0)) and store.total == 4


def test_a_clone_of_a_lazy_tensor_has_its_own_memory():
    value = torch.arange(12.0)
    tensor, _ = stored(value)
    tensor.clone().zero_()
    assert torch.equal(tensor.clone(), torch.arange(12.0)) and float(value.sum()) == 66


def test_conversions_of_a_lazy_tensor_read_nothing_and_round_as_for_an_ordinary_tensor():
    value = torch.linspace(0, 1, 12)
    tensor, store = stored(value)
    conversions = {
        "narrower": lambda x: x.half(),
        "and back": lambda x: x.bfloat16().float(),
        "wider": lambda x: x.double(),
        "several": lambda x: x.double().half().to(torch.float32, copy=True),
    }
    found = {name: act(tensor) for name, act in conversions.items()}
    assert store.total == 0
    tensor.zero_()
    for name, act in conversions.items():
        assert found[name].dtype == act(value).dtype and torch.equal(found[name].clone(), act(value)), name


def test_writes_to_a_lazy_tensor_are_kept_and_leave_the_store_unchanged():
    value = torch.arange(12.0).view(3, 4)
    expected = value.clone()
    tensor, store = stored(value)
    alias, other = tensor.detach(), copy.deepcopy(tensor)
    for each in (expected, tensor):
        each.mul_(2)
        each[1].add_(1)
        each.view(-1)[:2] = 7
    assert torch.equal(tensor.clone(), expected) and torch.equal(alias.clone(), expected)
    assert (
        torch.equal(tensor.shown(3, 9), expected.view(-1)[3:9])
        and tensor.lazy_values.origin != other.lazy_values.origin
    )
    assert torch.equal(other.clone(), torch.arange(12.0).view(3, 4)), "a deep copy is another"
    assert torch.equal(value, torch.arange(12.0).view(3, 4))
    later = copy.deepcopy(tensor)
    later.zero_()
    assert torch.equal(tensor.clone(), expected)


def test_a_lazy_scalar_behaves_as_a_number():
    tensor, _ = stored(torch.tensor(2.5))
    assert float(tensor) == 2.5 and tensor.item() == 2.5 and f"{tensor:.1f}" == "2.5" and bool(tensor == 2.5)


def test_writes_to_a_tensor_that_writes_to_its_store_change_the_store():
    value = torch.ones(3)
    tensor = LazyTensor("x", (3,), value.dtype, lambda start, stop: value[start:stop], write=value.copy_)
    tensor.mul_(2)
    assert value.tolist() == tensor.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match=r"LazyTensor\('x'.* has no memory .* tensor\.clone\(\)"):
        tensor.storage()


@pytest.mark.parametrize("make, kind", [(nn.Parameter, nn.Parameter), (torch.Tensor.detach, torch.Tensor)])
def test_access_to_the_memory_of_a_lazy_tensor_is_refused_and_set_replaces_it(make, kind):
    value = torch.arange(12.0).view(3, 4)
    tensor = make(stored(value)[0])
    assert tensor.data_ptr() == tensor.detach().data_ptr() == tensor.data.data_ptr()
    assert tensor.data_ptr() != copy.deepcopy(tensor).data_ptr(), "projects count distinct parameters by data_ptr()"
    for access in (torch.Tensor.storage, torch.Tensor.untyped_storage):
        with pytest.raises(RuntimeError, match=r"LazyTensor\('x', shape=\(3, 4\).*no memory of its own: call .*clone"):
            getattr(tensor, access.__name__)()
    alias = tensor.detach()
    with torch.no_grad():
        tensor.set_(value + 1)
        assert type(tensor) is kind and torch.equal(tensor, value + 1)
        tensor.zero_()
    assert torch.equal(alias, value) and torch.equal(value, torch.arange(12.0).view(3, 4))


def test_the_data_of_a_lazy_parameter_is_replaced_without_a_read():
    tensor, store = stored(torch.arange(3.0))
    parameter = nn.Parameter(tensor)
    parameter.data = torch.ones(5, dtype=torch.float64)
    assert store.total == 0 and type(parameter) is nn.Parameter and parameter.sum().item() == 5


def test_a_gradient_stays_when_a_module_is_converted():
    modules = [nn.Linear(3, 2), nn.Linear(3, 2)]
    modules[1].load_state_dict(Store(modules[0].state_dict()).tensors(), assign=True)
    for module in modules:
        module.weight.square().sum().backward()
        module.double()
        assert torch.equal(module.weight.grad, 2 * module.weight)
    assert torch.equal(modules[0].weight, modules[1].weight)


def test_ordinary_and_meta_modules_load_lazy_tensors():
    source = OddModel()
    state = {name: value.clone() for name, value in source.state_dict().items()}
    for case in ("ordinary", "assigned", "meta"):
        with torch.device("meta" if case != "ordinary" else "cpu"):
            module = OddModel()
        tensors = Store(state).tensors()
        if case == "meta":
            with taking_values(module, is_on_meta) as targets:
                module.load_state_dict(tensors)
            give_values(targets, wait=False)
            assert not any(isinstance(parameter, LazyTensor) for parameter in module.parameters())
        else:
            module.load_state_dict(tensors, assign=case == "assigned")
        same_tensors(module.state_dict(), state, bound=0)
        assert torch.equal(module(*batch(0)), source(*batch(0)))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        same_tensors(source.state_dict(), state, bound=0)


# -- engines -----------------------------------------------------------------------------------------------------------


def most(model, copies=1):
    """The most elements a rank may read: its shard of each bucket, which ends with padding."""
    numel = sum(parameter.numel() for parameter in model.parameters())
    return copies * (numel / world_size() + 64 * len(list(model.modules())))


def given_to_engines(stage):
    torch.manual_seed(5)
    state = {name: value.clone() for name, value in OddModel().state_dict().items()}
    numel = sum(value.numel() for value in state.values())
    for case in ("waiting", "assigned", "own"):
        store = Store(state, origin=case != "own")
        with torch.device("meta"):
            model = OddModel()
        if case == "assigned":
            model.load_state_dict(store.tensors(), assign=True)
        else:
            with values_may_wait(), taking_values(model, is_on_meta) as targets:
                model.load_state_dict(store.tensors())
            give_values(targets, wait=True)
        assert store.total == 0
        engine = Engine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], stage=stage)
        if case == "own":  # ranks may have different values: rank 0's are used
            assert store.total == (numel if rank() == 0 else 0)
        else:
            assert store.total <= (most(model) if stage == 3 else numel)
        same_tensors(engine.full_state_dict(), state, bound=0)
        assert not any(hasattr(parameter, "lazy_values") for parameter in model.parameters())
        engine.close()
        same_tensors(model.state_dict(), state, bound=0)


@STAGES
def test_an_engine_reads_only_each_ranks_share_when_it_shards_the_module(run_on, stage):
    run_on(2, given_to_engines, stage=stage)


def assigned_with_buffers():
    torch.manual_seed(5)
    source = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    nn.init.normal_(source[1].running_mean)
    store = Store(source.state_dict())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.load_state_dict(store.tensors(), assign=True)
    model.to(torch.float64)
    assert store.read["0.weight"] == 0, "a conversion reads nothing"
    engine = Engine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], stage=3)
    assert not any(isinstance(buffer, LazyTensor) for buffer in model.buffers())
    expected = {name: value.double() if value.dim() else value for name, value in source.state_dict().items()}
    same_tensors(engine.full_state_dict(), expected, bound=0)
    model.train()(torch.ones(2, 3, dtype=torch.float64))
    engine.close()


def test_a_module_with_assigned_values_is_converted_unread_and_gets_ordinary_buffers(run_on):
    run_on(2, assigned_with_buffers)


def flattened(state):
    return {f"{i}.{k}": v for i, values in state["state"].items() for k, v in values.items() if v.dim()}


def loaded_into_engines(stage, dtype):
    model, optimizer = prepare(Recipe(dtype=dtype))
    engine = Engine(model, [optimizer], stage=stage)
    for step in range(2):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state, masters = (
        engine.full_state_dict(),
        engine.full_optimizer_state_dict(optimizer),
        engine.masters_by_name(),
    )
    engine.close()

    model, optimizer = prepare(Recipe(dtype=dtype))
    engine = Engine(model, [optimizer], stage=stage)
    of_weights, of_moments, of_masters = Store(weights), Store(flattened(state)), Store(masters)
    model.load_state_dict(of_weights.tensors())
    instead = {
        i: {k: of_moments.tensor(f"{i}.{k}") if v.dim() else v for k, v in values.items()}
        for i, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": instead})
    engine.load_masters(of_masters.tensors())
    share = most(model)
    assert of_weights.total <= (share if stage == 3 else math.inf)
    assert of_moments.total <= 2 * share and of_masters.total <= share
    same_tensors(engine.full_state_dict(), weights, bound=0)
    same_tensors(engine.masters_by_name(), masters, bound=0)
    same_tensors(flattened(engine.full_optimizer_state_dict(optimizer)), flattened(state), bound=0)
    engine.close()


@STAGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sharded_module_and_its_optimizer_read_only_each_ranks_share(run_on, stage, dtype):
    run_on(2, loaded_into_engines, stage=stage, dtype=dtype)
