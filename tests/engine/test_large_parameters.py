"""One very large parameter: the size of reduction buffers does not depend on it (C_B in the paper)."""

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

WIDTH, CHUNK = 32, 2**13


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
    for rows in (2**10, 2**10 + 7, 2**12):
        found, peak = train(rows, CHUNK, machines, **options)
        expected, whole = train(rows, 2**25, machines, **options)
        same_tensors(found, expected, bound=0)
        bound = 2 * 4 * (2 * CHUNK)  # two chunks in fp32, each with its receive buffer
        assert peak["reduction"] <= bound + 4 * CHUNK, "and the small bucket that fills"
        assert rows == 2**10 or whole["reduction"] > bound or "reduce_dtype" not in options


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("machines", "options"),
    [("aa", {}), ("aa", {"reduce_dtype": "bf16"}), ("ab", {}), ("ab", {"reduce_dtype": "bf16"})],
    ids=str,
)
def test_reduction_buffers_do_not_grow_with_the_largest_parameter(run_on, stage, machines, options):
    run_on(2, compare, stage=stage, machines=machines, **options)


@pytest.mark.parametrize("options", [{}, {"reduce_dtype": "bf16"}, {"micro_batches": 2}], ids=str)
def test_reduction_buffers_with_shard_within_do_not_grow_with_the_largest_parameter(run_on, options):
    run_on(4, compare, stage=3, machines="aabb", shard_within="node", **options)


def reduce_in_16_bits(machines: str, stage: int, twice: bool) -> None:
    """A gradient in 16 bits is not copied to fp32 as a whole: only this rank's shard of the sum is kept next to it."""
    options: Any = {"stage": stage, "machines": machines, "dtype": torch.bfloat16, "uses_twice": twice}
    rows = 2**13
    found, peak = train(rows, CHUNK, **options)
    expected, _ = train(rows, 2**25, **options)
    same_tensors(found, expected, bound=0)
    elements = rows * WIDTH
    own = 4 * elements // 2  # the shard of the sum, in fp32
    assert peak["gradients"] <= (4 if twice else 2) * elements + own + 4 * 4 * CHUNK, "and those of small buckets"
    assert peak["reduction"] <= 2 * 4 * (2 * CHUNK) + 4 * CHUNK


@pytest.mark.parametrize("twice", [False, True], ids=["used once", "used twice"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("machines", ["aa", "ab"])
def test_a_gradient_in_16_bits_is_cast_in_chunks(run_on, machines, stage, twice):
    run_on(2, reduce_in_16_bits, machines=machines, stage=stage, twice=twice)


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
