"""Which parameters autocast casts, so that they may be gathered in the dtype in which they are used."""

from __future__ import annotations

from torch import nn

from lightning_zero.engine.plan.units import Owner

# Layers that use their weights only in operators that autocast computes in low precision.
_CAST_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.MultiheadAttention),
)
_CAST_FORWARDS = frozenset(layer.forward for layer in _CAST_LAYERS)
_CAST_ATTRIBUTES = frozenset(
    {"weight", "bias", "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
)


def is_cast_by_autocast(owner: Owner) -> bool:
    """Whether autocast casts a parameter at each use, so that gathering it in that dtype gives the same numbers.

    Of other layers this is unknown, or casting ahead is wrong: an embedding would sum up the gradients of a row in low
    precision, kernels of normalisation and of ``nn.Bilinear`` would refuse their weights, and sums overflow in fp16.
    """
    forward = getattr(owner.module.forward, "__func__", None)
    if type(owner.module).__name__ == "Conv1D" and type(owner.module).__module__ == "transformers.pytorch_utils":
        return True
    return forward in _CAST_FORWARDS and owner.attribute in _CAST_ATTRIBUTES
