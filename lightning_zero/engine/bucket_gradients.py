"""The gradients of one bucket: how this rank's are kept, their reduction, and what ``p.grad`` is afterwards."""

from __future__ import annotations

import weakref
from functools import cached_property

import torch
from torch import Tensor

from lightning_zero.engine.bucket import LOW_PRECISION, Bucket, BucketSlot
from lightning_zero.engine.collectives import Pending
from lightning_zero.engine.gradient_shard import GradientShard, shard_of_all, shown_by
from lightning_zero.engine.same_machine import Piece
from lightning_zero.engine.sharded_tensor import Handle, ShardedTensor
from lightning_zero.engine.streams import at, current_stream, wait_for

_SMALL, _SMALL_BUCKET = 2**13, 2**20
"""Elements up to which gradients are kept as they come and go into the flat buffer together, where copying one costs
more in calls than in bytes; and all those of a bucket, if they are small on the average."""


class BucketGradients:
    """Local gradients of a bucket's parameters as they come, in one flat buffer or apart, and their mean over ranks.

    Args:
        reduce_dtype: the dtype in which gradients travel, where it is narrower than the one in which they are kept;
            None for that.

    Attributes:
        reduces: whether what is accumulated now is reduced at the end of this backward.
        flat: the flat buffer, where there is one.
    """

    def __init__(self, bucket: Bucket, reduce_dtype: torch.dtype | None) -> None:
        self.bucket, self.reduces = bucket, True
        communicator, layout, dtype = bucket.communicator, bucket.layout, bucket.dtype
        self._dtype = self._wire_dtype = torch.float32 if dtype in LOW_PRECISION else dtype
        if reduce_dtype is not None and dtype.is_floating_point:
            self._wire_dtype = min(reduce_dtype, self._dtype, key=lambda kind: kind.itemsize)
        # The mean over ranks is free where it is taken with the copy of a gradient into the flat buffer, unless that
        # casts it; and of what travels in less than fp32 it keeps the sum in range.
        self._can_take_mean_first = communicator.size > 1 and (
            bucket.full.dtype == self._dtype or self._wire_dtype != self._dtype
        )
        are_small = layout.numel <= _SMALL * len(layout.segments)
        # Without a copy into one buffer; not where there are so many that asking for each costs more than the copy.
        self._reduces_in_pieces = communicator.takes_pieces and self._wire_dtype == self._dtype and not are_small
        copied_together = are_small and layout.numel <= _SMALL_BUCKET
        self._may_all_stay_apart = self._reduces_in_pieces or communicator.size == 1 or copied_together
        self._sizes, self._mean = layout.sizes(), 1.0 / communicator.size
        self.flat: Tensor | None = None
        self._apart: dict[int, Tensor] = {}  # gradients as they came
        self._filled = [False] * len(layout.segments)
        self._streams: list[torch.Stream] = []  # that gradients came on, each of which has waited for the one before it
        self._unsynchronised: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # what ``p.grad`` shows, and its version
        self._reducing_nbytes = 0

    def accumulate(self, index: int, gradient: Tensor) -> None:
        """Add a local gradient of one parameter (its full shape) to the flat buffer, in which gradients are kept.

        The tensor is taken over: the caller has no other use of it.
        """
        self._turn_to_current_stream()
        if isinstance(gradient, ShardedTensor):
            gradient = gradient.whole()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        stays_apart = gradient.numel() <= _SMALL or (self._may_all_stay_apart and self.flat is None)
        if stays_apart and self.reduces and not self._filled[index]:
            if gradient.dtype != self._dtype or not gradient.is_contiguous() or gradient.requires_grad:
                gradient = gradient.detach().to(self._dtype).contiguous()
            self._apart[index] = gradient
            self._filled[index] = True
            if self._reduces_in_pieces:
                self.bucket.ledger.add("reduction", gradient.nbytes)
            return
        with torch.no_grad():
            if index in self._apart:
                self._apart[index].add_(gradient)
                return
            if self.flat is None:
                self.flat = self._make_flat()
            target = self._flat_view(index)
            mean_first = self._can_take_mean_first and self.reduces
            factor = self._mean if mean_first else 1.0
            if self._filled[index]:
                target.add_(gradient, alpha=factor)
            elif mean_first and gradient.dtype == target.dtype:
                torch.mul(gradient, factor, out=target)
            else:
                target.copy_(gradient)
                if mean_first:
                    target.mul_(factor)
            self._filled[index] = True

    def _turn_to_current_stream(self) -> None:
        """Let this stream wait for the one that earlier gradients came on.

        Autograd computes a gradient on the stream of its forward, and a module may have streams of its own.
        """
        stream = current_stream(self.bucket.full.device)
        if stream is not None and not (self._streams and stream == self._streams[-1]):
            wait_for(self._streams[-1:], stream)
            self._streams.append(stream)

    def has(self, index: int) -> bool:
        return self._filled[index]

    @property
    def has_any(self) -> bool:
        return any(self._filled)

    def show_unsynchronised(self) -> list[BucketSlot]:
        """Make ``p.grad`` the local gradient accumulated so far: at stage 1 under ``no_sync``, as DDP does.

        Returns:
            The places of those parameters whose users want to be told.
        """
        shown = [slot for slot, filled in zip(self.bucket.slots, self._filled) if filled]
        for slot in shown:
            gradient, flat = slot.parameter.grad, self._flat_view(slot.index)
            if gradient is not None:  # the user's own, to which autograd would have added
                flat.add_(gradient)
            slot.parameter.grad = gradient = flat.to(self.bucket.dtype)
            self._unsynchronised[slot.index] = weakref.ref(gradient), gradient._version
        return [slot for slot in shown if slot.hooks_after_reduction]

    def resume_unsynchronised(self, leaf: Tensor | None) -> None:
        """Go on with the local gradients that ``show_unsynchronised`` has shown, as ``p.grad`` shows them now.

        Args:
            leaf: already has a gradient of this backward, which autograd has added to what it showed.
        """
        for index, (shown, version) in self._unsynchronised.items():
            parameter = self.bucket.parameter(index)
            gradient = parameter.grad
            if gradient is None or isinstance(gradient, Handle):  # dropped, or replaced by what is no longer local
                self._filled[index] = False
                continue
            if not self.shows_unsynchronised(index, gradient):
                if parameter is leaf:
                    self._filled[index] = False  # what is taken next holds the earlier gradient too
                    continue
                if gradient is not shown() or gradient._version != version:  # the user's, with fewer digits perhaps
                    self._flat_view(index).copy_(gradient)
            parameter.grad = None
            if self._can_take_mean_first and self.reduces:
                self._flat_view(index).mul_(self._mean)
        self._unsynchronised.clear()

    def shows_unsynchronised(self, index: int, gradient: Tensor) -> bool:
        """Whether a gradient is the flat buffer's own range, as ``show_unsynchronised`` gave it out."""
        if self.flat is None or not self._filled[index] or isinstance(gradient, Handle):
            return False
        return gradient.data_ptr() == self._flat_view(index).data_ptr() != 0

    def _take_local(self) -> None:
        """Accumulate what is in ``p.grad`` as this rank's own, an ordinary tensor, to be reduced too: as DDP does."""
        for slot in self.bucket.slots:
            gradient = slot.parameter.grad
            if gradient is not None and not isinstance(gradient, Handle):
                self.accumulate(slot.index, gradient)

    def drop(self) -> None:
        """Drop what was accumulated and not reduced."""
        if self.flat is not None:
            self.bucket.ledger.add("reduction", -self.flat.untyped_storage().nbytes())
        self._take_apart()
        self.flat = None
        self._streams.clear()
        self._filled = [False] * len(self._filled)
        self._unsynchronised.clear()

    def _make_flat(self) -> Tensor:
        device, home = self.bucket.full.device, self.bucket.communicator.home
        with at(home):
            flat = torch.empty(self.bucket.layout.padded_numel, dtype=self._dtype, device=device)
        wait_for([home], current_stream(device))
        self.bucket.ledger.add("reduction", flat.untyped_storage().nbytes())
        return flat

    def _flat_view(self, index: int) -> Tensor:
        assert self.flat is not None
        segment = self.bucket.layout.segments[index]
        return self.flat[segment.start : segment.stop].view(segment.shape)

    def start_reduction(self) -> Pending:
        """Start to sum the flat buffer over ranks, zeros for what got no gradient here."""
        self._turn_to_current_stream()
        self._take_local()
        if self.bucket.communicator.size == 1:
            alone = {index: gradient.view(-1) for index, gradient in self._take_apart().items()}
            self._streams.clear()
            self._filled = [False] * len(self._filled)
            return Pending("", [], [], lambda: alone)
        what = f"the gradient reduction of unit {self.bucket.unit_name!r}"
        with torch.no_grad():
            if self._reduces_in_pieces and self.flat is None:
                return self._start_in_pieces(what)
            flat, self.flat = self._complete_flat(), None
            self._reducing_nbytes = self.bucket.communicator.reduction_bytes(flat, self._wire_dtype)
            self.bucket.ledger.add("reduction", self._reducing_nbytes - flat.untyped_storage().nbytes())
            self._filled = [False] * len(self._filled)
            return self.bucket.communicator.reduce_scatter(flat, self._wire_dtype, what)

    def _start_in_pieces(self, what: str) -> Pending:
        apart = {index: gradient.view(-1) for index, gradient in self._take_apart().items()}
        self._filled = [False] * len(self._filled)
        pieces = [
            [
                Piece(numel, apart[index][offset : offset + numel] if index in apart else None)
                for numel, index, offset in self._pieces_of[rank]
            ]
            for rank in range(self.bucket.communicator.size)
        ]
        self._reducing_nbytes = sum(gradient.nbytes for gradient in apart.values())
        self._reducing_nbytes += self.bucket.layout.shard_numel * self._dtype.itemsize
        self.bucket.ledger.add("reduction", self._reducing_nbytes)
        factor = self._mean if self._can_take_mean_first else 1.0
        return self.bucket.communicator.reduce_pieces(pieces, self._dtype, factor, what)

    @cached_property
    def _own_pieces(self) -> list[tuple[int, int | None, int]]:
        return self.bucket.layout.pieces_of(self.bucket.communicator.rank)

    @cached_property
    def _pieces_of(self) -> list[list[tuple[int, int | None, int]]]:
        return [self.bucket.layout.pieces_of(rank) for rank in range(self.bucket.communicator.size)]

    def _take_apart(self) -> dict[int, Tensor]:
        """The gradients that were kept as they came, which the bucket keeps no longer."""
        apart, self._apart = self._apart, {}
        if self._reduces_in_pieces:
            self.bucket.ledger.add("reduction", -sum(gradient.nbytes for gradient in apart.values()))
        return apart

    def _complete_flat(self) -> Tensor:
        """The flat buffer, with what was kept beside it, and zeros for what got no gradient here."""
        flat = self._make_flat() if self.flat is None else self.flat
        apart = self._take_apart()
        if len(apart) == len(self._filled):  # the quickest way
            gaps = flat.new_zeros(max(self._sizes[1::2]))
            cut = [gaps[:n] if i % 2 else apart[i // 2].view(-1) for i, n in enumerate(self._sizes) if n]
            torch.cat(cut, out=flat)
            self._hand_back()
            return flat.mul_(self._mean) if self._can_take_mean_first else flat
        parts = flat.split_with_sizes(self._sizes)
        if apart:
            small = [parts[2 * index] for index in apart]
            torch._foreach_copy_(small, [gradient.view(-1) for gradient in apart.values()])
            if self._can_take_mean_first:
                torch._foreach_mul_(small, self._mean)
        blank = [part for part, filled in zip(parts[::2], self._filled) if not filled]
        blank += [part for part in parts[1::2] if part.numel()]
        if blank:
            torch._foreach_zero_(blank)
        self._hand_back()
        return flat

    def _hand_back(self) -> None:
        """Of gradients that came on other streams, which are about to be let go of."""
        for stream in self._streams:
            wait_for(self._streams[-1:], stream)
        self._streams.clear()

    def finish_reduction(self, pending: Pending) -> GradientShard:
        """Wait for a reduction and add the mean over ranks to the gradient shard."""
        with torch.no_grad():
            total = pending.wait()
            self.bucket.ledger.add("reduction", -self._reducing_nbytes)
            self._reducing_nbytes = 0
            if self.bucket.communicator.size > 1 and not self._can_take_mean_first:
                total.mul_(self._mean)
            arrival = None
            if self.bucket.updates is not None and self.bucket.updates.gradients:
                total, arrival = self.bucket.updates.to_host(total)
            former = shard_of_all(self.bucket.slots)
            if former is not None:  # as in every micro-batch but the first
                former.add(total, arrival)
                return former
            shard = GradientShard(total, arrival, self.bucket.ledger)
            shard.take_over(self.bucket.slots, self._own_pieces)
            return shard

    def show(self, used: list[bool], shard: GradientShard) -> None:
        """Make ``p.grad`` the reduced gradient, for those parameters that any rank had one of."""
        slots = [slot for slot, is_used in zip(self.bucket.slots, used) if is_used]
        slots = [slot for slot in slots if shown_by(slot.parameter.grad, slot) is None]
        parts = shard.parts(self._own_pieces) if slots else {}  # after the first of several micro-batches all are shown
        for slot in slots:
            if self.bucket.communicator.size > 1 or slot.index in parts:  # else it comes with what came late
                shard.show(slot, parts[slot.index], self.bucket.dtype)
