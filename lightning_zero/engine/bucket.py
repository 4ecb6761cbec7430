"""One flat buffer: its shard at rest, its gathering and release.

==============================  =====================  ====================  =====================
stage and state                 ``shard``              ``full``              ``views`` show
==============================  =====================  ====================  =====================
1, 2 in fp32                    slice of ``full``      all values            ``full``
1, 2 in low precision           fp32 masters           all values            ``full``
3 at rest                       the rank's values      zero bytes            NaN
3 gathered                      the rank's values      all values            ``full``
==============================  =====================  ====================  =====================
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from lightning_zero.engine.agreement import Agreement
from lightning_zero.engine.collectives import Communicator, Pending
from lightning_zero.engine.layout import BucketLayout
from lightning_zero.engine.offload.states import MASTERS, PARAMETERS, DiskStates, Swap
from lightning_zero.engine.offload.updates import Updates
from lightning_zero.engine.settling import Work, settle
from lightning_zero.engine.sharded_tensor import ShardedTensor, flat_range, local_range_of
from lightning_zero.engine.streams import current_stream, wait_for
from lightning_zero.engine.view import View

if TYPE_CHECKING:
    from lightning_zero.engine.sources import Source

LOW_PRECISION = (torch.bfloat16, torch.float16)


class Ledger:
    """Bytes that the engine holds, by category, now and at the moment of the highest total."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: dict[str, int] = {}

    def add(self, category: str, nbytes: int) -> None:
        self.now[category] += nbytes
        if nbytes > 0 and self.now.total() > sum(self.peak.values()):
            self.peak = dict(self.now)

    def reset_peak(self) -> None:
        self.peak = dict(self.now)


class BucketSlot:
    """A parameter's place in a bucket: what its sharded tensors ask for (see ``sharded_tensor.Slot``)."""

    def __init__(self, bucket: Bucket, index: int, dtype: torch.dtype) -> None:
        segment = bucket.layout.segments[index]
        start, stop = bucket.layout.owned_range(index, index, bucket.communicator.rank)
        self.bucket, self.index = bucket, index
        self.name, self.shape, self.dtype, self.device = segment.name, segment.shape, dtype, bucket.full.device
        self.offset, self.local_numel = start - segment.start, stop - start
        low, _ = bucket.layout.shard_range(bucket.communicator.rank)
        self.local_range = slice(start - low, start - low + self.local_numel) if stop > start else slice(0, 0)
        self.hooks_after_reduction: dict[int, Callable[[Tensor], Any]] = OrderedDict()
        self.take_gradient: Callable[[Tensor], None] | None = None
        self.add_gradient: Callable[[Tensor], None] | None = None
        self._derived: dict[tuple[str, int], weakref.ref[ShardedTensor]] = {}
        self._remembered: Counter[str] = Counter()

    @property
    def parameter(self) -> nn.Parameter:
        return self.bucket.parameter(self.index)

    @property
    def view(self) -> Tensor:
        return self.bucket.views[self.index]

    def remember(self, tensor: ShardedTensor) -> None:
        kind = "alias" if tensor.is_parameter else str(tensor.dtype)
        key = kind, self._remembered[kind]
        self._remembered[kind] += 1
        own = weakref.ref(self)  # no cycle: what is deleted is freed at once

        def forget(_: Any) -> None:
            slot = own()
            if slot is not None:
                slot._derived.pop(key, None)

        self._derived[key] = weakref.ref(tensor, forget)

    @property
    def remembered(self) -> int:
        """How many tensors, aliases apart, have been made of the parameter so far."""
        return sum(count for kind, count in self._remembered.items() if kind != "alias")

    @property
    def derived(self) -> dict[tuple[str, int], ShardedTensor]:
        """What user code made of the parameter and keeps (aliases, copies, averages), by kind and order of making."""
        alive = ((key, reference()) for key, reference in list(self._derived.items()))
        return {
            key: tensor
            for key, tensor in alive  # without those that have become something else since
            if isinstance(tensor, ShardedTensor) and tensor.slot is self and tensor.is_leaf
        }

    def local_parameter(self) -> Tensor:
        settle()  # whoever asks may write to it
        self.bucket.wait()  # in fp32 at stages 1 and 2 the shard is part of a buffer that others may be filling
        if self.bucket.views[self.index].may_be_written:
            self.bucket.take_over_writes()
        return self.bucket.part(self.local_range)

    def parameter_at_rest(self) -> Tensor:
        bucket = self.bucket
        if bucket.states is None:
            return self.local_parameter()
        settle()
        bucket.wait()
        bucket.take_over_writes()
        return bucket.states.tensor(MASTERS, self.local_range.start, self.local_range.stop)

    @property
    def is_written_by_modules(self) -> bool:
        return self.bucket.shard_in_full

    def whole_parameter(self, dtype: torch.dtype) -> Tensor | None:
        bucket = self.bucket
        if bucket.communicator.size == 1:
            settle()
            if not bucket.shard_in_full:
                bucket.wait()
                bucket.take_over_writes()
            return bucket.part(self.local_range).view(self.shape).to(self.device, self.dtype).to(dtype)
        if bucket.full.dtype != dtype:
            return None
        if bucket.communicator.absent:
            bucket.gather()  # ranks without a batch can serve this, and nothing else
        if bucket.is_ready:
            bucket.wait()
            return bucket.views[self.index].detach()
        return None

    def write_parameter(self, value: Tensor) -> None:
        bucket = self.bucket
        bucket.agreement.require_all(f"a write to '{self.name}'")
        bucket.wait()
        with torch.no_grad():
            if bucket.is_ready:
                bucket.segment_view(self.index).copy_(value)
            if not bucket.shard_in_full:
                bucket.follow(self.local_range, local_range_of(value, self))

    def may_be_written_whole(self, value: Tensor) -> bool:
        bucket = self.bucket
        return (
            bucket.is_ready
            and bucket.full.dtype == bucket.master_dtype == bucket.dtype
            and value.device == self.device
            and value.layout is torch.strided
            and value.untyped_storage()._cdata != bucket.full.untyped_storage()._cdata
        )

    def written_locally(self, values: Tensor) -> None:
        bucket = self.bucket
        bucket.written(self.local_range, values)
        if bucket.is_ready and bucket.communicator.size == 1 and not bucket.shard_in_full:
            bucket.segment_view(self.index).copy_(values.view(self.shape))
        elif bucket.is_ready and bucket.communicator.size > 1:
            bucket.segment_view(self.index).copy_(self.collect(values))

    def collect(self, local: Tensor) -> Tensor:
        bucket, local = self.bucket, local.to(self.device)
        if bucket.communicator.size == 1:
            return local.view(self.shape)
        flat = local.new_empty(self.shape.numel())
        flat[self.offset : self.offset + self.local_numel] = local
        bucket.agreement.meet(f"'{self.name}'")
        bucket.communicator.broadcast_ranges(flat, self.ranges(), f"the gather of '{self.name}'")
        return flat.view(self.shape)

    def accumulate(self, target: Tensor, gradient: Tensor) -> bool:
        if self.add_gradient is None or self.parameter.grad is not target:
            return False
        self.add_gradient(gradient)
        return True

    def ranges(self) -> list[tuple[int, int]]:
        """What each rank has of the flattened parameter, in the order of ranks."""
        layout, first = self.bucket.layout, self.bucket.layout.segments[self.index].start
        owned = (layout.owned_range(self.index, self.index, rank) for rank in range(layout.world_size))
        return [(start - first, stop - first) for start, stop in owned]

    @property
    def group(self) -> Any:
        return self.bucket.communicator

    def reduce(self, value: Tensor, op: Any, what: str | None = None) -> Tensor:
        if self.bucket.communicator.size > 1:
            self.bucket.agreement.meet(what or f"a sum or norm over parts of '{self.name}'")
        return self.bucket.communicator.all_reduce(value, op)


class Bucket:
    """The parameters of one (unit, dtype, requires_grad), one after another in one flat buffer.

    Args:
        layout: the ranges.
        parameters: the module's own, in the order of the layout; they stay as they are until ``cut``.
        number: the bucket's own among all, the same on every rank.
        compute_dtype: the dtype in which they are gathered.
        replicated: whether all values stay here at rest (stages 1 and 2).
        masters_on: the device on which masters are kept, and updated, if not where the module computes; or the disk.
        source_on: the device on which a rank keeps its part of the parameters at rest (stage 3), likewise.
        updates: what updates masters that are elsewhere.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: list[nn.Parameter],
        *,
        number: int,
        unit_name: str,
        compute_dtype: torch.dtype,
        replicated: bool,
        masters_on: torch.device | Swap | None,
        source_on: torch.device | Swap | None,
        updates: Updates,
        communicator: Communicator,
        agreement: Agreement,
        ledger: Ledger,
    ) -> None:
        self.layout, self.unit_name, self._number = layout, unit_name, number
        self.communicator, self.agreement, self.ledger = communicator, agreement, ledger
        dtype, device = parameters[0].dtype, communicator.device
        self.dtype = dtype
        trainable = parameters[0].requires_grad
        self.master_dtype = torch.float32 if trainable and dtype in LOW_PRECISION else dtype
        # what is frozen has no masters of its own
        self._masters_on, self._source_on = (masters_on if trainable else source_on), source_on
        self.updates = updates if self._masters_on is not None else None
        self.has_begun = False  # to be updated before the optimizer's step, which is to come
        self.update: Work | None = None  # the last of them; None when ``full`` shows it
        self._is_stale = False  # over one rank: ``full`` is to show it when somebody looks
        self._shows_update = False  # the update itself writes to this rank's part of ``full``
        self._is_kept = False  # somebody had another tensor over ``full`` when it began
        self.is_early = False  # the last update is one of those that may begin in backward; on every rank alike
        # Over one rank a shard of what is gathered, beside it, would be all of it a second time.
        shard_is_gathered = self.master_dtype == compute_dtype or self._masters_on is not None
        self.replicated = replicated or (communicator.size == 1 and source_on is None and shard_is_gathered)
        self.shard_in_full = self.replicated and self.master_dtype == compute_dtype and self._masters_on is None
        self.states: DiskStates | None = None  # in the place of ``shard``
        self._fetched: Future[Tensor] | None = None
        self._source: Tensor | None = None  # what gathers begin with, where that is not the masters
        self._pending: list[Pending] = []  # the gather under way, if one is
        self._left: torch.Event | None = None  # when what a gather copied to the device has left the host's memory
        weakref.finalize(self, _settle, self._pending).atexit = False
        self._allocated_on: torch.Stream | None = None  # for `full`; None on the CPU
        self._arrived: torch.Event | None = None  # when the first of those that use it had waited for the gather
        self._used_on: list[torch.Stream] = []
        self._gathered = self.is_cut = False
        self._low, self._high = layout.shard_range(communicator.rank)
        self._sizes = layout.sizes()

        # What is whole has no memory until it is cut, or gathered.
        self._flat = torch.empty(layout.padded_numel, dtype=dtype, device=device)
        self.full = torch.empty(layout.padded_numel, dtype=compute_dtype, device=device)
        self._flat_nbytes, self._full_nbytes = (t.untyped_storage().nbytes() for t in (self._flat, self.full))
        for empty in (self._flat, self.full):
            empty.untyped_storage().resize_(0)
        has_nan = compute_dtype.is_floating_point or compute_dtype.is_complex
        nan = torch.full((), float("nan") if has_nan else 0, device=device)
        self._placeholders = [nan.to(compute_dtype).expand(segment.shape) for segment in layout.segments]

    # -- setting up -------------------------------------------------------------------------------------------------

    def reserve(self, fields: Mapping[str, torch.dtype]) -> None:
        """Make room on the disk for masters, and for states of them, if that is where they are to be.

        Raises:
            OSError: if there is not enough.
        """
        if isinstance(self._masters_on, Swap):
            self.states = self._room_on(self._masters_on, fields)

    def _room_on(self, swap: Swap, fields: Mapping[str, torch.dtype]) -> DiskStates:
        if isinstance(self._source_on, Swap) and self.full.dtype != self.master_dtype:
            fields = {PARAMETERS: self.full.dtype, **fields}
        name = f"{self.unit_name} {self._number} {self.master_dtype}"
        return DiskStates(swap, name, self._high - self._low, self.master_dtype, fields)

    def room(self, index: int) -> Tensor:
        """Where the values of a parameter may be written before it is cut, in its shape."""
        segment = self.layout.segments[index]
        return self._opened()[segment.start : segment.stop].view(segment.shape)

    def _opened(self) -> Tensor:
        if self._flat.untyped_storage().nbytes() != self._flat_nbytes:
            self._flat.untyped_storage().resize_(self._flat_nbytes)
            for gap in self._flat.split_with_sizes(self._sizes)[1::2]:
                gap.zero_()
        return self._flat

    def cut(self, parameters: list[nn.Parameter], sources: list[Source]) -> None:
        """Make the parameters sharded tensors. Collective.

        Args:
            parameters: the module's own, in the order of the layout.
            sources: of their values; where there are none, on rank 0, they have been written to the room.
        """
        flat, communicator = self._opened(), self.communicator
        low, high = (0, len(flat)) if self.replicated else (self._low, self._high)
        run_goes_on = False
        from_first: list[slice] = []  # maximal runs of what rank 0 gives the others
        for segment, source in zip(self.layout.segments, sources):
            start, stop = segment.start, segment.stop
            if source.everywhere:
                start = min(max(start, low), stop)
                stop = max(min(stop, high), start)
                run_goes_on = False
            else:
                begin = from_first.pop().start if run_goes_on else start
                from_first.append(slice(begin, stop))
                run_goes_on = True
            if source.values is not None and (source.everywhere or communicator.rank == 0):
                begin, end = start - segment.start, stop - segment.start
                flat[start:stop].copy_(flat_range(source.values.detach(), begin, end))
        for run in from_first:
            communicator.from_first(flat[run])
        if self.shard_in_full:
            self.full = flat
            self.shard = flat[self._low : self._high]
        else:
            self._keep(flat[self._low : self._high])
        if self.replicated:
            self.ledger.add("parameters", self._full_nbytes)
            self._gathered = True
            if not self.shard_in_full:
                self.full.untyped_storage().resize_(self._full_nbytes)
                self.full.copy_(flat)
        del self._flat
        trains = parameters[0].requires_grad
        self._segments: list[Tensor] = []  # of ``full``: views of what has had no memory yet cannot be made
        if self.replicated:
            self._find_segments()
        self.views = [View(shown, trains) for shown in (self._segments if self.replicated else self._placeholders)]
        # a parameter holds its slot, which holds the bucket: the way back is weak, so that both go with the module
        slots = [BucketSlot(self, i, self.dtype) for i in range(len(self.layout.segments))]
        self._slots = [weakref.ref(slot) for slot in slots]
        self.parameters: list[weakref.ref[nn.Parameter]] = []
        for slot, parameter in zip(slots, parameters):
            become(parameter, nn.Parameter(ShardedTensor(slot), parameter.requires_grad))
            if parameter._post_accumulate_grad_hooks:
                slot.hooks_after_reduction = parameter._post_accumulate_grad_hooks
                parameter._post_accumulate_grad_hooks = OrderedDict()
            self.parameters.append(weakref.ref(parameter))
        self._masters: weakref.WeakSet[Any] = weakref.WeakSet()
        self._own_holders: int | None = None  # of ``full`` at rest, but for masters; known once all has come
        self.is_cut = True

    def _keep(self, own: Tensor) -> None:
        """Keep this rank's values where they are to be at rest."""
        here = own.device
        if self.states is not None:
            self._keep_on_disk(self.states, own.to("cpu", self.master_dtype))
        else:
            assert not isinstance(self._masters_on, Swap), "no room was reserved"
            self.shard = self._kept(own, self._masters_on or here, self.master_dtype)
        if self._masters_on is None or self.replicated:
            return
        if self._source_on is None:
            self._source = self._kept(own, here, self.full.dtype)
        elif isinstance(self._source_on, torch.device) and (
            self.full.dtype != self.master_dtype or self.states is not None
        ):
            self._source = self._kept(own, self._source_on, self.full.dtype)

    def _keep_on_disk(self, states: DiskStates, masters: Tensor) -> None:
        states.write(MASTERS, 0, masters)
        if PARAMETERS in states.fields:
            states.write(PARAMETERS, 0, masters)

    def _kept(self, values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        if device == values.device:
            kept = values.to(dtype, copy=True)
        else:
            kept = torch.empty(values.shape, dtype=dtype, pin_memory=True, device="cpu").copy_(values)
        self.ledger.add("parameters" if device == self.full.device else "host", kept.nbytes)
        return kept

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[BucketSlot]:
        """The places of the parameters, in the order of the layout."""
        return self.slots_of(0, len(self._slots) - 1)

    def slots_of(self, first: int, last: int) -> list[BucketSlot]:
        """The places of some neighbours, from the first to the last, inclusive."""
        slots = [reference() for reference in self._slots[first : last + 1]]
        assert None not in slots, f"parameters of unit {self.unit_name!r} were deleted"
        return slots  # type: ignore[return-value]

    @property
    def is_ready(self) -> bool:
        """Whether all values lie here, or are on their way."""
        return self._gathered

    @property
    def is_whole_here(self) -> bool:
        """Whether all values of the masters lie here, and none is on its way."""
        return self.replicated and self.full.dtype == self.dtype and not self._pending and not self._is_stale

    def parameter(self, index: int) -> nn.Parameter:
        parameter = self.parameters[index]()
        assert parameter is not None, f"parameter {self.layout.segments[index].name} was deleted"
        return parameter

    def segment_view(self, index: int) -> Tensor:
        """A parameter in ``full``, in its shape."""
        return self._segments[index]

    def _find_segments(self) -> None:
        ranges = self.full.split_with_sizes(self._sizes)[::2]
        self._segments = [part.view(segment.shape) for part, segment in zip(ranges, self.layout.segments)]
        self._own_holders = None

    def gather(self, *, refresh: bool = False) -> None:
        """Start to fill ``full``; ``wait`` before it is read. Does nothing where it is filled, unless to refresh it."""
        if self._gathered and not refresh and not self._is_stale:
            return
        with temporarily_clear_interpreter_stack():  # it is no part of a function that ``torch.func`` transforms
            self._gather()

    def _gather(self) -> None:
        if self.has_begun:
            raise RuntimeError(
                f"Unit {self.unit_name or 'root'!r} is needed again in a backward in which its update has begun: "
                "OffloadConfig(overlap=False) updates when all gradients are there."
            )
        self._finish_gather()
        if self.update is not None:
            self.update.wait()
        # Autograd may have saved views of this storage: they are valid again once it holds the same values.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.full):
            if not self._gathered:
                self.full.untyped_storage().resize_(self._full_nbytes)
                self._allocated_on = current_stream(self.full.device)
                self.ledger.add("gathered", self._full_nbytes)
                if not self._segments:
                    self._find_segments()
            own = None if self.shard_in_full or self._shows_update else self._own_values()
            self._pending.append(self._start_gather(own))
        self.update, self._is_stale, self._shows_update = None, False, False
        if not self._gathered and not self.replicated:
            for view, segment in zip(self.views, self._segments):
                view.show(segment)
                view.look()
        self._gathered = True

    def refresh(self) -> bool:
        """The masters have changed: let ``full`` show them, where it is filled.

        Over one rank that is done when somebody looks: nobody else waits for it, and the update may be under way still.

        Returns:
            Whether it has begun and is to be waited for, as somebody looks without asking: who keeps a part of ``full``
            (a module that has put a row of its weight aside).
        """
        is_kept = self._gathered and (self._is_kept if self._shows_update else self._is_full_kept())
        if self.communicator.size == 1 and self.update is not None and not is_kept:
            self._is_stale = self._gathered
        elif self._gathered:
            self.gather(refresh=True)
            return is_kept
        return False

    def has_master(self, master: Any) -> None:
        """Some of ``shard`` is a tensor of its own, as long as what has it lives."""
        self._masters.add(master)

    def _is_full_kept(self) -> bool:
        """Whether somebody else has a tensor over its memory."""
        return self._own_holders is not None and self._holders_but_masters() != self._own_holders

    def _holders_but_masters(self) -> int:
        """How many tensors there are over the memory of ``full``, apart from masters'."""
        masters = len(self._masters) if self.shard_in_full else 0
        return torch._C._storage_Use_Count(self.full.untyped_storage()._cdata) - masters

    @property
    def is_updated_late(self) -> bool:
        """Whether a gather is likely to wait for an update: one that did not begin before the optimizer's step."""
        return self.update is not None and not self.is_early

    def _start_gather(self, own: Tensor | None) -> Pending:
        """Put this rank's values in their place, if they are not there, and start to exchange them."""

        def gather() -> Pending:
            if own is not None:
                self.full[self._low : self._high].copy_(own, non_blocking=True)
            return self.communicator.all_gather(self.full, self._number, what)

        what = f"the gather of unit {self.unit_name!r}"
        if own is None or own.device == self.full.device:
            return gather()
        # from the host, on a stream of its own: it passes by what the device computes meanwhile
        stream, device = self.communicator.copies, self.full.device
        stream.wait_event(torch.accelerator.current_stream(device).record_event())
        with stream:
            gathered = gather()
            self._left = left = stream.record_event()

        def finish() -> None:
            gathered.wait()
            torch.accelerator.current_stream(device).wait_event(left)

        return Pending(what, [], [own], finish)

    def shown_in(self) -> Tensor | None:
        """Where an update that is about to begin is to put this rank's new values too, in the dtype of computing.

        None where gathers read them from the masters: these are at hand as they are, or backward needs ``full`` still.
        """
        differs = self.states is not None or self.full.dtype != self.master_dtype
        self._shows_update = self._source is None and differs and self.replicated and not self.has_begun
        if not self._shows_update:
            return self._source
        self._is_kept = self._is_full_kept()  # not later, when the update has parts of it in its thread
        return self.full.data[self._low : self._high]  # which its views do not take for a write of their module's

    @property
    def reads_states(self) -> bool:
        """Whether what an update leaves on the disk is what the next gather begins with."""
        return self.states is not None and self._source is None and not self._shows_update

    def _own_values(self) -> Tensor:
        """What a gather begins with."""
        if self._source is not None:
            return self._source
        if self.states is None:
            return self.shard
        fetched, self._fetched = self._fetched or self._read(self.states), None
        return fetched.result()

    def fetch(self) -> None:
        """Start to read what a gather will begin with, if that lies on a disk."""
        is_to_come = self._is_stale or not self._gathered
        if self.states is not None and self.reads_states and is_to_come and self._fetched is None:
            self._fetched = self._read(self.states)

    def _read(self, states: DiskStates) -> Future[Tensor]:
        field = PARAMETERS if PARAMETERS in states.fields else MASTERS
        update = self.update

        def read() -> Tensor:
            if update is not None:
                update.wait()
            values = states.read(field, 0, states.numel)
            return values.pin_memory() if self.full.device.type != "cpu" else values

        return states.swap.reader.submit(read)

    def before_update(self) -> None:
        """The masters are about to change."""
        self.wait()
        self.take_over_writes()
        self._fetched = None
        if self._left is not None:
            self._left.synchronize()

    def wait(self) -> None:
        """Wait until ``full`` is filled, with what the last update gave."""
        if self._is_stale:
            self.gather()
        self._finish_gather()
        if self._own_holders is None:
            self._own_holders = self._holders_but_masters()

    def _finish_gather(self) -> None:
        if self._pending:
            self._pending.pop().wait()
            if (stream := current_stream(self.full.device)) is not None:
                self._arrived, self._used_on = stream.record_event(), [stream]
        elif self._arrived is not None:  # a module may compute on streams of its own
            stream = current_stream(self.full.device)
            if stream is not None and stream not in self._used_on:
                stream.wait_event(self._arrived)
                self._used_on.append(stream)

    def abandon(self) -> None:
        """Stay in parts after a failure. What is under way is not waited for: other ranks may never take part."""
        self._pending.clear()
        if not self.replicated and self._gathered:
            self._free()
        self._gathered = False  # where it stays at rest, what had arrived of it is anybody's guess

    def promote(self) -> None:
        """Keep masters in fp32 from here on: parameters that were frozen in low precision begin to train."""
        if self.master_dtype not in LOW_PRECISION:
            return
        self.wait()
        if self.states is not None:
            former, self.master_dtype = self.states, torch.float32
            self.states = self._room_on(former.swap, {})
            self._keep_on_disk(self.states, former.read(MASTERS, 0, former.numel).float())
            former.close()
            return
        before = 0 if self.shard_in_full else self.shard.nbytes
        self._own_holders = None
        self.shard, self.shard_in_full, self.master_dtype = self.shard.float(), False, torch.float32
        self.ledger.add("parameters", self.shard.nbytes - before)

    def part(self, part: slice) -> Tensor:
        """Some of this rank's masters, 1-D: a copy of those on a disk, and else what they are."""
        return self.shard[part] if self.states is None else self.states.read(MASTERS, part.start, part.stop)

    def written(self, part: slice, values: Tensor) -> None:
        """Something was written to what ``part`` gave: let all that has these values have them now."""
        self._fetched = None
        if self.states is not None:
            self.states.write(MASTERS, part.start, values)
            if PARAMETERS in self.states.fields:
                self.states.write(PARAMETERS, part.start, values)
        if self._source is not None:  # what gathers begin with
            self._source[part].copy_(values)  # at once: an update may change them next, on the host

    def follow(self, part: slice, written: Tensor) -> None:
        """Give masters what was written to their parameters; those with more digits keep them where nothing changed."""
        settle()
        master = self.part(part)
        written = written.to(master.device)
        if written.dtype == master.dtype:
            master.copy_(written)
        else:
            master.copy_(torch.where(written != master.to(written.dtype), written.to(master.dtype), master))
        self.written(part, master)

    def release(self) -> None:
        """Free ``full`` where it is not to stay at rest."""
        if self.replicated or not self._gathered:
            return
        self.wait()
        self.take_over_writes()
        self._free()

    def take_over_writes(self) -> None:
        """Carry what modules wrote to their own parameters, which are views of ``full``, to the masters."""
        if self.shard_in_full or not self._gathered or not any(view.may_be_written for view in self.views):
            return
        self.wait()
        with torch.no_grad():
            self.follow(slice(0, self._high - self._low), self.full[self._low : self._high])
        for view in self.views:
            view.look()

    def _free(self) -> None:
        # A stray reference to a view shall compute NaN, not read freed memory.
        for view, placeholder in zip(self.views, self._placeholders):
            view.show(placeholder)
        wait_for(self._used_on, self._allocated_on)
        self.full.untyped_storage().resize_(0)
        self.ledger.add("gathered", -self._full_nbytes)
        self._gathered = False

    # -- the end ----------------------------------------------------------------------------------------------------

    def rejoin(self, communicator: Communicator, agreement: Agreement) -> None:
        """Go on with other means of communication between the same ranks, after those it had have failed."""
        self.communicator, self.agreement = communicator, agreement

    def leave_disk(self, may_read: bool) -> None:
        """Have the masters in memory, without a file that is about to go.

        Args:
            may_read: whether there is room for what is not in memory yet. Without it, and where the disk fails, what
                gathers begin with stands for the masters, or what was gathered; where there is nothing, NaN.
        """
        states, self.states, self._fetched = self.states, None, None
        if states is None:
            return
        at_hand = self._source
        if at_hand is None and self._gathered:
            at_hand = self.full[self._low : self._high].clone()
        if may_read and (at_hand is None or at_hand.dtype != self.master_dtype):
            with suppress(OSError):
                self.shard = states.read(MASTERS, 0, states.numel)
                return
        if at_hand is None:
            has_nan = self.master_dtype.is_floating_point or self.master_dtype.is_complex
            at_hand = torch.full((states.numel,), float("nan") if has_nan else 0, dtype=self.master_dtype, device="cpu")
        self.shard = at_hand.to(self.master_dtype)

    def restore(self, device: torch.device, *, as_gathered: bool = False) -> None:
        """Make the parameters ordinary again, whole, on a device.

        Args:
            as_gathered: with the values that modules have computed with last, where these have all digits; over several
                ranks in any case.
        """
        self.wait()
        exact = (as_gathered or self.communicator.size > 1) and self.dtype == self.full.dtype
        if exact:
            self.gather()
            self.wait()
        whole, slots = [], self.slots
        for slot in slots:
            value = self.segment_view(slot.index) if exact else slot.collect(slot.local_parameter())
            whole.append(value.to(device, self.dtype, copy=True))
        for slot, value in zip(slots, whole):
            parameter = self.parameter(slot.index)
            parameter.grad = None
            become(parameter, nn.Parameter(value, parameter.requires_grad))
            parameter._post_accumulate_grad_hooks = slot.hooks_after_reduction
        self.parameters = []
        self.release()


def _settle(pending: list[Pending]) -> None:
    """A bucket is deleted: the peers of what it still exchanges need it to end."""
    for exchange in pending:
        exchange.let_go()


def become(tensor: Tensor, other: Tensor) -> None:
    """Give a tensor another's contents; the object keeps its identity, its hooks and what attributes users gave it.

    What ``torch.utils.swap_tensors`` does, without its refusal of objects that somebody refers to weakly (an average of
    weights, ``nn.LSTM``): as the object stays the same, such a reference stays right.
    """
    own = {name: value for name, value in tensor.__dict__.items() if name not in _TENSOR_ATTRIBUTES}
    hooks = tensor._backward_hooks
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
    torch._C._swap_tensor_impl(tensor, other)
    tensor.__dict__.update(own)
    if hooks is not None:
        tensor._backward_hooks = hooks  # autograd's side of them went with the contents


_TENSOR_ATTRIBUTES = {"_slot", "_local", "keep", "_is_param", "promised", "_held"}
