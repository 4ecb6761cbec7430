"""Join of uneven inputs: a rank with no forward left to compute takes part in the other ranks' all-gathers.

A turn is one batch of an evaluation loop, or one forward of a text generation. Before each turn, ranks exchange their
positions (the next batch's dataloader, the end of a generation, or the end of the loop). The ranks with the lowest
position run their forward. The other ranks take part in the gathers that the first running rank announces.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import update_wrapper
from inspect import signature
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.failures import failure
from lightning_zero.engine.comm.rendezvous import Absence, Rendezvous
from lightning_zero.engine.runtime.schedule import Schedule
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor

_END = 2**62
_OVER = -1  # sent in place of a bucket's number when the turn is over


class Join:
    """Decides which ranks run a forward next; the other ranks are absent, and only take part in the gathers.

    While ranks are absent, user code that reads a parameter gathers the parameter's entire bucket, since absent ranks
    can take part only in gathers of buckets. Other collective operations (a write, a sum over shards of another tensor)
    raise an error.

    Where each machine has all parameters, the ranks of a machine take turns independently of other machines.
    """

    def __init__(
        self, communicator: Communicator, rendezvous: Rendezvous, schedule: Schedule, buckets: list[Bucket]
    ) -> None:
        self._control = communicator.gathering
        self._rendezvous, self._schedule, self._buckets = rendezvous, schedule, buckets
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
        is_sharded = any(isinstance(parameter, ShardedTensor) for parameter in module.parameters())
        if self._is_each_forward or not is_sharded:  # not sharded: for example, within ``full_parameters``
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
        ranks = [self._control.ranks[place] for place in absent]
        self._rendezvous.absence = Absence(ranks, self._announce if absent else None, is_turn=True)
        self._schedule.records_order = not absent and not self._is_each_forward

    def _end(self) -> None:
        for unit in self._schedule.units:
            self._schedule.release_if_idle(unit)  # units gathered for a read, or prefetched but not run
        absence = self._rendezvous.absence
        if absence.announce is not None:
            self._announce(_OVER)
        if absence.is_turn:
            self._rendezvous.absence = Absence()
            self._schedule.records_order = True

    def _announce(self, number: int) -> int:
        """Broadcast the leader's number of the bucket to gather next, or ``_OVER``. Running ranks gather the same."""
        what = f"what rank {self._control.ranks[self._leader]} gathers next"
        (announced,) = self._control.numbers_of(self._leader, [number], what)
        return announced

    def _serve(self) -> None:
        while (number := self._announce(_OVER)) != _OVER:
            bucket = self._buckets[number]
            stays = bucket.is_ready
            with self._rendezvous.have_met():  # the leader's announcement says what all ranks gather
                bucket.gather(refresh=True)
            bucket.wait()
            if not stays:
                bucket.release()


class JoinedMethod:
    """Replaces a module's ``generate``, so that transformers and PEFT call a method that joins the ranks' forwards.

    Copies and pickles of the module have the original method.
    """

    def __init__(self, join: Join, module: nn.Module) -> None:
        self._join = join
        self._module = weakref.ref(module)  # weak, since the module holds this object
        self._function = type(module).generate  # type: ignore[attr-defined]
        update_wrapper(self, self._function)
        self.__signature__ = signature(module.generate)  # type: ignore[arg-type]  # read by transformers
        module.generate = self  # type: ignore[assignment]
        module.__reduce_ex__ = self._reduced  # type: ignore[method-assign]

    @staticmethod
    def is_method_of(module: nn.Module) -> bool:
        """Whether the module has a ``generate`` method from its class, which the user has not replaced."""
        method = getattr(module, "generate", None)
        return isinstance(method, MethodType) and method.__func__ is getattr(type(module), "generate", None)

    def remove(self) -> None:
        module = self._module()
        if module is not None and vars(module).get("generate") is self:
            del module.generate, module.__reduce_ex__

    def _reduced(self, protocol: Any) -> Any:
        """The module's ``__reduce_ex__``, which ``copy.deepcopy`` and ``pickle`` look up before the class's."""
        module = self._module()
        assert module is not None, "the module was deleted"
        reduced: Any = type(module).__reduce_ex__(module, protocol)
        create, arguments, *more = reduced
        if more and isinstance(more[0], dict):
            more[0] = {key: value for key, value in more[0].items() if key not in ("generate", "__reduce_ex__")}
        return create, arguments, *more

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "the module was deleted"
        with self._join.each_forward(module):
            return self._function(module, *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "generate")
