"""Count floating-point operations with torch's formulas, and add formulas for attention on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_zero.engine.comm.tensor_parallel import are_divided
from lightning_zero.engine.compat import FakeTensor, TorchDispatchMode


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations in an operator call; 0 unless it is a matrix product, convolution or attention."""
    count = flop_registry.get(func._overloadpacket)
    return count(*args, **kwargs, out_val=result) if count is not None else 0


class FlopCounter(TorchDispatchMode):
    """Counts floating-point operations in its context, without the module hooks that torch's FlopCounterMode needs.

    Attributes:
        total: floating-point operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if are_divided(types):
            return NotImplemented  # the operator is dispatched again on the local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not any(issubclass(each, FakeTensor) for each in types):  # with fake tensors, DTensor only finds shapes
            self.total += flops_of(func, args, kwargs, result)
        return result


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward_flops(
    grad_out: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(grad_out.shape, query.shape, key.shape, value.shape)


_aten = torch.ops.aten
flop_registry.setdefault(_aten._scaled_dot_product_flash_attention_for_cpu, _attention_flops)
flop_registry.setdefault(_aten._scaled_dot_product_flash_attention_for_cpu_backward, _attention_backward_flops)
