"""Report on an engine: its bytes in memory, as measured and by the paper's formula, and its communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_zero.engine.plan.layout import Placements, replicated_bytes
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.io.swap import BUFFERS


@dataclass(frozen=True)
class DeviceMemory:
    """Memory that torch's allocator has used on a device since the process began, or since torch's peaks were reset.

    Attributes:
        allocated_peak: the most bytes that tensors occupied at one time.
        reserved_peak: the most bytes that the allocator held at one time.
    """

    allocated_peak: int
    reserved_peak: int

    @property
    def fragmentation(self) -> float:
        """The fraction of ``reserved_peak`` that tensors did not need (M_D in "ZeRO", SC20, section 6.3)."""
        return 1 - self.allocated_peak / self.reserved_peak if self.reserved_peak else 0.0


@dataclass(frozen=True)
class Report:
    """An engine's memory and communication.

    Attributes:
        stage: the engine's stage.
        world_size: number of ranks that have a part of the model states.
        tensor_parallel_size: number of ranks over which tensor parallelism divides a tensor; 1 without it.
        numel: Psi, the number of elements in all parameters.
        padded_numel: ``numel`` including the alignment gaps and padding of the buckets.
        at_rest: bytes in memory now, by category: parameters, gathered, gradients, reduction, optimizer, activations
            (of ``partition_activations``), host (offloaded).
        peak: the same bytes when their total was highest since the last ``reset_peak``.
        calls, elements, bytes: counts by kind of collective ("all_gather", "reduce_scatter", "control", "activations":
            gathers of ``partition_activations``) since the last ``reset_counters``. Elements are logical: an all-gather
            of a bucket counts the full padded bucket.
        bytes_by_link: ``bytes`` by link instead of kind: "within" a machine or "across" machines; see ``Counters``.
        steps, backwards: optimizer steps and synchronised backward passes since the last ``reset_counters``.
        formula: bytes of model states per rank by the paper's formula for this stage, with Adam's two moments.
        replicated: bytes of model states per rank under DDP, which keeps all of them on every rank.
        units: number of elements by unit name, in the order of the plan; the root unit's name is "".
        device_memory: the memory used by torch's allocator on this rank's device, for the whole process; None on a CPU.
        WORKING_BUFFERS: the categories that are not model states: gathered parameters, gradients that are not reduced
            yet, and partitioned inputs of checkpointed modules.
    """

    WORKING_BUFFERS: ClassVar = ("gathered", "reduction", "activations")

    stage: int
    world_size: int
    tensor_parallel_size: int
    numel: int
    padded_numel: int
    at_rest: dict[str, int]
    peak: dict[str, int]
    calls: dict[str, int]
    elements: dict[str, int]
    bytes: dict[str, int]
    bytes_by_link: dict[str, int]
    steps: int
    backwards: int
    formula: int
    replicated: int
    units: dict[str, int]
    device_memory: DeviceMemory | None

    def elements_per_step(self) -> float:
        """Elements of parameters and gradients communicated per optimizer step."""
        moved = self.elements.get("all_gather", 0) + self.elements.get("reduce_scatter", 0)
        return moved / max(self.steps, 1)


def bytes_on_disk(buckets: Sequence[Bucket]) -> tuple[int, int]:
    """Bytes of buckets' files, and of the largest of them, which updates may have in host memory at one time."""
    files = [bucket.states.file.nbytes for bucket in buckets if bucket.states is not None]
    return sum(files), sum(sorted(files)[-BUFFERS:])


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory used by torch's allocator on a device; None on a CPU."""
    read = getattr(torch.get_device_module(device), "memory_stats", None) if device.type != "cpu" else None
    if read is None:
        return None
    counts = read(device)
    return DeviceMemory(counts.get("allocated_bytes.all.peak", 0), counts.get("reserved_bytes.all.peak", 0))


def ddp_bytes(buckets: Sequence[Bucket]) -> int:
    """Bytes of model states per rank under DDP, which keeps all of them on every rank."""
    return sum(
        replicated_bytes(bucket.layout.numel, bucket.dtype.itemsize, trains=bucket.views[0].requires_grad)
        for bucket in buckets
    )


def formula_bytes(placements: Placements, buckets: Sequence[Bucket]) -> int:
    """Bytes of model states per rank, by the paper's formula, under ``placements``."""
    return sum(
        placements.model_state_bytes(
            bucket.layout.numel,
            bucket.communicator.mesh,
            parameter_bytes=bucket.full.element_size(),
            master_bytes=bucket.master_dtype.itemsize,
            state_bytes=bucket.residency.plan.state_dtype_of(bucket.residency.plan.update_dtype).itemsize,
            trains=bucket.views[0].requires_grad,
        )
        for bucket in buckets
    )
