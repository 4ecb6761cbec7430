"""Join of uneven inputs: a rank with no forward left to compute takes part in the other ranks' all-gathers.

A turn is one batch of an evaluation loop, or one forward of a text generation. Before each turn, ranks exchange their
positions (the next batch's dataloader, the end of a generation, or the end of the loop). The ranks with the lowest
position run their forward. The other ranks take part in the gathers that the first running rank announces.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from inspect import isfunction
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.failures import SAME_UNITS, failure
from lightning_zero.engine.compat import Patch
from lightning_zero.engine.runtime.reducer import GradientReducer
from lightning_zero.engine.runtime.schedule import Schedule
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor

_END = 2**62
_OVER = -1  # sent in place of a bucket's number when the turn is over


class Join:
    """Decides which ranks run a forward next; the other ranks are absent, and only take part in the gathers.

    While ranks are absent, user code that reads a parameter gathers the parameter's entire bucket, since absent ranks
    can take part only in gathers of buckets. Other collective operations (a write, a norm of another tensor)
    raise an error.
    """

    def __init__(
        self, communicator: Communicator, schedule: Schedule, reducer: GradientReducer, buckets: list[Bucket]
    ) -> None:
        self._control, self._rendezvous = communicator.control, communicator.rendezvous
        self._schedule, self._reducer = schedule, reducer
        self.buckets = buckets
        self._leader = 0  # the first rank that runs in this turn
        self._position = 0  # index of the dataloader that this rank's current batch is from
        self._is_each_forward = False  # whether ``each_forward`` is running

    def take(self, position: int | None) -> None:
        """End this rank's turn; return when its next turn begins or all ranks are at the end. See ``take_turn``."""
        self._position = position or 0
        self._take(_END if position is None else 2 * position)

    @contextmanager
    def each_forward(self, module: nn.Module) -> Iterator[None]:
        """Context in which ranks may run different numbers of forwards of a module or its submodules. Collective."""
        if self._is_each_forward:
            yield
            return
        members = set(module.modules())
        depth = 0

        def before(inner: nn.Module, _: Any) -> None:
            nonlocal depth
            if inner in members:
                depth += 1
                if depth == 1:
                    self._take(2 * self._position)

        def after(inner: nn.Module, *_: Any) -> None:
            nonlocal depth
            depth -= inner in members

        hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
        self._is_each_forward = True
        ends = True
        try:
            yield
        except BaseException as error:  # if the caller catches it, the program goes on
            ends = isinstance(error, Exception) and failure() is None
            raise
        finally:
            self._is_each_forward = False
            for hook in hooks:
                hook.remove()
            if ends:
                self._take(2 * self._position + 1)

    def _take(self, own: int) -> None:
        self._reducer.abort()  # here, since absent ranks open no window
        self._end()
        while True:
            positions = self._control.gather_numbers(own, "the other ranks' next batch or forward")
            behind = min(positions)
            self._leader = positions.index(behind)
            if own == behind:
                self._begin([place for place, other in enumerate(positions) if other > behind])
                return
            self._serve()

    def _begin(self, absent: list[int]) -> None:
        self._rendezvous.absent = [self._control.ranks[place] for place in absent]
        self._rendezvous.announce = self._announce if absent else None
        self._schedule.records_order = not absent and not self._is_each_forward

    def _end(self) -> None:
        for unit in self._schedule.units:
            self._schedule.release_if_idle(unit)  # units gathered for a read, or prefetched but not run
        if self._rendezvous.announce is not None:
            self._announce(_OVER)
        self._begin([])  # no rank is absent between turns

    def _number_of_leader(self, number: int = _OVER) -> int:
        """Broadcast the leader's ``number`` of the bucket to gather next, or ``_OVER``; others do not send theirs."""
        what = f"what rank {self._control.ranks[self._leader]} gathers next"
        (announced,) = self._control.numbers_of(self._leader, [number], what)
        return announced

    def _announce(self, number: int) -> None:
        """Announce a gather, or ``_OVER``, to the absent ranks. Running ranks must gather the same bucket."""
        if (announced := self._number_of_leader(number)) != number:
            units = [f"unit {bucket.unit_name or 'root'!r}" for bucket in self.buckets] + ["no unit"]  # for ``_OVER``
            raise RuntimeError(
                f"Next, rank {self._control.ranks[self._control.rank]} gathers {units[number]}, but rank "
                f"{self._control.ranks[self._leader]} gathers {units[announced]}. {SAME_UNITS}"
            )

    def _serve(self) -> None:
        while (number := self._number_of_leader()) != _OVER:
            bucket = self.buckets[number]
            stays = bucket.is_ready
            with self._rendezvous.have_met():  # the leader's announcement says what all ranks gather
                bucket.gather(refresh=True)
            bucket.wait()
            if not stays:
                bucket.release()


# -- ``generate`` ------------------------------------------------------------------------------------------------------


def each_forward(module: nn.Module) -> AbstractContextManager[None]:
    """``Join.each_forward``; without effect if no forward of the module gathers, as within ``full_parameters``."""
    sharded = [p for p in module.parameters() if isinstance(p, ShardedTensor) and p.is_parameter]
    buckets: set[Any] = {parameter.slot.bucket for parameter in sharded}
    join = next((join for join in _joins if not buckets.isdisjoint(join.buckets)), None)
    return join.each_forward(module) if join is not None else nullcontext()


def join_generate(join: Join, root: nn.Module) -> None:
    """Let ``generate`` of the module and its submodules, as in transformers and PEFT, join the ranks' forwards.

    As long as the join exists, the method is patched in the classes that define it, so that modules, their copies and
    pickles stay as they are.
    """
    _joins.add(join)
    for base in {base for inner in root.modules() for base in type(inner).__mro__}:
        if isfunction(vars(base).get("generate")):
            _patches.setdefault(base, Patch(base, "generate", _joined)).hold(join)


def _joined(generate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(generate)
    def joined(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # a mixin such as transformers' may serve classes that are not modules
        with each_forward(module) if isinstance(module, nn.Module) else nullcontext():
            return generate(module, *args, **kwargs)

    return joined


_joins: weakref.WeakSet[Join] = weakref.WeakSet()
_patches: weakref.WeakValueDictionary[type, Patch] = weakref.WeakValueDictionary()
