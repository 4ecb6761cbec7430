"""Computation in float8 with torchao, which emulates it on devices that cannot multiply float8 matrices."""

from collections import Counter
from dataclasses import replace

import torch
from torch import nn


def compute_in_float8(module: nn.Module, recipe: str, device: torch.device) -> None:
    """Replace a module's linear layers by torchao's, unless they are tied or a dimension is not a multiple of 16.

    Args:
        recipe: ``"tensorwise"``, whose weights are gathered in float8 as well, ``"rowwise"`` or
            ``"rowwise_with_gw_hp"``.
        device: where the module will be trained.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-untyped]

    multiplies = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, enable_fsdp_float8_all_gather=recipe == "tensorwise", emulate=not multiplies)
    uses = Counter(id(parameter) for inner in module.modules() for parameter in inner._parameters.values())

    def is_converted(layer: nn.Module, name: str) -> bool:
        suits = type(layer) is nn.Linear and not any(size % 16 for size in layer.weight.shape)
        return suits and uses[id(layer.weight)] == 1

    convert_to_float8_training(module, module_filter_fn=is_converted, config=config)
