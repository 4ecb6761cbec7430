"""Gradient reduction during backward, bucket by bucket, in an order that is the same on every rank."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_zero.engine.comm.asynchronous import Streams, at, current_stream, wait_for
from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.counters import Phases
from lightning_zero.engine.comm.transport import Pending
from lightning_zero.engine.compat import (
    current_autograd_node,
    current_graph_task,
    gradient_hooks,
    queue_callback,
    untraced,
)
from lightning_zero.engine.optim.optimizers import Hyperparameters
from lightning_zero.engine.runtime.autograd_patches import with_hooks_of
from lightning_zero.engine.runtime.schedule import Phase, Schedule, Unit, in_backward, weakly
from lightning_zero.engine.state.bucket_gradients import BucketGradients
from lightning_zero.engine.state.gradient_shard import GradientShard
from lightning_zero.engine.state.slot import BucketSlot, slots_of
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor, take_added_gradient
from lightning_zero.engine.tensor.wrapper import WrapperTensor

_END = "the end of backward"

_reducers = count()  # numbers them in the order in which they are made, which is the same on every rank


class _End:
    """A reducer's call at the end of a backward. Autograd holds it until then, or until the backward fails.

    Each call is collective, but autograd makes them in the order of the engines' first gradients, which may differ
    between ranks. So the first one makes all of them, in the order in which the reducers were made.
    """

    alive: ClassVar[weakref.WeakSet[_End]] = weakref.WeakSet()

    def __init__(self, number: int, call: Callable[[], None]) -> None:
        self._number, self._call, self._backward = number, call, current_graph_task()
        self.alive.add(self)

    def __call__(self) -> None:
        if self not in self.alive:
            return
        ends = sorted((end for end in self.alive if end._backward == self._backward), key=lambda end: end._number)
        self.alive.difference_update(ends)
        calls = [end._call for end in ends]
        # A traceback through this frame must not keep ends alive: to their reducers, the backward would still run.
        del self, ends
        for call in calls:
            call()


@dataclass
class _Expectation:
    """Observations from earlier backward passes over the same set of trainable parameters."""

    counts: list[list[int]]  # by bucket, how many gradients each parameter gets on this rank before its reduction
    order: list[int]  # buckets with gradients on any rank except late ones, as reduced; same on every rank
    observed: bool = False
    late: set[int] = field(default_factory=set)  # buckets reduced at the end of backward; same on every rank


@dataclass
class _Backward:
    """State of a running backward pass."""

    expectation: _Expectation
    counts: list[list[int]]
    missing: list[int]  # by bucket, the number of parameters whose gradients are incomplete
    position: int = 0  # index of the next bucket in the order of reduction
    left: set[int] = field(default_factory=set)  # buckets to reduce in their turn although gradients are missing
    sent: set[tuple[int, int]] = field(default_factory=set)  # (bucket, parameter) whose reduction has begun
    completed: list[int] = field(default_factory=list)
    in_flight: deque[tuple[int, Pending]] = field(default_factory=deque)
    crossing: deque[tuple[int, Pending]] = field(default_factory=deque)  # reductions across machines
    shards: dict[int, GradientShard] = field(default_factory=dict)


class GradientReducer:
    """Collects local gradients, reduces each bucket once it is complete, and sets ``p.grad``.

    All ranks reduce buckets in the same order, whatever their data: a complete bucket waits for the buckets before it.
    Buckets without gradients on this rank are reduced as zeros at the end of backward, when ranks exchange which
    parameters they used.

    Args:
        in_flight: maximum number of reductions, each with its own buffer, that run at one time; 0 to wait for each
            reduction right after starting it.
        reduces_every_backward: whether gradients are reduced even under ``no_sync``; if False, they accumulate locally.

    Attributes:
        hyperparameters: compared between ranks at the end of each backward that reduces gradients.
    """

    def __init__(
        self,
        units: list[Unit],
        schedule: Schedule,
        communicator: Communicator,
        streams: Streams,
        phases: Phases,
        *,
        reduce_dtype: torch.dtype | None,
        in_flight: int,
        reduces_every_backward: bool,
    ) -> None:
        self._schedule, self._communicator, self._streams, self._phases = schedule, communicator, streams, phases
        self._in_flight, self._reduces_every_backward = in_flight, reduces_every_backward
        self.backwards = 0
        self._units = [unit for unit in units for _ in unit.buckets]
        self._buckets = [bucket for unit in units for bucket in unit.buckets]
        self._gradients = [BucketGradients(bucket, reduce_dtype) for bucket in self._buckets]
        self.synchronise = True  # whether the next backward is synchronised; False under ``no_sync``
        self._continues = False  # whether a ``no_sync`` has been entered since the last synchronised backward
        self._synchronises = True  # whether the running backward is synchronised
        self._expectations: dict[tuple[int, ...], _Expectation] = {}
        self._backward: _Backward | None = None
        self._deferred = False
        # Autograd calls the referent at the end of a backward or, after an exception in backward, deletes it.
        self._end: Callable[[], Any] = lambda: None
        self._number = next(_reducers)
        self.hyperparameters = Hyperparameters((), communicator)
        self._hooks: list[Any] = []
        schedule.on_turn_in_backward = weakly(self.turn_to)
        for number, bucket in enumerate(self._buckets):
            for slot in slots_of(bucket):
                if slot.view.is_floating_point() or slot.view.is_complex():
                    self._hook(slot, number)

    def _hook(self, slot: BucketSlot, number: int) -> None:
        # weakly, since a leaf must not keep the engine alive
        slot.take_gradient = partial(weakly(self._take), number, slot.index)
        for leaf in (slot.view, slot.parameter):
            requires_grad = leaf.requires_grad
            leaf.requires_grad_(True)  # required to register hooks; a frozen parameter may be unfrozen later
            # ``Tensor``'s own method: views and sharded parameters override it for user hooks
            self._hooks.append(Tensor.register_post_accumulate_grad_hook(leaf, slot.take_gradient))
            leaf.requires_grad_(requires_grad)

    def enter_no_sync(self) -> None:
        """Let the next backwards not be synchronised. All ranks call this alike, also those without a backward."""
        self.synchronise, self._continues = False, True

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- during backward --------------------------------------------------------------------------------------------

    def _take(self, number: int, index: int, leaf: Tensor) -> None:
        """Take the gradient of ``leaf``: the sharded parameter itself, or an ordinary tensor that a forward used."""
        gradients = self._gradients[number]
        parameter, gradient = gradients.bucket.parameter(index), take_added_gradient(leaf)
        backward = self._begin()
        if not isinstance(leaf, ShardedTensor) and gradient_hooks(parameter):  # autograd has called the parameter's own
            gradient = with_hooks_of(parameter, gradients.bucket.whole_of(index, gradient))
            gradient = gradient.detach().clone()  # a hook may have kept the tensor, or returned a kept one
        if self._synchronises:
            gradients.accumulate(index, gradient)
        else:
            gradients.add_local(index, gradient)
        backward.counts[number][index] += 1
        if backward.counts[number][index] == backward.expectation.counts[number][index]:
            backward.missing[number] -= 1
            if backward.missing[number] == 0:
                backward.completed.append(number)
                if self._synchronises:
                    self._launch_in_order(backward)

    def turn_to(self, unit: Unit, left: Unit | None) -> None:
        """Start all reductions that another rank may have started, with zeros for missing gradients.

        Otherwise ranks may deadlock when they used different parameters: a rank with all gradients of a bucket would
        wait for this rank in the reduction, while this rank waits for the other one in the gather of `unit`. Gradients
        that are computed later are reduced at the end of backward.

        Args:
            unit: the unit whose backward begins; it is not gathered yet.
            left: the unit whose backward began before, if any.
        """
        is_running = self._backward is not None and self._end() is not None  # None: an exception ended that backward
        if not is_running and not (self._schedule.accumulates and unit.is_trained):
            return
        # Begin even if no gradient has arrived on this rank: another rank may have one, and start a reduction.
        backward = self._begin()
        if not self._synchronises:
            return
        is_known = backward.expectation.observed  # in the first backward, the order is only a guess
        is_due = True  # whether all reductions before this one may have started
        for number in backward.expectation.order[backward.position :]:
            following = self._units[number]
            never_turns = following.is_root or following.stays  # backward neither begins nor leaves such a unit
            if is_known and (following is unit or (following.phase is Phase.AWAITED and not never_turns)):
                break
            if backward.missing[number] > 0 and (is_known or following is left or (never_turns and is_due)):
                backward.left.add(number)
            is_due = is_due and (backward.missing[number] == 0 or number in backward.left)
        self._launch_in_order(backward)

    def _begin(self) -> _Backward:
        """Return or create the running backward's state."""
        if self._backward is not None and self._end() is None:  # an exception ended that backward; this is another one
            self._drop_failed()
        if self._backward is None:
            counts = [
                [int(bucket.parameter(i).requires_grad) for i in range(len(bucket.views))] for bucket in self._buckets
            ]
            key = tuple(chain.from_iterable(counts))
            order = [number for number in reversed(range(len(counts))) if any(counts[number])]
            expectation = self._expectations.setdefault(key, _Expectation(counts, order))
            self._backward = _Backward(
                expectation,
                counts=[[0] * len(bucket.views) for bucket in self._buckets],
                missing=[sum(count > 0 for count in counts) for counts in expectation.counts],
            )
            # Without ``synchronise``, stage 1 does not reduce gradients, unless some ``p.grad`` is already sharded by
            # an earlier reduction: a local gradient cannot be added to a sharded one.
            must = self.synchronise or self._reduces_every_backward
            self._synchronises = must or self._shows_reduced()
            for gradients in self._gradients:
                gradients.crosses = self.synchronise
                gradients.continues = self._continues
                gradients.forget_dropped()
            self._deferred = True
        if self._deferred:
            self._deferred = False
            self._end_by(_End(self._number, untraced(self._at_end)), queue_callback)
        return self._backward

    def _end_by(self, end: Callable[..., None], register: Callable[[Any], Any]) -> None:
        """Let autograd call a function later, and notice if it no longer can."""
        self._end = weakref.ref(end)
        register(end)

    def _shows_reduced(self) -> bool:
        parameters = (bucket.parameter(i) for bucket in self._buckets for i in range(len(bucket.views)))
        return any(isinstance(p.grad, WrapperTensor) for p in parameters)

    def _launch_in_order(self, backward: _Backward) -> None:
        for number in backward.expectation.order[backward.position :]:
            if backward.missing[number] > 0 and number not in backward.left:
                return
            backward.position += 1
            self._launch(backward, number)

    def _launch(self, backward: _Backward, number: int) -> None:
        bucket, gradients = self._buckets[number], self._gradients[number]
        with at(self._streams.home):
            while backward.in_flight and len(backward.in_flight) >= max(self._in_flight, 1):
                self._finish_oldest(backward)
            backward.sent.update((number, i) for i in range(len(bucket.views)) if gradients.has(i))
            with self._phases("reduce", bucket.unit_name):
                backward.in_flight.append((number, gradients.start_reduction()))
            if self._in_flight == 0:
                self._finish_oldest(backward)

    def _finish_oldest(self, backward: _Backward) -> None:
        number, pending = backward.in_flight.popleft()
        with at(self._streams.home):
            crossing = self._gradients[number].start_crossing(pending)
            backward.crossing.append((number, crossing or pending))
            self._finish_crossing(backward, self._in_flight if crossing is not None else 0)

    def _finish_all(self, backward: _Backward) -> None:
        while backward.in_flight:
            self._finish_oldest(backward)
        with at(self._streams.home):
            self._finish_crossing(backward, 0)

    def _finish_crossing(self, backward: _Backward, most: int) -> None:
        """Finish reductions until at most this many cross machines."""
        while len(backward.crossing) > most:
            number, pending = backward.crossing.popleft()
            backward.shards[number] = self._gradients[number].finish_reduction(pending)

    # -- at the end of backward -------------------------------------------------------------------------------------

    def _at_end(self) -> None:
        """Called by autograd at the end of the backward that computed the first gradient."""
        node = current_autograd_node()
        if node is not None:
            # This backward is nested (reentrant activation checkpointing): the outer backward has not ended yet.
            self._deferred = True
            self._end_by(partial(self._queue_in_outer), node.register_hook)
            return
        self._finish()

    def _queue_in_outer(self, *_: Any) -> None:
        if self._deferred:
            self._begin()

    def _finish(self) -> None:
        backward, self._backward = self._backward, None
        if backward is None:
            return
        self.backwards += 1
        if self.synchronise:
            self._continues = False
        used: Sequence[Sequence[int]] = self._complete(backward) if self._synchronises else backward.counts
        with_hooks = [
            slot
            for bucket, flags in zip(self._buckets, used)
            for slot, is_used in zip(slots_of(bucket), flags)
            if is_used and slot.hooks_after_reduction
        ]
        wait_for([self._streams.home], current_stream(self._communicator.device))
        self._schedule.end_backward()
        for slot in with_hooks:
            for hook in list(slot.hooks_after_reduction.values()):
                hook(slot.parameter)

    def _complete(self, backward: _Backward) -> list[list[bool]]:
        """Reduce the remaining buckets. Return by bucket which parameters have a gradient on any rank."""
        expectation = backward.expectation
        in_order = set(expectation.order)
        # Launch these reductions before the control message: another rank, out of free buffers, may wait for one.
        for number in expectation.order[backward.position :]:
            self._launch(backward, number)
        used = [
            [count > 0 or (number, i) in backward.sent or gradients.has(i) for i, count in enumerate(counts)]
            for number, (gradients, counts) in enumerate(zip(self._gradients, backward.counts))
        ]
        late = [number in in_order and gradients.has_any for number, gradients in enumerate(self._gradients)]
        was_left = [is_late and expectation.observed and number in backward.left for number, is_late in enumerate(late)]
        with self._phases("wait for the other ranks", _END):
            flags = [*chain.from_iterable(used), *late, *was_left, *self.hyperparameters.flags()]
            agreed = iter(self._communicator.control.any_rank(flags, _END))
        used = [[next(agreed) for _ in flags] for flags in used]
        late = [next(agreed) for _ in late]
        was_left = [next(agreed) for _ in was_left]
        self.hyperparameters.check(list(agreed))

        for number, flags in enumerate(used):
            if number not in in_order and any(flags):
                self._launch(backward, number)
        self._collect(backward, used)
        for number in (number for number, is_late in enumerate(late) if is_late):
            self._launch(backward, number)
        self._collect(backward, used)
        expectation.late.update(number for number, is_left in enumerate(was_left) if is_left)
        expectation.order = [number for number in expectation.order if number not in expectation.late]
        self._learn(backward, used)
        return used

    def abort(self) -> None:
        """Drop the gradients of a backward that raised an exception, so that the next backward does not add to them.

        Without effect within a backward, where a recomputation may open a window.
        """
        if not in_backward() and self._drop_failed():
            self._schedule.end_backward()

    def _drop_failed(self) -> bool:
        """Like ``abort``, but leave units gathered, since another backward may be using them. Return if any failed."""
        backward, self._backward, self._deferred = self._backward, None, False
        if backward is None:
            return False
        self._finish_all(backward)
        if self._synchronises:
            for gradients in self._gradients:
                gradients.drop()
        return True

    def _collect(self, backward: _Backward, used: list[list[bool]]) -> None:
        self._finish_all(backward)
        for number, shard in backward.shards.items():
            self._gradients[number].show(used[number], shard)

    def _learn(self, backward: _Backward, used: list[list[bool]]) -> None:
        expectation = backward.expectation
        for number, flags in enumerate(used):
            for index, is_used in enumerate(flags):
                seen = backward.counts[number][index]
                before = expectation.counts[number][index] if expectation.observed else 0
                expectation.counts[number][index] = max(seen, before, 1) if is_used else before
        in_use = {number for number, flags in enumerate(used) if any(flags)} - expectation.late
        if not expectation.observed or not in_use.issubset(expectation.order):
            # All ranks adopt rank 0's order of completed buckets. Buckets without gradients on rank 0 come last.
            seen_order = [number for number in backward.completed if number in in_use]
            order = seen_order + sorted(in_use.difference(seen_order), reverse=True)
            expectation.order = self._communicator.control.numbers_of(0, order, "the order of reductions")
            expectation.observed = True
