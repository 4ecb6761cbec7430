"""What each ``Trainer(precision=...)`` means under ZeRO."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision

_ALLOWED = "'32-true', 'bf16-mixed' and 'bf16-true'"


def compute_dtype_of(plugin: Precision) -> torch.dtype | None:
    """The dtype in which fp32 parameters are gathered and computed with; None for their own.

    ============  ==============  ===================  =======  ===========
    precision     the module's    gathered, computed   masters  reduction
    ============  ==============  ===================  =======  ===========
    32-true       fp32            fp32                 fp32     fp32
    bf16-mixed    fp32            bf16 (autocast)      fp32     fp32
    bf16-true     bf16            bf16                 fp32     fp32
    ============  ==============  ===================  =======  ===========

    Raises:
        ValueError: for a precision that this version does not support.
    """
    precision = getattr(plugin, "precision", "32-true")
    if type(plugin) is Precision:
        return None
    if isinstance(plugin, MixedPrecision) and precision == "bf16-mixed":
        return torch.bfloat16
    if isinstance(plugin, HalfPrecision) and precision == "bf16-true":
        return None
    raise ValueError(
        f"precision={precision!r} ({type(plugin).__name__}) is not supported by ZeroStrategy yet: "
        f"pass Trainer(precision=...) one of {_ALLOWED}."
    )
