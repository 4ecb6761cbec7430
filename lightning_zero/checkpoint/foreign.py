"""What a checkpoint that no Trainer wrote lacks to be one of Lightning's."""

from __future__ import annotations

from typing import Any


def with_lightnings_entries(checkpoint: dict[str, Any], *, steps: int = 0) -> dict[str, Any]:
    """The checkpoint with what a Trainer, and whoever else reads Lightning's files, looks for; what is there stays.

    Args:
        steps: of the optimizer so far.
    """
    from lightning import __version__

    return {
        "pytorch-lightning_version": __version__,
        "epoch": 0,
        "global_step": steps,
        "lr_schedulers": [],
        **checkpoint,
    }
