"""Muon for the matrices of a model's blocks, AdamW for all other parameters, in one optimizer."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def muon_and_adamw(
    params: Iterable[Tensor] | Iterable[dict[str, Any]],
    lr: float = 0.02,
    adamw_lr: float = 3e-4,
    weight_decay: float = 0.1,
) -> Optimizer:
    """Make pytorch_optimizer's Muon, some of whose groups are updated by AdamW.

    Args:
        params: parameters, of which Muon takes those of two dimensions; or groups, of which it takes those with
            ``"hidden": True``. Embeddings and heads train better with AdamW (Jordan et al., "Muon", 2024).
        lr: of Muon.
        adamw_lr: of AdamW.
        weight_decay: of matrices.
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


def splits_hidden(optimizer: Any) -> bool:
    """Whether a function that makes an optimizer, or a partial of it, is ``muon_and_adamw``."""
    return getattr(optimizer, "func", optimizer) is muon_and_adamw
