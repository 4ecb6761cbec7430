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

    ============  ==============  ===================  =======  ===========
    precision     the module's    gathered, computed   masters  reduction
    ============  ==============  ===================  =======  ===========
    32-true       fp32            fp32                 fp32     fp32
    64-true       fp64            fp64                 fp64     fp64
    bf16-true     bf16            bf16                 fp32     fp32
    16-true       fp16            fp16                 fp32     fp32
    bf16-mixed    fp32            bf16 (autocast)      fp32     fp32
    16-mixed      fp32            fp16 (autocast)      fp32     fp32
    ============  ==============  ===================  =======  ===========

    Parameters that autocast does not cast (an embedding, a norm, parameters of custom modules) are gathered in fp32 in
    mixed precision too. A custom plugin may convert the module and its inputs, wrap forward and backward, and scale
    the loss; parameters are gathered in the dtype that the plugin's conversion leaves them in.

    Arguments:
        plugin: a Precision plugin.
        lightning: the package that defines the plugin.

    Raises:
        ValueError: for a plugin whose parameters cannot be sharded.
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
