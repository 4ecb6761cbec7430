"""Patch Lightning's evaluation loops to report each batch to the engine (join: uneven inputs), and SIGTERM checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial
from typing import Any

from lightning.pytorch import Trainer

from lightning_zero.engine import Engine

TakeTurn = Callable[[int | None], None]


def take_turns(loop: Any, take_turn: TakeTurn) -> None:
    """Make a starting loop report each batch before the loop receives it, and report its end.

    Arguments:
        loop: a Lightning evaluation or prediction loop that has not fetched its first batch yet.
        take_turn: called with the dataloader's index for each batch, and with None at the end.
    """
    fetcher = loop._data_fetcher
    fetcher.take_turn = _Turn(take_turn)
    looks_ahead = hasattr(fetcher, "iterator_wrapper")  # hands the dataloaders' iterator to the step
    fetcher.__class__ = (_all_at_once if looks_ahead else _batch_by_batch)(type(fetcher))  # type: ignore[arg-type]


def attend(trainer: Trainer, engine: Engine) -> None:
    """Wrap ``run`` of the evaluation loops: report the end of a loop that this rank skips to the engine.

    A loop without any batch on this rank is skipped, and Lightning calls no strategy hook for a skipped loop.
    """
    for loop in _evaluation_loops(trainer):
        Around.put(loop, "run", partial(_run, loop, engine.take_turn))


def meets_between_batches(trainer: Trainer) -> bool:
    """Whether Lightning has a collective before each training batch that exchanges received SIGTERMs."""
    return hasattr(trainer.fit_loop.epoch_loop, _BETWEEN_BATCHES)


def meet_between_batches(trainer: Trainer, meet: Callable[[], None]) -> None:
    """Replace Lightning's SIGTERM exchange before each training batch by ``meet``, until ``leave`` is called."""
    Around.put(trainer.fit_loop.epoch_loop, _BETWEEN_BATCHES, lambda _: meet())


def leave(trainer: Trainer) -> None:
    """Undo ``attend`` and ``meet_between_batches``."""
    for loop in _evaluation_loops(trainer):
        Around.take_off(loop, "run")
    Around.take_off(trainer.fit_loop.epoch_loop, _BETWEEN_BATCHES)


class Around:
    """Wrapper around a method of a loop, which may be Lightning's own or a project's replacement.

    Attribute access, copying and pickling are forwarded to the method, so a copied trainer never refers to the engine.
    """

    def __init__(self, method: Any, act: Callable[..., Any]) -> None:
        self._method, self._act = method, act

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._act(self._method, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self._method, memo)

    def __reduce__(self) -> Any:
        return _itself, (self._method,)

    @staticmethod
    def put(loop: Any, name: str, act: Callable[..., Any]) -> None:
        """Replace a loop's method by a call of ``act`` with the original method and the call's arguments."""
        Around.take_off(loop, name)  # a wrapper may be left from a run that ended without teardown
        setattr(loop, name, Around(getattr(loop, name), act))

    @staticmethod
    def take_off(loop: Any, name: str) -> None:
        """Undo ``put``."""
        own = vars(loop).get(name)
        if isinstance(own, Around):
            method = own._method
            delattr(loop, name)
            if method != getattr(loop, name, None):  # the project had replaced Lightning's method
                setattr(loop, name, method)


class _Turn:
    """Callable that reports a batch to the engine; a copy or unpickled one does nothing."""

    def __init__(self, take: TakeTurn) -> None:
        self._take = take

    def __call__(self, position: int | None) -> None:
        self._take(position)

    def __reduce__(self) -> Any:
        return _Turn, (_nothing,)


def _nothing(position: int | None) -> None:
    """Ignore the report: used by copies of ``_Turn``."""


def _itself(method: Any) -> Any:
    return method


_BETWEEN_BATCHES = "_broadcast_sigterm_tensor"


def _evaluation_loops(trainer: Trainer) -> list[Any]:
    return [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]


def _run(loop: Any, take_turn: TakeTurn, run: Any) -> Any:
    outputs = run()
    if loop.skip:
        take_turn(None)
    return outputs


# Made for each fetcher class: every namespace (`lightning.pytorch`, `pytorch_lightning`) has its own.


@cache
def _batch_by_batch(fetcher: Any) -> type:
    class BatchByBatch(fetcher):
        take_turn: TakeTurn

        def __next__(self) -> Any:
            try:
                item = super().__next__()
            except StopIteration:
                self.take_turn(None)
                raise
            self.take_turn(item[2])
            return item

    return BatchByBatch


@cache
def _all_at_once(fetcher: Any) -> type:
    """Fetcher class for steps that take ``dataloader_iter`` and fetch batches themselves: looks one batch ahead."""

    class AllAtOnce(fetcher):
        take_turn: TakeTurn
        iterator: Any
        done: bool

        def __next__(self) -> Any:
            if not isinstance(self.iterator, _Ahead):
                self.iterator = _Ahead(self.iterator)
            item = None if self.done else self.iterator.peek()
            self.take_turn(None if item is None else item[2])
            if item is None:
                self.done = True
            return super().__next__()

    return AllAtOnce


class _Ahead(Iterator[Any]):
    def __init__(self, iterator: Any) -> None:
        self._iterator, self._next = iterator, None

    def peek(self) -> Any:
        """The next item, or None at the end."""
        if self._next is None:
            self._next = next(self._iterator, None)
        return self._next

    def __next__(self) -> Any:
        if self.peek() is None:
            raise StopIteration
        item, self._next = self._next, None
        return item
