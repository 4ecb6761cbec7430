"""Count floating-point operations with torch's formulas, and with formulas of its own for fused attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations in an operator call; 0 unless it is a matrix product, convolution or attention."""
    operator = func._overloadpacket
    count = _ATTENTION.get(operator) or flop_registry.get(operator)
    return count(*args, **kwargs, out_val=result) if count is not None else 0


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, _repeated(key, query), _repeated(value, query))


def _attention_backward_flops(grad_out: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad_out.shape, query.shape, _repeated(key, query), _repeated(value, query))


def _repeated(tensor: Any, query: Any) -> torch.Size:
    """The shape of keys or values with as many heads as the queries: several query heads may share one."""
    return torch.Size((*tensor.shape[:-3], query.shape[-3], *tensor.shape[-2:]))


# Used instead of torch's formulas, which have none for the CPU's kernel, and before torch 2.12 raise an error if query
# heads share keys.
_ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{suffix}"): count
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for suffix, count in (("", _attention_flops), ("_backward", _attention_backward_flops))
}
