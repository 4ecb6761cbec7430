"""Where this rank's master weights are at rest: gathered buffer, part of the parameters, device, host memory or disk.

If gathers do not start from the master weights, a copy in the compute dtype may be at rest, too. A ``ResidencyPlan``
says where the master weights and the copy are; a ``Residency`` holds their values.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from lightning_zero.engine.comm.asynchronous import current_stream
from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.counters import Ledger
from lightning_zero.engine.comm.transport import Pending
from lightning_zero.engine.config import LOW_PRECISION, EngineConfig, OffloadConfig, full_precision
from lightning_zero.engine.offload import MASTERS, PARAMETERS, DiskStates, Swap
from lightning_zero.engine.plan.layout import BucketLayout, Placements, Segment
from lightning_zero.engine.plan.mesh import NODE
from lightning_zero.engine.tensor.wrapper import flat_range


class Medium(Enum):
    """Where a rank's values are at rest."""

    BUFFER = "this rank's slice of the gathered buffer"
    PART = "this rank's shard within its part of the parameters (``shard_within``)"
    DEVICE = "separate memory on the computing device"
    HOST = "the host's memory"
    DISK = "a file"


SHOWN = (Medium.BUFFER, Medium.PART)
"""Media in which this rank's values are a slice of memory that also holds other ranks' values."""

_MEDIA = {None: None, "cpu": Medium.HOST, "nvme": Medium.DISK}


@dataclass(frozen=True)
class ResidencyPlan:
    """Where one rank's master weights of a bucket are at rest; the plan itself holds no values.

    ``copy`` is where the master weights' copy in the compute dtype is at rest, to which updates write as well; None if
    there is no copy, so that gathers start from the master weights.
    ``extension_dtype`` is that of the codes of extended parameters (see ``extensions.py``); None for others.
    """

    layout: BucketLayout
    device: torch.device  # the computing device
    master_dtype: torch.dtype
    compute_dtype: torch.dtype  # of the values from which a gather starts
    is_replicated: bool  # whether the gathered buffer keeps all values at rest
    masters: Medium
    copy: Medium | None
    extension_dtype: torch.dtype | None
    config: EngineConfig

    @classmethod
    def of(
        cls,
        layout: BucketLayout,
        placements: Placements,
        offload: OffloadConfig | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        extension_dtype: torch.dtype | None = None,
        trains: bool,
        config: EngineConfig,
    ) -> ResidencyPlan:
        """Plan where the master weights and their copy are at rest.

        ``offload`` is None if the bucket stays on the device. Master weights of frozen parameters keep the parameters'
        dtype, as do those of trained ones if ``masters=False``.
        """
        parameters_on = _MEDIA[offload.parameters] if offload is not None else None
        offloaded_to = _MEDIA[offload.optimizer] if offload is not None and trains else parameters_on
        master_dtype = full_precision(dtype) if trains and config.masters else dtype
        is_cast = master_dtype != compute_dtype or extension_dtype is not None
        is_replicated = not placements.parameters.is_sharded
        # With one rank, the shard is the full bucket: a separate gathered buffer would be a second copy.
        if not layout.is_sharded and parameters_on is None and (not is_cast or offloaded_to is not None):
            is_replicated = True
        at_rest = Medium.BUFFER if is_replicated else Medium.PART if layout.nodes > 1 else Medium.DEVICE
        masters = offloaded_to or (Medium.DEVICE if is_cast else at_rest)
        copy = None if offloaded_to is None else parameters_on or at_rest
        if is_replicated and extension_dtype is not None:
            copy = None  # the buffer has codes
        elif not is_cast and (copy is masters or copy is Medium.DISK):
            copy = None
        dtypes = master_dtype, compute_dtype
        return cls(layout, device, *dtypes, is_replicated, masters, copy, extension_dtype, config)

    @property
    def gathered_dtype(self) -> torch.dtype:
        """The dtype of the gathered buffer."""
        return self.extension_dtype or self.compute_dtype

    @property
    def update_dtype(self) -> torch.dtype:
        """The dtype in which updates are computed."""
        return full_precision(self.master_dtype)

    def state_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which an optimizer state by element is kept, given that of the update."""
        return torch.bfloat16 if self.config.state_dtype is not None and dtype.is_floating_point else dtype

    @property
    def rounds(self) -> bool:
        """Whether updates round their results stochastically: master weights or optimizer states."""
        return self.config.state_dtype is not None or self.master_dtype in LOW_PRECISION

    @property
    def shard_numel(self) -> int:
        """The number of elements in this rank's shard."""
        return self.layout.shard_numel(self.layout.rank)

    @property
    def is_offloaded(self) -> bool:
        """Whether the master weights are in host memory or on a disk, and are updated in the background."""
        return self.masters in (Medium.HOST, Medium.DISK)

    def reserve(self, swap: Swap, name: str) -> DiskStates:
        """Reserve disk space for master weights and their copy. Raises OSError if space is short."""
        copy = {PARAMETERS: self.compute_dtype} if self.copy is Medium.DISK else {}
        return DiskStates(swap, name, self.shard_numel, {MASTERS: self.master_dtype, **copy})


class Residency:
    """This rank's master weights of one bucket, and their copy in the compute dtype, if the plan has one.

    Args:
        own: this rank's values. If the plan keeps the master weights in the gathered buffer or in this rank's part of
            the parameters, ``own`` is a slice of that memory, and updates change it directly.
        states: the file of master weights and optimizer states; None if the master weights are in memory.
        copy: such a slice with the copy, if the plan keeps it there; otherwise None.
    """

    def __init__(
        self,
        plan: ResidencyPlan,
        own: Tensor,
        states: DiskStates | None,
        ledger: Ledger,
        copy: Tensor | None,
    ) -> None:
        self.plan, self.states, self._ledger = plan, states, ledger
        self._fetched: Future[Tensor] | None = None
        self._values = own  # replaced below unless the plan keeps the master weights in this memory
        if plan.masters is Medium.DISK:
            self._write(0, own.to("cpu", plan.master_dtype))
            self._values = torch.empty(0, dtype=plan.master_dtype, device="cpu")
        elif plan.masters not in SHOWN:
            self._values = self._kept(own, plan.masters, plan.master_dtype)
        is_apart = plan.copy in (Medium.DEVICE, Medium.HOST)
        self.copy = self._kept(own, plan.copy, plan.compute_dtype) if is_apart else copy

    def _kept(self, own: Tensor, medium: Medium | None, dtype: torch.dtype) -> Tensor:
        if medium is Medium.DEVICE or self.plan.device.type == "cpu":
            kept = own.to(dtype, copy=True)
        else:
            kept = torch.empty(own.shape, dtype=dtype, pin_memory=True, device="cpu").copy_(own)
        return self._held(kept, medium)

    def _held(self, kept: Tensor, medium: Medium | None) -> Tensor:
        """Count the memory of values until they are deleted."""
        return self._ledger.hold(kept, "host" if medium is Medium.HOST else "parameters")

    @property
    def device(self) -> torch.device:
        """The device on which the master weights are updated."""
        return self._values.device

    def part(self, part: slice) -> Tensor:
        """A range of the master weights, 1-D: a copy if they are on a disk, otherwise a view."""
        return self._values[part] if self.states is None else self.states.read(MASTERS, part.start, part.stop)

    def at_rest(self, part: slice) -> Tensor:
        """Like ``part``, but if the master weights are on a disk, a lazy tensor that is read when used."""
        return self._values[part] if self.states is None else self.states.tensor(MASTERS, part)

    def leaf(self, part: slice) -> Tensor:
        """Like ``part``, but if the master weights are on a disk, a meta tensor of the same shape."""
        if self.states is None:
            return self._values[part]
        return torch.empty(part.stop - part.start, dtype=self.plan.master_dtype, device="meta")

    def written(self, part: slice, values: Tensor) -> None:
        """Update the file and the copy, after ``values`` have been written to the tensor that ``part`` returned."""
        if self.states is not None:
            self.forget_fetched()
            self._write(part.start, values)
        if self.copy is not None:
            self.copy[part].copy_(values)  # synchronous, since the next update may change ``values``

    def _write(self, start: int, values: Tensor) -> None:
        """Write values to the master weights in the file, and to their copy if the file contains one."""
        assert self.states is not None
        for field in (MASTERS, PARAMETERS) if PARAMETERS in self.states.fields else (MASTERS,):
            self.states.write(field, start, values)

    def write_to_masters(self, part: slice, written: Tensor) -> None:
        """Copy new parameter values to master weights. A master weight that already rounds to its new value is kept."""
        master = self.part(part)
        written = written.to(master.device)
        if written.dtype == master.dtype:
            master.copy_(written)
        else:
            master.copy_(torch.where(written != master.to(written.dtype), written.to(master.dtype), master))
        self.written(part, master)

    def own_values(self) -> Tensor | None:
        """This rank's values, from which a gather starts; None if the memory to be gathered already contains them."""
        if self.plan.masters in SHOWN or self.plan.copy in SHOWN:
            return None
        if self.copy is not None:
            return self.copy
        self.fetch(None)
        fetched, self._fetched = self._fetched, None
        return self._values if fetched is None else fetched.result()

    def fetch(self, update: Future[None] | None) -> None:
        """If gathers start from values on a disk, start to read them in the background, once ``update`` has ended."""
        states, is_pinned = self.states, self.plan.device.type != "cpu"
        if states is None or self.copy is not None or self._fetched is not None:
            return
        field = PARAMETERS if PARAMETERS in states.fields else MASTERS

        def read() -> Tensor:
            if update is not None:
                update.result()
            values = states.read(field, 0, states.numel)
            return values.pin_memory() if is_pinned else values

        self._fetched = states.swap.reader.submit(read)

    def forget_fetched(self) -> None:
        """Drop the values that ``fetch`` has read, before a change of the master weights makes them stale."""
        self._fetched = None

    def promote(self) -> None:
        """Convert the master weights to fp32."""
        plan = replace(self.plan, master_dtype=torch.float32)
        if self.states is not None:
            on_disk, self.plan = self.states, replace(plan, copy=plan.copy or Medium.DISK)
            self.states = self.plan.reserve(on_disk.swap, on_disk.name)
            self._write(0, on_disk.read(MASTERS, 0, on_disk.numel).float())
            on_disk.file.close()
            return
        self.plan = replace(plan, masters=Medium.DEVICE) if plan.masters in SHOWN else plan
        self._values = self._held(self._values.float(), self.plan.masters)

    def leave_part(self, layout: BucketLayout) -> None:
        """Replace the layout by one without parts. This rank's own values stay in the same memory."""
        masters, copy = (Medium.DEVICE if m is Medium.PART else m for m in (self.plan.masters, self.plan.copy))
        assert masters is not None
        self.plan = replace(self.plan, layout=layout, masters=masters, copy=copy)


# -- parts of the parameters (``shard_within``) ------------------------------------------------------------------------


class NodePart:
    """Parameter values of this rank's shard, and of the shards of ranks with the same local index on other machines.

    The bucket is gathered from the parts of one machine's ranks. After each change of the parameters, machines exchange
    shards once; then all ranks with the same local index hold the same values.

    Args:
        values: the part's values, a 1-D tensor in the dtype of the gathered buffer.

    Attributes:
        own: this rank's shard, a view of ``values``.
    """

    def __init__(
        self, values: Tensor, layout: BucketLayout, communicator: Communicator, what: str, ledger: Ledger
    ) -> None:
        self._values, self._what = ledger.hold(values, "parameters"), what
        self._bounds, self._collectives = layout.bounds_in_part, communicator.along((NODE,))
        self._begin, _ = layout.own_part
        low, high = layout.own_range
        self.own = values[low - self._begin : high - self._begin]
        self._pending: list[Pending] = []
        self._arrived: torch.Event | None = None  # recorded on the stream that waited for the last exchange

    def refresh(self, new: Tensor | None) -> None:
        """Start to fetch the other shards of this part, after every rank has updated its own shard. Collective.

        Args:
            new: the new values of this rank's shard; None if they are in ``own`` already.
        """
        values = self.values()
        if new is not None:
            self.own.copy_(new)
        self._pending.append(self._collectives.all_gather(values, self._bounds, self._what))

    def values(self) -> Tensor:
        """The values of this part. Waits for shards that are being fetched."""
        stream = current_stream(self._values.device)
        if self._pending:
            self._pending.pop().wait()
            self._arrived = stream.record_event() if stream is not None else None
        elif self._arrived is not None and stream is not None:
            stream.wait_event(self._arrived)  # the wait may have been on another stream
        return self._values

    def write(self, segment: Segment, value: Tensor) -> None:
        """Expand ``value``, the same on every rank, to a parameter's shape; write the range that is in this part."""
        start, stop = (min(max(each - self._begin, 0), len(self._values)) for each in (segment.start, segment.stop))
        begin = self._begin - segment.start
        self.values()[start:stop].copy_(flat_range(value.expand(segment.shape), start + begin, stop + begin))

    def abandon(self) -> None:
        """Drop this part after a failure. A running exchange is not awaited: other ranks may never join it."""
        self._pending.clear()
