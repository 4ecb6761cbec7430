"""Predict the time of a step: replay the events of a fake run at a machine's speed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_zero.io.annotations import check_fields


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Speed and memory available to one rank on a machine; ``lightning-zero doctor`` measures them.

    Attributes:
        flops: floating-point operations per second of matrix products.
        low_flops: the same of tensors in at most 16 bits; None means as many as ``flops``.
        memory_bandwidth: bytes per second that operators read and write in total.
        operator_seconds: the minimum time of an operator.
        link_bandwidth: bytes per second that a rank sends in a collective, while it receives at the same rate.
        machine_bandwidth: bytes per second that all ranks of a machine together send to other machines; None if the
            links between machines are not a bottleneck.
        link_seconds: latency of a collective.
        host_bandwidth: bytes per second that an update of states in the host's memory reads and writes in total.
        disk_bandwidth: bytes per second that an update of states on a disk reads and writes in total.
        overlaps: whether collectives and updates in the host's memory overlap with computation on the device. On a CPU,
            all three compete for the same cores.
        memory: the device's memory in bytes, on a CPU this rank's share of the host's; None if unknown.
    """

    flops: float = field(metadata={"least": 0})
    memory_bandwidth: float = field(metadata={"least": 0})
    operator_seconds: float = field(default=5e-6, metadata={"least": 0})
    link_bandwidth: float = field(default=10e9, metadata={"least": 0})
    machine_bandwidth: float | None = field(default=None, metadata={"least": 0})
    link_seconds: float = field(default=30e-6, metadata={"least": 0})
    host_bandwidth: float = field(default=10e9, metadata={"least": 0})
    disk_bandwidth: float = field(default=2e9, metadata={"least": 0})
    overlaps: bool = True
    low_flops: float | None = field(default=None, metadata={"least": 0})
    memory: float | None = field(default=None, metadata={"least": 0})

    def __post_init__(self) -> None:
        check_fields(self)


def resources_of(values: Any, where: str | Path) -> Resources:
    """Return the resources for the values under ``"resources"`` in the output of ``lightning-zero doctor --json``.

    Raises:
        ValueError: if a value is missing, has an unknown name, or has a wrong type; its message begins with ``where``.
    """
    try:
        return Resources(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} does not state resources as lightning-zero doctor --json does: {error}") from None


class Event(NamedTuple):
    """One action of a rank.

    Attributes:
        kind: ``"compute"``, an operator; ``"launch"``, the start of a collective; ``"wait"``, the wait for its end;
            ``"host"``, an operator in a background update; ``"disk"``, a read or write of states on a disk.
        flops, nbytes: floating-point operations, and bytes read and written (in a collective, bytes sent by the rank).
        number: the collective's number, which links a ``"wait"`` to its ``"launch"``.
        leaving: bytes that all ranks of a machine together send to other machines in the collective.
        is_low: whether the operator computes in at most 16 bits.
    """

    kind: str
    flops: float = 0.0
    nbytes: float = 0.0
    number: int = 0
    leaving: float = 0.0
    is_low: bool = False


def replay(events: list[Event], resources: Resources) -> tuple[float, float]:
    """Compute the seconds that the events take, and those in which no operator runs, since something is awaited.

    Operators run one after another; each takes the time for its arithmetic plus the time for its bytes, but at least
    ``operator_seconds``. Collectives, updates in the host's memory and disk accesses form three more queues, which run
    in parallel with operators (without ``overlaps``, only disk accesses do). A wait lasts until its collective is done.
    """
    now = network_free = host_free = disk_free = compute = 0.0
    ends: dict[int, float] = defaultdict(float)
    for event in events:
        if event.kind == "compute":
            flops = resources.low_flops if event.is_low and resources.low_flops is not None else resources.flops
            seconds = event.flops / flops + event.nbytes / resources.memory_bandwidth
            seconds = max(seconds, resources.operator_seconds)
            now, compute = now + seconds, compute + seconds
        elif event.kind == "host":
            host_free = max(host_free, now) + event.nbytes / resources.host_bandwidth
            now = now if resources.overlaps else host_free
        elif event.kind == "disk":
            disk_free = max(disk_free, now) + event.nbytes / resources.disk_bandwidth
        elif event.kind == "launch":
            seconds = event.nbytes / resources.link_bandwidth
            if resources.machine_bandwidth is not None:
                seconds = max(seconds, event.leaving / resources.machine_bandwidth)
            seconds += resources.link_seconds
            network_free = max(network_free, now) + seconds
            ends[event.number] = network_free
            now = now if resources.overlaps else network_free
        else:
            now = max(now, ends[event.number])
    now = max(now, network_free, host_free, disk_free)
    return now, now - compute
