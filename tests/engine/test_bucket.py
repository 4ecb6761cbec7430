"""Where a bucket keeps its values, by stage, dtype and offload, and the state of its gathered buffer over a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine
from lightning_zero.engine.config import EngineConfig, OffloadConfig
from lightning_zero.engine.plan.layout import BucketLayout, placements_of
from lightning_zero.engine.state.bucket import BucketState
from lightning_zero.engine.state.residency import Medium, ResidencyPlan

BUFFER, DEVICE, HOST, DISK = Medium.BUFFER, Medium.DEVICE, Medium.HOST, Medium.DISK
FP32, BF16 = torch.float32, torch.bfloat16
ON_CPU = OffloadConfig("cpu")
ON_DISK = OffloadConfig("nvme", path="/anywhere")
ALL_ON_CPU = OffloadConfig("cpu", parameters="cpu")
ALL_ON_DISK = OffloadConfig("nvme", parameters="nvme", path="/anywhere")
MIXED = OffloadConfig("nvme", parameters="cpu", path="/anywhere")


def planned(stage: int, ranks: int, dtype: torch.dtype, offload: OffloadConfig | None, **options: Any) -> ResidencyPlan:
    layout = BucketLayout.of([("weight", torch.Size([256]))], ranks)  # 256 / 4 is a multiple of the alignment
    chosen = {"dtype": dtype, "compute_dtype": dtype, "trains": True, "config": EngineConfig()} | options
    return ResidencyPlan.of(layout, placements_of(stage), offload, device=torch.device("cuda"), **chosen)


def bytes_of(plan: ResidencyPlan) -> dict[Medium, int]:
    found = Counter[Medium]()
    if plan.is_replicated:
        found[BUFFER] += plan.layout.padded_numel * plan.gathered_dtype.itemsize
    for medium, dtype in ((plan.masters, plan.master_dtype), (plan.copy, plan.compute_dtype)):
        if medium in (DEVICE, HOST, DISK):
            found[medium] += plan.shard_numel * dtype.itemsize
    return found


@pytest.mark.parametrize(
    ("stage", "ranks", "dtype", "offload", "masters", "copy", "at_rest"),
    [
        # 256 elements over 4 ranks: a shard of 64, 256 bytes in fp32 and 128 in bf16
        (2, 4, FP32, None, BUFFER, None, {BUFFER: 1024}),
        (2, 4, BF16, None, DEVICE, None, {BUFFER: 512, DEVICE: 256}),
        (3, 4, FP32, None, DEVICE, None, {DEVICE: 256}),
        (3, 4, BF16, None, DEVICE, None, {DEVICE: 256}),
        (2, 4, FP32, ON_CPU, HOST, BUFFER, {BUFFER: 1024, HOST: 256}),
        (2, 4, BF16, ON_DISK, DISK, BUFFER, {BUFFER: 512, DISK: 256}),
        # The input of gathers stays on the device, unless the parameters are offloaded, too.
        (3, 4, FP32, ON_CPU, HOST, DEVICE, {HOST: 256, DEVICE: 256}),
        (3, 4, BF16, ON_CPU, HOST, DEVICE, {HOST: 256, DEVICE: 128}),
        (3, 4, FP32, ALL_ON_CPU, HOST, None, {HOST: 256}),
        (3, 4, BF16, ALL_ON_CPU, HOST, HOST, {HOST: 256 + 128}),
        (3, 4, FP32, MIXED, DISK, HOST, {DISK: 256, HOST: 256}),
        (3, 4, FP32, ALL_ON_DISK, DISK, None, {DISK: 256}),
        (3, 4, BF16, ALL_ON_DISK, DISK, DISK, {DISK: 256 + 128}),
        # On one rank, a shard in addition to the buffer would be a second copy of everything.
        (3, 1, FP32, None, BUFFER, None, {BUFFER: 1024}),
        (3, 1, BF16, None, DEVICE, None, {DEVICE: 1024}),
        (3, 1, BF16, ON_CPU, HOST, BUFFER, {BUFFER: 512, HOST: 1024}),
        (3, 1, FP32, ALL_ON_CPU, HOST, None, {HOST: 1024}),
    ],
)
def test_stage_dtype_and_offload_decide_where_values_are_kept(stage, ranks, dtype, offload, masters, copy, at_rest):
    plan = planned(stage, ranks, dtype, offload)
    assert (plan.masters, plan.copy, bytes_of(plan)) == (masters, copy, at_rest)


def test_frozen_parameters_are_their_own_masters_and_are_offloaded_with_the_parameters():
    assert bytes_of(planned(3, 4, BF16, ON_CPU, trains=False)) == {DEVICE: 128}
    assert bytes_of(planned(3, 4, BF16, ALL_ON_CPU, trains=False)) == {HOST: 128}
    assert bytes_of(planned(1, 4, BF16, ON_CPU, trains=False)) == {BUFFER: 512}


def test_in_mixed_precision_masters_are_the_parameters_and_the_buffer_is_cast():
    assert bytes_of(planned(1, 4, FP32, None, compute_dtype=BF16)) == {BUFFER: 512, DEVICE: 256}
    assert bytes_of(planned(3, 4, FP32, ALL_ON_DISK, compute_dtype=BF16, trains=False)) == {DISK: 256 + 128}


def state_over_one_step(**options: Any) -> list[BucketState]:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(options.pop("dtype", FP32))
    optimizer = torch.optim.Adam(module.parameters())
    engine = Engine(module, [optimizer], stage=3, units=[nn.Linear], unit_numel=0, **options)
    bucket = engine.units[0].buckets[0]
    seen = [bucket.state]
    module[0].register_forward_hook(lambda *_: seen.append(bucket.state))
    loss = module(torch.randn(2, 4, dtype=module[0].weight.dtype)).sum()
    seen.append(bucket.state)
    loss.backward()
    optimizer.step()
    seen.append(bucket.state)
    bucket.gather()
    seen.append(bucket.state)
    bucket.wait()
    seen.append(bucket.state)
    engine.close()
    return seen


def test_a_released_bucket_is_sharded_between_its_uses(run_on):
    run_on(1, released)


def released():
    # in bf16 the buffer is separate from the masters, so it is released on one rank, too
    sharded, gathering, gathered = BucketState.SHARDED, BucketState.GATHERING, BucketState.GATHERED
    assert state_over_one_step(dtype=BF16) == [sharded, gathered, sharded, sharded, gathering, gathered]


def test_on_one_rank_an_offloaded_update_leaves_the_buffer_stale_until_the_next_gather(run_on):
    run_on(1, stale)


def stale():
    gathering, gathered = BucketState.GATHERING, BucketState.GATHERED
    expected = [gathered, gathered, gathered, BucketState.STALE, gathering, gathered]
    assert state_over_one_step(offload="cpu") == expected
