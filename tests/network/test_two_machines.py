"""Two machines, as far as the network is concerned: the kernel counts the bytes that leave each."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.machines import bytes_sent_by_all, run_on_two
from tests.support.transports import cross_memory

WIDTH, LAYERS, STEPS = 512, 8, 4
PSI = WIDTH * WIDTH * LAYERS

pytestmark = pytest.mark.timeout(300)


def train(stage: int, accumulate: int = 1, reads_memory: bool = False, **options: Any) -> dict[str, Any]:
    """Train, and count what leaves this rank's machine in a step: by the kernel, and by the engine's own counters."""
    from lightning_zero.engine import Engine

    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    with cross_memory() if reads_memory else nullcontext():
        engine = Engine(module, [optimizer], stage=stage, unit_numel=0, **options)
    losses = []

    def step(number: int) -> None:
        for micro_batch in range(accumulate):
            generator = torch.Generator().manual_seed(100 * number + 10 * micro_batch + dist.get_rank())
            loss = module(torch.randn(4, WIDTH, generator=generator)).square().mean()
            with engine.no_sync() if micro_batch + 1 < accumulate else nullcontext():
                (loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    def read_counters() -> dict[str, int]:
        for bucket in engine.buckets:  # wait for gathers that a step has begun
            if bucket.part is not None:
                bucket.part.values()
            elif bucket.is_ready:
                bucket.wait()
        return bytes_sent_by_all()

    step(0)
    before = read_counters()
    engine.reset_counters()
    for number in range(1, STEPS + 1):
        step(number)
    after = read_counters()
    crossed = sum(n for (_, link), n in engine.communicator.counters.bytes.items() if link == "across")
    found = {"losses": losses, "crossed": crossed / STEPS, "machines": engine.communicator.mesh.dimensions["node"]}
    weights = torch.cat([value.flatten() for value in engine.full_state_dict().values()])
    engine.close()
    found |= {name: (after[name] - before[name]) / STEPS for name in after}
    return found | {"sum": weights.double().sum().item()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "accumulate", "elements", "reads_memory"),
    # In units of PSI. Each element crosses once, so each of two machines sends half of a reduction or a gather.
    [
        pytest.param({"stage": 1}, 4, 2, True, marks=pytest.mark.exhaustive),
        pytest.param({"stage": 2}, 4, 5, False, marks=pytest.mark.exhaustive),
        pytest.param({"stage": 3}, 4, 12, False, marks=pytest.mark.exhaustive),
        pytest.param({"stage": 3, "shard_within": "node"}, 4, 2, True, marks=pytest.mark.exhaustive),
        # a byte, and a scale of four bytes for 128 elements
        ({"stage": 2, "compression": "int8"}, 1, 1 + (1 + 4 / 128) / 4, True),
    ],
    ids=str,
)
def test_bytes_that_leave_a_machine_match_the_formula(options, accumulate, elements, reads_memory):
    ranks = run_on_two(train, accumulate=accumulate, reads_memory=reads_memory, **options)
    formula = 0.5 * elements * 4 * PSI
    if options == {"stage": 3}:  # backward begins with the unit with which forward has ended, still gathered
        formula -= 0.5 * 4 * accumulate * WIDTH * WIDTH
    assert [rank["machines"] for rank in ranks] == [2] * 4
    assert ranks[0]["losses"] != ranks[1]["losses"] and len({rank["sum"] for rank in ranks}) == 1
    for first, second in (ranks[:2], ranks[2:]):
        assert formula <= first["cable"] <= 1.02 * formula, (first["cable"], formula)
        counted = first["crossed"] + second["crossed"]
        assert counted == pytest.approx(first["cable"], rel=0.02), "the engine's counters say what the kernel counts"
        if reads_memory:
            assert first["lo"] < 0.01 * formula, "ranks of one machine use no network"
