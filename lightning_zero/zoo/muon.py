"""Muon for the matrices of a model's blocks, AdamW for all other parameters, in one optimizer."""

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def muon_and_adamw(
    params: Iterable[Tensor] | Iterable[dict[str, Any]],
    lr: float = 0.02,
    adamw_lr: float = 3e-4,
    weight_decay: float = 0.1,
) -> Optimizer:
    """Create a Muon optimizer (from pytorch_optimizer) that updates some groups with AdamW.

    Args:
        params: parameters, of which Muon updates the two-dimensional ones; or groups, of which Muon updates those with
            ``"hidden": True``. AdamW, which suits embeddings and heads (Jordan et al., "Muon", 2024), updates the rest.
        lr: Muon's learning rate.
        adamw_lr: AdamW's learning rate.
        weight_decay: weight decay of two-dimensional parameters, or of groups that do not set their own.
    """
    from pytorch_optimizer import Muon

    groups: list[Any] = list(params)
    if not isinstance(groups[0], dict):
        groups = [
            {"params": [p for p in groups if p.ndim == 2], "hidden": True},
            {"params": [p for p in groups if p.ndim != 2], "weight_decay": 0.0},
        ]
    made = []
    for group in groups:
        options = {key: value for key, value in group.items() if key != "hidden"}
        is_hidden = group.get("hidden", False)
        rate = lr if is_hidden else adamw_lr
        made.append({"lr": rate, "weight_decay": weight_decay, **options, "use_muon": is_hidden})
    return Muon([group for group in made if group["params"]])


def groups_of(module: nn.Module, optimizer: Any) -> list[dict[str, Any]]:
    """Group a module's trained parameters into matrices, and one-dimensional parameters without weight decay.

    Args:
        module: a module whose repeated blocks are numbered, as in ``nn.ModuleList`` or ``nn.Sequential``.
        optimizer: function that creates an optimizer from groups, such as ``partial(torch.optim.AdamW, lr=1e-3)``. With
            ``muon_and_adamw``, the matrices in blocks are a separate group.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in trained.items() if p.ndim >= 2}
    rest = {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 0.0}
    if getattr(optimizer, "func", optimizer) is not muon_and_adamw:
        return [{"params": list(matrices.values())}, rest]
    hidden = {name for name, p in matrices.items() if p.ndim == 2 and re.search(r"\.\d+\.", name)}
    return [
        {"params": [p for name, p in matrices.items() if name in hidden], "hidden": True},
        {"params": [p for name, p in matrices.items() if name not in hidden]},
        rest,
    ]
