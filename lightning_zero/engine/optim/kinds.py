"""Entries of an optimizer's state are of two kinds, by which they are split, gathered and loaded.

By element: one number for each element of the parameter (``exp_avg``), sharded as the parameter is.
Small: a count or an option that all ranks hold alike (``step``), sent between ranks with the names of entries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.compat import tree_map_only

# Zero-dimensional entries of zero-dimensional parameters that are nevertheless not by element.
_COUNTERS = {"step", "mu_product", "eta", "mu"}


class Small:
    """Describes a small entry to other ranks, with its value.

    Args:
        is_on_device: whether each rank keeps it on its own device, with the parameter, and not in the host's memory.
    """

    def __init__(self, value: Any, dtype: torch.dtype | None = None, is_on_device: bool = False) -> None:
        self.value = value if dtype is None else torch.tensor(value, dtype=dtype, device="cpu")
        self.is_on_device = is_on_device or isinstance(value, Tensor) and value.device.type != "cpu"

    def of_parameter(self, device: torch.device) -> Any:
        """A copy for one parameter on a device: no two share one, also after pickling."""
        value = copied(self.value)
        return value.to(device) if self.is_on_device else value

    def __reduce__(self) -> Any:
        if not isinstance(self.value, Tensor):
            return Small, (self.value,)
        return Small, (self.value.tolist(), self.value.dtype, self.is_on_device)  # a tensor takes ten times longer


def is_by_element(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether an entry of a parameter or master of this shape is one number for each element."""
    return isinstance(value, Tensor) and value.shape == shape and (value.dim() > 0 or key not in _COUNTERS)


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def comparable(value: Any) -> Any:
    """A small entry as something to compare: masters are shared by parameters whose small entries are equal."""
    if not isinstance(value, Tensor):
        return repr(value)
    return float(value) if value.numel() == 1 else id(value)


def placed(key: str, value: Any, group: dict[str, Any], device: torch.device) -> Any:
    """A copy of a small entry where torch's own ``load_state_dict`` puts it: usually on the parameter's device."""
    if key != "step":  # lists of tensors, too (LBFGS)
        return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), value)
    if not isinstance(value, Tensor):
        return value
    if group.get("capturable") or group.get("fused"):
        return value.to(device, torch.float32, copy=True)
    # An optimizer may have made it elsewhere, with a default device of the user's; a kernel for the CPU needs it there.
    return value.to("cpu", copy=True) if device.type == "cpu" else copied(value)
