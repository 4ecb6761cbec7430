"""Patch Lightning's loops, callbacks and loggers, so that ranks meet where Lightning acts on one of them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.checkpoint.saver import Saver
from lightning_zero.engine import Engine, WrapperTensor, compat, sharded_tree
from lightning_zero.strategies.lightning_internals import BETWEEN_BATCHES, data_fetcher, is_epoch_ending

TakeTurn = Callable[[int | None], None]


def take_turns(loop: Any, take_turn: TakeTurn) -> None:
    """Make a loop call ``take_turn`` with the dataloader's index before each batch, and with None at the loop's end."""
    fetcher = data_fetcher(loop)
    fetcher.take_turn = take_turn
    looks_ahead = hasattr(fetcher, "iterator_wrapper")  # such a fetcher passes its iterator to the step
    mixin = _AllAtOnce if looks_ahead else _BatchByBatch
    fetcher.__class__ = type(mixin.__name__, (mixin, type(fetcher)), {})


class _BatchByBatch(Iterator[Any]):
    take_turn: TakeTurn

    def __next__(self) -> Any:
        try:
            item = super().__next__()
        except StopIteration:
            self.take_turn(None)
            raise
        self.take_turn(item[2])
        return item


class _AllAtOnce(Iterator[Any]):
    """Fetcher for steps that take ``dataloader_iter`` and fetch batches themselves. It looks one batch ahead."""

    take_turn: TakeTurn
    iterator: Iterator[Any]
    done: bool
    _batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._batches is None:  # wrapped, since `chain` would restart a CombinedLoader
            self._batches = self.iterator = iter(partial(next, self.iterator), None)
        item = None if self.done else next(self.iterator, None)
        self.take_turn(None if item is None else item[2])
        if item is None:
            self.done = True
        else:
            self.iterator = chain([item], self._batches)
        return super().__next__()


def attend(trainer: Trainer, engine: Engine, wrappers: Wrappers) -> None:
    """Wrap ``run`` of each evaluation loop, to report the loop's end to the engine if this rank skips the loop.

    Lightning skips a loop that has no batch on this rank, and calls no strategy hook for a skipped loop.
    """

    def run(loop: Any, method: Any) -> Any:
        outputs = method()
        if loop.skip:
            engine.take_turn(None)
        return outputs

    within_fit: Any = trainer.fit_loop.epoch_loop.val_loop
    for loop in (within_fit, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        wrappers.put(loop, "run", partial(run, loop))


def meet_between_batches(
    trainer: Trainer, meet: Callable[[], None], end_epoch: Callable[[], None], wrappers: Wrappers
) -> None:
    """Call ``meet`` before each training batch in place of Lightning's SIGTERM exchange.

    ``end_epoch`` is called after the last batch of an epoch on this rank, before validation.
    """

    def advance(method: Any, *args: Any) -> Any:
        meet()
        return method(*args)

    def on_advance_end(method: Any, *args: Any) -> Any:
        if is_epoch_ending(trainer):
            end_epoch()
        return method(*args)

    loop = trainer.fit_loop.epoch_loop
    wrappers.put(loop, BETWEEN_BATCHES, lambda _: None)
    wrappers.put(loop, "advance", advance)
    wrappers.put(loop, "on_advance_end", on_advance_end)


def name_as_if_written(trainer: Trainer, saver: Saver, wrappers: Wrappers) -> None:
    """Let ``ModelCheckpoint`` choose names as if checkpoints that are still being written or removed had been."""

    def file_exists(method: Any, path: Any, trainer: Trainer) -> bool:
        expected = saver.expects(path)  # the same on every rank
        return bool(method(path, trainer)) if expected is None else expected

    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            wrappers.put(callback, "file_exists", file_exists)


class WrappedMethod:
    """Wrapper around a method of an object. The method may be Lightning's own or a replacement by the project.

    Attribute access, copying and pickling are forwarded to the method, so a copied trainer never refers to the engine.
    """

    def __init__(self, method: Any, act: Callable[..., Any]) -> None:
        self._method, self._act = method, act

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._act(self._method, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def __reduce__(self) -> Any:
        owner, name = getattr(self._method, "__self__", None), getattr(self._method, "__name__", "")
        if hasattr(type(owner), name):  # so that a pickled callback can be loaded without this package
            return getattr, (owner, name)
        return _itself, (self._method,)


def _itself(method: Any) -> Any:
    return method


def log_graphs(trainer: Trainer, module: LightningModule | None, wrappers: Wrappers) -> None:
    """Call the loggers' ``log_graph`` now, and not once the module is sharded: they trace the module on rank 0 alone.

    Args:
        module: the whole module; None if it is sharded already.
    """
    for logger in trainer.loggers if getattr(trainer, "enable_autolog_hparams", True) else ():
        if module is not None and not any(parameter.is_meta for parameter in module.parameters()):
            logger.log_graph(module)
        wrappers.put(logger, "log_graph", lambda *_, **__: None)


def read_for_loggers(no_experiment: type, wrappers: Wrappers) -> None:
    """Read the sharded tensors that go to ``logger.experiment`` also on ranks whose loggers have no experiment.

    On rank 0 ``experiment.add_histogram(name, parameter)`` gathers the parameter; on other ranks the call does nothing.
    """

    def nop(_: Any, *args: Any, **options: Any) -> None:
        compat.tree_map_only(WrapperTensor, sharded_tree.whole, (args, options))

    wrappers.put(no_experiment, "nop", nop)


class Wrappers:
    """The wrapped methods of a run, by object."""

    def __init__(self) -> None:
        self._names = WeakIdKeyDictionary()

    def __reduce__(self) -> Any:
        return Wrappers, ()  # users copy trainers and strategies, whose copies have no wrapped methods

    def put(self, holder: Any, name: str, act: Callable[..., Any]) -> None:
        """Replace a method with a wrapper that calls ``act`` with the original method and the call's arguments."""
        _take_off(holder, name)  # a wrapper may be left from a run that ended without teardown
        setattr(holder, name, WrappedMethod(getattr(holder, name), act))
        self._names.setdefault(holder, set()).add(name)

    def take_off(self) -> None:
        """Put all methods back in their places."""
        for holder, names in self._names.items():
            for name in names:
                _take_off(holder, name)
        self._names.clear()


def _take_off(holder: Any, name: str) -> None:
    wrapper = getattr(holder, "__dict__", {}).get(name)  # a dataloader may be a `range`, which has no `__dict__`
    if isinstance(wrapper, WrappedMethod):
        delattr(holder, name)
        if wrapper._method != getattr(holder, name, None):  # the project had replaced Lightning's method
            setattr(holder, name, wrapper._method)
