"""Ranks that run different numbers of forwards: one with nothing left to compute serves the gathers of the others.

Each batch of an evaluation loop is a turn, and so is each forward while a text is generated. Ranks first tell each
other how far they are (which dataloader their next batch is from, whether they have generated their text, or that they
are at the end); those who are behind run theirs, and the others take part in what the first of these announces.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import update_wrapper
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_zero.engine.bucket import Bucket
from lightning_zero.engine.collectives import Communicator
from lightning_zero.engine.schedule import Schedule
from lightning_zero.engine.sharded_tensor import ShardedTensor

_END = 2**62
_OVER = -1  # in the place of a bucket's number: the turn is over


class Turns:
    """Whose turn it is.

    While ranks are absent, parameters that user code reads are gathered by bucket, which the absent can serve. What
    they cannot know (a sum over parts of some other sharded tensor, a write) is an error.

    Args:
        buckets: all of the engine, by number.
    """

    def __init__(self, communicator: Communicator, schedule: Schedule, buckets: list[Bucket]) -> None:
        self._communicator, self._schedule, self._buckets = communicator, schedule, buckets
        self._sent: list[tuple[Tensor, Any]] = []  # messages are kept until they have left
        self._position = 0  # of the dataloader whose batch this rank is at

    def take(self, position: int | None) -> None:
        """End this rank's turn, and return when it has another, or when every rank is at its end. Collective.

        Args:
            position: the index of the dataloader of its next batch; None at the end.
        """
        self._position = position or 0
        self._take(_END if position is None else 2 * position)

    @contextmanager
    def each_forward(self, module: nn.Module) -> Iterator[None]:
        """Ranks may run different numbers of forwards in here, and leave it together. Collective.

        Args:
            module: whose forwards, and those of the modules in it where they are called by themselves, are turns.
        """
        needs_gathers = any(isinstance(parameter, ShardedTensor) for parameter in module.parameters())
        if self._schedule.is_uneven or not needs_gathers:  # as within ``full_parameters``
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
        self._schedule.is_uneven = True
        try:
            yield
        finally:
            self._schedule.is_uneven = False
            for hook in hooks:
                hook.remove()
        self._take(2 * self._position + 1)

    def _take(self, own: int) -> None:
        self._end()
        communicator = self._communicator
        while True:
            positions = torch.zeros(communicator.size, dtype=torch.int64, device="cpu")
            positions[communicator.rank] = own
            communicator.agree(positions, "the other ranks' next batch or forward")
            behind = int(positions.min())
            absent = [rank for rank, other in enumerate(positions.tolist()) if other > behind]
            if own == behind:
                self._begin(absent)
                return
            self._serve(leader=int(positions.argmin()))

    def _begin(self, absent: list[int]) -> None:
        communicator = self._communicator
        communicator.absent = absent
        if absent and communicator.rank == min(set(range(communicator.size)).difference(absent)):
            communicator.before_gather = self._announce

    def _end(self) -> None:
        communicator = self._communicator
        for unit in self._schedule.units:
            self._schedule.release_if_idle(unit)  # gathered to be read, or ahead of a forward that did not come
        if not communicator.absent:
            return
        if communicator.before_gather is not None:
            self._announce(_OVER)
            for _, work in self._sent:
                work.wait()
            self._sent = []
        communicator.absent, communicator.before_gather = [], None

    def _announce(self, number: int) -> None:
        """Tell the absent which bucket is gathered next, and the order of units that the turn has left behind."""
        message = self._message()
        message[0] = number
        message[1 : 1 + len(self._schedule.order)] = torch.tensor(self._schedule.order, dtype=torch.int64, device="cpu")
        works = self._communicator.tell(self._communicator.absent, message)
        self._sent.extend((message, work) for work in works)

    def _serve(self, leader: int) -> None:
        while True:
            message = self._message()
            self._communicator.hear(leader, message, f"what rank {leader} gathers next")
            number, *order = message.tolist()
            if number == _OVER:
                self._schedule.order = [unit for unit in order if unit >= 0]
                return
            bucket = self._buckets[number]
            stays = bucket.is_ready
            bucket.gather(refresh=True)
            bucket.wait()
            if not stays:
                bucket.release()

    def _message(self) -> Tensor:
        return torch.full((1 + len(self._schedule.units),), -1, dtype=torch.int64, device="cpu")


class UnevenMethod:
    """In the place of a module's ``generate``: so transformers and PEFT call what runs a forward for each token.

    Copies and pickles of the module have the method itself.
    """

    NAME = "generate"

    def __init__(self, turns: Turns, module: nn.Module) -> None:
        self._turns = turns
        self._module = weakref.ref(module)  # which holds this
        self._function = getattr(type(module), self.NAME)
        update_wrapper(self, self._function)
        self.__signature__ = signature(getattr(module, self.NAME))  # read by transformers
        setattr(module, self.NAME, self)

    @classmethod
    def is_method_of(cls, module: nn.Module) -> bool:
        """Whether the module's class has such a method, and the user has put nothing in its place."""
        method = getattr(module, cls.NAME, None)
        return isinstance(method, MethodType) and method.__func__ is getattr(type(module), cls.NAME, None)

    def remove(self) -> None:
        module = self._module()
        if module is not None and vars(module).get(self.NAME) is self:
            delattr(module, self.NAME)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "the module was deleted"
        with self._turns.each_forward(module):
            return self._function(module, *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._module(), self.NAME)
