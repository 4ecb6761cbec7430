"""Where this rank's master weights are at rest: in the gathered buffer, on the device, on the host or on a disk.

Where a gather cannot start from the master weights, there is also a copy of them in the compute dtype. A
``ResidencyPlan`` says where both are, without values; a ``Residency`` holds the values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from lightning_zero.engine.comm.background_work import BackgroundWork
from lightning_zero.engine.config import OffloadConfig
from lightning_zero.engine.offload.states import MASTERS, PARAMETERS, DiskStates, Swap
from lightning_zero.engine.plan.layout import BucketLayout
from lightning_zero.engine.plan.placement import Placement, Placements
from lightning_zero.engine.state.ledger import Ledger

LOW_PRECISION = (torch.bfloat16, torch.float16)


class Medium(Enum):
    """Where a rank's values are at rest."""

    BUFFER = "this rank's slice of the gathered buffer"
    DEVICE = "memory of their own on the device that computes"
    HOST = "the host's memory"
    DISK = "a file"


_MEDIA = {None: None, "cpu": Medium.HOST, "nvme": Medium.DISK}


@dataclass(frozen=True)
class ResidencyPlan:
    """Where one rank's master weights of a bucket are at rest. Arithmetic only.

    Attributes:
        layout: of the bucket.
        placements: of the stage.
        device: the device that computes.
        master_dtype, compute_dtype: of the master weights, and of the gathered buffer.
        parameters: placement of this bucket's parameters: whether the gathered buffer stays.
        masters: where the master weights are.
        copy: where the copy in ``compute_dtype`` is; None where gathers start from the master weights.
    """

    layout: BucketLayout
    placements: Placements
    device: torch.device
    master_dtype: torch.dtype
    compute_dtype: torch.dtype
    parameters: Placement
    masters: Medium
    copy: Medium | None

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
        trains: bool,
    ) -> ResidencyPlan:
        """Plan from the stage, the offload options and the dtypes.

        Args:
            offload: the options; None if this bucket stays on the device.
            dtype: of the parameters.
            trains: whether the parameters require gradients. Frozen ones have no separate master weights.
        """
        parameters_on = _MEDIA[offload.parameters] if offload is not None else None
        offloaded_to = _MEDIA[offload.optimizer] if offload is not None and trains else parameters_on
        master_dtype = torch.float32 if trains and dtype in LOW_PRECISION else dtype
        is_cast = master_dtype != compute_dtype
        parameters = placements.parameters
        # With one rank the shard is the full bucket: with a gathered buffer there would be two copies.
        if layout.world_size == 1 and parameters_on is None and (not is_cast or offloaded_to is not None):
            parameters = Placement.REPLICATED
        is_replicated = parameters is Placement.REPLICATED
        masters = offloaded_to or (Medium.BUFFER if is_replicated and not is_cast else Medium.DEVICE)
        copy = None
        if offloaded_to is not None and not is_replicated:
            copy = parameters_on or Medium.DEVICE
            if not is_cast and (copy is masters or copy is Medium.DISK):
                copy = None  # gathers start from the master weights
        return cls(layout, placements, device, master_dtype, compute_dtype, parameters, masters, copy)

    def without_offload(self) -> ResidencyPlan:
        """The plan of the same bucket with nothing offloaded."""
        return self.of(
            self.layout,
            self.placements,
            None,
            device=self.device,
            dtype=self.master_dtype,
            compute_dtype=self.compute_dtype,
            trains=False,
        )

    @property
    def is_replicated(self) -> bool:
        """Whether the gathered buffer keeps all values at rest."""
        return self.parameters is Placement.REPLICATED

    @property
    def is_cast(self) -> bool:
        """Whether the compute dtype differs from that of the master weights."""
        return self.master_dtype != self.compute_dtype

    @property
    def updates_write_to_buffer(self) -> bool:
        """Whether a background update may write its result to the gathered buffer as well.

        False where gathers can start from master weights in the compute dtype, or from a copy of them.
        """
        return self.is_replicated and self.copy is None and (self.is_cast or self.masters is Medium.DISK)

    def at_rest(self) -> Counter[Medium]:
        """Bytes of parameters and master weights that a rank keeps at rest, by medium."""
        shard, nbytes = self.layout.shard_numel, Counter[Medium]()
        if self.is_replicated:
            nbytes[Medium.BUFFER] += self.layout.padded_numel * self.compute_dtype.itemsize
        if self.masters is not Medium.BUFFER:
            nbytes[self.masters] += shard * self.master_dtype.itemsize
        if self.copy is not None:
            nbytes[self.copy] += shard * self.compute_dtype.itemsize
        return nbytes

    def reserve(self, swap: Swap, label: str, fields: Mapping[str, torch.dtype]) -> DiskStates:
        """Reserve disk space for the master weights and for optimizer states.

        Args:
            label: of the bucket.
            fields: dtypes of the optimizer states by name.

        Raises:
            OSError: if the disk lacks space.
        """
        if self.copy is Medium.DISK:
            fields = {PARAMETERS: self.compute_dtype, **fields}
        return DiskStates(swap, f"{label} {self.master_dtype}", self.layout.shard_numel, self.master_dtype, fields)


class Residency:
    """This rank's master weights of one bucket, and their copy in the compute dtype if one is in memory.

    Attributes:
        plan: where they are.
        states: optimizer states and master weights on a disk; None if the master weights are in memory.
    """

    states: DiskStates | None = None

    def __init__(self, plan: ResidencyPlan, copy: Tensor | None, ledger: Ledger) -> None:
        self.plan, self.copy, self._ledger = plan, copy, ledger

    @property
    def device(self) -> torch.device:
        """The device that updates the master weights."""
        raise NotImplementedError

    def part(self, part: slice) -> Tensor:
        """A range of the master weights, 1-D: a copy if they are on a disk, otherwise a view."""
        raise NotImplementedError

    def at_rest(self, part: slice) -> Tensor:
        """As ``part``; if on a disk, a lazy tensor that is read when its values are needed."""
        return self.part(part)

    def leaf(self, part: slice) -> Tensor:
        """As ``part``; if on a disk, a meta tensor of the same shape."""
        return self.part(part)

    def written(self, part: slice, values: Tensor) -> None:
        """After a write to the tensor from ``part``, update the file and the copy."""
        if self.copy is not None:
            self.copy[part].copy_(values)  # now: the next update may change host memory

    def follow(self, part: slice, written: Tensor) -> None:
        """Copy values written to parameters to the master weights, except where these already round to them."""
        master = self.part(part)
        written = written.to(master.device)
        if written.dtype == master.dtype:
            master.copy_(written)
        else:
            master.copy_(torch.where(written != master.to(written.dtype), written.to(master.dtype), master))
        self.written(part, master)

    def own_values(self) -> Tensor | None:
        """The values that a gather starts from; None where these are in the gathered buffer already."""
        raise NotImplementedError

    def fetch(self, update: BackgroundWork | None) -> None:
        """Start to read the values that a gather starts from, if they are on a disk.

        Args:
            update: the update to wait for first.
        """

    def forget_fetched(self) -> None:
        """Drop the values that ``fetch`` has read, since the master weights change."""

    def in_fp32(self) -> Residency:
        """The same master weights in fp32. Invalidates this object."""
        raise NotImplementedError

    def in_memory(self, at_hand: Tensor | None, may_read: bool) -> Residency:
        """The same master weights in memory. Invalidates this object.

        Args:
            at_hand: this rank's gathered values, if there are any. They replace master weights that cannot be read;
                without them the result is NaN.
            may_read: whether host memory has space for the file's contents.
        """
        return self


class InMemory(Residency):
    """Master weights with memory of their own."""

    def __init__(self, plan: ResidencyPlan, values: Tensor, copy: Tensor | None, ledger: Ledger) -> None:
        super().__init__(plan, copy, ledger)
        self._values = values

    @property
    def device(self) -> torch.device:
        return self._values.device

    def part(self, part: slice) -> Tensor:
        return self._values[part]

    def own_values(self) -> Tensor | None:
        return self._values if self.copy is None else self.copy

    def in_fp32(self) -> Residency:
        values, category = self._values.float(), _category(self.device, self.plan)
        self._ledger.add(category, values.nbytes - self._values.nbytes)
        return InMemory(replace(self.plan, master_dtype=torch.float32), values, self.copy, self._ledger)


class InBuffer(InMemory):
    """Master weights that are this rank's slice of the gathered buffer: updates change modules' values directly."""

    def own_values(self) -> None:
        return None

    def in_fp32(self) -> Residency:
        values, plan = self._values.float(), replace(self.plan, masters=Medium.DEVICE, master_dtype=torch.float32)
        self._ledger.add("parameters", values.nbytes)
        return InMemory(plan, values, None, self._ledger)


class OnDisk(Residency):
    """Master weights in a file.

    Args:
        states: the file.
        label: of the bucket.
    """

    def __init__(
        self, plan: ResidencyPlan, states: DiskStates, label: str, copy: Tensor | None, ledger: Ledger
    ) -> None:
        super().__init__(plan, copy, ledger)
        self.states: DiskStates = states
        self._label = label
        self._fetched: Future[Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def part(self, part: slice) -> Tensor:
        return self.states.read(MASTERS, part.start, part.stop)

    def at_rest(self, part: slice) -> Tensor:
        return self.states.tensor(MASTERS, part.start, part.stop)

    def leaf(self, part: slice) -> Tensor:
        return torch.empty(part.stop - part.start, dtype=self.plan.master_dtype, device="meta")

    def written(self, part: slice, values: Tensor) -> None:
        self.forget_fetched()
        _write(self.states, part.start, values)
        super().written(part, values)

    def own_values(self) -> Tensor:
        if self.copy is not None:
            return self.copy
        self.fetch(None)
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        return fetched.result()

    def fetch(self, update: BackgroundWork | None) -> None:
        if self.copy is not None or self._fetched is not None:
            return
        states, is_pinned = self.states, self.plan.device.type != "cpu"
        field = PARAMETERS if PARAMETERS in states.fields else MASTERS

        def read() -> Tensor:
            if update is not None:
                update.wait()
            values = states.read(field, 0, states.numel)
            return values.pin_memory() if is_pinned else values

        self._fetched = states.swap.reader.submit(read)

    def forget_fetched(self) -> None:
        self._fetched = None

    def in_fp32(self) -> Residency:
        copy = Medium.DISK if self.plan.copy is None else self.plan.copy
        plan, former = replace(self.plan, master_dtype=torch.float32, copy=copy), self.states
        states = plan.reserve(former.swap, self._label, {})
        _write(states, 0, former.read(MASTERS, 0, former.numel).float())
        former.close()
        return OnDisk(plan, states, self._label, self.copy, self._ledger)

    def in_memory(self, at_hand: Tensor | None, may_read: bool) -> Residency:
        dtype, at_hand, values = self.plan.master_dtype, at_hand if self.copy is None else self.copy, None
        if may_read and (at_hand is None or at_hand.dtype != dtype):
            with suppress(OSError):
                values = self.states.read(MASTERS, 0, self.states.numel)
        if values is None and at_hand is None:
            has_nan = dtype.is_floating_point or dtype.is_complex
            values = torch.full((self.states.numel,), float("nan") if has_nan else 0, dtype=dtype, device="cpu")
        elif values is None:
            assert at_hand is not None
            values = at_hand.to(dtype)
        return InMemory(replace(self.plan, masters=Medium.HOST), values, self.copy, self._ledger)


def take_residence(
    plan: ResidencyPlan, own: Tensor, states: DiskStates | None, label: str, ledger: Ledger
) -> Residency:
    """Store a rank's own values where the plan wants them at rest.

    Args:
        own: in the dtype of the parameters; a slice of the gathered buffer if the plan keeps the master weights there.
        states: the file with reserved space, if the plan puts master weights on a disk.
        label: of the bucket.
    """
    if plan.masters is Medium.BUFFER:
        return InBuffer(plan, own, None, ledger)
    masters = None
    if plan.masters is Medium.DISK:
        assert states is not None, "no room was reserved"
        _write(states, 0, own.to("cpu", plan.master_dtype))
    else:
        masters = _kept(own, plan.masters, plan.master_dtype, plan, ledger)
    is_copied = plan.copy in (Medium.DEVICE, Medium.HOST)
    copy = _kept(own, plan.copy, plan.compute_dtype, plan, ledger) if is_copied else None
    if masters is not None:
        return InMemory(plan, masters, copy, ledger)
    assert states is not None
    return OnDisk(plan, states, label, copy, ledger)


def _write(states: DiskStates, start: int, values: Tensor) -> None:
    """Write master weights, and their copy if it is in the file too."""
    for field in (MASTERS, PARAMETERS) if PARAMETERS in states.fields else (MASTERS,):
        states.write(field, start, values)


def _kept(own: Tensor, medium: Medium | None, dtype: torch.dtype, plan: ResidencyPlan, ledger: Ledger) -> Tensor:
    if medium is Medium.DEVICE or plan.device.type == "cpu":
        kept = own.to(dtype, copy=True)
    else:
        kept = torch.empty(own.shape, dtype=dtype, pin_memory=True, device="cpu").copy_(own)
    ledger.add(_category(kept.device, plan), kept.nbytes)
    return kept


def _category(device: torch.device, plan: ResidencyPlan) -> str:
    return "parameters" if device.type == plan.device.type else "host"
