"""Complete a checkpoint that was not written by a Trainer with the entries that Lightning expects."""

from __future__ import annotations

from typing import Any


def with_lightnings_entries(checkpoint: dict[str, Any], *, steps: int = 0) -> dict[str, Any]:
    """Return the checkpoint with all entries that a Trainer, and other readers of Lightning's files, need.

    Existing entries are kept.

    Args:
        steps: number of optimizer steps so far.
    """
    from lightning import __version__

    return {
        "pytorch-lightning_version": __version__,
        "epoch": 0,
        "global_step": steps,
        "lr_schedulers": [],
        **checkpoint,
    }
