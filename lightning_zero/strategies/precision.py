"""How each ``precision=`` of a Trainer or of Fabric is mapped to dtypes under ZeRO."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

# These plugins store weights as fp8 scales and copies, as quantised blocks or as another strategy's shards, none of
# which can be split into flat shards of plain numbers.
_REFUSED = ("TransformerEngine", "Bitsandbytes", "DeepSpeed", "FSDP", "XLA")


def compute_dtype_of(plugin: Any, lightning: ModuleType) -> torch.dtype | None:
    """Return the dtype in which fp32 parameters that autocast casts are gathered, or None to gather in their own dtype.

    In mixed precision an embedding, a norm and parameters of custom modules are gathered in fp32, as autocast uses
    them. Otherwise parameters have the dtype in which the plugin's conversion leaves them; masters are fp32 or fp64.
    """
    plugins = lightning.plugins.precision
    if isinstance(plugin, tuple(getattr(plugins, f"{name}Precision") for name in _REFUSED)):
        raise ValueError(
            f"{type(plugin).__name__} cannot be used with ZeroStrategy: pass precision= one of '32-true', '64-true', "
            "'16-true', 'bf16-true', '16-mixed' and 'bf16-mixed', or a Precision plugin of your own."
        )
    if isinstance(plugin, plugins.MixedPrecision):
        return torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16
    return None
