"""Placements: the ranks over which a ZeRO stage shards parameters, gradients and optimizer state at rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_zero.engine.config import stage_number
from lightning_zero.engine.plan.mesh import ALL, LOCAL, Mesh


@dataclass(frozen=True)
class Placement:
    """The mesh dimensions over which a kind of model state is sharded; over other dimensions it is replicated."""

    over: tuple[str, ...] = ()

    @property
    def is_sharded(self) -> bool:
        return bool(self.over)


@dataclass(frozen=True)
class Placements:
    """The placements that define a stage (Rajbhandari et al., SC20, section 5, figure 1)."""

    stage: int
    parameters: Placement
    gradients: Placement  # replicated while micro-batches are accumulated without synchronisation
    optimizer: Placement

    def model_state_bytes(
        self, numel: int, mesh: Mesh, *, parameter_bytes: int, master_bytes: int = 4, trains: bool = True
    ) -> int:
        """Bytes of model states per rank, by the paper's formula for Adam and this engine's dtypes.

        A master weight as wide as its parameter *is* the rank's own slice of the parameter. If parameters are sharded
        like the master weights, their low-precision copy exists only while gathered. So neither is counted twice.

        Args:
            numel: Psi, the number of parameter elements.
            mesh: the mesh of ranks; N is their number along the dimensions that shard.
            parameter_bytes: width of a parameter in computation: 4 for fp32, 2 for bf16 and fp16, 8 for fp64.
            master_bytes: width of a master weight, of a gradient and of each of Adam's moments: 4, but 8 for fp64.
            trains: whether there are gradients and moments.
        """
        kinds = (self.parameters, self.gradients, self.optimizer)
        parameters, gradients, optimizer = (-(-numel // mesh.size(kind.over)) for kind in kinds)
        total = master_bytes * optimizer
        if self.parameters != self.optimizer:
            total = parameter_bytes * parameters + (master_bytes * optimizer if parameter_bytes != master_bytes else 0)
        if trains:
            total += master_bytes * (gradients + 2 * optimizer)
        return total


def replicated_bytes(numel: int, parameter_bytes: int, *, trains: bool) -> int:
    """Bytes per rank if nothing is sharded, as under DDP: parameters and, if they train, gradients and Adam's two
    moments, each as wide as the parameter."""
    return (4 if trains else 1) * numel * parameter_bytes


_R, _S = Placement(), Placement(ALL)
_STAGES = {
    1: Placements(1, parameters=_R, gradients=_R, optimizer=_S),
    2: Placements(2, parameters=_R, gradients=_S, optimizer=_S),
    3: Placements(3, parameters=_S, gradients=_S, optimizer=_S),
}


def placements_of(stage: int | str, *, shards_within: bool = False) -> Placements:
    """The placements of a stage, given by number or by a name from the literature; raises a ValueError for others.

    Args:
        shards_within: whether each machine has all parameters (stage 3 only).
    """
    placements = _STAGES[stage_number(stage)]
    return replace(placements, parameters=Placement((LOCAL,))) if shards_within else placements
