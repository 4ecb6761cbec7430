"""``torch.compile`` of a transformers model under a Trainer: DDP's numbers, and no more graphs than with FSDP2."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_zero import ZeroStrategy
from tests.libraries.training import Learner, fit, same_learning
from tests.support import world_size
from tests.support.graphs import CountingBackend


class Compiled(Learner):
    """Compiles in `configure_model`, and shards there for FSDP2, whose strategy requires it.

    Arguments:
        way: what is compiled: "model", "training_step", or "" for nothing.
    """

    def __init__(self, name, way, backend, fsdp2=False):
        super().__init__(name)
        self.way, self.backend, self.fsdp2, self.configured = way, backend, fsdp2, False

    def configure_model(self):
        if self.configured:
            return
        self.configured = True
        if self.fsdp2:
            for part in (*self.model.model.layers, self.model):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])
        if self.way == "model":
            self.model = torch.compile(self.model, backend=self.backend)
        if self.way == "training_step":
            self.training_step = torch.compile(self.training_step, backend=self.backend)


def count(strategy, name, way, **options):
    """Fit; return the run and Dynamo's counts."""
    backend = CountingBackend()

    def make():
        if way == "module":  # as Lightning takes it: torch.compile(LightningModule)
            return torch.compile(Compiled(name, "", backend, **options), backend=backend)
        return Compiled(name, way, backend, **options)

    run = fit(strategy, make, limit_val_batches=0)
    return run, backend.counts()


def compare(name, way):
    warnings.simplefilter("ignore")
    reference, _ = count("ddp", name, way)
    fsdp2 = ModelParallelStrategy(data_parallel_size=world_size(), tensor_parallel_size=1)
    # with this strategy Lightning refuses a compiled module, so its training_step is compiled instead
    _, allowed = count(fsdp2, name, "training_step" if way == "module" else way, fsdp2=True)
    assert allowed["graphs"] > 0, "nothing was compiled"
    run, found = count(ZeroStrategy(3), name, way)
    same_learning(run, reference, bound=0)
    assert found["operators"] >= allowed["operators"], f"{found}, with FSDP2 {allowed}"
    for what in ("graphs", "unique graphs", "breaks"):
        assert found[what] <= allowed[what], f"{found}, with FSDP2 {allowed}"


@pytest.mark.exhaustive
@pytest.mark.behaviour("The module", "`torch.compile` of a transformers model, and of the whole LightningModule")
@pytest.mark.parametrize("way", ["model", "module"])
@pytest.mark.timeout(360)  # three compilations
def test_a_compiled_model_learns_as_under_ddp_with_no_more_graphs_than_under_fsdp2(run_on, way):
    run_on(2, compare, timeout=330, name="Llama", way=way)
