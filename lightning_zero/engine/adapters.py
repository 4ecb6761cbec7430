"""Adapters of the package peft, merged into one layer's weights at a time, without changing the layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.init.quantised_layers import quantised_layers

_ADVICE = "leave out merge_adapters=True, or call peft's merge_and_unload after the run"


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is one of peft's models, around a model whose layers have adapters."""
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def adapters_in(module: nn.Module) -> tuple[list[str], dict[str, nn.Module]]:
    """The prefixes of names within peft's models, and the outermost layers with adapters by their prefixes.

    Raises:
        ValueError: if there are adapters that no layer's weights can include.
    """
    wrappers: list[str] = []
    layers: dict[str, nn.Module] = {}
    owners: dict[int, str] = {}  # the prefix of the layer that changes a parameter
    for name, inner in module.named_modules():
        prefix = f"{name}." if name else ""
        if any(map(prefix.startswith, layers)):
            continue
        if is_wrapper(inner):
            wrappers.append(f"{prefix}base_model.model.")
            if not hasattr(inner, "merge_and_unload"):
                raise ValueError(f"{type(inner).__name__} has adapters that are not part of layers: {_ADVICE}.")
        if hasattr(inner, "get_base_layer"):
            owners |= dict.fromkeys(map(id, inner.parameters()), prefix)
        if hasattr(inner, "get_base_layer") or hasattr(inner, "unload_and_optionally_merge_module"):
            layers[prefix] = inner
            if any(quantised_layers(inner)):
                raise ValueError(f"The adapters of {name} cannot be merged, since it is quantised: {_ADVICE}.")
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not name.startswith(prefix := owners.get(id(parameter), "")):
            raise ValueError(f"The adapters of {prefix[:-1]} change a weight that is tied to {name}: {_ADVICE}.")
    return wrappers, layers


def merged(layer: nn.Module, prefix: str, names: Sequence[str], values: Sequence[Tensor]) -> dict[str, Tensor]:
    """The state dict of a layer's base after the adapters have been merged, in a copy of the layer.

    Args:
        prefix: of the names, and of the result's.
        values: the whole tensors of the layer's state dict, which may be overwritten.
    """
    memo: dict[int, Any] = {id(buffer): buffer.to(values[0].device) for buffer in layer.buffers()}
    state = layer.state_dict(prefix=prefix, keep_vars=True)
    for name, value in zip(names, values):
        memo[id(state[name])] = nn.Parameter(value, False) if isinstance(state[name], nn.Parameter) else value
    try:
        copied: Any = copy.deepcopy(layer, memo)
        with torch.no_grad():
            if hasattr(copied, "unload_and_optionally_merge_module"):
                base = copied.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                copied.merge()
                base = copied.get_base_layer()
    except Exception as error:
        raise ValueError(f"The adapters of {prefix[:-1]} cannot be merged ({error}): {_ADVICE}.") from error
    return base.state_dict(prefix=prefix)
