"""Lightning's evaluation loops made to take turns, so that they may end at different batches on different ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
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
    fetcher.take_turn = _Turn(take_turn)
    looks_ahead = hasattr(fetcher, "iterator_wrapper")  # it hands out itself
    fetcher.__class__ = (_all_at_once if looks_ahead else _batch_by_batch)(type(fetcher))  # type: ignore[arg-type]


def attend(trainer: Trainer, engine: Engine) -> None:
    """Let the loops tell the engine where they are, where no hook of a strategy's is called.

    A loop that this rank skips, since its dataloaders are empty, announces its end as well.
    """
    for loop in _evaluation_loops(trainer):
        Around.put(loop, "run", partial(_run, loop, engine.take_turn))


def meets_between_batches(trainer: Trainer) -> bool:
    """Whether ranks tell each other before each training batch if one has got a SIGTERM."""
    return hasattr(trainer.fit_loop.epoch_loop, _BETWEEN_BATCHES)


def meet_between_batches(trainer: Trainer, meet: Callable[[], None]) -> None:
    """Let them do so by other means, until ``leave``."""
    Around.put(trainer.fit_loop.epoch_loop, _BETWEEN_BATCHES, lambda _: meet())


def leave(trainer: Trainer) -> None:
    """Undo ``attend`` and ``meet_between_batches``."""
    for loop in _evaluation_loops(trainer):
        Around.take_off(loop, "run")
    Around.take_off(trainer.fit_loop.epoch_loop, _BETWEEN_BATCHES)


class Around:
    """A method of a loop with something of ours around it, whether it is Lightning's or a project has replaced it.

    It has the attributes of the method, and copies and pickles as that: a copy of a trainer has nothing of the engine.
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
        """Call ``act`` with the method and its arguments in the place of a loop's method."""
        Around.take_off(loop, name)  # one that a run left, which ended otherwise than by a teardown
        setattr(loop, name, Around(getattr(loop, name), act))

    @staticmethod
    def take_off(loop: Any, name: str) -> None:
        """Undo ``put``."""
        own = vars(loop).get(name)
        if isinstance(own, Around):
            method = own._method
            delattr(loop, name)
            if method != getattr(loop, name, None):  # a project's own
                setattr(loop, name, method)


class _Turn:
    """What takes a turn of the engine's; a copy takes none."""

    def __init__(self, take: TakeTurn) -> None:
        self._take = take

    def __call__(self, position: int | None) -> None:
        self._take(position)

    def __reduce__(self) -> Any:
        return _Turn, (_nothing,)


def _nothing(position: int | None) -> None:
    """In the place of a turn."""


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
