"""Measures the machine's speed for plans."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import multiprocessing

from lightning_zero.engine import Communicator, placement, process_group
from lightning_zero.io.disk import is_in_memory
from lightning_zero.io.swap import FileRange, Ring, SwapFile, stream
from lightning_zero.planning.timeline import Resources

_REPEATS = 7
_SIZES = (2**14, 2**24)
"""Sizes in bytes of the shard that a rank sends."""

_DISK_BYTES, _EXTENT = 2**27, 2**24


def measure(ranks: int = 2, device: str = "cpu") -> tuple[Resources, dict[str, Any]]:
    """Measure this machine. If there are several ranks, each runs in its own process, and uses the engine's transport.

    Returns:
        The resources available to one rank while all ranks are busy, and a description of the measurement.

    Raises:
        ValueError: if ``ranks`` is below 1.
        RuntimeError: if a rank cannot be measured.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1.")
    if ranks == 1:
        return measure_rank(torch.device(device), 1)
    # This process hosts the store, so that the port is open before the ranks receive its number.
    store = process_group.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        multiprocessing.start_processes(_worker, (ranks, store.port, device, results), ranks)
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeError(f"rank {error.error_index} could not be measured: {reason}") from None
    return results.get()


def _worker(rank: int, ranks: int, port: int, device: str, results: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    place = torch.device(device if device == "cpu" else f"{device}:{rank}")
    store = process_group.TCPStore("127.0.0.1", port, is_master=False)
    process_group.start("gloo" if place.type == "cpu" else "nccl", store, rank, ranks)
    found = measure_rank(place, ranks)
    process_group.destroy()
    if rank == 0:
        results.put(found)


def measure_rank(place: torch.device, ranks: int, machines: int = 1) -> tuple[Resources, dict[str, Any]]:
    """Measure this rank's device, and its links to the ranks of the default process group. Collective.

    Args:
        ranks: the size of the group.
        machines: number of machines; the ranks are split evenly among them.

    Returns:
        The same as ``measure``.
    """
    a = torch.randn(1024, 1024, device=place)
    large = torch.randn(2**24, device=place)
    other, small = torch.empty_like(large), torch.zeros(8, device=place)
    on_host = torch.randn(2**24, device="cpu")  # larger than the caches
    averages = [torch.zeros_like(on_host) for _ in range(2)]

    def adam() -> None:
        averages[0].lerp_(on_host, 0.1)
        averages[1].mul_(0.9).addcmul_(on_host, on_host, value=0.1)

    flops = 2 * 1024**3 / _seconds(lambda: a @ a, place)
    about: dict[str, Any] = {"device": str(place), "threads": torch.get_num_threads(), "ranks": ranks}
    link: dict[str, float] = {}
    if ranks > 1:
        link, about["transport"] = _link(ranks, place)
    resources = Resources(
        flops=flops,
        memory_bandwidth=2 * large.nbytes / _seconds(lambda: other.copy_(large), place),
        operator_seconds=_seconds(lambda: small.add_(1), place, 200),
        host_bandwidth=8 * on_host.nbytes / _seconds(adam, torch.device("cpu")),
        overlaps=place.type != "cpu",
        memory=_memory(place, ranks // machines),
        **link,
    )
    return resources, about


def _link(ranks: int, place: torch.device) -> tuple[dict[str, float], str]:
    """Measure latency and bandwidth with all-gathers of two sizes; return both, and the transport's name."""
    communicator = Communicator(None, place)
    seconds = []
    for size in _SIZES:
        part = size // 4
        full = torch.zeros(part * ranks, device=place)
        positions = communicator.mesh.order(placement.ALL) or range(ranks)
        ranges = [(part * position, part * (position + 1)) for position in positions]
        gather = partial(communicator.along(placement.ALL).all_gather, full, ranges, "a measurement")
        seconds.append(_seconds(lambda gather=gather: gather().wait(), place))  # type: ignore[misc]
    transport = "shared memory" if communicator.control.small is not None else "gloo" if place.type == "cpu" else "nccl"
    communicator.close()
    bandwidth = (_SIZES[-1] - _SIZES[0]) * (ranks - 1) / max(seconds[-1] - seconds[0], 1e-9)
    return {"link_bandwidth": bandwidth, "link_seconds": seconds[0]}, transport


def _seconds(act: Callable[[], Any], place: torch.device, calls: int = 1, repeats: int = _REPEATS) -> float:
    """The median time of a call, in seconds. The first two calls, which initialise memory and files, do not count."""
    times = []
    for _ in range(repeats + 2):
        _finish(place)
        started = time.perf_counter()
        for _ in range(calls):
            act()
        _finish(place)
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times[2:])


def _finish(place: torch.device) -> None:
    if place.type != "cpu":
        torch.accelerator.synchronize(place)


def _memory(place: torch.device, ranks: int) -> float:
    """The memory in bytes for one of a machine's ranks: its GPU's, or its share of the host's."""
    if place.type == "cuda":
        return float(torch.cuda.get_device_properties(place).total_memory)
    return host_memory() / ranks


def host_memory() -> int:
    """This host's total RAM in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def disk_bandwidth(folder: str) -> float:
    """Bytes per second, read plus written, that the pipeline for offloaded states achieves in a folder.

    Raises:
        OSError: if the folder is on an in-memory file system, or a file of 128 MiB cannot be created in it.
    """
    if is_in_memory(folder):
        raise OSError(f"{folder} is on an in-memory file system")
    file = SwapFile(folder, _DISK_BYTES)
    extents, ring = [FileRange(file, start, _EXTENT) for start in range(0, _DISK_BYTES, _EXTENT)], Ring(_EXTENT)
    seconds = _seconds(lambda: stream(extents, lambda *_: None, ring), torch.device("cpu"), repeats=2)
    file.close()
    return 2 * _DISK_BYTES / seconds
