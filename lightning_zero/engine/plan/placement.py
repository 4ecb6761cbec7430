"""Placements: whether a ZeRO stage shards or replicates parameters, gradients and optimizer state at rest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_zero.engine.config import stage_number


class Placement(Enum):
    """Whether one kind of model state is replicated or sharded at rest."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


@dataclass(frozen=True)
class Placements:
    """The placements that define a stage (Rajbhandari et al., SC20, section 5, figure 1).

    Args:
        stage: 1, 2 or 3.
        parameters: REPLICATED at stages 1 and 2; SHARDED at stage 3.
        gradients: REPLICATED at stage 1 (while micro-batches are accumulated without synchronisation); SHARDED above.
        optimizer: SHARDED at every stage of ZeRO.
    """

    stage: int
    parameters: Placement
    gradients: Placement
    optimizer: Placement

    def model_state_bytes(
        self,
        numel: int,
        world_size: int,
        *,
        parameter_bytes: int,
        master_bytes: int = 4,
        state_bytes: int | None = None,
    ) -> int:
        """Bytes of model states per rank, by the paper's formula with the dtypes of this engine.

        Args:
            numel: Psi, the number of parameter elements.
            world_size: N, the number of ranks.
            parameter_bytes: width of a parameter in computation: 4 for fp32, 2 for bf16 and fp16, 8 for fp64.
            master_bytes: width of a master weight, and of a gradient: 4, but 8 for fp64.
            state_bytes: bytes of optimizer state per element; by default Adam's two moments in the width of masters.

        Returns:
            Bytes of parameters, master weights, gradients and optimizer state.
        """
        local = -(-numel // world_size)
        gradients = local if self.gradients is Placement.SHARDED else numel
        parameters = self.parameter_bytes(numel, world_size, parameter_bytes=parameter_bytes, master_bytes=master_bytes)
        state_bytes = 2 * master_bytes if state_bytes is None else state_bytes
        return parameters + master_bytes * gradients + state_bytes * local

    def parameter_bytes(self, numel: int, world_size: int, *, parameter_bytes: int, master_bytes: int) -> int:
        """Bytes of parameters and master weights per rank, which is all that frozen parameters need.

        A master weight as wide as its parameter *is* the rank's own slice of the parameter, and at stage 3 a
        low-precision copy exists only while it is gathered, so neither is counted twice.
        """
        local = -(-numel // world_size)
        if self.parameters is Placement.SHARDED:
            return master_bytes * local
        return parameter_bytes * numel + (master_bytes * local if parameter_bytes != master_bytes else 0)


def replicated_bytes(numel: int, parameter_bytes: int, *, trains: bool) -> int:
    """Bytes per rank if nothing is sharded, as under DDP: parameters and, if they train, gradients and Adam's two
    moments, each as wide as the parameter."""
    return (4 if trains else 1) * numel * parameter_bytes


_R, _S = Placement.REPLICATED, Placement.SHARDED
_STAGES = {
    1: Placements(1, parameters=_R, gradients=_R, optimizer=_S),
    2: Placements(2, parameters=_R, gradients=_S, optimizer=_S),
    3: Placements(3, parameters=_S, gradients=_S, optimizer=_S),
}


def placements_of(stage: int | str) -> Placements:
    """The placements of a stage, given by number or by a name from the literature.

    Raises:
        ValueError: if ``stage`` is not a stage.
    """
    return _STAGES[stage_number(stage)]
