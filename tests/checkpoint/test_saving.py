"""A sharded checkpoint has DCP's format: plain tools, FSDP2 and dcp.load read it by name, in full shapes."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.objects import Ranks
from lightning_zero.checkpoint.saving import by_name, content_of, write_folder
from lightning_zero.engine import Engine
from lightning_zero.engine.plan.share import boxes
from lightning_zero.engine.tensor.sharded_tree import in_parts
from lightning_zero.io.labels import new_label
from tests.support import rank
from tests.support.models import CLASSES, VOCABULARY, OddModel
from tests.support.training import Recipe, batch, prepare


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (1, 4, 1, 3), (2, 1, 2, 2, 3)], ids=str)
def test_boxes_tile_every_range_in_order_and_are_few(shape):
    numel = prod(shape)
    for start, stop in itertools.combinations(range(numel + 1), 2):
        for most in (None, 4):
            found = boxes(shape, start, stop, most)
            covered = torch.arange(numel).view(shape)
            elements = [
                covered[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))].flatten() for box in found
            ]
            assert torch.equal(torch.cat(elements), torch.arange(start, stop))
            assert [box.start for box in found] == [int(part[0]) for part in elements]
            assert most is not None or len(found) <= max(2 * len(shape) - 1, 1)


class EvenModel(nn.Module):
    """A model without scalars, which FSDP2 refuses."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 7)
        self.head = nn.Sequential(nn.Linear(7, 15), nn.GELU(), nn.Linear(15, CLASSES))

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), targets.flatten())


def trained(stage, dtype=torch.float32, model=OddModel):
    """A small model after three steps, its engine, and the full state that DDP would have."""
    model, optimizer = prepare(Recipe(model, dtype=dtype))
    engine = Engine(model, [optimizer], stage=stage)
    for step in range(3):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in model.named_parameters()]
    by_number = engine.full_optimizer_state_dict(optimizer)
    order = {id(p): name for name, p in model.named_parameters()}
    in_order = [order[id(p)] for group in optimizer.param_groups for p in group["params"]]
    assert sorted(in_order) == sorted(names)
    return model, optimizer, engine, engine.full_state_dict(), by_name(by_number, in_order), in_order


def save(path, stage, dtype=torch.float32, model=OddModel):
    model, optimizer, engine, weights, state, names = trained(stage, dtype, model)
    tree = {
        "state_dict": model.state_dict(),
        "optimizer_0": by_name(engine.full_optimizer_state_dict(optimizer, leaf=in_parts), names),
    }
    rest = {"epoch": 3, "callbacks": {"kept": [1, 2]}}
    if masters := engine.masters_by_name(leaf=in_parts):
        rest["lightning_zero"] = {"masters": masters}
    content = content_of(tree, rest, Ranks(rank()))
    gather = engine.communicator.control.gather_objects
    label = gather(new_label())[0]
    write_folder(content, Destination(path, label), {"stage": stage}, Ranks(rank(), gather))
    masters = engine.masters_by_name()
    engine.close()
    return weights, state, masters


def plain_dcp(path, stage, dtype):
    weights, state, masters = save(path, stage, dtype)
    if rank() == 0:
        dcp_to_torch_save(path, f"{path}.pt")
        read = torch.load(f"{path}.pt", weights_only=False)
        assert_same(read["state_dict"], weights)
        assert_same(read["optimizer_0"]["state"], state["state"])
        assert read["optimizer_0"]["param_groups"] == state["param_groups"]
        assert_same(read.get("lightning_zero", {}).get("masters", {}), masters)
        wanted = {"state_dict": {name: torch.empty_like(value) for name, value in weights.items()}}
        dcp.load(wanted, checkpoint_id=path, no_dist=True)
        assert_same(wanted["state_dict"], weights)
        rest = torch.load(f"{path}/meta.pt", weights_only=True)
        assert rest["epoch"] == 3 and rest["callbacks"] == {"kept": [1, 2]}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_plain_dcp_reads_a_sharded_checkpoint(run_on, tmp_path, stage, ranks):
    run_on(ranks, plain_dcp, path=str(tmp_path / "x.ckpt"), stage=stage, dtype=torch.float32)


@pytest.mark.parametrize("stage", [1, 3])
def test_plain_dcp_reads_low_precision_weights_and_their_masters(run_on, tmp_path, stage):
    run_on(2, plain_dcp, path=str(tmp_path / "x.ckpt"), stage=stage, dtype=torch.bfloat16)


def into_fsdp2(path):
    weights, state, _ = save(path, 3, model=EvenModel)
    model, _ = prepare(Recipe(EvenModel))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(*batch(9)).backward()
    optimizer.step()
    wanted = {
        "state_dict": get_model_state_dict(model),
        "optimizer_0": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(wanted, checkpoint_id=path)
    set_model_state_dict(model, wanted["state_dict"])
    set_optimizer_state_dict(model, optimizer, wanted["optimizer_0"])
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(model, options=whole)
    moments = get_optimizer_state_dict(model, optimizer, options=whole)
    if rank() == 0:
        assert_same(found, weights)
        assert_same(moments["state"], state["state"])


def test_an_fsdp2_job_continues_from_a_sharded_checkpoint(run_on, tmp_path):
    run_on(2, into_fsdp2, path=str(tmp_path / "x.ckpt"))


def by_the_users_own_calls(path, stage, dtype):
    model, optimizer, engine, weights, *_ = trained(stage, dtype)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    if rank() == 0:
        read = {"model": {name: torch.empty_like(value) for name, value in weights.items()}}
        dcp.load(read, checkpoint_id=path, no_dist=True)
        assert_same(read["model"], weights)
    masters = engine.masters_by_name()
    model(*batch(9)).backward()
    optimizer.step()
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=path)
    model.load_state_dict(state)
    assert_same(engine.full_state_dict(), weights)
    assert_same(engine.masters_by_name(), masters)
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_dcp_saves_and_loads_the_modules_own_state_dict(run_on, tmp_path, stage, dtype):
    """As in DCP's documentation: save(state_dict), and load(state_dict) followed by load_state_dict."""
    run_on(2, by_the_users_own_calls, path=str(tmp_path / "x"), stage=stage, dtype=dtype)


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[name], value)
        else:
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
