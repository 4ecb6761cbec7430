"""Writes checkpoints with FSDP and FSDP2, through Lightning's strategies and with torch alone, on a worker pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from tests.checkpoint.small_model import AFTER, BEFORE, SmallLearner, batch, make_model, make_optimizer
from tests.support.trainer import make_trainer
from tests.support.workers import rank

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
FORMS = ["model-optim", "other-names", "deeper", "with-average", "flattened", "bare-weights", "whole-file"]
"""Formats that torch alone writes."""


def sharded_by_fsdp1() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return FullyShardedDataParallel(make_model(), device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu"))


def sharded_by_fsdp2() -> nn.Module:
    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.blocks, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def write_by_torch(shard: Callable[[], nn.Module], folder: Path) -> None:
    """Train, save in every form, write `expected.pt`, continue training, and write `later.pt`."""
    model = shard()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(BEFORE))
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    forms: dict[str, dict[str, Any]] = {
        "model-optim": {"model": weights, "optim": state, "step": BEFORE},
        "other-names": {"net": weights, "opt": state},
        "deeper": {"app": {"weights": weights, "adam": state}, "epoch": 1},
        "with-average": {"model": weights, "optim": state, "average": weights, "rng": {"cpu": torch.get_rng_state()}},
        "flattened": {
            "model": weights,
            "optim": get_optimizer_state_dict(model, optimizer, options=FLATTENED),
        },
        "bare-weights": weights,
    }
    for name, saved in forms.items():
        dcp.save(saved, checkpoint_id=folder / name)
    whole = {"model": whole_weights(model), "optimizer": whole_state(model, optimizer)}
    if rank() == 0:
        torch.save(whole, folder / "whole-file")
        torch.save(whole, folder / "expected.pt")
    train(model, optimizer, range(BEFORE, BEFORE + AFTER))
    later = whole_weights(model)
    if rank() == 0:
        torch.save(later, folder / "later.pt")


def whole_weights(model: nn.Module) -> dict[str, Any]:
    if isinstance(model, FullyShardedDataParallel):  # torch 2.13 crashes on FULL_STATE_DICT with tied weights on CPU
        return put_together(get_model_state_dict(model))
    return get_model_state_dict(model, options=WHOLE)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if isinstance(model, FullyShardedDataParallel):
        return put_together(get_optimizer_state_dict(model, optimizer))
    return get_optimizer_state_dict(model, optimizer, options=WHOLE)


def put_together(tree: Any) -> Any:
    return tree_map(lambda value: value.full_tensor() if isinstance(value, DTensor) else value, tree)


class SmallLearnerOfFSDP2(SmallLearner):
    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def write_by_lightning(folder: Path) -> None:
    """Write checkpoints with `FSDPStrategy` and `ModelParallelStrategy`."""

    class FSDPOnCPU(FSDPStrategy):
        """Skips the check for a GPU when the module is wrapped; saving needs none."""

        def _setup_model(self, model: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    sizes: dict[str, Any] = {"data_parallel_size": dist.get_world_size(), "tensor_parallel_size": 1}
    strategies = {
        "lightning-fsdp": (FSDPOnCPU(state_dict_type="sharded", use_orig_params=True), SmallLearner),
        "lightning-fsdp2": (ModelParallelStrategy(**sizes), SmallLearnerOfFSDP2),
        "lightning-fsdp2-whole": (
            ModelParallelStrategy(**sizes, save_distributed_checkpoint=False),
            SmallLearnerOfFSDP2,
        ),
    }
    for name, (strategy, learner) in strategies.items():
        module = learner(rank())
        trainer = make_trainer(strategy, max_steps=BEFORE, use_distributed_sampler=False)
        trainer.fit(module)
        trainer.save_checkpoint(folder / name)
        dist.barrier()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train for these steps on this rank's batches; return its losses."""
    losses = []
    for step in steps:
        loss = model(*batch(step, rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
