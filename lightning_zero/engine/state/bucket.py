"""A bucket: a flat buffer of parameters that is gathered and released, and this rank's shard of master weights.

==============================  =====================  ====================  =====================
stage and state                 masters                ``full``              ``views`` refer to
==============================  =====================  ====================  =====================
1, 2 in fp32                    slice of ``full``      all values            ``full``
1, 2 in low precision           separate, in fp32      all values            ``full``
3 at rest                       the rank's values      no memory             NaN
3 gathered                      the rank's values      all values            ``full``
==============================  =====================  ====================  =====================

Without master weights (``masters=False``), low-precision parameters are kept as those in fp32 are.

If each machine has all parameters (``shard_within``), masters in ``full``'s dtype are a slice of ``part`` instead.

``residency`` describes where the master weights are stored. The state of ``full`` is a ``BucketState``::

              gather               wait              release, or a failure
    SHARDED ----------> GATHERING ------> GATHERED ----------------------> SHARDED
                          ^    refresh     |    | refresh after an update in the background, with one rank
                          +----------------+    v
                          +------ wait ------ STALE
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_zero.engine.comm.asynchronous import Streams
from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.counters import Ledger, Phases
from lightning_zero.engine.comm.transport import Codec, Pending
from lightning_zero.engine.compat import keep_version, temporarily_clear_interpreter_stack
from lightning_zero.engine.config import LOW_PRECISION
from lightning_zero.engine.offload import DiskStates, Updates, on_own_stream
from lightning_zero.engine.plan.mesh import ALL, LOCAL
from lightning_zero.engine.state.buffer import GatheredBuffer, without_memory
from lightning_zero.engine.state.extensions import Extension, Scales, encode
from lightning_zero.engine.state.residency import SHOWN, Medium, NodePart, Residency, ResidencyPlan
from lightning_zero.engine.tensor.identity import joined, project_class
from lightning_zero.engine.tensor.sharded_tensor import View, show


class BucketState(Enum):
    """The content of ``full``."""

    SHARDED = "nothing valid: this rank has only its own values"
    GATHERING = "the masters' values, which are still arriving"
    GATHERED = "the masters' values"
    STALE = "values from before the last update; the next wait gathers"


class SharedByBuckets(NamedTuple):
    """Objects that all buckets of an engine share; ``updates`` runs updates of offloaded master weights."""

    communicator: Communicator
    streams: Streams
    ledger: Ledger
    phases: Phases
    updates: Updates
    scales: Scales


@dataclass(eq=False)
class UnshardedBucket:
    """A bucket before sharding.

    Attributes:
        parameters: the module's own parameters, in the order of the layout.
        number: the bucket's number among all buckets, the same on every rank.
        gradient_codec: the codec of gradients sent between machines; None if they are only cast to ``reduce_dtype``.
        extensions: those of the parameters; empty if values are only cast for ``full``.
        states: the file of master weights and optimizer states; None if the master weights are in memory.
        full: the flat buffer, 1-D, in the gathered dtype; without memory unless all values stay gathered at rest.
    """

    parameters: list[nn.Parameter]
    plan: ResidencyPlan
    number: int
    unit_name: str
    shared: SharedByBuckets
    gradient_codec: Codec | None
    extensions: Sequence[Extension]
    states: DiskStates | None = None

    def __post_init__(self) -> None:
        # Created now, before other buffers take memory: a new tensor takes memory until its storage is emptied.
        self.full = without_memory(self.plan.layout.padded_numel, self.plan.gathered_dtype, self.plan.device)


class Bucket:
    """Parameters of one unit with the same dtype and ``requires_grad``, one after another in a flat buffer.

    Args:
        flat: the values of all parameters, 1-D; ``full`` itself if the plan keeps the master weights there.

    Attributes:
        part: the values that gathers start from if each machine has all parameters; None if gathers start from the
            values in ``residency``.
        update: the last background update, until a gather of its result begins; otherwise None.
        views: one view of ``full`` for each parameter, in the order of the layout. While a module runs, its parameters
            themselves are views, and are in this list.
        parameters: weak references to the sharded parameters. While a module runs, these references are to the tensors
            that hold its parameters' sharded contents (see ``BucketSlot.enter_forward``). Empty once the parameters are
            ordinary.
        is_data_read: whether a module has read ``data`` of a parameter, through which it may have written values.
        awaits_refresh: whether ``hooks_after_update`` are running, before ``refresh`` gathers the update's result.
    """

    def __init__(self, unsharded: UnshardedBucket, flat: Tensor) -> None:
        plan, parameters, full = unsharded.plan, unsharded.parameters, unsharded.full
        self.full, self.unit_name, self._number = full, unsharded.unit_name, unsharded.number
        self.communicator, self.streams, self.ledger, self.phases, updates, self.scales = unsharded.shared
        self._keep(flat, plan, unsharded.states)
        self.parameters = [weakref.ref(parameter) for parameter in parameters]
        self.dtype = parameters[0].dtype
        self.background, self.updates = updates, updates if plan.is_offloaded else None
        self.update: Future[None] | None = None
        self.awaits_refresh = False
        self._is_kept = False  # whether user code had a tensor over ``full`` when the last update began
        self.is_replicated, self._is_left = plan.is_replicated, False
        self.state = BucketState.GATHERED if self.is_replicated else BucketState.SHARDED
        self.gradient_codec, self.extensions = unsharded.gradient_codec, unsharded.extensions
        if self.extensions:
            self.scales.add(self)
        self._buffer = GatheredBuffer(full, self.layout, self.ledger, stays=self.is_replicated)
        self._pending: list[Pending] = []  # the running gather, if there is one
        self._left: torch.Event | None = None  # recorded after the last copy from host to device

        nan = torch.full((), float("nan"), device=full.device).to(full.dtype)
        self._placeholders = [nan.expand(segment.shape) for segment in self.layout.segments]
        shown = self._buffer.segments if self.is_replicated else self._placeholders
        # through ``data``, so that each has its own version: a layer that writes to its weight changes no other weight
        self.views: list[Tensor] = [View(tensor.data, parameters[0].requires_grad) for tensor in shown]
        for view, parameter in zip(self.views, parameters):
            if type(view) is View and (kind := project_class(parameter)) is not None:
                view.__class__ = joined(View, kind)
        self._versions_seen = [-1] * len(self.views)  # versions of the views when writes were last taken over
        self.is_data_read = False

    def _keep(self, flat: Tensor, plan: ResidencyPlan, states: DiskStates | None) -> None:
        """Keep this rank's values of all parameters, and its part of them if each machine has all."""
        self.layout = plan.layout
        self._find_ranges()
        own, copy = flat[self._shard], None
        self.part: NodePart | None = None
        if plan.layout.nodes > 1:
            in_part = flat[slice(*plan.layout.own_part)].to(plan.device, plan.compute_dtype, copy=True)
            what = f"unit {self.unit_name or 'root'!r}"
            self.part = NodePart(in_part, plan.layout, self.communicator, what, self.ledger)
            own = self.part.own if plan.masters is Medium.PART else own
        if plan.copy in SHOWN:
            # through ``data``, which has its own version: an update must not look like a write by a module
            copy = self.part.own if self.part is not None else self.full[self._shard].data
        self.residency = Residency(plan, own, states, self.ledger, copy)

    def _find_ranges(self) -> None:
        self._shard, self._bounds = slice(*self.layout.own_range), self.layout.part_bounds

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def over(self) -> tuple[str, ...]:
        """The mesh dimensions along which the bucket is gathered, and along which its gradients are first reduced."""
        return (LOCAL,) if self.part is not None else ALL

    @property
    def states(self) -> DiskStates | None:
        """Master weights and optimizer states on a disk; None if they are not on a disk."""
        return self.residency.states

    @property
    def master_dtype(self) -> torch.dtype:
        return self.residency.plan.master_dtype

    @property
    def is_in_buffer(self) -> bool:
        """Whether the master weights are a slice of ``full``."""
        return self.residency.plan.masters is Medium.BUFFER

    @property
    def is_ready(self) -> bool:
        """Whether ``full`` has all values, or a gather of them has begun."""
        return self.state is not BucketState.SHARDED

    @property
    def is_whole_here(self) -> bool:
        """Whether ``full`` permanently holds all values in the parameters' dtype, and no gather is running."""
        return self.is_replicated and self.full.dtype == self.dtype and self.state is BucketState.GATHERED

    def parameter(self, index: int) -> nn.Parameter:
        parameter = self.parameters[index]()
        assert parameter is not None, f"parameter {self.layout.segments[index].name} was deleted"
        return parameter

    def whole_of(self, index: int, share: Tensor) -> Tensor:
        """Gather a tensor from the tensor-parallel ranks' shares of it. Collective if the parameter is divided."""
        return self.communicator.tensor.whole(share, self.layout.segments[index].share)

    def segment_view(self, index: int) -> Tensor:
        """The view of ``full`` with a parameter's values, in the parameter's shape."""
        return self._buffer.segments[index]

    def has_master(self, master: Any) -> None:
        """Register a master weight tensor, by weak reference, if it is a view of ``full``."""
        if self.is_in_buffer:
            self._buffer.masters.add(master)

    def promote(self) -> None:
        """Keep master weights in fp32 from now on, because parameters frozen in low precision start to train.

        No effect without master weights (``masters=False``).
        """
        if self.master_dtype in LOW_PRECISION and self.residency.plan.config.masters:
            self.wait()
            self.residency.promote()
            self._buffer.masters.clear()

    # -- gather and release -----------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Start to read the values that a gather starts from, if they are on a disk."""
        if self.part is not None:
            return
        if self.state in (BucketState.SHARDED, BucketState.STALE):
            self.residency.fetch(self.update)

    def gather(self, *, refresh: bool = False) -> None:
        """Start to fill ``full``; call ``wait`` before reading it. No effect if a gather has begun, unless ``refresh``.

        Args:
            refresh: gather again, after a change of the values that gathers start from.
        """
        if self.state in (BucketState.GATHERING, BucketState.GATHERED) and not refresh:
            return
        with temporarily_clear_interpreter_stack():  # a gather is not part of a function that ``torch.func`` transforms
            self._gather()

    def _gather(self) -> None:
        self._finish_gather()
        if self.update is not None:
            with self.phases("wait for update", self.unit_name):
                self.update.result()
        # The version is kept: views that autograd has saved are valid again once the storage holds the same values.
        with torch.no_grad(), keep_version(self.full), self.phases("gather", self.unit_name):
            self._buffer.allocate()
            self._pending.append(self._start_gather(self.own_values()))
        self.update = None
        if self.state is BucketState.SHARDED and not self.is_replicated:
            for view, segment in zip(self.views, self._buffer.segments):
                show(view, segment)
            self._mark_seen()
        self.state = BucketState.GATHERING

    def own_values(self) -> Tensor | None:
        """The values that a gather starts from, after the last update; None if they are already in ``full``."""
        if self.part is None:
            if self.update is not None:
                self.update.result()
            return self.residency.own_values()
        if self.update is not None:  # an update of a step that has since failed
            self._refresh_part(self.part)
        return self.part.values()

    def _start_gather(self, own: Tensor | None) -> Pending:
        """Copy ``own``, this rank's values, to ``full``, unless ``own`` is None; then start the all-gather."""

        def gather() -> Pending:
            if own is not None and not self.extensions:
                self.full[slice(*self.layout.own_part)].copy_(own, non_blocking=True)
            if not self.is_replicated:
                with self.phases("wait for the other ranks", self.unit_name):
                    self.communicator.rendezvous.agree_on_gather(self._number, what)
            if (announce := self.communicator.rendezvous.announce) is not None:
                announce(self._number)
            if own is not None and self.extensions:
                encode(self, own)  # may be collective, so it follows the announcement
            if self._is_left:
                return self.communicator.broadcast_ranges(self.full, self.layout.shard_ranges, what)
            return self.communicator.along(self.over).all_gather(self.full, self._bounds, what)

        what = f"the gather of unit {self.unit_name or 'root'!r}"
        if own is None or own.device == self.full.device:
            return gather()
        # A copy from the host runs on a separate stream, so that it overlaps with computation.
        stream, device = self.streams.copies, self.full.device
        stream.wait_event(torch.accelerator.current_stream(device).record_event())
        with stream:
            gathered = gather()
            self._left = left = stream.record_event()
        gathered.waits.append(lambda: torch.accelerator.current_stream(device).wait_event(left))
        gathered.buffers.append(own)
        return gathered

    def wait(self) -> None:
        """Wait for ``part`` and, if its gather has begun, for ``full``; both then contain the last update's result."""
        if self.part is not None:
            self.part.values()
        if self.state is BucketState.STALE:
            self.gather()
        self._finish_gather()

    def _finish_gather(self) -> None:
        if self._pending:
            with self.phases("wait for gather", self.unit_name, on_stream=True):
                self._pending.pop().wait()
            self._buffer.arrived()
            self.state = BucketState.GATHERED
        else:
            self._buffer.use()

    def release(self) -> None:
        """Free ``full``, unless it stays gathered at rest."""
        if not self.is_replicated and self.is_ready:
            self.wait()
            self.copy_writes_to_masters()
            self._free()

    def may_be_written(self, index: int) -> bool:
        """Whether a module may have written to a parameter since writes were last taken over."""
        is_written = self.is_data_read or self.views[index]._version != self._versions_seen[index]
        return is_written and not self.extensions

    def _mark_seen(self) -> None:
        self._versions_seen = [view._version for view in self.views]
        self.is_data_read = False

    def copy_writes_to_masters(self) -> None:
        """Copy values that modules wrote to their parameters (views of ``full``) to the master weights."""
        if self.is_in_buffer or not self.is_ready or not any(map(self.may_be_written, range(len(self.views)))):
            return
        self.wait()
        with torch.no_grad():
            self.write_to_masters(slice(0, self._shard.stop - self._shard.start), self.full[self._shard])
            if self.part is not None:
                self.part.values().copy_(self.full[slice(*self.layout.own_part)])
        self._mark_seen()

    def write_to_masters(self, part: slice, written: Tensor) -> None:
        """Copy ``written``, values that were written to a range of the parameters, to the master weights."""
        self.background.synchronize()
        self.residency.write_to_masters(part, written)

    def encode_again(self) -> None:
        """After a write to extended parameters, gather ``full`` again if it is filled. Collective in this case."""
        if self.extensions:
            self.scales.are_stale = True
            if self.is_ready:
                self.gather(refresh=True)

    def _free(self) -> None:
        # Computing with a view that user code still holds must give NaN, not read freed memory.
        for view, placeholder in zip(self.views, self._placeholders):
            show(view, placeholder)
        self._buffer.free()
        self.state = BucketState.SHARDED

    # -- updates ----------------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Prepare for a change of the master weights: finish gathers and copies that read them."""
        self.wait()
        plan = self.residency.plan  # asked now, since the update's thread may have tensors over ``full``
        self._is_kept = self._buffer.is_kept(len(self.views) + (Medium.BUFFER in (plan.masters, plan.copy)))
        self.copy_writes_to_masters()
        self.residency.forget_fetched()
        if self.extensions:
            self.scales.are_stale = True
        if self._left is not None:
            self._left.synchronize()

    def note_update(self, indices: Iterable[int]) -> None:
        """Let graphs of parameters' former values raise autograd's usual error; called after ``before_update``."""
        for index in indices:
            increment_version(self.views[index])
            self._versions_seen[index] = self.views[index]._version

    def update_in_background(self, update: Callable[..., None]) -> None:
        """Start to update the master weights in another thread.

        ``update`` receives the copy of the master weights to which it also writes its results, or None; then the fields
        of states that are on a disk (see ``Updates.submit``).
        """
        act = on_own_stream(self.full.device, partial(update, self.residency.copy))
        self.update = self.background.submit(act, self.states)

    def refresh(self) -> None:
        """After a change of the master weights, gather ``full`` again if it is filled.

        With one rank, a background update may still be running, so the next ``wait`` gathers instead. If user code
        holds a tensor over ``full`` (for example, a module has stored a row of its weight), wait for the gather.
        """
        if self.part is not None:
            self._refresh_part(self.part)
        if not self.is_ready:
            return
        if not self.layout.is_sharded and self.update is not None and not self._is_kept:
            self.state = BucketState.STALE
            return
        self.gather(refresh=True)
        if self._is_kept:
            self.wait()

    def _refresh_part(self, part: NodePart) -> None:
        """Start to fetch the values that other machines have updated."""
        if self.update is not None:
            with self.phases("wait for update", self.unit_name):
                self.update.result()
            self.update = None
        with torch.no_grad(), self.phases("gather", self.unit_name):
            part.refresh(self.residency.own_values())

    def repartition(self, owners: Sequence[int], values: Sequence[Tensor]) -> None:
        """Change the layout, so that each parameter has one owner.

        Args:
            owners: the owner of each parameter, as a position in the order of shards.
            values: the full master weights of each parameter.
        """
        self.wait()
        flat, layout = self.full, self.layout.with_owners(owners)
        if not self.is_in_buffer:
            flat = torch.zeros(layout.padded_numel, dtype=self.master_dtype, device=self.residency.device)
            for segment, value in zip(layout.segments, values):
                flat[segment.start : segment.stop].copy_(value.reshape(-1))
        plan, former = replace(self.residency.plan, layout=layout), self.states
        self._keep(flat, plan, plan.reserve(former.swap, former.name) if former is not None else None)
        if former is not None:
            former.file.close()
        self._buffer.masters.clear()

    # -- the end ----------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Become sharded after a failure. A running gather is not awaited: other ranks may never take part."""
        self._pending.clear()
        if not self.is_replicated and self.is_ready:
            self._free()
        if self.part is not None:  # ``part`` may mix values from before and after an update
            self.layout = replace(self.layout, nodes=1)
            self.residency.leave_part(self.layout)
            self.part.abandon()
            self.part = None
            self._find_ranges()
        self.state = BucketState.SHARDED  # a replicated buffer may be partly overwritten

    def rejoin(self, communicator: Communicator) -> None:
        """Use a new communicator between the same ranks, after the previous one has failed."""
        self.communicator = communicator
        # If true, gathers broadcast each shard: with ``shard_within``, no collective gathers over all ranks.
        self._is_left = self.layout.order is not None or communicator.shards_within
