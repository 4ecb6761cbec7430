"""The walk over trees with sharded tensors: what it changes, what it leaves alone, and the forms of a tensor."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_zero.engine import Engine
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.sharded_tree import in_parts, is_in_parts, on_cpu, on_meta, walk, whole


class Pair(NamedTuple):
    left: Any
    right: Any


def test_containers_keep_their_class_and_attributes():
    state = OrderedDict(a=torch.zeros(2))
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    tree = {"state": state, "pair": Pair(torch.ones(1), "x"), "default": defaultdict(list, b=[torch.ones(1), 3])}
    found = walk(tree, lambda tensor: tensor + 1)
    assert type(found["state"]) is OrderedDict and found["state"]._metadata == {"": {"version": 2}}
    assert torch.equal(found["state"]["a"], torch.ones(2)) and torch.equal(state["a"], torch.zeros(2))
    assert type(found["pair"]) is Pair and found["pair"].right == "x"
    assert found["default"]["b"][1] == 3 and found["default"]["c"] == []


def test_a_container_in_which_nothing_changes_is_the_same_object():
    tree = {"a": [1, (2, "x")], "b": [torch.ones(1)]}
    found = walk(tree, whole)
    assert found["a"] is tree["a"] and found["b"] is not tree["b"]
    assert walk(tree, in_parts) is tree and walk(tree, whole, is_in_parts) is tree


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.arange(4))


def forms_of_a_state_dict(stage: int) -> None:
    torch.manual_seed(0)
    module = Tied()
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    engine = Engine(module, stage=stage)
    parts = engine.full_state_dict(leaf=in_parts)
    assert isinstance(parts["first.weight"], ShardedTensor) and parts["seen"].data_ptr() == module.seen.data_ptr()
    nested = walk({"in": [parts, parts["first.bias"][1:]]}, on_cpu)["in"]
    assert torch.equal(nested[1], expected["first.bias"][1:])
    for found in (nested[0], engine.full_state_dict()):
        assert found["first.weight"] is found["last.weight"]
        assert all(type(value) is torch.Tensor and torch.equal(value, expected[name]) for name, value in found.items())
        assert found["seen"].data_ptr() != module.seen.data_ptr()
    for name, value in engine.full_state_dict(leaf=on_meta).items():
        assert value.is_meta and (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype)
    engine.close()


def test_a_sharded_state_dict_becomes_whole_on_the_cpu_or_on_the_meta_device(run_on):
    run_on(2, forms_of_a_state_dict, stage=3)


def test_a_state_dict_of_one_rank_becomes_whole_on_the_cpu_or_on_the_meta_device(run_on):
    run_on(1, forms_of_a_state_dict, stage=1)
