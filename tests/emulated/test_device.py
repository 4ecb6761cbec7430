"""The emulation reports ordering errors, and nothing where everything is in order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.emulated import device
from tests.support import rank

SIZE = 64


def refused_devices() -> list[str]:
    here, there = torch.ones(SIZE, device=device.NAME), torch.ones(SIZE)
    assert (here * torch.tensor(2.0) == 2).all(), "a number of the host is a number"
    assert (here[torch.arange(2)] == 1).all(), "so are indices"
    refused = []
    for operator in (lambda: here + there, lambda: torch.cat([here, there]), lambda: torch.stack([here[0], there[0]])):
        try:
            operator()
        except RuntimeError as error:
            refused.append(str(error))
    return refused


def test_tensors_of_several_devices_are_refused_as_on_a_gpu(run_on_device):
    (refused,) = run_on_device(1, refused_devices)
    assert len(refused) == 3
    assert all("same device" in message for message in refused), refused


def read_what_another_writes(waits: bool) -> list[str]:
    values, beside = torch.ones(SIZE, device=device.NAME), torch.Stream(device.NAME)
    if waits:
        beside.wait_event(torch.accelerator.current_stream().record_event())
    with beside:
        result = values + 1
    races = device.native.races()
    torch.accelerator.synchronize()
    assert (result == 2).all()
    return races


def test_a_read_during_another_streams_write_is_detected(run_on_device):
    ((race,),) = run_on_device(1, read_what_another_writes, waits=False)
    assert race.startswith("read after write: aten::add")
    assert run_on_device(1, read_what_another_writes, waits=True) == [[]]


def write_while_read(waits: bool) -> list[str]:
    values, beside = torch.ones(SIZE, device=device.NAME), torch.Stream(device.NAME)
    torch.accelerator.synchronize()
    with beside:
        copy = values + 1
    if waits:
        torch.accelerator.current_stream().wait_stream(beside)
    values.zero_()
    torch.accelerator.synchronize()
    assert (copy == 2).all(), "the emulation itself computes in program order"
    return device.native.races()


def test_a_write_during_another_streams_read_is_detected(run_on_device):
    ((race,),) = run_on_device(1, write_while_read, waits=False)
    assert race.startswith("write after read: aten::zero_")
    assert run_on_device(1, write_while_read, waits=True) == [[]]


def free_while_used(recorded: bool) -> list[str]:
    values, beside = torch.ones(SIZE, device=device.NAME), torch.Stream(device.NAME)
    torch.accelerator.synchronize()
    with beside:
        kept = values + 1
        if recorded:
            values.record_stream(beside)
    del values
    races = device.native.races()
    torch.accelerator.synchronize()
    assert (kept == 2).all()
    return races


def test_freeing_memory_that_another_stream_uses_is_detected(run_on_device):
    ((race,),) = run_on_device(1, free_while_used, recorded=False)
    assert race.startswith("freed while in use")
    assert run_on_device(1, free_while_used, recorded=True) == [[]]


def copies_to_the_host() -> None:
    values = torch.ones(SIZE, device=device.NAME)
    late = torch.zeros(SIZE, pin_memory=True).copy_(values, non_blocking=True)
    assert late.isnan().all(), "before the copy is known to be done"
    done = torch.accelerator.current_stream().record_event()
    assert not done.query() and late.isnan().all()
    done.synchronize()
    assert (late == 1).all()
    assert (torch.zeros(SIZE).copy_(values, non_blocking=True) == 1).all(), "memory that is not pinned: the host waits"
    assert device.native.races() == []


def test_a_copy_to_pinned_memory_arrives_only_when_the_host_has_waited(run_on_device):
    run_on_device(1, copies_to_the_host)


def copy_from_the_host(waits: bool) -> list[str]:
    host = torch.ones(SIZE, pin_memory=True)
    values = host.to(device.NAME, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().synchronize()
    host.zero_()
    torch.accelerator.synchronize()
    assert (values == 1).all()
    return device.native.races()


def test_changing_pinned_memory_before_it_is_copied_is_detected(run_on_device):
    assert run_on_device(1, copy_from_the_host, waits=False) == [
        ["pinned memory changed while a copy from it could still read it"]
    ]
    assert run_on_device(1, copy_from_the_host, waits=True) == [[]]


def copy_twice_through_the_same_memory() -> list[str]:
    """The device runs both copies in order, whether or not the host has synchronized."""
    host = torch.ones(SIZE, pin_memory=True)
    values = host.to(device.NAME, non_blocking=True)
    host[: SIZE // 2].copy_((3 * values)[: SIZE // 2], non_blocking=True)
    host[SIZE // 2 :].copy_((5 * values)[SIZE // 2 :], non_blocking=True)
    assert host.isnan().all(), "neither half is known to have arrived"
    races = device.races_so_far()
    assert (host[: SIZE // 2] == 3).all() and (host[SIZE // 2 :] == 5).all()
    return races


def test_copies_that_are_in_order_on_the_device_may_share_memory(run_on_device):
    assert run_on_device(1, copy_twice_through_the_same_memory) == [[]]


def read_after_a_staged_copy() -> list[str]:
    values, beside = torch.ones(SIZE, device=device.NAME), torch.Stream(device.NAME)
    torch.ones(SIZE).to(device.NAME, non_blocking=True)
    with beside:
        kept = values + 1
    races = device.races_so_far()
    assert (kept == 2).all()
    return races


def test_a_copy_from_unpinned_memory_does_not_order_other_streams(run_on_device):
    ((race,),) = run_on_device(1, read_after_a_staged_copy)
    assert race.startswith("read after write: aten::add")


def collective(waits: bool) -> list[str]:
    values = torch.full((SIZE,), 1.0 + rank(), device=device.NAME)
    work = dist.all_reduce(values, async_op=True)
    if waits:
        work.wait()
    total = values * 1
    races = device.native.races()
    work.wait()
    assert not waits or (total == 3).all()
    return races


def test_reading_the_result_of_a_collective_without_waiting_is_detected(run_on_device):
    for races in run_on_device(2, collective, waits=False):
        assert races[0].startswith("read after write: aten::mul")
    assert run_on_device(2, collective, waits=True) == [[], []]


def allocate() -> None:
    device.native.memory()
    before, _ = device.native.memory()
    kept = torch.ones(1024, device=device.NAME)
    del kept
    kept = torch.ones(512, device=device.NAME)
    assert device.native.memory() == (before + 2048, before + 4096)
    del kept
    assert torch.empty(512, device=device.NAME).isnan().all(), "memory as it is found holds nothing of use"


def test_allocated_and_peak_memory_are_counted(run_on_device):
    run_on_device(1, allocate)
