"""Slots and sharded checkpoints are read as they were written; tests of killed jobs are in tests/resilience."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Adam

from lightning_zero.checkpoint.checksums import DamagedCheckpointError
from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.checkpoint.saving import content_of, save_in_parts
from lightning_zero.checkpoint.slots import About, Slot, SlotWriter, kept_state_of, open_slots
from lightning_zero.engine import Engine
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.engine.tensor.sharded_tree import in_parts, walk
from lightning_zero.io.labels import new_label
from tests.support.training import same_values
from tests.support.workers import rank

NUMBERS = {
    torch.float64: [1 / 3, math.inf, -0.0, 5e-324],
    torch.float32: [0.1, 1e-45, math.nan],
    torch.float16: [0.1],
    torch.bfloat16: [0.1, 3e38],
    torch.float8_e4m3fn: [0.1],
    torch.complex64: [0.1 - 2j],
    torch.int64: [2**62 + 1, -(2**63)],
    torch.uint8: [255],
    torch.bool: [True],
}

Keep = Callable[[dict[str, Any]], dict[str, Any]]


def in_memory(tree: dict[str, Any]) -> dict[str, Any]:
    """Read the tensors that are still in files."""
    return walk(tree, Tensor.clone, lambda leaf: isinstance(leaf, LazyTensor))


@contextmanager
def slot_in(folder: Path) -> Iterator[Keep]:
    """A function that writes a tree to a slot, over the one before, and reads it."""
    path = str(folder / "0.0")
    writer, numbers = SlotWriter(path), itertools.count(1)

    def keep(tree: dict[str, Any]) -> dict[str, Any]:
        number = next(numbers)
        about = About(attempt=0, number=number, step=number, world_size=1, rank=0)
        writer.begin(kept_state_of({"tree": tree}, {}), about, {})()
        slot = Slot.at(path)
        assert slot is not None and slot.verify() and slot.about == about
        opened, _ = open_slots(str(folder), [slot])
        return in_memory(opened.checkpoint["tree"])

    try:
        yield keep
    finally:
        writer.close()


def saved(folder: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Write a tree to a sharded checkpoint, and read it."""
    path = str(folder / "x.ckpt")
    save_in_parts(content_of({"tree": tree}, {}), Destination(path, new_label()), {})
    return in_memory(open_checkpoint(path).checkpoint["tree"])


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_a_tensor_of_one_number_keeps_its_bits(tmp_path, dtype):
    numbers = {str(number): torch.tensor(number, dtype=dtype) for number in NUMBERS[dtype]}
    with slot_in(tmp_path) as keep:
        found = keep(numbers)
    for name, number in numbers.items():
        assert type(found[name]) is Tensor and found[name].dtype == dtype and found[name].shape == ()
        assert found[name].view(-1).view(torch.uint8).tolist() == number.view(-1).view(torch.uint8).tolist()


def test_each_copy_has_the_layout_of_its_own_values(tmp_path):
    """Shapes, dtypes and names change from copy to copy, and values do in every copy."""
    rows = torch.arange(2**21, dtype=torch.float32).view(2**11, -1)  # two pieces
    with slot_in(tmp_path) as keep:
        for tree in (
            {"a": rows, "b": torch.ones(3, dtype=torch.bfloat16), "step": torch.tensor(1.0)},
            {"a": rows + 1, "b": torch.zeros(3, dtype=torch.bfloat16), "step": torch.tensor(2.0)},
            {"a": torch.ones(5), "b": rows[:, ::2], "step": torch.tensor([3.0])},
            {"c": torch.ones(5), "b": torch.empty(0, 4), "more": rows.double().repeat(2, 1)},
            {"c": torch.zeros(5), "b": torch.empty(0, 4), "more": rows.double().repeat(2, 1) - 1},
        ):
            same_values(keep(tree), tree, "tree")


def test_a_slot_has_tensors_of_any_layout_and_the_versions_of_modules(tmp_path):
    values = torch.randn(3, dtype=torch.complex64)
    views = {"conj": values.conj(), "one": values.conj()[0], "neg": torch._neg_view(values.real.clone())}
    state = nn.BatchNorm1d(3).state_dict()
    other = [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.nested.as_nested_tensor([torch.ones(2)])]
    with slot_in(tmp_path) as keep:
        found = keep({"views": views, "state": state, "other": other})
    assert all(torch.equal(found["views"][name], value) for name, value in views.items())
    assert found["state"]._metadata == state._metadata
    *sparse, nested = found["other"]
    assert all(torch.equal(each.to_dense(), torch.eye(3)) for each in sparse)
    assert torch.equal(nested.unbind()[0], torch.ones(2))


def test_a_slot_has_the_values_of_parameters_that_require_gradients(tmp_path):
    with slot_in(tmp_path) as keep:
        same_values(keep({"w": torch.nn.Parameter(torch.ones(3))}), {"w": torch.ones(3)}, "tree")


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Small tensors of any shape, also empty ones, and views: transposed, strided or expanded."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]))
    tensor = torch.randint(99, draw(st.lists(st.integers(0, 3), max_size=3))).to(dtype)
    if tensor.dim() and draw(st.booleans()):
        tensor = draw(
            st.sampled_from([tensor.mT if tensor.dim() > 1 else tensor, tensor[::2], tensor.expand(2, *tensor.shape)])
        )
    return tensor


NAMES = st.sampled_from("abcde")
TREES = st.dictionaries(NAMES, tensors() | st.dictionaries(NAMES, tensors(), min_size=1, max_size=3), min_size=1)


@settings(max_examples=100, deadline=None)
@given(trees=st.lists(TREES, min_size=1, max_size=3), twice=st.booleans())
def test_any_tree_is_read_as_it_was_written(trees, twice):
    with tempfile.TemporaryDirectory() as name, slot_in(Path(name)) as keep:
        for tree in trees:
            written = tree | {"tied": next(iter(tree.values()))} if twice else tree
            same_values(keep(written), written, "slot")
        same_values(saved(Path(name), written), written, "checkpoint")


def keep_together(folder: str) -> None:
    """Each rank keeps its shards of weights and optimizer states, and rank 0 also keeps values that are not sharded."""
    torch.manual_seed(0)
    module = nn.Linear(7, 5)
    optimizer = Adam(module.parameters())
    engine = Engine(module, [optimizer], stage=3)
    module(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    state = engine.full_optimizer_state_dict(optimizer, leaf=in_parts)["state"]
    expected = engine.full_optimizer_state_dict(optimizer)["state"]
    weights = engine.full_state_dict()

    def kept(number: int, extra: dict[str, Any]) -> dict[str, Any]:
        tree = {"state_dict": module.state_dict(), "again": module.weight, "states": state, "mean": torch.ones(2, 2)}
        rest = {"callback": torch.arange(3), "part": state[0]["exp_avg"], "object": {1: Fraction(1, 3)}, **extra}
        about = About(0, number, step=number, world_size=2, rank=rank())
        writer = SlotWriter(os.path.join(folder, f"{rank()}.{number}"))
        writer.begin(kept_state_of(tree, rest, rank()), about, {"rank": rank()})()
        writer.close()
        dist.barrier()
        slots = [slot for other in (0, 1) if (slot := Slot.at(os.path.join(folder, f"{other}.{number}"))) is not None]
        opened, own = open_slots(folder, slots)
        assert own == [{"rank": 0}, {"rank": 1}]
        return opened.checkpoint

    found = kept(0, {})
    assert type(found["callback"]) is Tensor and isinstance(found["mean"], LazyTensor)
    assert found["again"] is found["state_dict"]["weight"] and found["part"] is found["states"][0]["exp_avg"]
    assert found["object"] == {1: Fraction(1, 3)}
    values = {"state_dict": weights, "states": expected, "mean": torch.ones(2, 2), "callback": torch.arange(3)}
    same_values({name: in_memory(found[name]) for name in values}, values, "slots")
    with pytest.raises(DamagedCheckpointError, match="different numbers of sharded tensors, \\(7, 6\\)"):
        kept(1, {"only here": module.bias.detach() * 2} if rank() == 0 else {})
    engine.close()


def test_slots_of_several_ranks_are_read_as_one_state(run_on, tmp_path):
    run_on(2, keep_together, folder=str(tmp_path))
