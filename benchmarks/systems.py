"""How each compared system trains the same model: one function a system, set up as its own documentation recommends.

Each takes the model (ordinary, the same weights on every rank) and returns a `Training`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Training:
    step: Callable[[Tensor, Tensor], Tensor]
    """One step on tokens and targets, (batch, sequence) of bytes each; returns this rank's loss, detached."""
    peak_by_category: Callable[[], dict[str, int]] = dict
    """Bytes of the system's own buffers at their peak, where it tells."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(module(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def single(model: nn.Module) -> Training:
    return Training(plain_step(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)))


def ddp(model: nn.Module) -> Training:
    wrapped = DistributedDataParallel(model)
    return Training(plain_step(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=LEARNING_RATE)))


def fully_shard_blocks(model: nn.Module, **options: Any) -> None:
    """Each block by itself, and the root with what is left, as FSDP2's documentation recommends."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def fsdp2(model: nn.Module) -> Training:
    fully_shard_blocks(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return Training(plain_step(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)))


def zero(model: nn.Module, stage: int) -> Training:
    from lightning_zero.engine import Engine

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine = Engine(model, [optimizer], stage=stage)
    return Training(plain_step(model, optimizer), peak_by_category=lambda: dict(engine.report().peak))


def deepspeed(model: nn.Module, stage: int, **config: Any) -> Training:
    import deepspeed

    # with torch's AdamW, as all others, unless the configuration names one of DeepSpeed's own
    optimizer = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,  # required; with one micro-batch a step only its log reads it
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # its default is to clip to 1.0, which nobody else does here
            **config,
        },
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Training(step)


SYSTEMS: dict[str, Callable[[nn.Module], Training]] = {
    "single": single,
    "ddp": ddp,
    "zero1": partial(zero, stage=1),
    "zero2": partial(zero, stage=2),
    "zero3": partial(zero, stage=3),
    "fsdp2": fsdp2,
    "deepspeed1": partial(deepspeed, stage=1),
    "deepspeed2": partial(deepspeed, stage=2),
    "deepspeed3": partial(deepspeed, stage=3),
}
