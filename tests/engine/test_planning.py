"""Memory for offloaded states is computed before anything changes, and offloading is refused without enough room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine
from lightning_zero.engine.config import EngineConfig, OffloadConfig
from lightning_zero.engine.init import host_room
from lightning_zero.engine.init.host_room import available_memory, memory_for
from lightning_zero.engine.plan.layout import BucketLayout, placements_of
from lightning_zero.engine.state.residency import ResidencyPlan
from tests.support.models import Square, adam
from tests.support.training import batch
from tests.support.workers import rank

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


def shard(
    numel: int,
    offload: OffloadConfig,
    *,
    stage: int = 3,
    dtype: torch.dtype = FP32,
    device: str = "cuda",
    **options: Any,
) -> ResidencyPlan:
    """The plan of a bucket over two ranks with `numel` elements per rank, a multiple of the alignment."""
    layout = BucketLayout.of([("weight", torch.Size([2 * numel]))], 2)
    chosen = {"dtype": dtype, "compute_dtype": dtype, "trains": True, "config": EngineConfig()} | options
    return ResidencyPlan.of(layout, placements_of(stage), offload, device=torch.device(device), **chosen)


ON_CPU, ALL_ON_CPU = OffloadConfig("cpu"), OffloadConfig("cpu", parameters="cpu")
GRADIENTS_TOO = OffloadConfig("cpu", gradients="cpu")
ON_DISK = OffloadConfig("nvme", path="/anywhere", sub_group=4096)
ALL_ON_DISK = OffloadConfig("nvme", parameters="nvme", path="/anywhere", sub_group=4096)


@pytest.mark.parametrize(
    ("offload", "shards", "need"),
    [
        # Adam on the CPU for a GPU: 3840 bytes of masters take 4096 pinned bytes, states 2 x 3840
        (
            ON_CPU,
            [(shard(960, ON_CPU), [4, 4])],
            {"master weights": 4096, "optimizer states": 7680},
        ),
        # all gradients on the CPU, too: 3840 -> 4096
        (
            GRADIENTS_TOO,
            [(shard(960, GRADIENTS_TOO), [4, 4])],
            {"master weights": 4096, "optimizer states": 7680, "gradients": 4096},
        ),
        # SGD with momentum in fp64, two buckets: 8 x 96 -> 1024 and 8 x 128 = 1024 pinned
        (
            ON_CPU,
            [(shard(96, ON_CPU, dtype=FP64), [8]), (shard(128, ON_CPU, dtype=FP64), [8])],
            {"master weights": 2048, "optimizer states": 1792},
        ),
        # parameters in bf16 and masters: 1920 -> 2048 and 4096; frozen parameters have nothing else: 1216 -> 2048
        (
            ALL_ON_CPU,
            [
                (shard(960, ALL_ON_CPU, dtype=BF16), [4, 4]),
                (shard(608, ALL_ON_CPU, dtype=BF16, trains=False), None),
            ],
            {"master weights": 4096 + 2048, "optimizer states": 7680, "parameters": 2048},
        ),
        # a module on the CPU: optimizer states and gradients are in host memory without offload, too
        (ON_CPU, [(shard(960, ON_CPU, device="cpu"), [4, 4])], {"master weights": 3840}),
        # Adam on a disk: chunks of 4096 elements, fields of 16384 bytes
        (ON_DISK, [(shard(4992, ON_DISK), [4, 4])], {"buffers for the disk": 3 * 3 * 16384}),
        # SGD has no states
        (ON_DISK, [(shard(4992, ON_DISK, device="cpu"), [])], {"buffers for the disk": 3 * 16384}),
        # parameters in bf16 with masters in fp32: fields of 8192 and 16384 bytes; SGD with momentum
        (
            ALL_ON_DISK,
            [(shard(4992, ALL_ON_DISK, dtype=BF16), [4])],
            {"buffers for the disk": 3 * (2 * 16384 + 8192)},
        ),
        # the largest bucket decides the size of the buffers
        (
            ON_DISK,
            [(shard(32, ON_DISK), [4, 4]), (shard(4992, ON_DISK), [4, 4])],
            {"buffers for the disk": 3 * 3 * 16384},
        ),
        (ON_CPU, [], {}),
    ],
)
def test_the_host_memory_that_a_rank_needs_is_computed_by_purpose(offload, shards, need):
    assert memory_for(shards, offload) == need


# ----------------------------------------------------------------------------------------------------- available memory


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:  8000 kB\n"}
VERSION_2 = {**MEMINFO, "proc/self/cgroup": "0::/a/b\n"}
VERSION_1 = {**MEMINFO, "proc/self/cgroup": "5:cpu:/x\n4:memory:/a/b\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, None),
        (MEMINFO, 8000 * 1024),
        (VERSION_2, 8000 * 1024),  # no visible limit
        (
            {**VERSION_2, "sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/b/memory.current": "5000"},
            8000 * 1024,
        ),
        # 7000 of which 5000 are taken, 600 of these by files that were read
        (
            {
                **VERSION_2,
                "sys/fs/cgroup/a/b/memory.max": "7000\n",
                "sys/fs/cgroup/a/b/memory.current": "5000\n",
                "sys/fs/cgroup/a/b/memory.stat": "anon 4000\ninactive_file 500\nactive_file 100\nfile 1000\n",
            },
            2600,
        ),
        # the enclosing group allows less
        (
            {
                **VERSION_2,
                "sys/fs/cgroup/a/b/memory.max": "7000",
                "sys/fs/cgroup/a/b/memory.current": "5000",
                "sys/fs/cgroup/a/memory.max": "9000",
                "sys/fs/cgroup/a/memory.current": "8500",
            },
            500,
        ),
        # a container sees its own group as the topmost
        (
            {
                **VERSION_1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "7500",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 700\ntotal_active_file 0\n",
            },
            200,
        ),
        # no limit, as version 1 writes it
        (
            {
                **VERSION_1,
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "7500",
            },
            8000 * 1024,
        ),
    ],
)
def test_available_memory_is_what_the_system_and_its_containers_allow(tmp_path: Path, files, found):
    assert available_memory(write(tmp_path, files)) == found


def test_the_memory_of_this_machine_is_known_on_linux():
    if Path("/proc/meminfo").exists():
        assert 2**20 < available_memory() < 2**50


# ---------------------------------------------------------------------------------------------------- in an engine


def refused(offload: Any, stage: int, memory: int, message: str) -> None:
    """With this much memory the error is raised and nothing has been changed; with a byte more, training works."""
    module = Square()  # six layers of 1024 elements, a multiple of the alignment of shards
    before = {name: value.clone() for name, value in module.state_dict().items()}
    optimizer = adam(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "this_machine", lambda: "node7.123")
        patch.setattr(host_room, "available_memory", lambda: memory)
        with pytest.raises(ValueError, match=message):
            Engine(module, [optimizer], stage=stage, offload=offload)
        assert all(type(p) is nn.Parameter for p in module.parameters())
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        patch.setattr(host_room, "available_memory", lambda: memory + 1)
        engine = Engine(module, [optimizer], stage=stage, offload=offload)
    module(*batch(0)).backward()
    optimizer.step()
    if engine._swap is not None:
        assert sum(file.nbytes for file in engine._swap._files) == 6 * 3 * 4096
    engine.close()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_too_little_memory_is_reported_in_bytes_on_every_rank_before_anything_is_changed(run_on, size, stage):
    total = 6 * 1024 * 4
    message = (
        rf"not enough host memory. The {size} rank\(s\) on node7 need {total} bytes \(master weights: {total}\), and "
        rf"{total - 1} are available\. Use more machines"
    )
    run_on(size, refused, offload="cpu", stage=stage, memory=total - 1, message=message)


def test_buffers_that_do_not_fit_are_reported(run_on, tmp_path: Path):
    total = 3 * 3 * 4096
    message = rf"{total} bytes \(buffers for the disk: {total}\), .*set a smaller sub_group"
    offload = OffloadConfig("nvme", path=str(tmp_path))
    run_on(1, refused, offload=offload, stage=1, memory=total - 1, message=message)


def asks_for_its_own(tmp: str) -> None:
    """Ranks on two machines: each machine needs room only for its own rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "this_machine", lambda: f"node{rank()}.1")
        patch.setattr(host_room, "available_memory", lambda: 3 * 1024 * 4 - rank())
        with pytest.raises(ValueError, match=r"memory. The 1 rank\(s\) on node1 need 12288 .* 12287 are available\. "):
            Engine(Square(), stage=1, offload="cpu")


def test_memory_is_checked_per_machine_and_a_shortage_is_reported_on_all_ranks(run_on, tmp_path: Path):
    run_on(2, asks_for_its_own, tmp=str(tmp_path))


def states_of(optimizer: Any, expected: int, tmp: str) -> None:
    """Bytes of three buffers, one rank: each has a field of 4096 bytes for masters, and one for each state."""
    wanted = 3 * (1 + expected) * 4096
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "available_memory", lambda: wanted - 1)
        module = Square()
        with pytest.raises(ValueError, match=f"need {wanted} bytes"):
            Engine(module, [optimizer(module)] if optimizer else [], offload=OffloadConfig("nvme", path=tmp))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def momentum_for_one_layer(module: nn.Module) -> torch.optim.Optimizer:
    first, *others = module.parameters()
    return torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": others}], lr=0.1)


def amsgrad(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), amsgrad=True)


@pytest.mark.parametrize(("optimizer", "expected"), [(None, 2), (adam, 2), (sgd, 0), (amsgrad, 3)])
def test_states_are_those_of_the_optimizer_or_two_if_there_is_no_optimizer_yet(
    run_on, tmp_path: Path, optimizer, expected
):
    run_on(1, states_of, optimizer=optimizer, expected=expected, tmp=str(tmp_path))


def by_group(tmp: str) -> None:
    """Masters of six layers and a momentum for one are seven fields of 4096 bytes."""
    module = Square()
    engine = Engine(module, [momentum_for_one_layer(module)], offload=OffloadConfig("nvme", path=tmp))
    assert engine._swap is not None
    assert sum(file.nbytes for file in engine._swap._files) == 7 * 4096
    engine.close()


def test_states_are_counted_per_parameter_group(run_on, tmp_path: Path):
    run_on(1, by_group, tmp=str(tmp_path))


def states_of_whole_parameters() -> None:
    counted = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            host_room, "memory_for", lambda shards, offload: counted.extend(shards) or memory_for(shards, offload)
        )
        module = Square()
        Engine(module, [torch.optim.Adafactor(module.parameters())], offload="cpu").close()
    assert counted and all(states == [] for _, states in counted)


def test_unknown_states_of_optimizers_that_need_whole_parameters_are_not_counted(run_on):
    run_on(2, states_of_whole_parameters)
