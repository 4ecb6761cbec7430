"""The simulated time of a step, compared with times computed by hand."""

from __future__ import annotations

from dataclasses import replace as with_

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_zero.planning.timeline import Event, Resources, replay
from lightning_zero.planning.tracking import Observer

SLOW = Resources(
    flops=10.0,
    memory_bandwidth=10.0,
    operator_seconds=1.0,
    link_bandwidth=10.0,
    link_seconds=1.0,
    host_bandwidth=10.0,
    disk_bandwidth=10.0,
)


def test_an_operator_takes_the_time_of_its_arithmetic_plus_its_bytes_and_at_least_a_launch():
    for event, seconds in (
        (Event("compute", flops=50.0), 5.0),
        (Event("compute", nbytes=30.0), 3.0),
        (Event("compute", flops=50.0, nbytes=30.0), 8.0),
        (Event("compute"), 1.0),
    ):
        assert replay([event], SLOW)[0] == seconds


def test_a_collective_overlaps_with_operators_until_it_is_awaited():
    events = [Event("launch", nbytes=30.0, number=1), Event("compute", nbytes=20.0), Event("wait", number=1)]
    assert replay(events, SLOW) == (4.0, 2.0)


def test_collectives_run_one_after_another():
    events = [Event("launch", nbytes=10.0, number=number) for number in (1, 2)] + [Event("wait", number=2)]
    assert replay(events, SLOW)[0] == 4.0


def test_updates_on_the_host_overlap_with_the_device():
    events = [Event("compute", nbytes=10.0), Event("host", nbytes=50.0), Event("compute", nbytes=20.0)]
    assert replay(events, SLOW) == (6.0, 3.0)


def test_on_a_cpu_collectives_and_updates_do_not_overlap_with_operators():
    cpu = with_(SLOW, overlaps=False)
    events = [Event("launch", nbytes=30.0, number=1), Event("compute", nbytes=20.0), Event("wait", number=1)]
    assert replay(events, cpu) == (6.0, 4.0)
    events = [Event("compute", nbytes=10.0), Event("host", nbytes=50.0), Event("compute", nbytes=20.0)]
    assert replay(events, cpu)[0] == 8.0


def test_disk_transfers_overlap_with_the_device_and_the_host():
    events = [Event("disk", nbytes=40.0), Event("compute", nbytes=20.0), Event("host", nbytes=50.0)]
    assert replay(events, SLOW)[0] == 7.0
    assert replay([*events, Event("disk", nbytes=40.0)], SLOW)[0] == 8.0


def test_a_speed_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="flops='fast' must be a number of at least 0"):
        Resources(flops="fast", memory_bandwidth=1.0)


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.ReLU())
        self.out = nn.Linear(4, 4)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x).unflatten(1, (4, 4)).transpose(2, 3).contiguous()  # as the fused kernel requires
        keys = x[:, : self.heads]
        shares = self.heads < 4
        return self.out(nn.functional.scaled_dot_product_attention(x, keys, keys, enable_gqa=shares))


def test_products_in_16_bits_take_the_time_of_their_own_speed():
    event = Event("compute", flops=50.0, is_low=True)
    assert replay([event], with_(SLOW, low_flops=25.0))[0] == 2.0
    assert replay([event], SLOW)[0] == replay([Event("compute", flops=50.0)], with_(SLOW, low_flops=25.0))[0] == 5.0


@pytest.mark.parametrize(("dtype", "is_low"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)])
def test_products_in_16_bits_are_recorded_as_such(dtype: torch.dtype, is_low: bool) -> None:
    with Observer() as observer:
        nn.Linear(4, 4, dtype=dtype)(torch.ones(2, 4, dtype=dtype))
    assert [event.is_low for event in observer.events if event.flops] == [is_low]


@pytest.mark.parametrize("heads", [4, 2], ids=["a head of keys each", "query heads that share keys"])
def test_counted_operations_equal_torchs_count_of_single_products(heads: int) -> None:
    x = torch.randn(2, 8, 32)
    observer, torchs = Observer(), FlopCounterMode(display=False)
    with observer:
        Attention(heads)(x).sum().backward()
    with torchs, sdpa_kernel(SDPBackend.MATH):
        Attention(heads)(x).sum().backward()
    # the fused kernel computes the product of queries and keys once more, in backward
    counted = sum(event.flops for event in observer.events)
    assert counted == torchs.get_total_flops() + 2 * (2 * 4 * 32 * 32 * 4)
