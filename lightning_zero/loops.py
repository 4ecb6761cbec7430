"""Lightning's evaluation loops made to take turns, so that they may end at different batches on different ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher

TakeTurn = Callable[[int | None], None]


def take_turns(loop: Any, take_turn: TakeTurn) -> None:
    """Let a loop that begins announce each batch before it is handed out, and its end.

    Arguments:
        loop: an evaluation or prediction loop of Lightning's, about to fetch its first batch.
        take_turn: called with the dataloader's index, or None at the end.
    """
    fetcher = loop._data_fetcher
    fetcher.take_turn = take_turn
    fetcher.__class__ = _AllAtOnce if isinstance(fetcher, _DataLoaderIterDataFetcher) else _BatchByBatch


def take_part_in_skipped(trainer: Trainer, take_turn: TakeTurn) -> None:
    """Let loops that a rank skips, since its dataloaders are empty, announce their end as well."""
    for loop in _loops_of(trainer):
        loop.run = partial(_run, loop, take_turn)


def leave(trainer: Trainer) -> None:
    """Undo ``take_part_in_skipped``."""
    for loop in _loops_of(trainer):
        vars(loop).pop("run", None)


def _loops_of(trainer: Trainer) -> list[Any]:
    return [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]


def _run(loop: Any, take_turn: TakeTurn) -> Any:
    outputs = type(loop).run(loop)
    if loop.skip:
        take_turn(None)
    return outputs


class _BatchByBatch(_PrefetchDataFetcher):
    take_turn: TakeTurn

    def __next__(self) -> Any:
        try:
            item = super().__next__()
        except StopIteration:
            self.take_turn(None)
            raise
        self.take_turn(item[2])
        return item


class _AllAtOnce(_DataLoaderIterDataFetcher):
    """For steps that take ``dataloader_iter`` and fetch for themselves: one batch a step is looked at ahead."""

    take_turn: TakeTurn

    def __next__(self) -> Any:
        if not isinstance(self.iterator, _Ahead):
            self.iterator = _Ahead(self.iterator)
        item = None if self.done else self.iterator.peek()
        self.take_turn(None if item is None else item[2])
        if item is None:
            self.done = True
        return super().__next__()


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
