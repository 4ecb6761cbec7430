"""The option ``resilience``. This module does not import Lightning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lightning_zero.engine.config import config_of


@dataclass(frozen=True)
class ResilienceConfig:
    """How a job keeps its state in shared memory, to continue when its processes are restarted.

    Args:
        every_n_steps: number of optimizer steps between two kept states.
        path: a folder in memory (tmpfs) on each machine; None for a private folder of this user in ``/dev/shm``. It
            must hold twice the model states of the machine's ranks, or four times if the job uses several machines.
        job: the job's name, which must be the same when the job is restarted; None derives a name from the command line
            and from SLURM's job id or torchrun's ``--rdzv-id``.
        deaths_at_one_step: after the job has died this many times without keeping a newer state, it stops with an error
            that names the step of the newest state.

    Raises:
        ValueError: if a value is not allowed.

    Example:
        >>> resilience = lightning_zero.ResilienceConfig(every_n_steps=5)
        >>> strategy = lightning_zero.ZeroStrategy(stage=3, resilience=resilience)
    """

    every_n_steps: int = 1
    path: str | None = None
    job: str | None = None
    deaths_at_one_step: int = 3

    def __post_init__(self) -> None:
        for name, least in (("every_n_steps", 1), ("deaths_at_one_step", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"resilience: {name}={value!r} must be an integer of at least {least}.")
        if self.job is not None and not re.fullmatch(r"[\w.-]+", str(self.job)):
            raise ValueError(f"resilience: job={self.job!r} must consist of letters, digits, '.', '_' and '-'.")


def resilience_config(resilience: Any) -> ResilienceConfig | None:
    """Convert the option ``resilience`` to a ``ResilienceConfig``.

    Args:
        resilience: None, ``"memory"``, a ``ResilienceConfig``, or a mapping of its fields, as from Hydra.

    Raises:
        ValueError: for any other value.
    """
    value = ResilienceConfig() if resilience == "memory" else resilience
    return config_of("resilience", value, ResilienceConfig, ["memory"])
