"""Lightning's evaluation loops made to take turns, so that they may end at different batches on different ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from lightning.pytorch import Trainer

from lightning_zero.engine import Engine

TakeTurn = Callable[[int | None], None]


def take_turns(loop: Any, take_turn: TakeTurn) -> None:
    """Let a loop that begins announce each batch before it is handed out, and its end.

    Arguments:
        loop: an evaluation or prediction loop of Lightning's, about to fetch its first batch.
        take_turn: called with the dataloader's index, or None at the end.
    """
    fetcher = loop._data_fetcher
    fetcher.take_turn = take_turn
    looks_ahead = hasattr(fetcher, "iterator_wrapper")  # it hands out itself
    fetcher.__class__ = (_all_at_once if looks_ahead else _batch_by_batch)(type(fetcher))  # type: ignore[arg-type]


def attend(trainer: Trainer, engine: Engine) -> None:
    """Let the loops tell the engine where they are, where no hook of a strategy's is called.

    A loop that this rank skips, since its dataloaders are empty, announces its end as well.
    """
    for loop in _evaluation_loops(trainer):
        loop.run = partial(_run, loop, engine.take_turn)


def meets_between_batches(trainer: Trainer) -> bool:
    """Whether ranks tell each other before each training batch if one has got a SIGTERM."""
    return hasattr(trainer.fit_loop.epoch_loop, _BETWEEN_BATCHES)


def meet_between_batches(trainer: Trainer, meet: Callable[[], None]) -> None:
    """Let them do so by other means, until ``leave``."""
    setattr(trainer.fit_loop.epoch_loop, _BETWEEN_BATCHES, lambda: meet())


def leave(trainer: Trainer) -> None:
    """Undo ``attend`` and ``meet_between_batches``."""
    for loop in _evaluation_loops(trainer):
        vars(loop).pop("run", None)
    vars(trainer.fit_loop.epoch_loop).pop(_BETWEEN_BATCHES, None)


_BETWEEN_BATCHES = "_broadcast_sigterm_tensor"


def _evaluation_loops(trainer: Trainer) -> list[Any]:
    return [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]


def _run(loop: Any, take_turn: TakeTurn) -> Any:
    outputs = type(loop).run(loop)
    if loop.skip:
        take_turn(None)
    return outputs


# Each namespace of Lightning's has fetchers of its own.


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
    """For steps that take ``dataloader_iter`` and fetch for themselves: one batch a step is looked at ahead."""

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
