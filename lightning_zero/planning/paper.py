"""Table 1 of the ZeRO paper (Rajbhandari et al., SC20): model states by its formula and in this engine."""

from __future__ import annotations

from typing import NamedTuple

from lightning_zero.engine.plan.mesh import Mesh
from lightning_zero.engine.plan.placement import placements_of

TABLE_1_SIZES = (7.5e9, 128e9, 1e12)
"""The model sizes of the table, in parameters."""

TABLE_1_RANKS = (1, 4, 16, 64, 256, 1024)


class Cell(NamedTuple):
    """One cell of the table, in GB (10^9 bytes) per rank.

    Attributes:
        formula_gb: the paper's figure, with 2-byte parameters and gradients and 12 bytes of fp32 states per parameter.
        engine_gb: the model states in this engine after backward, with gradients in fp32.
    """

    ranks: int
    parameters: float
    stage: int
    formula_gb: float
    engine_gb: float


def formula_bytes(parameters: float, ranks: int, stage: int) -> float:
    """Bytes of model states per rank by the paper's Figure 1, with Adam in mixed precision (K = 12)."""
    psi, shard = parameters, parameters / ranks
    return {1: 4 * psi + 12 * shard, 2: 2 * psi + 14 * shard, 3: 16 * shard}[stage]


def engine_bytes(parameters: float, ranks: int, stage: int) -> int:
    """Bytes of model states per rank at the end of backward, with Adam and bf16 parameters."""
    # by then, stage 1 also has only shards of gradients: it keeps full gradients only while micro-batches accumulate
    placements = placements_of(max(stage, 2))
    return placements.model_state_bytes(round(parameters), Mesh.flat(ranks), parameter_bytes=2)


def table_1() -> list[Cell]:
    """Compute the table's 54 cells."""
    return [
        Cell(ranks, size, stage, formula_bytes(size, ranks, stage) / 1e9, engine_bytes(size, ranks, stage) / 1e9)
        for ranks in TABLE_1_RANKS
        for size in TABLE_1_SIZES
        for stage in (1, 2, 3)
    ]
