"""Measures the machine's speed for plans."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.utils.benchmark import Timer

from lightning_zero.engine import Communicator, layout, process_group
from lightning_zero.io.disk import is_in_memory
from lightning_zero.io.swap import BUFFERS, Buffers, SwapFile, Turn
from lightning_zero.planning.timeline import Resources

_SIZES = (2**14, 2**24)
"""Sizes in bytes of the shard that a rank sends."""

_DISK_BYTES, _FILE_BYTES = 2**27, 2**24


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
    # An environment of its own: under SLURM, for example, this process is not one of several ranks.
    fabric = Fabric(accelerator=device, devices=ranks, strategy="ddp_spawn", plugins=LightningEnvironment())
    try:
        values, about = fabric.launch(_measure, ranks)  # type: ignore[arg-type]
    except (ProcessRaisedException, ProcessExitedException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeError(f"rank {error.error_index} could not be measured: {reason}") from None
    return Resources(**values), about


def _measure(fabric: Fabric, ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    resources, about = measure_rank(fabric.device, ranks)
    process_group.destroy()
    return asdict(resources), about


def measure_rank(place: torch.device, ranks: int, machines: int = 1) -> tuple[Resources, dict[str, Any]]:
    """Measure this rank's device, and its links to the ranks of the default process group. Collective.

    Args:
        machines: number of machines; the ranks are split evenly among them.

    Returns:
        The same as ``measure``.
    """
    large = torch.randn(2**24 if place.type == "cpu" else 2**28, device=place)  # larger than the caches
    other, small = torch.empty_like(large), torch.zeros(8, device=place)
    on_host = torch.randn(2**24, device="cpu")
    averages = [torch.zeros_like(on_host) for _ in range(2)]

    def adam() -> None:
        averages[0].lerp_(on_host, 0.1)
        averages[1].mul_(0.9).addcmul_(on_host, on_host, value=0.1)

    about: dict[str, Any] = {"device": str(place), "threads": torch.get_num_threads(), "ranks": ranks}
    link: dict[str, float] = {}
    if ranks > 1:
        link, about["transport"] = _link(ranks, place)
    resources = Resources(
        flops=_flops(place, torch.float32),
        low_flops=None if place.type == "cpu" else _flops(place, torch.bfloat16),
        memory_bandwidth=2 * large.nbytes / _seconds(lambda: other.copy_(large)),
        operator_seconds=_seconds(lambda: small.add_(1), 200),
        host_bandwidth=8 * on_host.nbytes / _seconds(adam),
        overlaps=place.type != "cpu",
        memory=_memory(place, ranks // machines),
        **link,
    )
    return resources, about


def _flops(place: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a matrix product that keeps the whole device busy."""
    size = 1024 if place.type == "cpu" else 8192
    a = torch.randn(size, size, device=place).to(dtype)
    return 2 * size**3 / _seconds(lambda: a @ a)


def _link(ranks: int, place: torch.device) -> tuple[dict[str, float], str]:
    """Measure latency and bandwidth with all-gathers of two sizes; return both, and the transport's name."""
    communicator = Communicator(None, place)
    seconds = []
    for size in _SIZES:
        part = size // 4
        full = torch.zeros(part * ranks, device=place)
        bounds = range(0, part * ranks + 1, part)
        gather = partial(communicator.along(layout.ALL).all_gather, full, bounds, "a measurement")
        seconds.append(_seconds(lambda gather=gather: gather().wait()))  # type: ignore[misc]
    transport = "shared memory" if communicator.control.small is not None else "gloo" if place.type == "cpu" else "nccl"
    communicator.close()
    bandwidth = (_SIZES[-1] - _SIZES[0]) * (ranks - 1) / max(seconds[-1] - seconds[0], 1e-9)
    return {"link_bandwidth": bandwidth, "link_seconds": seconds[0]}, transport


def _seconds(act: Callable[[], Any], calls: int = 1, repeats: int = 7) -> float:
    """The median time of a call, in seconds. Before each measurement, the timer makes two calls that do not count."""
    timer = Timer("act()", globals={"act": act}, num_threads=torch.get_num_threads())
    return statistics.median(timer.timeit(calls).mean for _ in range(repeats))


def _memory(place: torch.device, ranks: int) -> float:
    """The memory in bytes for one of a machine's ranks: its GPU's, or its share of the host's."""
    if place.type == "cuda":
        return float(torch.cuda.get_device_properties(place).total_memory)
    return host_memory() / ranks


def host_memory() -> int:
    """This host's total RAM in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def disk_bandwidth(folder: str) -> float:
    """Bytes per second, read plus written, that updates of offloaded states achieve in a folder.

    Raises:
        OSError: if the folder is on an in-memory file system, or files of 128 MiB in all cannot be created in it.
    """
    if is_in_memory(folder):
        raise OSError(f"{folder} is on an in-memory file system")
    files, buffers = [SwapFile(folder, _FILE_BYTES) for _ in range(_DISK_BYTES // _FILE_BYTES)], Buffers()
    with ThreadPoolExecutor(BUFFERS) as threads:
        change_all = partial(threads.map, lambda file: buffers.change(file, lambda _: None, Turn()), files)
        seconds = _seconds(lambda: [*change_all()], repeats=1)
    for file in files:
        file.close()
    return 2 * _DISK_BYTES / seconds
