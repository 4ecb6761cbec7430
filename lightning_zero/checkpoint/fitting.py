"""Load a module's state dict, and check that optimizers' states fit before any of them is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine import compatibility, deferred_param, quantised_layers


def load_module(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load a state dict, also with the scales of quantised layers."""
    state, scales = quantised_layers.take_scales(module, state)
    with deferred_param.taking_values(module, deferred_param.is_deferred) as stand_ins:
        module.load_state_dict(state, strict=strict)
    deferred_param.give_values(stand_ins, wait=True)
    quantised_layers.load_scales(scales)


def check_optimizers(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states of other optimizers, or of parameters in another order; torch itself compares the groups."""
    if not states:
        return  # a checkpoint assembled by hand: optimizers start without state, as under DDP
    if len(optimizers) != len(states):
        raise ValueError(
            f"The checkpoint has the state of {len(states)} optimizer(s), but configure_optimizers returns "
            f"{len(optimizers)}. Return the optimizers that were saved, in the same order. To load only the weights, "
            "call lightning_zero.load_weights(self, path) in configure_model instead of passing ckpt_path."
        )
    for number, (optimizer, state) in enumerate(zip(optimizers, states)):
        if "param_groups" not in state:
            continue  # Lightning's mock optimizer, for which nothing is saved
        if not compatibility.is_torchs_elementwise(type(optimizer)):
            continue  # its states may differ in shape from the parameter
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = [index for group in state["param_groups"] for index in group["params"]]
        for index, parameter in zip(numbers, parameters):
            for key, value in state.get("state", {}).get(index, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    raise ValueError(
                        f"The state of optimizer {number} ({type(optimizer).__name__}) does not fit: {key} of "
                        f"parameter number {index} has the shape {tuple(value.shape)}, not the parameter's "
                        f"{tuple(parameter.shape)}. Give the optimizer its parameters in the saved order."
                    )
