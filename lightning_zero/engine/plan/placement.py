"""Placements: the ranks over which a ZeRO stage shards parameters, gradients and optimizer state at rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_zero.engine.config import stage_number
from lightning_zero.engine.plan.mesh import ALL, LOCAL, Mesh


@dataclass(frozen=True)
class Placement:
    """The mesh dimensions over which one kind of model state is sharded; other dimensions hold replicas."""

    over: tuple[str, ...] = ()

    @property
    def is_sharded(self) -> bool:
        return bool(self.over)


@dataclass(frozen=True)
class Placements:
    """The placements that define a stage (Rajbhandari et al., SC20, section 5, figure 1)."""

    stage: int
    parameters: Placement
    gradients: Placement  # at stage 1, full-size gradients accumulate under ``no_sync``
    optimizer: Placement

    def model_state_bytes(
        self,
        numel: int,
        mesh: Mesh,
        *,
        parameter_bytes: int,
        master_bytes: int = 4,
        state_bytes: int | None = None,
        trains: bool = True,
    ) -> int:
        """Return the bytes of model states per rank, by the paper's formula for Adam, with this engine's dtypes.

        If master weights have as many bytes as parameters, they *are* the rank's slice of the parameters, so they are
        counted once. If parameters are sharded like master weights, only master weights are counted: low-precision
        parameters exist only while gathered.

        Args:
            numel: Psi, the number of parameter elements.
            mesh: the mesh of ranks; the paper's N is the number of ranks along the sharded dimensions.
            parameter_bytes: bytes per parameter element in computation: 4 for fp32, 2 for bf16 and fp16, 8 for fp64.
            master_bytes: bytes per element of master weights and gradients: 4, 8 for fp64, or 2 for bf16 parameters
                without master weights. Gradients that are not sharded have at least 4.
            state_bytes: bytes per element of each of Adam's moments; None for ``master_bytes``.
            trains: whether the parameters have gradients and moments.
        """
        kinds = (self.parameters, self.gradients, self.optimizer)
        parameters, gradients, optimizer = (-(-numel // mesh.size(kind.over)) for kind in kinds)
        total = master_bytes * optimizer
        if self.parameters != self.optimizer:
            total = parameter_bytes * parameters + (master_bytes * optimizer if parameter_bytes != master_bytes else 0)
        if trains:
            gradient_bytes = master_bytes if self.gradients.is_sharded else max(master_bytes, 4)
            total += gradient_bytes * gradients + 2 * (state_bytes or master_bytes) * optimizer
        return total

    def communicated_psi(self, accumulate: int, ranks: int, within: int | None = None) -> float:
        """Return the elements that a rank communicates per optimizer step, divided by Psi (SC20, section 7).

        Gradients are reduced once per step, or once per micro-batch if they are sharded. Parameters are gathered once
        per step, or twice per micro-batch if they are sharded. If they are sharded within groups of ``within`` ranks,
        groups also exchange shards once per step.
        """
        if ranks == 1:
            return 0
        reductions = accumulate if self.gradients.is_sharded else 1
        gathers = 2 * accumulate if self.parameters.is_sharded else 1
        between_groups = 2 / within if within is not None and 1 < within < ranks else 0
        return reductions + gathers + between_groups


def replicated_bytes(numel: int, parameter_bytes: int, *, trains: bool) -> int:
    """Bytes per rank if nothing is sharded, as under DDP: parameters and, if they train, gradients and Adam's two
    moments, all in the parameters' dtype."""
    return (4 if trains else 1) * numel * parameter_bytes


_R, _S = Placement(), Placement(ALL)
_STAGES = {
    1: Placements(1, parameters=_R, gradients=_R, optimizer=_S),
    2: Placements(2, parameters=_R, gradients=_S, optimizer=_S),
    3: Placements(3, parameters=_S, gradients=_S, optimizer=_S),
}


def placements_of(stage: int | str, *, shards_within: bool = False) -> Placements:
    """Return the placements of a stage. Raises a ValueError if there is no such stage.

    Args:
        stage: a number, or a name from the literature.
        shards_within: whether parameters are sharded only within machines, so that each machine has all of them
            (stage 3 only).
    """
    placements = _STAGES[stage_number(stage)]
    return replace(placements, parameters=Placement((LOCAL,))) if shards_within else placements
