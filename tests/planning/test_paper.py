"""Table 1 of the paper as printed there, and the memory of this engine."""

from __future__ import annotations

import pytest

from lightning_zero.planning.paper import TABLE_1_RANKS, TABLE_1_SIZES, engine_bytes, formula_bytes

# GB by ranks: 7.5 B, 128 B and 1 T parameters, each at stages 1, 2 and 3 (Rajbhandari et al., SC20, Table 1).
TABLE_1 = {
    1: (120, 120, 120, 2048, 2048, 2048, 16000, 16000, 16000),
    4: (52.5, 41.3, 30, 896, 704, 512, 7000, 5500, 4000),
    16: (35.6, 21.6, 7.5, 608, 368, 128, 4750, 2875, 1000),
    64: (31.4, 16.6, 1.88, 536, 284, 32, 4187, 2218, 250),
    256: (30.4, 15.4, 0.47, 518, 263, 8, 4046, 2054, 62.5),
    1024: (30.1, 15.1, 0.12, 513, 257, 2, 4011, 2013, 15.6),
}


def test_the_formula_gives_the_papers_table():
    for ranks in TABLE_1_RANKS:
        cells = [formula_bytes(size, ranks, stage) / 1e9 for size in TABLE_1_SIZES for stage in (1, 2, 3)]
        assert cells == pytest.approx(TABLE_1[ranks], rel=0.005, abs=0.005)


@pytest.mark.parametrize("ranks", [4, 1024])
@pytest.mark.parametrize("parameters", [7.5e9, pytest.param(1e12, marks=pytest.mark.exhaustive)])
def test_engine_bytes_follow_the_engines_own_formula(parameters, ranks):
    """As in the paper, with gradients of 4 bytes; stage 1 keeps them in full only while micro-batches accumulate."""
    shard = parameters / ranks
    own = {1: 2 * parameters + 16 * shard, 2: 2 * parameters + 16 * shard, 3: 16 * shard}
    for stage, expected in own.items():
        assert engine_bytes(parameters, ranks, stage) == pytest.approx(expected, rel=0.001)
