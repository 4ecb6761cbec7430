"""Modules that cannot be sharded are refused with advice, and are not changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from lightning_zero.engine import Engine


def with_distributed_weight(module):
    weight = distribute_tensor(
        module[1].weight.detach(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    )
    module[1].weight = nn.Parameter(weight)


class Scale(nn.Module):
    """A module without any method that initialises it."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2))
        self.register_buffer("offset", torch.zeros(2))


def on_meta(module):
    module.append(Scale().to("meta"))


def lazy(module):
    module[1] = nn.LazyLinear(2)


def sharded(module):
    module.engine = Engine(module[1])


def quantised(module):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(module[1], Int8WeightOnlyConfig())


def quantised_later(module):
    from bitsandbytes.nn import Linear4bit

    module[1] = Linear4bit(2, 2, device="meta")


def made_of_two(module):
    module[1].weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))


def sparse(module):
    module[1].weight = nn.Parameter(torch.eye(2).to_sparse())


REFUSED = {
    "meta": (on_meta, r"^2\.factor, 2\.offset: on the meta device without values, and there is no .* in Scale"),
    "lazy": (lazy, r"1\.weight is not initialised yet: run a batch through the lazy module first"),
    "sharded": (sharded, r"1\.weight is sharded already: a module can have only one engine at a time"),
    "distributed": (
        with_distributed_weight,
        r"1\.weight is a DTensor, but parameters must be ordinary tensors: remove fully_shard\(\.\.\.\)",
    ),
    "quantised": (
        quantised,
        r"1\.weight is of the tensor subclass torchao\..*Int8Tensor, which cannot be divided.*quantize='nf4'",
    ),
    "quantised later": (
        quantised_later,
        r"^1\.weight has no values that could be quantised: load them in configure_model",
    ),
    "made of two": (made_of_two, r"1\.weight is of the tensor subclass .*TwoTensor, which cannot be divided"),
    "sparse": (sparse, r"1\.weight is a tensor of layout torch\.sparse_coo, which cannot be divided"),
}


def refuse(kind):
    prepare, message = REFUSED[kind]
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    prepare(module)
    with pytest.raises(ValueError, match=message):
        Engine(module, [torch.optim.SGD(module[0].parameters(), lr=0.1)])
    assert all(type(parameter) is nn.Parameter for parameter in module[0].parameters())
    module[0](torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_that_cannot_be_sharded_is_refused_and_left_unchanged(run_on, kind):
    run_on(2, refuse, kind=kind)


class Packed(nn.Parameter):
    """A parameter with integers and its own functions, like those of 4-bit layers."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


def accept():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.packed = Packed(torch.arange(4, dtype=torch.uint8), requires_grad=False)
    Engine(module, [torch.optim.SGD(module[0].parameters(), lr=0.1)])
    assert module.packed.tolist() == [0, 1, 2, 3]


def test_parameters_of_a_subclass_of_parameter_are_accepted(run_on):
    run_on(2, accept)
