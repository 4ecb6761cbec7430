"""Background saves copy values in the background: only a write to such values waits, and only for the copy."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from lightning_zero import full_parameters
from lightning_zero.checkpoint.objects import Ranks
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.checkpoint.saver import SaveJob, SaveMode, Saver
from lightning_zero.checkpoint.saving import CopyBuffer, by_name, names_in
from lightning_zero.engine import Engine
from lightning_zero.engine.offload import DiskStates
from lightning_zero.engine.tensor.sharded_tree import in_parts
from tests.support import rank


class Clipped(nn.Module):
    """Writes to its own weight while it computes with it, as nets with a bounded Lipschitz constant do."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(5, 9), nn.Parameter(torch.randn(9, 7))

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return self.first(x) @ self.weight


def train(model, optimizer, seed):
    torch.manual_seed(seed)
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def to_all_states(model, optimizer, average):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def to_one_state(model, optimizer, average):
    optimizer.state[model[1].weight]["exp_avg"].zero_()


def by_load(model, optimizer, average):
    model.load_state_dict({name: torch.zeros(value.shape) for name, value in model.state_dict().items()})


def by_data(model, optimizer, average):
    for parameter in model.parameters():
        parameter.data.mul_(2)


def whole(model, optimizer, average):
    with full_parameters(model, writeback=True), torch.no_grad():
        model[1].weight.zero_()


def to_an_average(model, optimizer, average):
    for tensor in average.values():
        tensor.mul_(0.5)


def by_a_step(model, optimizer, average):
    train(model, optimizer, 2)


def by_a_module(model, optimizer, average):
    model(torch.randn(4, 5))


WRITES = {
    write.__name__: write
    for write in (by_a_step, by_a_module, by_load, by_data, whole, to_one_state, to_all_states, to_an_average)
}


def saved_while_written(folder, stage, form, name, offload=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), Clipped())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    engine = Engine(model, [optimizer], stage=stage, offload=offload and {**offload, "path": folder.parent / "swap"})
    average = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    train(model, optimizer, 1)

    def values():
        states = engine.full_optimizer_state_dict(optimizer)["state"]
        return {
            **{key: value.clone() for key, value in engine.full_state_dict().items()},
            **{f"average {key}": torch.tensor(tensor.tolist()) for key, tensor in average.items()},
            **{f"{key} {number}": value for number, state in states.items() for key, value in state.items()},
        }

    kind, method = (CopyBuffer, "copied") if offload is None else (DiskStates, "read")
    call, begun = getattr(kind, method), threading.Event()

    def late(*args):
        if threading.current_thread().name.startswith("lightning_zero-checkpoint"):
            begun.wait()
            time.sleep(0.2)  # during which the write begins, and waits
        return call(*args)

    before, saver = values(), Saver(in_background=True)
    setattr(kind, method, late)
    try:
        states = engine.full_optimizer_state_dict(optimizer, leaf=in_parts)
        if form == "sharded":
            states = by_name(states, names_in(optimizer, {id(p): key for key, p in model.named_parameters()}))
            tree = {"state_dict": model.state_dict(), "optimizer_0": states, "average": average}
            job = SaveJob(SaveMode.SHARDED, folder, {}, tree)
        else:
            tree = {"state_dict": model.state_dict(), "optimizer_states": [states], "average": average}
            job = SaveJob(SaveMode.ASSEMBLED, folder, tree)
        saver.save(job, Ranks(rank(), engine.communicator.control.gather_objects))
        begun.set()
        WRITES[name](model, optimizer, average)
        saver.finish()
    finally:
        setattr(kind, method, call)
    engine.communicator.control.gather_objects(None)  # wait until rank 0, or every rank, has written

    read = open_checkpoint(folder).checkpoint
    states = read["optimizer_states"][0]["state"]
    found = {
        **read["state_dict"],
        **{f"average {key}": tensor for key, tensor in read["average"].items()},
        **{f"{key} {number}": value for number, state in states.items() for key, value in state.items()},
    }
    assert found.keys() == before.keys()
    assert [key for key in before if not torch.equal(found[key] + 0, before[key])] == []
    after = values()
    assert any(not torch.equal(after[key], before[key]) for key in before), "nothing was written"


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", WRITES)
def test_values_written_to_during_a_background_save_are_saved_as_they_were(run_on, tmp_path, stage, form, name):
    run_on(2, saved_while_written, folder=tmp_path / "c.ckpt", stage=stage, form=form, name=name)


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.exhaustive
def test_values_on_disk_written_to_during_a_background_save_are_saved_as_they_were(run_on, tmp_path, name):
    offload = {"optimizer": "nvme", "parameters": "nvme"}
    run_on(2, saved_while_written, folder=tmp_path / "c.ckpt", stage=3, form="sharded", name=name, offload=offload)


def waits_for_nothing(folder, form):
    """Forward and backward passes continue while the states are being copied and, for one file, gathered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    optimizer = torch.optim.Adam(model.parameters())
    engine = Engine(model, [optimizer], stage=3)
    train(model, optimizer, 1)
    copied, computed, steps = CopyBuffer.copied, threading.Event(), []

    def late(memory, entries, after=None):
        if entries and threading.current_thread() is not threading.main_thread():
            assert computed.wait(30), "training waits for the copy before it has to"
            steps.append("copied")
        return copied(memory, entries, after)

    saver = Saver(in_background=True)
    CopyBuffer.copied = late
    try:
        tree = {"state_dict": model.state_dict()}
        job = SaveJob(SaveMode.SHARDED, folder, {}, tree)
        if form == "full":
            job = SaveJob(SaveMode.ASSEMBLED, folder, tree)
        saver.save(job, Ranks(rank(), engine.communicator.control.gather_objects))
        model(torch.randn(4, 5)).square().mean().backward()
        computed.set()
        optimizer.step()
        steps.append("stepped")
        saver.finish()
    finally:
        CopyBuffer.copied = copied
    assert steps == ["copied", "stepped"]


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_forward_and_backward_passes_do_not_wait_for_a_background_save(run_on, tmp_path, form):
    run_on(2, waits_for_nothing, folder=tmp_path / "c.ckpt", form=form)
