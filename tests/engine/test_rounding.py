"""Stochastic rounding: its bits are uniform and independent, its mean is the value, and it depends on no rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_zero.engine.optim.updating import GROUP_KEY, count_update, random_bits, round_stochastically
from lightning_zero.engine.plan.layout import BucketLayout
from lightning_zero.engine.plan.share import Share

NUMEL = 2**18


def bits(
    name: str = "weight", updates: int = 1, what: str = "exp_avg", seed: int = 0, first: int = 0, numel: int = NUMEL
) -> Tensor:
    layout = BucketLayout.of([(name, torch.Size([2**20]))], 1)
    return random_bits((seed, updates), layout, slice(first, first + numel), what, "cpu")


def is_uniform(cells: Tensor, count: int) -> bool:
    """A chi-square test; the statistic is within 4 standard deviations of its mean, the degrees of freedom."""
    expected = cells.numel() / count
    statistic = ((torch.bincount(cells.long(), minlength=count) - expected) ** 2 / expected).sum().item()
    return abs(statistic - (count - 1)) < 4 * math.sqrt(2 * (count - 1))


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63 - 1])
def test_all_sixteen_bits_are_uniform(seed):
    found = bits(seed=seed)
    assert found.min() >= 0 and found.max() < 2**16
    assert is_uniform(found, 2**16) and is_uniform(found >> 8, 256) and is_uniform(found & 255, 256)


@pytest.mark.parametrize(
    "other",
    [{"first": 1}, {"first": 2}, {"first": 64}, {"first": 4096}]
    + [{"name": "bias"}, {"updates": 2}, {"updates": 3}, {"what": "exp_avg_sq"}, {"seed": 1}],
    ids=str,
)
def test_bits_of_other_elements_parameters_updates_entries_and_seeds_are_independent(other):
    first, second = bits(), bits(**other)
    for low in (0, 4, 8):  # 16 bits are used from the top: the upper ones matter most
        assert is_uniform((first >> low & 255) << 8 | (second >> low & 255), 2**16)


def test_one_element_has_independent_bits_in_a_sequence_of_updates():
    found = torch.cat([bits(updates=number, numel=4) for number in range(8192)]).view(-1, 4)
    for element in range(4):
        assert is_uniform(found[:, element] >> 8, 256)
        assert is_uniform((found[:-1, element] >> 12 << 4) | (found[1:, element] >> 12), 256)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_bits_are_those_of_the_parameters_elements_however_they_are_laid_out_and_divided(ranks):
    shapes = {"a": (7, 15), "scalar": (), "empty": (0, 3), "b": (100,)}
    whole = {
        name: random_bits(
            (3, 9), BucketLayout.of([(name, torch.Size(shape))], 1), slice(0, math.prod(shape)), "m", "cpu"
        )
        for name, shape in shapes.items()
    }
    named = [(name, torch.Size(shape)) for name, shape in shapes.items()]
    found = []
    for rank in range(ranks):
        layout = BucketLayout.of(named, ranks, rank=rank)
        numel = layout.shard_numel(rank)
        cut = numel // 3  # also in two calls
        found += [random_bits((3, 9), layout, part, "m", "cpu") for part in (slice(0, cut), slice(cut, numel))]
    flat = torch.cat(found)
    for segment in layout.segments:
        assert torch.equal(flat[segment.start : segment.stop], whole[segment.name])


def test_tensor_parallel_shares_of_a_parameter_have_their_own_bits():
    shape = torch.Size([64, 64])
    first, second = (
        random_bits((0, 0), BucketLayout.of([("w", Share(shape, 0, index, 2))], 1), slice(0, 2048), "m", "cpu")
        for index in range(2)
    )
    assert not torch.equal(first, second)


def test_elements_beyond_two_to_the_power_of_32_have_bits():
    layout = BucketLayout.of([("w", torch.Size([2**33]))], 1)
    for first in (2**31 - 2, 2**31, 2**32 - 2, 2**33 - 4):
        found = random_bits((0, 0), layout, slice(first, first + 4), "m", "cpu")
        assert len(found.unique()) == 4
        again = [random_bits((0, 0), layout, slice(first + i, first + i + 1), "m", "cpu") for i in range(4)]
        assert torch.equal(found, torch.cat(again))


@pytest.mark.parametrize("value", [1.001, -1.001, 0.999 * 2**-126, 3e-41, 1e38, -7.0 / 3])
def test_the_mean_of_many_roundings_is_the_value(value):
    values = torch.full((NUMEL,), value)
    target = torch.empty(NUMEL, dtype=torch.bfloat16)
    round_stochastically(values, target, bits())
    low, high = target.double().unique().tolist()
    exact = values[0].double().item()
    assert low < exact < high
    up = (exact - low) / (high - low)
    error = (high - low) * math.sqrt(up * (1 - up) / NUMEL)  # the standard error of the mean of Bernoulli variables
    assert abs(target.double().mean().item() - exact) < 4 * error


def test_values_that_bf16_has_stay_and_nan_stays_nan():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    target = torch.empty_like(every)
    round_stochastically(every.float(), target, torch.full((2**16,), 2**16 - 1, dtype=torch.int32))
    assert torch.equal(target[~every.isnan()].view(torch.int16), every[~every.isnan()].view(torch.int16))
    assert target[every.isnan()].isnan().all()
    payloads = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    for number in (0, 2**16 - 1):
        target = torch.empty(4, dtype=torch.bfloat16)
        round_stochastically(payloads, target, torch.full((4,), number, dtype=torch.int32))
        assert target.isnan().all()


def test_the_seed_and_the_count_are_kept_in_param_groups_and_continue_from_them():
    groups: list[dict[str, object]] = [{}, {}]
    count_update(groups, seed=5)
    count_update(groups, seed=5)
    assert groups == [{GROUP_KEY: (5, 2)}, {GROUP_KEY: (5, 2)}]
    groups.append({})
    count_update(groups, seed=6)
    assert groups == 3 * [{GROUP_KEY: (5, 3)}]
