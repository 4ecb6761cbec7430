"""`reduce_dtype`: the dtype in which gradients are communicated, as opposed to the dtype of their accumulation."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim import SGD

from lightning_zero import ZeroStrategy
from tests.numbers.test_bf16 import Weight
from tests.support.arithmetic import difference, padded_units
from tests.support.models import Square
from tests.support.trainer import Learner, fit
from tests.support.training import Recipe, same_runs, train_ddp, train_zero
from tests.support.workers import rank

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def reduce_once(dtype: torch.dtype, reduce_dtype: str, stage: int, micro_batches: list[list[float]]) -> torch.Tensor:
    """The full mean over ranks of each rank's sum of gradients, which are given by rank and micro-batch."""
    import lightning_zero
    from lightning_zero.engine import Engine

    module = Weight(dtype, 0.0)
    engine = Engine(module, [SGD(module.parameters(), lr=1.0)], stage=stage, reduce_dtype=reduce_dtype)
    gradients = micro_batches[rank()]
    for index, x in enumerate(gradients):
        loss = module(x)
        if stage == 1 and index < len(gradients) - 1:
            with engine.no_sync():
                loss.backward()
        else:
            loss.backward()
    assert lightning_zero.shard_of(module.linear.weight.grad).dtype == torch.promote_types(dtype, torch.float32)
    gathered = [torch.empty(32, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2)]
    torch.distributed.all_gather(gathered, lightning_zero.shard_of(module.linear.weight.grad).clone())
    engine.close()
    return torch.stack([part[0] for part in gathered])


def round_on_the_wire_only(name: str) -> None:
    wire = DTYPES[name]
    third = torch.tensor(1 / 3)
    for stage in (1, 2, 3):
        # Gradients are 1/3 and 2/3: each rank adds the rounded half that it receives to its own unrounded half.
        halves = third / 2, third * 2 / 2
        expected = torch.stack([halves[0] + halves[1].to(wire).float(), halves[1] + halves[0].to(wire).float()])
        result = reduce_once(torch.float32, name, stage, [[1 / 3], [2 / 3]])
        assert torch.equal(result, expected), f"{result} instead of {expected}"
        # Micro-batches are summed in fp32, at stage 1 before they are communicated, at stages 2 and 3 after. Terms that
        # bf16 and fp16 cannot represent next to 1 are not lost, and 1 + 16 * 2**-12 = 1 + 2**-8 is exact in fp16.
        tiny = 2.0**-12
        result = reduce_once(torch.float32, name, stage, [[0.0] * 17, [1.0] + [tiny] * 16])
        sent = torch.tensor(1 + 16 * tiny) / 2
        if stage == 1:
            sent = sent.to(wire).float()
        assert torch.equal(result, torch.stack([sent, torch.tensor(1 + 16 * tiny) / 2]))
        # Gradients are divided first, so that a sum that exceeds fp16 does not overflow.
        assert torch.equal(
            reduce_once(torch.float32, name, stage, [[40000.0], [40000.0]]).to(wire), torch.full((2,), 40000.0).to(wire)
        )
        # fp64 gradients may be communicated in fp32; gradients of low-precision parameters are by default.
        result = reduce_once(torch.float64, "fp32", stage, [[1 / 3], [2 / 3]])
        third64 = torch.tensor(1 / 3, dtype=torch.float64)
        other = (third64 / 2).float().double()
        assert torch.equal(result[1:], (third64 + other)[None]), f"{result}"
        assert torch.equal(reduce_once(wire, "fp32", stage, [[1.0], [tiny]]), torch.full((2,), (1 + tiny) / 2))


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The numbers", "`reduce_dtype=`: gradients are rounded on the wire only")
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_gradients_are_rounded_on_the_wire_and_added_up_in_fp32(run_on, name):
    run_on(2, round_on_the_wire_only, name=name)


def count_bytes() -> None:
    for reduce_dtype, width in ((None, 4), ("fp32", 4), ("bf16", 2), ("fp16", 2)):
        for precision in ("32-true", "bf16-true"):
            strategy = ZeroStrategy(stage=2, reduce_dtype=reduce_dtype)
            run = fit(strategy, partial(Learner, Square, batches=4), max_epochs=1, precision=precision)
            counted = difference(run.reports[3], run.reports[1])
            elements = counted["elements"]["reduce_scatter"]
            assert elements == 2 * sum(padded_units(run.units, run.module, 2).values())
            assert counted["bytes"]["reduce_scatter"] == width * elements


def test_the_report_counts_bytes_in_the_reduce_dtype(run_on):
    run_on(2, count_bytes)


def train_all_stages() -> None:
    first, *others = [train_zero(Recipe(), stage, reduce_dtype="bf16") for stage in (1, 2, 3)]
    for run in (*others, train_zero(Recipe(), 3, reduce_dtype="bf16", overlap=False)):
        same_runs(run, first)
    reference = train_ddp(Recipe())
    assert any(not torch.equal(a, b) for a, b in zip(first.losses, reference.losses)), "nothing was rounded"
    for loss, expected in zip(first.losses, reference.losses):
        assert abs(loss - expected) <= 0.01 * abs(expected)
    in_fp32 = train_zero(Recipe(), 2, reduce_dtype="fp32")
    same_runs(in_fp32, reference)


def test_with_a_bf16_reduce_dtype_the_three_stages_give_the_same_bits_and_follow_ddp(run_on):
    run_on(2, train_all_stages)


def train_alone() -> None:
    same_runs(train_zero(Recipe(), 2, reduce_dtype="bf16"), train_ddp(Recipe()))


def test_with_a_reduce_dtype_one_rank_communicates_and_rounds_nothing(run_on):
    run_on(1, train_alone)
