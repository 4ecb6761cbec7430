"""Table 1 of the ZeRO paper (Rajbhandari et al., SC20): bytes of model states by the formula and in the engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_zero.engine import Engine, Simulation, compat, process_group
from lightning_zero.planning.fake_run import leave_meta

TABLE_1_SIZES = (7.5e9, 128e9, 1e12)
"""The model sizes of the table, in parameters."""

TABLE_1_RANKS = (1, 4, 16, 64, 256, 1024)

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    name: {"stages": [stage], "checkpointing": [activations], "offloads": [offload]}
    for name, stage, activations, offload in (
        ("C1", 1, True, "none"),
        ("C2", 1, "partitioned", "none"),
        ("C3", 2, True, "none"),
        ("C4", 2, "partitioned", "none"),
        ("C5", 2, "partitioned", "activations"),
    )
}
"""The paper's Table 3, as choices for ``make_plans``. The engine always uses constant-size buffers (C_B)."""

_STATES = ("parameters", "gradients", "optimizer")


class Cell(NamedTuple):
    """One cell of the table, in GB (10^9 bytes) per rank.

    Attributes:
        formula_gb: the paper's figure, with 2-byte parameters and gradients and 12 bytes of fp32 states per parameter.
        engine_gb: the model states in the engine after backward, with gradients in fp32. By then, stage 1 also has only
            shards of gradients: it keeps full gradients only while micro-batches accumulate.
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
    """Run two engine steps on fake tensors; return the bytes of model states on a rank at the end of backward."""
    width = 2**14
    with torch.device("meta"):
        count, rest = divmod(round(parameters), 64 * width)
        parts = [count // 16 + (number < count % 16) for number in range(16)]
        layers = [nn.Linear(64 * width, part, bias=False, dtype=torch.bfloat16) for part in parts]
        if rest:
            layers.append(nn.Linear(rest, 1, bias=False, dtype=torch.bfloat16))
    module = _Rows(layers)
    held: dict[str, int] = {}
    with process_group.simulated(0, ranks), compat.FakeTensorMode(allow_non_fake_inputs=True):
        leave_meta(module)
        optimizer = torch.optim.AdamW(module.parameters())
        # Reduce in one chunk: thousands of chunks are slow on fake tensors, and do not change the model states.
        whole = max(parameter.numel() for parameter in module.parameters())
        engine = Engine(module, [optimizer], stage=stage, device="cpu", bucket_numel=whole, simulation=Simulation())
        for _ in range(2):
            module().backward()
            engine.report()
            held = dict(engine.ledger.now)
            optimizer.step()
            optimizer.zero_grad()
    return sum(held.get(category, 0) for category in _STATES)


def table_1() -> list[Cell]:
    """Compute the table's 54 cells."""
    return [
        Cell(ranks, size, stage, formula_bytes(size, ranks, stage) / 1e9, engine_bytes(size, ranks, stage) / 1e9)
        for ranks in TABLE_1_RANKS
        for size in TABLE_1_SIZES
        for stage in (1, 2, 3)
    ]


class _Rows(nn.ModuleList):
    """Layers that each receive their own row of ones."""

    def forward(self) -> torch.Tensor:
        layers: list[Any] = list(self)
        rows = [torch.ones(1, layer.in_features, dtype=torch.bfloat16, device="cpu") for layer in layers]
        return torch.stack([layer(row).float().mean() for layer, row in zip(layers, rows)]).sum()
