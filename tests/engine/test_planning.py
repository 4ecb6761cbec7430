"""Memory for offloaded states is computed before anything changes, and offloading is refused without enough room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine
from lightning_zero.engine.config import OffloadConfig
from lightning_zero.engine.init import host_room
from lightning_zero.engine.init.host_room import Need, Part, available_memory, free_disk, need_of
from lightning_zero.io.disk import is_in_memory
from tests.support.models import Square, adam
from tests.support.training import batch
from tests.support.workers import rank

PLAIN = {
    "gradient": 0,
    "keeps_gradient": False,
    "source": 0,
    "stored": 0,
    "on_disk": False,
    "masters_are_new": True,
    "states_are_new": True,
}


def part(numel: int, master: int = 4, states: tuple[int, ...] = (4, 4), **options: Any) -> Part:
    return Part(**{"numel": numel, "master": master, "states": states} | PLAIN | options)


@pytest.mark.parametrize(
    ("parts", "options", "need"),
    [
        # Adam on the CPU for a GPU: 4000 bytes of masters take 4096 pinned ones, 2 x 4000 of states; gradients come by
        # memory of 4096, and of any smaller power of two that torch keeps
        (
            [part(1000, gradient=4)],
            {"pins": True},
            Need({"masters": 4096, "optimizer states": 8000, "gradients": 8192}, 4096 + 8192, 0),
        ),
        # all gradients there, too: 4000 -> 4096, and 2 x 4096 for those that come
        (
            [part(1000, gradient=4, keeps_gradient=True)],
            {"pins": True},
            Need({"masters": 4096, "optimizer states": 8000, "gradients": 3 * 4096}, 4 * 4096, 0),
        ),
        # SGD with momentum in fp64, two buckets: 8 x 100 -> 1024 and 8 x 128 = 1024 pinned
        (
            [part(100, 8, (8,), gradient=8), part(128, 8, (8,), gradient=8)],
            {"pins": True},
            Need({"masters": 2048, "optimizer states": 1824, "gradients": 2048}, 4096, 0),
        ),
        # parameters in bf16 beside the masters, 2000 -> 2048; frozen ones have nothing else
        (
            [part(1000, gradient=4, source=2), part(600, 2, ())],
            {"pins": True},
            Need(
                {"masters": 4096 + 2048, "optimizer states": 8000, "gradients": 8192, "parameters": 2048},
                4096 + 2048 + 8192 + 2048,
                0,
            ),
        ),
        # a module on the CPU at stages 1 and 2 in fp32: masters are no longer a part of what it computes with
        ([part(1000, states_are_new=False)], {"pins": False}, Need({"masters": 4000}, 0, 0)),
        # at stage 3: what gathers begin with is no longer the masters
        (
            [part(1000, source=4, masters_are_new=False, states_are_new=False)],
            {"pins": False},
            Need({"parameters": 4000}, 0, 0),
        ),
        # Adam on a disk: pieces of 4096 and 904 elements, fields of 16384 and 4096 bytes; masters twice at first
        (
            [part(5000, on_disk=True)],
            {"pins": False},
            Need({"buffers for the disk": 3 * 3 * 16384}, 0, 3 * (16384 + 4096) + (16384 + 4096)),
        ),
        # SGD keeps nothing else: no second file
        (
            [part(5000, states=(), on_disk=True)],
            {"pins": False},
            Need({"buffers for the disk": 3 * 16384}, 0, 16384 + 4096),
        ),
        # parameters in bf16 beside masters in fp32, 8192 + 4096 bytes, there twice meanwhile; SGD with momentum
        (
            [part(5000, states=(4,), stored=2, on_disk=True)],
            {"pins": False},
            Need({"buffers for the disk": 3 * (2 * 16384 + 8192)}, 0, 2 * 20480 + 12288 + (20480 + 12288)),
        ),
        # the largest bucket decides what buffers there are, and what lies there twice; pieces begin at 4096 elements
        (
            [part(10, on_disk=True, gradient=4), part(5000, on_disk=True, gradient=4)],
            {"pins": True, "sub_group": 1},
            Need({"gradients": 32768, "buffers for the disk": 3 * 3 * 16384}, 32768, 3 * 4096 + 3 * 20480 + 20480),
        ),
        ([part(0), part(0, on_disk=True)], {"pins": True}, Need({}, 0, 0)),
        ([], {"pins": True}, Need({}, 0, 0)),
    ],
)
def test_the_bytes_that_a_rank_asks_for(parts, options, need):
    assert need_of(parts, **{"sub_group": 4096} | options) == need


# ----------------------------------------------------------------------------------------------------- what is there


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
        (VERSION_2, 8000 * 1024),  # no limit that shows
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
        # the group around it allows less
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
def test_the_memory_that_is_there_is_what_the_system_and_its_containers_allow(tmp_path: Path, files, found):
    assert available_memory(write(tmp_path, files)) == found


def test_the_memory_of_this_machine_is_known_on_linux():
    if Path("/proc/meminfo").exists():
        assert 2**20 < available_memory() < 2**50


def test_room_below_a_folder_that_is_not_there_yet_is_that_of_its_disk(tmp_path: Path):
    if is_in_memory(str(tmp_path)):
        assert free_disk(str(tmp_path / "a" / "b")) is None
    else:
        assert free_disk(str(tmp_path / "a" / "b")) == pytest.approx(free_disk(str(tmp_path)), rel=0.05)
    assert not (tmp_path / "a").exists()


# ---------------------------------------------------------------------------------------------------- in an engine


def refused(offload: Any, stage: int, memory: int, disk: int, message: str) -> None:
    """With this much there is the error; nothing has been changed; and with a byte more all is well."""
    module = Square()  # six layers of 1024 elements, a multiple of what shards are aligned to
    before = {name: value.clone() for name, value in module.state_dict().items()}
    optimizer = adam(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "this_machine", lambda: "node7.123")
        patch.setattr(host_room, "available_memory", lambda: memory)
        patch.setattr(host_room, "free_disk", lambda path: disk)
        with pytest.raises(ValueError, match=message):
            Engine(module, [optimizer], stage=stage, offload=offload)
        assert all(type(p) is nn.Parameter for p in module.parameters())
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        patch.setattr(host_room, "available_memory", lambda: memory + 1)
        patch.setattr(host_room, "free_disk", lambda path: disk + 1)
        engine = Engine(module, [optimizer], stage=stage, offload=offload)
    module(*batch(0)).backward()
    optimizer.step()
    if engine._swap is not None:  # all files; one with masters alone would be beside them, had the optimizer come later
        held = sum(file.stat().st_size for file in Path(engine._swap.folder.path).iterdir())
        assert held == 6 * 3 * 4096
    engine.close()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_too_little_memory_is_told_in_bytes_on_every_rank_before_anything_is_changed(run_on, size, stage):
    # On the CPU: masters, or at stage 3 over several ranks what gathers begin with, come a second time
    what, total = ("parameters" if stage == 3 and size > 1 else "masters"), 6 * 1024 * 4
    message = (
        rf"not enough room. {size} ranks? on node7 would take {total} bytes of memory \({what} {total}\), and "
        rf"{total - 1} are available: 1 bytes are missing; .*take more ranks on more machines\.$"
    )
    run_on(size, refused, offload="cpu", stage=stage, memory=total - 1, disk=0, message=message)


@pytest.mark.parametrize("size", [1, 2])
def test_too_little_room_on_a_disk_is_told_likewise_and_is_what_files_take(run_on, size, tmp_path: Path):
    # six files of three fields, each of 4096 bytes or less, and one with masters alone
    total = size * (6 * 3 * 4096 + 4096)
    message = (
        rf"{size} ranks? on node7 would write {total} bytes below {tmp_path}, and {total - 1} are free there: "
        r"1 bytes are missing; write the path= of a folder on a larger disk"
    )
    offload = OffloadConfig("nvme", path=str(tmp_path))
    run_on(size, refused, offload=offload, stage=2, memory=2**40, disk=total - 1, message=message)
    assert not list(tmp_path.iterdir())


def test_buffers_that_do_not_fit_ask_for_smaller_pieces(run_on, tmp_path: Path):
    total = 3 * 3 * 4096
    message = (
        rf"would take {total} bytes of memory \(buffers for the disk {total}\), .*; write a smaller sub_group, or take"
    )
    offload = OffloadConfig("nvme", path=str(tmp_path))
    run_on(1, refused, offload=offload, stage=1, memory=total - 1, disk=2**40, message=message)


def asks_for_its_own(tmp: str) -> None:
    """Ranks of two machines: each machine has to have room for its own alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "this_machine", lambda: f"node{rank()}.1")
        patch.setattr(host_room, "available_memory", lambda: 3 * 1024 * 4 - rank())
        with pytest.raises(ValueError, match=r"room. 1 rank on node1 would take 12288 .* 12287 are available: 1 bytes"):
            Engine(Square(), stage=1, offload="cpu")


def test_each_machine_counts_for_itself_and_all_ranks_are_told(run_on, tmp_path: Path):
    run_on(2, asks_for_its_own, tmp=str(tmp_path))


def states_of(optimizer: Any, expected: int, tmp: str) -> None:
    """Bytes of files, one rank, 6 x 1024 elements: fields of 4096 bytes, and masters of one bucket once more."""
    wanted = (6 * (1 + expected) + bool(expected)) * 4096
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "free_disk", lambda path: wanted - 1)
        module = Square()
        with pytest.raises(ValueError, match=f"would write {wanted} bytes"):
            Engine(module, [optimizer(module)] if optimizer else [], offload=OffloadConfig("nvme", path=tmp))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def momentum_for_one_layer(module: nn.Module) -> torch.optim.Optimizer:
    first, *others = module.parameters()
    return torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": others}], lr=0.1)


def amsgrad(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), amsgrad=True)


@pytest.mark.parametrize(("optimizer", "expected"), [(None, 2), (adam, 2), (sgd, 0), (amsgrad, 3)])
def test_states_are_those_of_the_optimizer_or_two_where_there_is_none_yet(run_on, tmp_path: Path, optimizer, expected):
    run_on(1, states_of, optimizer=optimizer, expected=expected, tmp=str(tmp_path))


def by_group(tmp: str) -> None:
    wanted = (6 + 1 + 1) * 4096
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "free_disk", lambda path: wanted - 1)
        module = Square()
        with pytest.raises(ValueError, match=f"would write {wanted} bytes"):
            Engine(module, [momentum_for_one_layer(module)], offload=OffloadConfig("nvme", path=tmp))


def test_states_are_those_of_each_parameter_group(run_on, tmp_path: Path):
    run_on(1, by_group, tmp=str(tmp_path))


def in_memory() -> None:
    module, total = Square(), 19 * 4096 + 3 * 3 * 4096
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "available_memory", lambda: total - 1)
        with pytest.raises(ValueError, match=f"would take {total} bytes of memory .*files in memory {19 * 4096}"):
            Engine(module, [adam(module)], stage=1, offload=OffloadConfig("nvme", path="/dev/shm"))


@pytest.mark.skipif(not is_in_memory("/dev/shm"), reason="this system has no folder in memory")
def test_files_in_a_folder_that_lies_in_memory_count_as_memory(run_on):
    run_on(1, in_memory)
