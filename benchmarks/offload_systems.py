"""How each system in `offload.py` trains the same model on one device, and which states it offloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from systems import LEARNING_RATE, Training, cross_entropy, deepspeed, fully_shard_blocks, plain_step
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from lightning_zero.engine import Engine
from lightning_zero.zoo.gpt import GPT


@dataclass(frozen=True)
class Setting:
    """The training device, the dtype of computation, and the folder for states on a disk."""

    device: torch.device
    dtype: torch.dtype
    disk: Path


def ours(model: GPT, setting: Setting, **offload: Any) -> Training:
    model.to(setting.dtype)  # the masters are fp32 all the same
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    elsewhere = {**offload, "path": setting.disk} if offload else None
    engine = Engine(model, [optimizer], stage=3, offload=elsewhere, device=setting.device)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(step, peak_by_category=lambda: dict(engine.report().peak))


def fsdp2(model: GPT, setting: Setting, offload: bool) -> Training:
    """FSDP2 with fp32 parameters and states, as many bytes as ours, and computation in the requested dtype."""
    on_gpu = setting.device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    policy = {
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=setting.dtype, reduce_dtype=torch.float32),
    }
    model.to("cpu" if offload else setting.device)
    fully_shard_blocks(model, **policy)
    return Training(plain_step(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)))


def zero_offload(model: GPT, setting: Setting, offload: bool) -> Training:
    """DeepSpeed's stage 3 with its own kernels: DeepSpeedCPUAdam with offload, compiled at the first use."""
    to = {"device": "cpu", "pin_memory": setting.device.type == "cuda"}
    config = {
        "zero_optimization": {"stage": 3, **({"offload_optimizer": to, "offload_param": to} if offload else {})},
        "bf16": {"enabled": setting.dtype == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},  # as torch's default
    }
    return deepspeed(model, 3, **config)


SYSTEMS: dict[str, Callable[[GPT, Setting], Training]] = {
    "none": ours,
    "cpu": partial(ours, optimizer="cpu"),
    "cpu_serial": partial(ours, optimizer="cpu", overlap=False),
    "cpu_all": partial(ours, optimizer="cpu", gradients="cpu", parameters="cpu"),
    "nvme": partial(ours, optimizer="nvme"),
    "nvme_serial": partial(ours, optimizer="nvme", overlap=False),
    "nvme_all": partial(ours, optimizer="nvme", gradients="cpu", parameters="nvme"),
    "fsdp2": partial(fsdp2, offload=False),
    "fsdp2_cpu": partial(fsdp2, offload=True),
    "deepspeed": partial(zero_offload, offload=False),
    "deepspeed_cpu": partial(zero_offload, offload=True),
}
