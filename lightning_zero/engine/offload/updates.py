"""Updates of masters that are kept elsewhere: one bucket after another, in a thread, while the device computes.

(Ren et al., "ZeRO-Offload", ATC 2021, section 4.3: what waits there for the whole backward and the whole update is here
done bucket by bucket.)
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.settling import Work


class Updates:
    """A thread that updates masters, in the order in which they are given to it."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, act: Callable[[], None]) -> Work:
        """Do something when all before it is done; who needs it waits for it."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "lightning_zero-update", initializer=_leave_a_core_to_training)
        work = Work(act, tells=True)
        self._executor.submit(work)
        return work

    def close(self) -> None:
        """Finish, and end the thread."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


def _leave_a_core_to_training() -> None:
    """Of the cores that this process may use the first is for what feeds the device."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 2:
            os.sched_setaffinity(0, cores[1:])  # of this thread, and of those that its kernels start


def update(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    """Update one tensor, which has its gradient, as the optimizer's ``step`` does, and nothing else. In any thread.

    Args:
        group: the options of the parameter group that it is of; ``params`` is not looked at.
        parameter: a leaf; its state is in ``optimizer.state``.
    """
    alone = object.__new__(type(optimizer))
    alone.__dict__ = {
        **optimizer.__dict__,
        "param_groups": [{**group, "params": [parameter]}],
        # whoever hooks in is called once for the whole step, and by nobody else
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    type(optimizer).step(alone)


def options_of(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A parameter group's options as they are now, and as suits the CPU: schedulers change them for the next step.

    Args:
        device: where the module computes. Where that is the CPU, too, the kernel is the one that it would be anyway.
    """
    options = {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }
    if device.type != "cpu" and options.get("fused", False) is None and not options.get("foreach"):
        options["fused"] = hasattr(optimizer, "_step_supports_amp_scaling") or type(optimizer).__name__ in _FUSED
    return options


_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
"""Those of which torch has a kernel for the CPU that does all of an update in one pass over memory."""
