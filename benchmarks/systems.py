"""How each compared system trains the same model: one function per system, set up as its own documentation recommends.

Each function takes the model (ordinary, on its device, with the same weights on every rank) and the common training
conditions, and returns a `Training`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Conditions:
    """The common training conditions: the device, the dtype of computation, micro-batches per step, whether blocks
    recompute activations in backward, and the optimizer: ``"adamw"``, or ``"muon"`` for the matrices of blocks.
    """

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    accumulate: int = 1
    checkpoint: bool = False
    optimizer: str = "adamw"

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)


@dataclass(frozen=True)
class Training:
    step: Callable[[Tensor, Tensor], Tensor]
    """One step on inputs and targets, with all micro-batches concatenated; returns this rank's loss, detached."""
    peak_by_category: Callable[[], dict[str, int]] = dict
    """Peak bytes of the system's own buffers by category, if it reports them."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def plain_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    accumulate: int = 1,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[Tensor, Tensor], Tensor]:
    """The training loop from torch's documentation.

    Args:
        no_sync: context for all but the last micro-batch of a step.
    """

    def backward(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast():
            loss = cross_entropy(module(inputs), targets)
        if accumulate > 1:
            loss = loss / accumulate
        loss.backward()
        return loss.detach()

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        *others, last = zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True)
        losses = []
        for batch in others:
            with no_sync():
                losses.append(backward(*batch))
        losses.append(backward(*last))
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses[1:], losses[0])

    return step


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=LEARNING_RATE)


class Both:
    """Two optimizers with the interface of one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class MuonOfWholeTensors(torch.optim.Optimizer):
    """Muon over sharded tensors as FSDP2 projects write it: every rank gathers and computes each matrix.

    The update is that of torch's Muon, which does not accept DTensors.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {**torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))], **options).defaults})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                whole = nn.Parameter(p.full_tensor())
                whole.grad = p.grad.full_tensor()
                alone = torch.optim.Muon([whole], **{k: v for k, v in group.items() if k != "params"})
                if self.state[p]:
                    alone.state[whole] = {"momentum_buffer": self.state[p]["momentum_buffer"].full_tensor()}
                alone.step()
                for key, value in alone.state[whole].items():
                    self.state[p][key] = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
                p.copy_(distribute_tensor(whole.detach(), p.device_mesh, p.placements, src_data_rank=None))


def is_hidden(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon updates the parameter, a matrix in a block."""
    return "blocks." in name and parameter.ndim == 2


def muon(model: nn.Module, kind: Callable[..., torch.optim.Optimizer] = torch.optim.Muon) -> Both:
    """Muon for the matrices of blocks, AdamW for the rest."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return Both(
        kind([p for name, p in named if is_hidden(name, p)], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([p for name, p in named if not is_hidden(name, p)], lr=LEARNING_RATE),
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {"adamw": adamw, "muon": muon}


def single(model: nn.Module, conditions: Conditions) -> Training:
    optimizer = OPTIMIZERS[conditions.optimizer](model)
    return Training(plain_step(model, optimizer, conditions.accumulate, conditions.autocast))


def data_parallel(
    model: nn.Module, conditions: Conditions, optimizer: Callable[[nn.Module], Any] | None = None
) -> Training:
    wrapped = DistributedDataParallel(model)
    loop = (conditions.accumulate, conditions.autocast, wrapped.no_sync)
    return Training(plain_step(wrapped, (optimizer or OPTIMIZERS[conditions.optimizer])(wrapped), *loop))


def zero_redundancy(model: nn.Module) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(trained(model), optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE)


def fsdp1(model: nn.Module, conditions: Conditions) -> Training:
    """FSDP with each block wrapped separately, in mixed precision with gradients reduced in fp32."""
    low = MixedPrecision(param_dtype=conditions.dtype, reduce_dtype=torch.float32)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in model.blocks}),
        mixed_precision=low if conditions.dtype != torch.float32 else None,
        device_id=conditions.device,
        use_orig_params=True,
    )
    return Training(plain_step(wrapped, adamw(wrapped), conditions.accumulate, no_sync=wrapped.no_sync))


def fully_shard_blocks(model: nn.Module, **options: Any) -> None:
    """Shard each block separately, and the root with the remaining parameters, as FSDP2's documentation recommends."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def fsdp2(model: nn.Module, conditions: Conditions, reshard_after_forward: bool, is_hybrid: bool = False) -> Training:
    """FSDP2; with ``is_hybrid`` one replica per machine (HSDP)."""
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    if conditions.dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=conditions.dtype, reduce_dtype=torch.float32)
    shape: tuple[int, ...] = (dist.get_world_size(),)
    if is_hybrid:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        shape = (shape[0] // here, here)
    mesh = init_device_mesh(conditions.device.type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    fully_shard_blocks(model, mesh=mesh, **options)

    @contextmanager
    def no_sync() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    optimizer = adamw(model) if conditions.optimizer == "adamw" else muon(model, MuonOfWholeTensors)
    return Training(plain_step(model, optimizer, conditions.accumulate, no_sync=no_sync))


def zero_over_gloo(model: nn.Module, conditions: Conditions, stage: int) -> Training:
    """Ours with the transport of all others: Gloo, even where ranks could read each other's memory."""
    with patch.dict(os.environ, LIGHTNING_ZERO_CROSS_MEMORY="0"):
        return zero(model, conditions, stage)


def zero(model: nn.Module, conditions: Conditions, stage: int, **options: Any) -> Training:
    from lightning_zero.engine import Engine

    optimizer, blocks = OPTIMIZERS[conditions.optimizer](model), set(model.blocks)
    engine = Engine(
        model,
        getattr(optimizer, "optimizers", [optimizer]),
        stage=stage,
        compute_dtype=conditions.dtype if conditions.dtype != torch.float32 else None,
        device=conditions.device,
        activation_checkpointing=(lambda _, module: module in blocks) if conditions.checkpoint else None,
        **options,
    )
    loop = (conditions.accumulate, conditions.autocast, engine.no_sync)
    return Training(plain_step(model, optimizer, *loop), peak_by_category=lambda: dict(engine.report().peak))


def deepspeed(model: nn.Module, stage: int, accumulate: int = 1, **config: Any) -> Training:
    import deepspeed

    # with torch's AdamW, as all others, unless the configuration names one of DeepSpeed's own
    optimizer = None if "optimizer" in config else adamw(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=trained(model),
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,  # required; only its log reads it
            "gradient_accumulation_steps": accumulate,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # its default is to clip to 1.0, which nobody else does here
            **config,
        },
    )
    dtype = next(engine.module.parameters()).dtype

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for part, wanted in zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True):
            loss = cross_entropy(engine(part.to(dtype) if part.is_floating_point() else part), wanted)
            engine.backward(loss)  # which divides by the number of micro-batches
            engine.step()
            losses.append(loss.detach())
        return sum(losses[1:], losses[0]) / accumulate

    return Training(step)


def deepspeed_zero(model: nn.Module, conditions: Conditions, stage: int, is_hybrid: bool = False) -> Training:
    """DeepSpeed's ZeRO; with ``is_hybrid`` a secondary copy of the parameters on each machine (ZeRO++)."""
    config: dict[str, Any] = {"bf16": {"enabled": conditions.dtype == torch.bfloat16}}
    if is_hybrid:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        config["zero_optimization"] = {"stage": stage, "zero_hpz_partition_size": here}
    if conditions.optimizer == "muon":  # DeepSpeed's own, which reads this attribute
        for name, parameter in model.named_parameters():
            parameter.use_muon = is_hidden(name, parameter)
        config["optimizer"] = {"type": "Muon", "params": {"lr": LEARNING_RATE, "muon_lr": 0.02, "weight_decay": 0.1}}
    return deepspeed(model, stage, conditions.accumulate, **config)


def checkpointed(train: Callable[[nn.Module, Conditions], Training]) -> Callable[[nn.Module, Conditions], Training]:
    """Add torch's activation checkpointing to each block, if requested, inside all of the system's hooks."""

    def checkpoint_and_train(model: nn.Module, conditions: Conditions) -> Training:
        for block in model.blocks if conditions.checkpoint else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return train(model, conditions)

    return checkpoint_and_train


SYSTEMS: dict[str, Callable[[nn.Module, Conditions], Training]] = {
    "single": checkpointed(single),
    "ddp": checkpointed(data_parallel),
    "zero_optimizer": checkpointed(partial(data_parallel, optimizer=zero_redundancy)),
    "fsdp1": checkpointed(fsdp1),
    "fsdp2": checkpointed(partial(fsdp2, reshard_after_forward=True)),
    "hsdp": checkpointed(partial(fsdp2, reshard_after_forward=True, is_hybrid=True)),
    "fsdp2_keep": checkpointed(partial(fsdp2, reshard_after_forward=False)),
    "deepspeed1": checkpointed(partial(deepspeed_zero, stage=1)),
    "deepspeed2": checkpointed(partial(deepspeed_zero, stage=2)),
    "deepspeed3": checkpointed(partial(deepspeed_zero, stage=3)),
    "deepspeed3_hpz": checkpointed(partial(deepspeed_zero, stage=3, is_hybrid=True)),
    "zero1": partial(zero, stage=1),  # with an option of its own for that
    "zero2": partial(zero, stage=2),
    "zero3": partial(zero, stage=3),
    "zero1_gloo": partial(zero_over_gloo, stage=1),
    "zero2_gloo": partial(zero_over_gloo, stage=2),
    "zero3_gloo": partial(zero_over_gloo, stage=3),
    "zero3_node": partial(zero, stage=3, shard_within="node"),
}
