"""How each compared system saves and loads: one class per system, set up as its own documentation recommends."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from systems import LEARNING_RATE, fully_shard_blocks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from lightning_zero.checkpoint.objects import Ranks
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.checkpoint.saver import SaveJob, SaveMode, Saver
from lightning_zero.checkpoint.saving import by_name, names_in
from lightning_zero.engine import Engine
from lightning_zero.engine.tensor.sharded_tree import in_parts, on_cpu, on_meta
from lightning_zero.zoo.gpt import GPT


class Ours:
    """Saves and resumes as a Trainer does with ``ZeroStrategy(stage=3, checkpoint=..., async_save=...)``."""

    def __init__(self, model: GPT, in_parts: bool, in_background: bool) -> None:
        self.module: nn.Module = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self._engine = Engine(model, [self.optimizer], stage=3)
        self._saver, self._in_parts, self._in_background = Saver(in_background), in_parts, in_background

    def save(self, path: Path) -> None:
        gather = self._engine.communicator.control.gather_objects
        if self._in_parts:
            names = names_in(self.optimizer, {id(p): name for name, p in self.module.named_parameters()})
            state = self._engine.full_optimizer_state_dict(self.optimizer, leaf=in_parts)
            tree = {"state_dict": self.module.state_dict(), "optimizer_0": by_name(state, names)}
            self._saver.save(SaveJob(SaveMode.SHARDED, path, {}, tree), Ranks(dist.get_rank(), gather))
            return
        if self._in_background:
            state = self._engine.full_optimizer_state_dict(self.optimizer, leaf=in_parts)
            whole = {"state_dict": self.module.state_dict(), "optimizer_states": [state]}
            self._saver.save(SaveJob(SaveMode.ASSEMBLED, path, whole), Ranks(dist.get_rank(), gather))
            return
        is_first = dist.get_rank() == 0
        whole = {
            "state_dict": self._engine.full_state_dict(leaf=on_cpu if is_first else on_meta),
            "optimizer_states": [
                self._engine.full_optimizer_state_dict(self.optimizer, leaf=on_cpu if is_first else on_meta)
            ],
        }
        if is_first:
            self._saver.save(SaveJob(SaveMode.GATHERED, path, whole))

    def is_written(self) -> bool:
        return all(job.done() for job in self._saver._jobs)

    def finish(self) -> None:
        self._saver.finish()

    def load(self, path: Path) -> None:
        opened = open_checkpoint(path)
        opened.verify(share=(dist.get_rank(), dist.get_world_size()))
        dist.barrier()
        self.module.load_state_dict(opened.checkpoint["state_dict"])
        self.optimizer.load_state_dict(opened.checkpoint["optimizer_states"][0])


class FSDP2:
    """``torch.distributed.checkpoint`` with its defaults; its cache of staging buffers for async saves needs a GPU."""

    def __init__(self, model: GPT, in_background: bool) -> None:
        fully_shard_blocks(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.module: nn.Module = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self._in_background, self._future = in_background, None
        self._group = dist.new_group(backend="gloo")

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        if not self._in_background:
            dcp.save(self._state(), checkpoint_id=path)
            return
        self._future = dcp.async_save(self._state(), checkpoint_id=path, process_group=self._group)

    def is_written(self) -> bool:
        return self._future is None or self._future.done()

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()

    def load(self, path: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


SYSTEMS: dict[str, Callable[[GPT], Ours | FSDP2]] = {
    "sharded": partial(Ours, in_parts=True, in_background=False),
    "sharded_async": partial(Ours, in_parts=True, in_background=True),
    "full": partial(Ours, in_parts=False, in_background=False),
    "full_async": partial(Ours, in_parts=False, in_background=True),
    "fsdp2": partial(FSDP2, in_background=False),
    "fsdp2_async": partial(FSDP2, in_background=True),
}
