"""Table 1 of the ZeRO paper (Rajbhandari et al., SC20): model states by its formula and in this engine."""

from __future__ import annotations

from itertools import product

from lightning_zero.engine import layout

TABLE_1_SIZES = (7.5e9, 128e9, 1e12)
"""The model sizes of the table, in parameters."""

TABLE_1_RANKS = (1, 4, 16, 64, 256, 1024)


def formula_bytes(parameters: float, ranks: int, stage: int) -> float:
    """Bytes of model states per rank by the paper's Figure 1, with Adam in mixed precision (K = 12).

    Gradients have 2 bytes per parameter; in this engine, they have 4.
    """
    psi, shard = parameters, parameters / ranks
    return {1: 4 * psi + 12 * shard, 2: 2 * psi + 14 * shard, 3: 16 * shard}[stage]


def engine_bytes(parameters: float, ranks: int, stage: int) -> int:
    """Bytes of model states per rank at the end of backward, with Adam and bf16 parameters."""
    # by then, stage 1 also has only shards of gradients: it keeps full gradients only while micro-batches accumulate
    placements = layout.placements_of(max(stage, 2))
    return placements.model_state_bytes(round(parameters), layout.Mesh.flat(ranks), parameter_bytes=2)


def table_1() -> list[dict[str, float]]:
    """The table's 54 cells, in GB (10^9 bytes) per rank: by the paper's formula, and in this engine after backward."""
    return [
        {
            "ranks": ranks,
            "parameters": size,
            "stage": stage,
            "formula_gb": formula_bytes(size, ranks, stage) / 1e9,
            "engine_gb": engine_bytes(size, ranks, stage) / 1e9,
        }
        for ranks, size, stage in product(TABLE_1_RANKS, TABLE_1_SIZES, (1, 2, 3))
    ]
