"""Gradients of one bucket: accumulation on this rank, reduction over ranks, and ``p.grad`` afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.engine.comm.asynchronous import at, current_stream, wait_for
from lightning_zero.engine.comm.transport import Cast, Pending
from lightning_zero.engine.compat import foreach_copy, foreach_zero
from lightning_zero.engine.config import full_precision
from lightning_zero.engine.plan.mesh import NODE
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.gradient_shard import Accumulated, GradientShard, shown_by
from lightning_zero.engine.state.slot import BucketSlot, slots_of
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.wrapper import WrapperTensor

_SMALL, _SMALL_BUCKET = 2**13, 2**20
"""In elements. Gradients of up to ``_SMALL`` are copied to the flat buffer together, just before the reduction, since a
call for each would take longer than its copy. In a bucket of up to ``_SMALL_BUCKET`` whose parameters have up to
``_SMALL`` on average, this applies to all gradients."""


class BucketGradients:
    """Local gradients of a bucket's parameters in one flat buffer, and their mean over ranks.

    A gradient is added to its segment of the buffer when it arrives. In a backward that reduces nothing, gradients are
    added to ``p.grad`` instead, from which the next reduction takes them.

    Args:
        reduce_dtype: dtype of gradients in collectives; the dtype of accumulation is used if this is None or wider.

    Attributes:
        crosses: whether the current backward is synchronised, so that it also sums over machines if each of them has
            all parameters.
        continues: whether a ``no_sync`` came before the current backward, so that some rank may have local gradients.
        flat: the flat buffer, if there is one.
    """

    def __init__(self, bucket: Bucket, reduce_dtype: torch.dtype | None) -> None:
        self.bucket, self.crosses, self.continues = bucket, True, False
        layout, dtype = bucket.layout, bucket.dtype
        self._dtype = sent = full_precision(dtype)
        self._dtype_at_rest = self._dtype if bucket.residency.plan.config.masters else dtype
        if reduce_dtype is not None and dtype.is_floating_point:
            sent = min(reduce_dtype, self._dtype, key=lambda kind: kind.itemsize)
        self._codec = bucket.gradient_codec or Cast(sent)
        # gradients of more elements are copied to the flat buffer when they arrive
        self._most_waiting = _SMALL
        if layout.numel <= min(_SMALL * len(layout.segments), _SMALL_BUCKET):
            self._most_waiting = layout.numel
        self.flat: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}  # gradients that are not in the buffer yet, by parameter index
        self._filled = [False] * len(layout.segments)
        self._streams: list[torch.Stream] = []  # streams that computed gradients; each has waited for the one before it
        # sums that ``add_local`` has shown as ``p.grad``: the sum, the tensor in ``p.grad``, its version
        self._unreduced: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._included: set[int] = set()  # parameters whose earlier sums a running reduction over machines includes
        self._local: dict[int, Tensor] = {}  # ``p.grad`` that the user had set, taken for the running reductions

    def accumulate(self, index: int, gradient: Tensor) -> None:
        """Add a local gradient in a parameter's full shape, or of this rank's share. The tensor is used up."""
        self._turn_to_current_stream()
        gradient = self._own_values(index, gradient)
        is_first, self._filled[index] = not self._filled[index], True
        with torch.no_grad():
            if index in self._waiting:
                self._waiting[index].add_(gradient)
            elif is_first and gradient.numel() <= self._most_waiting:
                self._waiting[index] = gradient.to(self._dtype).contiguous()
            elif is_first and self._fits_as_buffer(gradient):
                self.flat = gradient.view(-1)
                self.bucket.ledger.add("reduction", gradient.nbytes)
            else:
                if self.flat is None:
                    self.flat = self._make_flat()
                segment = self.bucket.layout.segments[index]
                view = self.flat[segment.start : segment.stop].view(segment.shape)
                if is_first:
                    view.copy_(gradient)
                else:
                    view.add_(gradient)

    def _own_values(self, index: int, gradient: Tensor) -> Tensor:
        """The values of a gradient, without a graph: strided, and only this rank's share of the parameter."""
        if isinstance(gradient, ShardedTensor):
            gradient = gradient.whole()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        gradient = gradient.detach().resolve_conj().resolve_neg()  # other ranks read its bytes
        share = self.bucket.layout.segments[index].share
        is_whole = share.is_divided and gradient.shape == share.shape
        return share.own(gradient) if is_whole else gradient

    def _fits_as_buffer(self, gradient: Tensor) -> bool:
        """Whether a gradient can be the flat buffer itself, as that of a large parameter alone in its bucket."""
        device, numel = gradient.device, self.bucket.layout.padded_numel
        return (
            self.flat is None
            and gradient.dtype == self._dtype
            and gradient.is_contiguous()
            and gradient.numel() == numel
            and current_stream(device) == self.bucket.streams.home
            and gradient.untyped_storage().nbytes() == gradient.nbytes
        )

    def _turn_to_current_stream(self) -> None:
        """Make the current stream wait for the stream that computed the earlier gradients.

        Autograd computes a gradient on the stream of the module's forward, and a module may use streams of its own.
        """
        stream = current_stream(self.bucket.full.device)
        if stream is not None and not (self._streams and stream == self._streams[-1]):
            wait_for(self._streams[-1:], stream)
            self._streams.append(stream)

    def has(self, index: int) -> bool:
        return self._filled[index] or index in self._unreduced

    @property
    def has_any(self) -> bool:
        return any(self._filled) or bool(self._unreduced)

    def add_local(self, index: int, gradient: Tensor) -> None:
        """Add a gradient to ``p.grad`` without communication, as DDP does under ``no_sync``. The tensor is used up."""
        self._turn_to_current_stream()
        parameter, known = self.bucket.parameter(index), self._unreduced.get(index)
        with torch.no_grad():
            total = self._local_values(index, parameter.grad)
            gradient = self._own_values(index, gradient)
            total = gradient.to(self._dtype) if total is None else total.add_(gradient)
            shown = total.to(self.bucket.dtype)
            parameter.grad = shown
        self._unreduced[index] = total, shown, shown._version
        if known is None:
            self.bucket.ledger.add("reduction", total.nbytes)

    def _local_values(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """The values of ``p.grad``, not rounded to its dtype if ``add_local`` has set it; None unless it is local."""
        if gradient is None or isinstance(gradient, WrapperTensor):
            return None
        total, shown, version = self._unreduced.get(index, (None, None, 0))
        if gradient is shown and gradient._version == version:
            return total
        return self._own_values(index, gradient).to(self._dtype)

    def forget_dropped(self) -> None:
        """Forget local gradients that are no longer in ``p.grad``, such as after ``zero_grad``."""
        for index in list(self._unreduced):
            if self._local_values(index, self.bucket.parameter(index).grad) is None:
                self._forget_local(index)

    def _forget_local(self, index: int) -> None:
        total, _, _ = self._unreduced.pop(index)
        self.bucket.ledger.add("reduction", -total.nbytes)

    def _take_local(self) -> list[Tensor]:
        """Accumulate each ``p.grad`` that is an ordinary tensor: its values are local, and DDP would reduce them.

        Returns:
            Tensors that must be kept until the current stream has read them.
        """
        taken: list[Tensor] = []
        for slot in slots_of(self.bucket):
            gradient = slot.parameter.grad
            if gradient is not None and (values := self._local_values(slot.index, gradient)) is not None:
                # Otherwise, a reduction of late gradients would take these values again.
                slot.parameter.grad = None
                self.accumulate(slot.index, values)
                taken.append(values)
                if slot.index not in self._unreduced:
                    self._local[slot.index] = gradient
        for index in list(self._unreduced):
            self._forget_local(index)
        return taken

    def drop(self) -> None:
        """Drop gradients that were accumulated but not reduced."""
        if self.flat is not None:
            self.bucket.ledger.add("reduction", -self.flat.untyped_storage().nbytes())
        self._waiting = {}
        self.flat = None
        self._streams.clear()
        self._filled = [False] * len(self._filled)
        for index in list(self._unreduced):
            self.bucket.parameter(index).grad = None
            self._forget_local(index)
        self._local.clear()
        self._included.clear()

    def _make_flat(self) -> Tensor:
        device, home = self.bucket.full.device, self.bucket.streams.home
        with at(home):
            flat = torch.empty(self.bucket.layout.padded_numel, dtype=self._dtype, device=device)
        wait_for([home], current_stream(device))
        self.bucket.ledger.add("reduction", flat.untyped_storage().nbytes())
        return flat

    def start_reduction(self) -> Pending:
        """Start to sum the gradients over ranks, with zeros for parameters without a gradient.

        If each machine has all parameters, this sums only over the machine's ranks; then call ``start_crossing``.
        """
        self._turn_to_current_stream()
        taken = self._take_local()
        collectives, bounds = self.bucket.communicator.along(self.bucket.over), self.bucket.layout.part_bounds
        # If a sum over machines follows, gradients are not compressed within a machine.
        codec = Cast(self._dtype) if self.bucket.part is not None else self._codec
        with torch.no_grad():
            flat = self._complete_flat()
            del taken  # only now, see ``_complete_flat``
            return self._held(collectives.reduce_scatter(flat, bounds, codec, self._what))

    @property
    def _what(self) -> str:
        return f"the gradient reduction of unit {self.bucket.unit_name or 'root'!r}"

    def start_crossing(self, pending: Pending) -> Pending | None:
        """Wait for the machine's sum, add earlier ones, and start to sum over machines; None if nothing crosses now."""
        if self.bucket.part is None or not self.crosses:
            return None
        with torch.no_grad():
            return self._reduce_across(self._add_earlier(self._sum_of(pending), self.bucket.layout.world_size))

    def _add_earlier(self, part: Tensor, factor: int = 1) -> Tensor:
        """Add, times ``factor``, the sums within this machine to which each ``p.grad`` refers; return ``part``."""
        layout, (begin, _) = self.bucket.layout, self.bucket.layout.own_part
        for slot in slots_of(self.bucket):
            shown = shown_by(slot.parameter.grad, slot)
            if shown is not None and (earlier := shown.shard.accumulated) is not None:
                start, stop = layout.range_in_part(slot.index)
                own = slice(start - begin, stop - begin)
                part[own].add_(earlier.part[own], alpha=factor)
                self._included.add(slot.index)
        return part

    def _held(self, pending: Pending) -> Pending:
        """Count the memory of a reduction, until ``_sum_of`` has ended it."""
        self.bucket.ledger.add("reduction", pending.nbytes)
        return pending

    def _sum_of(self, pending: Pending) -> Tensor:
        """Wait for a reduction, and return the sum."""
        with self.bucket.phases("wait for reduction", self.bucket.unit_name, on_stream=True):
            total: Tensor = pending.wait()
        self.bucket.ledger.add("reduction", -pending.nbytes)
        return total

    def _mean_of(self, pending: Pending) -> Tensor:
        """Like ``_sum_of``, but divided by the number of all ranks, also if the sum is only within a machine so far."""
        total, ranks = self._sum_of(pending), self.bucket.layout.world_size
        return total.mul_(1.0 / ranks) if ranks > 1 else total

    def _reduce_across(self, part: Tensor) -> Pending:
        collectives, bounds = self.bucket.communicator.along((NODE,)), self.bucket.layout.bounds_in_part
        return self._held(collectives.reduce_scatter(part, bounds, self._codec, f"{self._what} over machines"))

    def _sum_over_machines(self, part: Tensor) -> Tensor:
        """Sum ``part``, a sum within this rank's machine, over all machines. Collective."""
        self.bucket.communicator.rendezvous.meet(
            f"the gradients of unit {self.bucket.unit_name or 'root'!r}, so far summed only within each machine"
        )
        with torch.no_grad():
            return self._sum_of(self._reduce_across(part))

    def _complete_flat(self) -> Tensor:
        """Remove and return the flat buffer, with waiting gradients copied in and zeros for missing ones."""
        flat = self._make_flat() if self.flat is None else self.flat
        self.bucket.ledger.add("reduction", -flat.untyped_storage().nbytes())
        self.flat = None
        filled, self._filled = self._filled, [False] * len(self._filled)
        waiting, self._waiting = self._waiting, {}
        self._fill(flat, waiting, filled)
        for stream in self._streams:
            wait_for(self._streams[-1:], stream)
        del waiting  # only now: its memory may be used again on the streams that allocated it
        self._streams.clear()
        return flat

    def _fill(self, flat: Tensor, waiting: dict[int, Tensor], filled: list[bool]) -> None:
        """Copy waiting gradients into the buffer, and zeros where there is no gradient, neither waiting nor in it."""
        sizes = self.bucket.layout.sizes()  # of each segment, and of the gap after it
        if len(waiting) == len(filled) and flat.numel():  # the fastest way
            gaps = flat.new_zeros(max(sizes[1::2]))
            torch.cat([gaps[:n] if i % 2 else waiting[i // 2].view(-1) for i, n in enumerate(sizes) if n], out=flat)
            return
        parts = flat.split_with_sizes(list(sizes))
        if waiting:
            foreach_copy([parts[2 * index] for index in waiting], [gradient.view(-1) for gradient in waiting.values()])
        blank = [part for part, is_filled in zip(parts[::2], filled) if not is_filled]
        blank += [part for part in parts[1::2] if part.numel()]
        if blank:
            foreach_zero(blank)

    def finish_reduction(self, pending: Pending) -> GradientShard:
        """Wait for a reduction, and return a gradient shard of its result and of what each ``p.grad`` has so far."""
        with torch.no_grad():
            total, slots, layout = self._mean_of(pending), slots_of(self.bucket), self.bucket.layout
            arrival = accumulated = None
            if self.bucket.part is not None and not self.crosses:
                accumulated = Accumulated(self._add_earlier(total), self._sum_over_machines)
                (begin, _), (low, high) = layout.own_part, layout.own_range
                total = total[low - begin : high - begin]
            else:
                if self._dtype_at_rest != self._dtype and not self._is_of_several(slots):
                    total = total.to(self._dtype_at_rest)
                if self.bucket.updates is not None and self.bucket.updates.gradients:
                    total, arrival = self.bucket.updates.to_host(total)
            shard = GradientShard(total, arrival, self.bucket.ledger, accumulated)
            shard.take_over(slots, self._included)
            self._included.clear()
        return shard

    def _is_of_several(self, slots: list[BucketSlot]) -> bool:
        """Whether gradients are a sum of several micro-batches, or further micro-batches follow."""
        return not self.crosses or self.continues or any(slot.parameter.grad is not None for slot in slots)

    def show(self, used: list[bool], shard: GradientShard) -> None:
        """Set ``p.grad`` to the reduced gradient, for the parameters that had a gradient on any rank.

        As under DDP, other parameters keep a ``p.grad`` that the user has set.
        """
        local, self._local = self._local, {}
        for index in (each for each in local if not used[each]):
            self.bucket.parameter(index).grad = local[index]
        for slot in slots_of(self.bucket):
            # from the second micro-batch on, ``p.grad`` already refers to the shard
            if used[slot.index] and shown_by(slot.parameter.grad, slot) is None:
                shard.show(slot, self.bucket.dtype)
