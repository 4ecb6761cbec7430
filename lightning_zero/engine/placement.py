"""What a ZeRO stage means: where parameters, gradients and optimizer state live at rest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Placement(Enum):
    """Where one kind of model state lives between its uses."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


@dataclass(frozen=True)
class Placements:
    """The triple that a stage is (Rajbhandari et al., SC20, section 5, figure 1).

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
        """Bytes of model states a rank, by the formula of the paper with the widths in which this engine keeps them.

        Args:
            numel: Psi, the number of parameter elements.
            world_size: N, the number of ranks.
            parameter_bytes: width of a parameter as it is computed with: 4 for fp32, 2 for bf16 and fp16, 8 for fp64.
            master_bytes: width of a master, and of a gradient: 4, but 8 for fp64.
            state_bytes: what the optimizer keeps an element; by default Adam's two moments, as wide as the masters.

        Returns:
            Parameters + masters + gradients + optimizer state.
        """
        local = -(-numel // world_size)
        gradients = local if self.gradients is Placement.SHARDED else numel
        parameters = self.parameter_bytes(numel, world_size, parameter_bytes=parameter_bytes, master_bytes=master_bytes)
        state_bytes = 2 * master_bytes if state_bytes is None else state_bytes
        return parameters + master_bytes * gradients + state_bytes * local

    def parameter_bytes(self, numel: int, world_size: int, *, parameter_bytes: int, master_bytes: int) -> int:
        """The part of parameters and masters, which is all that frozen parameters cost.

        A master as wide as its parameter *is* the rank's own slice of it, and at stage 3 a low-precision copy exists
        only while it is gathered, so neither is counted twice.
        """
        local = -(-numel // world_size)
        if self.parameters is Placement.SHARDED:
            return master_bytes * local
        return parameter_bytes * numel + (master_bytes * local if parameter_bytes != master_bytes else 0)


def replicated_bytes(numel: int, parameter_bytes: int, *, trains: bool) -> int:
    """Bytes a rank where nothing is sharded, as under DDP: parameters and, of those that train, gradients and Adam's
    two moments, each as wide as the parameter itself."""
    return (4 if trains else 1) * numel * parameter_bytes


_R, _S = Placement.REPLICATED, Placement.SHARDED
_STAGES = {
    1: Placements(1, parameters=_R, gradients=_R, optimizer=_S),
    2: Placements(2, parameters=_R, gradients=_S, optimizer=_S),
    3: Placements(3, parameters=_S, gradients=_S, optimizer=_S),
}
# The paper's names (P_os, P_os+g, P_os+g+p), and those of texts that name a stage after what it is the first to shard:
# ZeRO-O(ptimizer), ZeRO-D (gra*d*ients), ZeRO-P(arameters).
_ALIASES = {"os": 1, "o": 1, "os+g": 2, "d": 2, "os+g+p": 3, "p": 3}


def placements_of(stage: int | str) -> Placements:
    """The placements of a stage, given by number or by one of the names that papers use.

    Raises:
        ValueError: if ``stage`` names none.
    """
    key = _ALIASES.get(stage.lower().strip(), stage) if isinstance(stage, str) else stage
    if isinstance(key, str) and key.isdigit():
        key = int(key)
    if isinstance(key, bool) or key not in _STAGES:
        raise ValueError(
            f"stage={stage!r} is not a ZeRO stage: write 1, 2 or 3, or the paper's 'os', 'os+g', 'os+g+p' "
            "(for stage 0 use Lightning's strategy='ddp')."
        )
    return _STAGES[key]
