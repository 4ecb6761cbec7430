"""Table 1 of the paper as printed there, and the memory of this engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine
from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.simulation import Simulation
from lightning_zero.engine.compat import FakeTensorMode
from lightning_zero.engine.init import deferred_param
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


class Rows(nn.ModuleList):
    """Linear layers with this number of parameters in total, which each receive their own row of ones."""

    def __init__(self, parameters: float, width: int = 64 * 2**14) -> None:
        count, rest = divmod(round(parameters), width)
        parts = [count // 16 + (number < count % 16) for number in range(16)]
        layers = [nn.Linear(width, part, bias=False, dtype=torch.bfloat16) for part in parts]
        if rest:
            layers.append(nn.Linear(rest, 1, bias=False, dtype=torch.bfloat16))
        super().__init__(layers)

    def forward(self) -> torch.Tensor:
        layers: list[Any] = list(self)
        rows = [torch.ones(1, layer.in_features, dtype=torch.bfloat16, device="cpu") for layer in layers]
        return torch.stack([layer(row).float().mean() for layer, row in zip(layers, rows)]).sum()


def bytes_on_fake_tensors(parameters: float, ranks: int, stage: int, **options: Any) -> int:
    """Run two engine steps on fake tensors; return the bytes of model states on a rank at the end of backward."""
    with torch.device("meta"):
        module = Rows(parameters)
    held: dict[str, int] = {}
    with process_group.simulated(0, ranks), FakeTensorMode(allow_non_fake_inputs=True):
        deferred_param.leave_meta(module)
        optimizer = torch.optim.AdamW(module.parameters())
        # Reduce in one chunk: thousands of chunks are slow on fake tensors, and do not change the model states.
        whole = max(parameter.numel() for parameter in module.parameters())
        options |= {"stage": stage, "device": "cpu", "bucket_numel": whole, "simulation": Simulation()}
        engine = Engine(module, [optimizer], **options)
        for _ in range(2):
            module().backward()
            engine.report()
            held = dict(engine.ledger.now)
            optimizer.step()
            optimizer.zero_grad()
    return sum(held.get(category, 0) for category in ("parameters", "gradients", "optimizer"))


@pytest.mark.parametrize("ranks", [4, 1024])
@pytest.mark.parametrize("parameters", [7.5e9, pytest.param(1e12, marks=pytest.mark.exhaustive)])
def test_the_engine_takes_as_many_bytes_as_the_table_says(parameters, ranks):
    """As in the paper, with gradients of 4 bytes; stage 1 keeps them in full only while micro-batches accumulate."""
    shard = parameters / ranks
    own = {1: 2 * parameters + 16 * shard, 2: 2 * parameters + 16 * shard, 3: 16 * shard}
    for stage, expected in own.items():
        assert engine_bytes(parameters, ranks, stage) == pytest.approx(expected, rel=1e-6)
        assert bytes_on_fake_tensors(parameters, ranks, stage) == pytest.approx(expected, rel=0.001)


@pytest.mark.exhaustive
def test_bf16_states_without_masters_take_eight_bytes_instead_of_sixteen():
    """Bytes at the end of backward, with 2 bytes for each gradient and each of Adam's moments."""
    shard = 7.5e9 / 16
    for stage, expected in {1: 15e9 + 6 * shard, 2: 15e9 + 6 * shard, 3: 8 * shard}.items():
        found = bytes_on_fake_tensors(7.5e9, 16, stage, state_dtype="bf16", masters=False)
        assert found == pytest.approx(expected, rel=0.001)
