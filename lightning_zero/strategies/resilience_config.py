"""The option ``resilience``. This module does not import Lightning."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_zero.engine.config import config_of
from lightning_zero.io.annotations import check_fields, shown


@dataclass(frozen=True)
class ResilienceConfig:
    """How a job keeps its state in shared memory, to continue when its processes are restarted.

    Args:
        every_n_steps: number of optimizer steps between two kept states.
        path: a folder in memory (tmpfs) on each machine; None for a private folder of this user in ``/dev/shm``. It
            must hold twice the model states of the machine's ranks, or four times if the job uses several machines.
        job: the job's name (ASCII letters, digits, ``_`` and ``-``), which must be the same when the job is restarted;
            None derives a name from the command line and from SLURM's job id or torchrun's ``--rdzv-id``.
        deaths_at_one_step: after the job has died this many times without keeping a newer state, it stops with an error
            that names the step of the newest state.

    Raises:
        ValueError: if a value is not allowed.

    Example:
        >>> resilience = lightning_zero.ResilienceConfig(every_n_steps=5)
        >>> strategy = lightning_zero.ZeroStrategy(stage=3, resilience=resilience)
    """

    every_n_steps: int = field(default=1, metadata={"least": 1})
    path: str | Path | None = None
    job: str | None = None
    deaths_at_one_step: int = field(default=3, metadata={"least": 2})

    def __post_init__(self) -> None:
        check_fields(self, "resilience: ")
        if self.job is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", self.job):  # it becomes a folder's name
            raise ValueError(f"resilience: job={shown(self.job)} must consist of ASCII letters, digits, '_' and '-'.")


def resilience_config(resilience: Any) -> ResilienceConfig | None:
    """Convert the option ``resilience`` to a ``ResilienceConfig``.

    Args:
        resilience: None, ``"memory"``, a ``ResilienceConfig``, or a mapping of its fields, as from Hydra.

    Raises:
        ValueError: for any other value.
    """
    value = ResilienceConfig() if isinstance(resilience, str) and resilience == "memory" else resilience
    return config_of("resilience", value, ResilienceConfig, ["memory"])
