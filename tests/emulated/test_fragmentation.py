"""Memory that the device's allocator reserves but nothing uses: by the allocator's rules, and in training."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.engine.report import DeviceMemory
from lightning_zero.engine.state.buffer import GatheredBuffer
from tests.emulated import device
from tests.emulated.conftest import pools_of
from tests.emulated.device import in_order
from tests.gpu.one_device import twins
from tests.numbers.test_memory import large_storages

MB = 2**20
WIDTH = 512


def reserved_by(sizes: list[int], expandable: bool = False) -> tuple[int, int]:
    """Megabytes in use and reserved in a new pool, for tensors of these sizes in MB; 0 deletes the oldest."""
    device.native.expand_segments(expandable)
    before = device.native.segments()
    held = []
    with device.use_mem_pool(device.MemPool()):
        for size in sizes:
            if size:
                held.append(torch.empty(size * MB, dtype=torch.uint8, device=device.NAME))
            else:
                held.pop(0)
    after = device.native.segments()
    device.native.expand_segments(False)
    return (after[0] - before[0]) // MB, (after[2] - before[2]) // MB


@in_order
def follow_the_rules() -> None:
    assert reserved_by([4]) == (4, 20), "segments have at least 20 MB"
    assert reserved_by([4, 4, 8]) == (16, 20), "and are cut"
    assert reserved_by([31]) == (32, 32), "large ones have a multiple of 2 MB; a rest of up to 1 MB is not cut off"
    assert reserved_by([32, 0, 16]) == (16, 32), "freed memory is used again"
    assert reserved_by([32, 0, 4, 32]) == (36, 64), "but what is left of it is too short for as much as before"
    assert reserved_by([16, 16, 0, 0, 32]) == (32, 64), "segments are not joined"
    assert reserved_by([32, 0, 4, 32], expandable=True) == (36, 40), "one that grows, by 20 MB, has no such end"
    with pytest.raises(RuntimeError, match="already recording"):
        pool = device.MemPool()
        with device.use_mem_pool(pool), device.use_mem_pool(pool):
            pass


@in_order
def run_short() -> None:
    """Unused memory in segments that are in use, and attempts to give memory back when it is short."""
    gc.collect()
    device.native.empty()
    empty = partial(torch.empty, dtype=torch.uint8, device=device.NAME)
    before = memory_now()
    with device.use_mem_pool(device.MemPool()):
        first = empty(32 * MB)
        assert memory_now()["inactive_split"] == before["inactive_split"]
        del first
        assert memory_now()["inactive_split"] == before["inactive_split"], "a whole segment can be given back"
        second = empty(12 * MB)
        assert memory_now()["inactive_split"] == before["inactive_split"] + 20 * MB, "the rest of one in use cannot"
        device.native.limit(before["reserved"] + 64 * MB)
        with pytest.raises(RuntimeError, match="out of memory"):
            empty(48 * MB)
        assert memory_now()["retries"] == 1
        del second
        assert empty(48 * MB).numel() == 48 * MB and memory_now()["retries"] == 2
    device.native.limit(None)


def memory_now() -> dict[str, int]:
    stats = torch.get_device_module(device.NAME).memory_stats()
    names = "allocated", "reserved", "inactive_split"
    return {name: stats[f"{name}_bytes.all.current"] for name in names} | {"retries": stats["num_alloc_retries"]}


def test_memory_that_cannot_be_given_back_and_attempts_to_give_it_back_are_counted(run_on_unused_device):
    run_on_unused_device(1, run_short)


@in_order
def look_at_addresses(stage: int) -> None:
    """At rest, after the step that made the optimizer's states and after later ones."""
    with twins(8):
        module = nn.Sequential(*(Block() for _ in range(4)))
        optimizer = torch.optim.Adam(module.parameters())
        before = large_storages(MB // 4)
        engine = Engine(module, [optimizer], stage=stage, units=[Block], device=device.NAME)
        found = []
        for step in range(4):
            module(torch.randn(100 + 50 * step, WIDTH, device=device.NAME)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.accelerator.synchronize()
            found.append({k: n for k, n in large_storages(MB // 4).items() if k not in before})
        assert found[0] and sum(found[0].values()) == pytest.approx(sum(engine.report().at_rest.values()), rel=0.01)
        assert found[1:] == found[:1] * 3
        engine.close(communicate=False)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_and_states_are_allocated_once(run_on_device, stage):
    run_on_device(1, look_at_addresses, stage=stage)


def test_memory_fragments_by_the_rules_of_cudas_allocator(run_on_device):
    run_on_device(1, follow_the_rules)


class Block(nn.Module):
    """A block whose tensors have many sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        one, other, gate = self.mixed(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.tanh(one) * other * torch.sigmoid(gate))
        return x + self.down(torch.relu(self.up(x)))


@in_order
def trained(stage: int, expandable: bool = False, varied: bool = False, apart: bool = False) -> DeviceMemory:
    """Memory that training takes on an unused device.

    Args:
        varied: whether batches have a different length in each step.
        apart: whether gathered parameters are in a pool of their own.
    """
    gc.collect()
    device.native.empty()
    assert device.native.segments()[2] == 0
    device.native.expand_segments(expandable)
    pool, allocate = device.MemPool(), GatheredBuffer.allocate

    def allocate_apart(buffer: GatheredBuffer) -> None:
        with device.use_mem_pool(pool):
            allocate(buffer)

    with twins(8), patch.object(GatheredBuffer, "allocate", allocate_apart if apart else allocate):
        torch.manual_seed(0)
        module = nn.Sequential(*(Block() for _ in range(12)), nn.Linear(WIDTH, 3001, bias=False))
        optimizer = torch.optim.Adam(module.parameters())
        engine = Engine(module, [optimizer], stage=stage, units=[Block], device=device.NAME)
        for step in range(4):
            x = torch.randn((300, 1000, 450, 800)[step] if varied else 700, WIDTH, device=device.NAME)
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize()
        memory = engine.report().device_memory
        engine.close(communicate=False)
    device.native.expand_segments(False)
    assert memory is not None
    return memory


@pytest.fixture(scope="module")
def run_on_unused_device(library: Path) -> Iterator[Callable[..., Any]]:
    """Like `run_on_device`, in a process in which other tests have left nothing on the device."""
    for pools in pools_of(library):
        yield pools.run_on


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [2, 3])
def test_little_memory_is_lost_if_all_batches_have_one_size(run_on_unused_device, stage):
    (memory,) = run_on_unused_device(1, trained, stage=stage)
    assert 0 <= memory.fragmentation <= 0.10
    (memory,) = run_on_unused_device(1, trained, stage=stage, expandable=True)
    assert memory.reserved_peak - memory.allocated_peak <= 2 * 20 * MB, "segments grow by 20 MB, 5 % of this memory"


@pytest.mark.exhaustive
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("varied", [False, True])
def test_a_pool_for_gathered_parameters_would_save_nothing(run_on_unused_device, varied, expandable):
    """This is why the engine has no such pool: activations cannot use the memory that it reserves."""
    choices = {"stage": 3, "varied": varied, "expandable": expandable}
    ((one,), (two,)) = (run_on_unused_device(1, trained, apart=apart, **choices) for apart in (False, True))
    assert one.allocated_peak == pytest.approx(two.allocated_peak, rel=0.02)
    assert one.reserved_peak < two.reserved_peak or (expandable and one.reserved_peak == two.reserved_peak)
    assert one.fragmentation <= 0.22
