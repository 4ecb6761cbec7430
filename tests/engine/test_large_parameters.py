"""One very large parameter, alone in its bucket."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import full_grad
from lightning_zero.engine import Engine
from tests.engine.test_several_machines import on_machines
from tests.support.training import same_tensors
from tests.support.workers import rank

WIDTH, BUCKET = 32, 2**13


class Embeds(nn.Module):
    def __init__(self, rows: int, uses_twice: bool = False) -> None:
        super().__init__()
        self.uses_twice = uses_twice
        self.embed = nn.Embedding(rows, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.uses_twice:
            x = nn.functional.linear(x, self.embed.weight)
        return x.square().mean()


def train(
    rows: int,
    bucket_numel: int,
    machines: str,
    unused: bool = False,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    uses_twice: bool = False,
    **options: Any,
) -> tuple[Any, dict[str, int]]:
    torch.manual_seed(0)
    model = Embeds(rows, uses_twice).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with on_machines(machines):
        engine = Engine(model, [optimizer], bucket_numel=bucket_numel, **options)
    for step in range(3):
        if step == 1:
            engine.reset_peak()
        for micro_batch in range(micro_batches):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank())
            loss = model(torch.randint(rows, (8, 16), generator=generator))
            if unused and rank() == micro_batch % 2:
                loss = model.blocks[0](torch.ones(1, WIDTH, dtype=dtype)).sum()
            last = micro_batch + 1 == micro_batches
            with contextlib.nullcontext() if last or options["stage"] != 1 else engine.no_sync():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, peak = engine.full_state_dict(), engine.report().peak
    engine.close()
    return weights, peak


def compare(machines: str, **options: Any) -> None:
    """In a bucket of its own, a large parameter trains as in a bucket with all others."""
    for rows in (2**10, 2**10 + 7):
        found, peak = train(rows, BUCKET, machines, **options)
        expected, _ = train(rows, 2**25, machines, **options)
        same_tensors(found, expected, bound=0)
    if set(options) == {"stage"}:
        elements = (2**10 + 7) * WIDTH
        # its gradient, one half of it received from the other rank, and small buckets
        assert peak["reduction"] <= 1.5 * 4 * elements + 2 * 4 * BUCKET


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"reduce_dtype": "bf16"}, {"dtype": torch.bfloat16}], ids=str)
def test_a_large_parameter_trains_in_a_bucket_of_its_own(run_on, stage, options):
    run_on(2, compare, stage=stage, machines="aa", **options)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("options", [{}, {"reduce_dtype": "bf16"}, {"micro_batches": 2}], ids=str)
def test_with_shard_within_a_large_parameter_trains_in_a_bucket_of_its_own(run_on, options):
    run_on(4, compare, stage=3, machines="aabb", shard_within="node", **options)


@pytest.mark.parametrize(("stage", "micro_batches"), [(2, 1), (1, 2), (2, 2)])
def test_the_gradient_of_a_large_parameter_counts_as_zero_on_ranks_that_do_not_use_it(run_on, stage, micro_batches):
    """This also holds if one rank has accumulated a gradient without synchronisation and the other has not."""
    run_on(2, compare, stage=stage, machines="ab", unused=True, micro_batches=micro_batches, reduce_dtype="bf16")


def drop_a_local_gradient(rows: int) -> None:
    torch.manual_seed(0)
    module, reference = nn.Linear(64, rows, bias=False), nn.Linear(64, rows, bias=False)
    reference.load_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], stage=1, bucket_numel=1000)
    inputs = [torch.full((2, 64), 1.0 + number) for number in range(2)]
    with engine.no_sync():
        module(inputs[rank()]).sum().backward()
    optimizer.zero_grad()
    module(inputs[rank()]).square().sum().backward()
    (sum(reference(each).square().sum() for each in inputs) / 2).backward()
    torch.testing.assert_close(full_grad(module.weight), reference.weight.grad)
    engine.close()


@pytest.mark.parametrize("rows", [64, 256], ids=["small enough to be kept apart", "larger"])
def test_a_dropped_local_gradient_of_a_large_parameter_is_not_reduced(run_on, rows):
    run_on(2, drop_a_local_gradient, rows=rows)
