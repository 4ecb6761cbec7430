"""What is kept outside of the device's memory, and where."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lightning_zero.disk import is_in_memory

Place = Literal["cpu", "nvme"]

_PLACES = (None, "cpu", "nvme")
_MOVED = ("optimizer", "parameters", "activations")


@dataclass(frozen=True)
class OffloadConfig:
    """Where model states are kept, if not in the memory of the device that computes.

    (Ren et al., "ZeRO-Offload", ATC 2021; Rajbhandari et al., "ZeRO-Infinity", SC 2021.)

    Args:
        optimizer: of the optimizer's states and of the masters: ``"cpu"``, where they are updated too; ``"nvme"``, a
            file on a local disk, piece by piece in the CPU's memory for an update; None leaves them.
        gradients: of each rank's part of the reduced gradients of these, ``"cpu"``; None leaves them until they have
            been used.
        parameters: of each rank's part of the parameters, between their uses (stage 3), likewise.
        activations: of the inputs of modules that ``activation_checkpointing`` computes again, likewise.
        path: a folder on a fast local disk, for what goes to ``"nvme"``.
        fraction: of the optimizer's states and masters that go, from the last modules to the first; the rest stays.
        sub_group: elements of masters that are in the CPU's memory at once for an update of those on the disk, three
            times: while one such group is updated, the next is read and the last is written.
        overlap: False does everything where it is called for, and nothing beside anything else; for debugging.

    Raises:
        ValueError: if an argument is not one of the allowed values.
    """

    optimizer: Place | None = "cpu"
    gradients: Literal["cpu"] | None = None
    parameters: Place | None = None
    activations: Place | None = None
    path: str | Path | None = None
    fraction: float = 1.0
    sub_group: int = 2**24
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in _MOVED:
            if getattr(self, name) not in _PLACES:
                raise ValueError(f"offload: {name}={getattr(self, name)!r} must be None, 'cpu' or 'nvme'.")
        if self.gradients not in (None, "cpu"):
            raise ValueError(f"offload: gradients={self.gradients!r} must be None or 'cpu'.")
        if self.gradients is not None and self.optimizer is None:
            raise ValueError("offload: gradients='cpu' needs optimizer='cpu' or 'nvme', which takes them from there.")
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"offload: fraction={self.fraction!r} must be between 0 and 1.")
        if isinstance(self.sub_group, bool) or not isinstance(self.sub_group, int) or self.sub_group < 1:
            raise ValueError(f"offload: sub_group={self.sub_group!r} must be a number of elements, 1 or more.")
        if self.parameters is not None and self.optimizer is None:
            raise ValueError(
                f"offload: parameters={self.parameters!r} needs the masters there, which they are updated from: add "
                "optimizer='cpu' or optimizer='nvme'."
            )
        if self.parameters == "nvme" and self.optimizer != "nvme":
            raise ValueError(
                "offload: parameters='nvme' needs optimizer='nvme': they are in one file with the masters; write "
                "parameters='cpu', or both."
            )
        if self.needs_disk and self.path is None:
            raise ValueError("offload: 'nvme' needs path=, a folder on a fast local disk.")

    @property
    def needs_disk(self) -> bool:
        return "nvme" in (self.optimizer, self.parameters, self.activations)

    def check_stage(self, stage: int) -> None:
        """See whether a stage has what is to be moved.

        Raises:
            ValueError: if it has not.
        """
        if self.parameters is not None and stage != 3:
            raise ValueError(
                f"offload: parameters={self.parameters!r} needs stage 3: at stage {stage} every rank computes with all "
                "of them all the time."
            )


def offload_config(offload: Any) -> OffloadConfig | None:
    """What the option ``offload`` means.

    Args:
        offload: None, ``"cpu"``, ``"nvme"``, an ``OffloadConfig``, or its fields in a mapping, as from Hydra. In all
            but an ``OffloadConfig`` a missing ``path`` is ``default_folder``.

    Raises:
        ValueError, TypeError: if it is nothing of that.
    """
    if offload is None or isinstance(offload, OffloadConfig):
        return offload
    if isinstance(offload, str) and offload in _PLACES:
        offload = {"optimizer": offload}
    if isinstance(offload, Mapping):
        known = [field.name for field in fields(OffloadConfig)]
        unknown = sorted(set(offload) - set(known))
        if unknown:
            raise ValueError(f"offload: {', '.join(map(repr, unknown))} is not among {', '.join(known)}.")
        if offload.get("path") is None and "nvme" in [offload.get(name) for name in _MOVED]:
            offload = {**offload, "path": default_folder()}
        return OffloadConfig(**offload) if offload else None
    raise ValueError(f"offload={offload!r} must be None, 'cpu', 'nvme' or an OffloadConfig.")


def default_folder() -> str:
    """Where files go if nobody says where: a folder of this user's below that for temporary files (``$TMPDIR``).

    Raises:
        ValueError: if that lies in memory.
    """
    folder = os.path.join(tempfile.gettempdir(), f"lightning_zero-offload-{os.getuid()}")
    if is_in_memory(folder):
        raise ValueError(
            f"offload='nvme' would write to {folder}, which lies in memory: write "
            "offload=OffloadConfig(optimizer='nvme', path=...) with a folder on a local disk, or set TMPDIR to one."
        )
    return folder
