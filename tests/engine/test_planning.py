"""The host memory that is available, and the files of optimizer states on a disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine
from lightning_zero.engine.config import OffloadConfig
from lightning_zero.engine.init.host_room import available_memory
from tests.support.models import Square, adam


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


def momentum_for_one_layer(module: nn.Module) -> torch.optim.Optimizer:
    first, *others = module.parameters()
    return torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": others}], lr=0.1)


def on_disk(make: Callable[[nn.Module], torch.optim.Optimizer], fields: int, tmp: str) -> None:
    """Each of the six layers has a field of 4096 bytes for its master weights, and one for each state."""
    module = Square()
    optimizer = make(module)
    engine = Engine(module, [optimizer], offload=OffloadConfig("nvme", path=tmp))
    assert engine.bytes_on_disk()[0] == 6 * 4096
    for _ in range(2):
        module(torch.ones(2, 3), torch.ones(2, 3)).backward()
        optimizer.step()
        engine.full_optimizer_state_dict(optimizer)
        assert engine.bytes_on_disk()[0] == fields * 4096
    engine.close()


@pytest.mark.parametrize(("make", "fields"), [(adam, 6 * 3), (momentum_for_one_layer, 7)])
def test_files_grow_by_the_states_that_each_parameter_group_has(run_on, tmp_path: Path, make, fields):
    run_on(1, on_disk, make=make, fields=fields, tmp=str(tmp_path))
