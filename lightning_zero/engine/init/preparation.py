"""Checks and preparations before a module is sharded."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor, nn

from lightning_zero.engine.init.deferred_param import values_of
from lightning_zero.engine.plan.units import UnitPlan
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor


def check_ordinary(module: nn.Module) -> None:
    """Raise a ValueError if a parameter is not an ordinary tensor."""
    tensors = sys.modules.get("torch.distributed.tensor")  # not imported here, which would take half a second
    for name, parameter in module.named_parameters():
        if isinstance(parameter, ShardedTensor):
            raise ValueError(f"{name} is sharded already: a module belongs to one engine at a time.")
        if tensors is not None and isinstance(parameter, tensors.DTensor):
            raise ValueError(
                f"{name} is a DTensor, but parameters must be ordinary tensors: remove fully_shard(...) or "
                "distribute_tensor(...)."
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} is not initialised yet: run a batch through the lazy module first.")


def common_device(plans: list[UnitPlan]) -> torch.device:
    """The device of all parameter values, the CPU if there are none yet; a ValueError if they are on several."""
    found = None
    for name, parameter in (named for plan in plans for named in plan.parameters.items()):
        if (values := values_of(parameter)) is not None:
            found = found or values.device
            if values.device != found:
                raise ValueError(
                    f"{name} is on {values.device}, other parameters on {found}: move the module to one device."
                )
    return found or torch.device("cpu")


def detach_kept_graphs(module: nn.Module) -> None:
    """Detach tensors that modules keep of a forward, as old ``weight_norm`` does: their graphs hold parameters."""
    for inner in module.modules():
        for attribute, value in vars(inner).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(inner, attribute, value.detach())


def let_freed_memory_stay() -> None:
    """Keep freed memory in the process, so that new buffers reuse it and the system need not clear it again.

    glibc returns blocks larger than the largest one freed so far (up to 32 MiB) to the system at once, and free memory
    at the end of its heap beyond twice that size: see ``mallopt(3)``, M_MMAP_THRESHOLD. Freeing one large block that
    is never touched raises both limits; ``mallopt`` itself would override what the user has set in the environment.
    """
    if sys.platform == "linux":
        system = ctypes.CDLL(None)
        system.malloc.argtypes, system.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        system.free.argtypes = [ctypes.c_void_p]
        system.free(system.malloc(2**25 - 2**16))
