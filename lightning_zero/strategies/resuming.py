"""State of a run besides its weights: random number generators and data-loading state (position in the epoch)."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_zero.engine.compat import tree_map_only
from lightning_zero.strategies.loops import Around
from lightning_zero.strategies.skipping import goes_by_samplers, skipping

Rng = dict[str, Any]
"""States of this process's random number generators."""


def rng_state(device: torch.device) -> Rng:
    """Return the states of the generators of Python, torch (CPU and device) and, if it has been imported, NumPy."""
    state: Rng = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: Rng, device: torch.device) -> None:
    """Inverse of ``rng_state``, before or after ``in_tensors``. Generators missing in ``state`` are left unchanged."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tree_map_only(Tensor, lambda t: t.numpy().view(f"u{t.itemsize}"), state["numpy"]))
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])


def in_tensors(states: Any) -> Any:
    """Replace NumPy arrays by tensors, which ``torch.load(weights_only=True)`` accepts."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return states
    # Viewed as signed integers, since torch does not pickle unsigned ones.
    return tree_map_only(numpy.ndarray, lambda words: torch.from_numpy(words.view(f"i{words.itemsize}")), states)


class Bookmark:
    """Data-loading state: restarts an epoch's data and skips the batches that were trained on before the checkpoint.

    Lightning alone would restart the epoch in another order (the order was drawn when the iterators were created) and
    with batches that were already trained on. This class creates the iterators again from the random state of that
    time, advances their samplers by the finished batches, and then restores the random state at the time of saving. An
    unfinished optimizer step (saved within the step, or between micro-batches, whose gradients no checkpoint contains)
    is repeated from its first micro-batch.

    No sample is read to skip a batch. So loaders without samplers (a stream, a queue, any other iterable) are left to
    Lightning, as are stateful loaders, whose own state Lightning saves and loads.

    Arguments:
        trainer: about to start its fit.
        device: this rank's device.
    """

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        self._trainer, self._device = trainer, device
        self._loop: Any = trainer.fit_loop
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop
        # The iterators of this epoch, None before any exist. "epoch": its number; "made": the random state when they
        # were created; "fresh": whether workers were started for them; "before": the random state before each batch at
        # which an iterator may have drawn numbers; "missed": batches that the loop counts but that earlier iterators
        # returned.
        self._position: dict[str, Any] | None = None
        # The current optimizer step: batches before it, its number, random state before its first batch was fetched.
        self._step: tuple[int, int, Rng] | None = None
        self._saved: dict[str, Any] | None = None
        self._hooks: list[tuple[Any, str, Any]] = [
            (self._loop, "_load_combined_loader_states", self._before_iterators),
            (self._epoch_loop, "reset", self._reset),
            (self._epoch_loop, "on_run_start", self._begin_epoch),
        ]
        for loop, name, hook in self._hooks:
            Around.put(loop, name, hook)

    def close(self) -> None:
        """Unhook from the loops; ``state`` can still be called."""
        for loop, name, _ in self._hooks:
            Around.take_off(loop, name)

    # -- saving -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return this rank's ``rng`` and ``data`` entries for a checkpoint."""
        if self._saved is not None:
            return dict(in_tensors(self._saved))
        rng, position = rng_state(self._device), self._position
        if position is not None and position["epoch"] != self._epoch:
            position = None
        if position is not None and self._step is not None and self._is_within_step:
            batches, _, rng = self._step
            position = {**position, "batches": batches}
        return dict(in_tensors({"rng": rng, "data": position}))

    @property
    def _epoch(self) -> int:
        return int(self._loop.epoch_progress.current.processed)

    @property
    def _is_within_step(self) -> bool:
        assert self._step is not None
        progress = self._epoch_loop.batch_progress.current
        # In manual optimization, a batch that does not advance global_step may still have changed weights.
        is_own_batch = self._trainer.lightning_module.automatic_optimization or progress.processed < progress.ready
        return bool(is_own_batch) and self._trainer.global_step == self._step[1]

    # -- resuming ---------------------------------------------------------------------------------------------------

    def resume(self, rng: Rng | None, data: dict[str, Any] | None) -> None:
        """Set the state that training continues from; None for an entry that the checkpoint lacks."""
        self._saved = {"rng": rng or rng_state(self._device), "data": data}

    def restore_rng(self) -> None:
        """Restore the random state, if a checkpoint was loaded."""
        if self._saved is not None:
            set_rng_state(self._saved["rng"], self._device)

    @property
    def _place(self) -> dict[str, Any] | None:
        """The saved position to continue from, or None: outside of the current epoch, or with unsuitable loaders."""
        data = self._saved["data"] if self._saved is not None else None
        is_here = data is not None and data["epoch"] == self._epoch and _begins_again(self._loop._data_fetcher)
        return data if is_here else None

    def _reset(self, reset: Any) -> None:
        with warnings.catch_warnings():
            if self._place is not None:
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            reset()

    def _before_iterators(self, load_states: Any) -> None:
        load_states()
        self._note_iterators(rng_state(self._device))

    def _note_iterators(self, rng: Rng) -> None:
        loader = self._loop._combined_loader
        assert loader is not None
        fresh = all(getattr(each, "_iterator", None) is None for each in loader.flattened)
        self._position = {"epoch": self._epoch, "made": rng, "fresh": fresh, "before": {}, "missed": 0}

    def _begin_epoch(self, begin: Any, fetcher: Any) -> None:
        place, resumed = self._place, self._saved is not None
        loader, progress = fetcher.combined_loader, self._epoch_loop.batch_progress
        self._step = self._saved = None
        repeats_step = place is not None and "batches" in place
        if place is not None and repeats_step:
            _go_back(progress, progress.current.ready - place["batches"])
            progress.is_last_batch = False
        iterator, rng = loader._iterator, rng_state(self._device)
        # Taken before `begin`: whether workers persist shows in the iterators that exist already.
        noted, self._position = self._position, None
        self._note_iterators(rng)
        begin(fetcher)
        if repeats_step:
            self._epoch_loop.restarting = False  # or the loop would look for an interrupted validation to continue
        if place is not None:
            self._position = {name: value for name, value in place.items() if name != "batches"}
            if not self._epoch_loop._num_ready_batches_reached():
                self._go_on(fetcher)
        else:
            if resumed and progress.current.ready == 0 and loader._iterator is iterator and _begins_again(fetcher):
                # Created here, after the hooks and with the epoch's number known, as in an uninterrupted run.
                iter(fetcher)
            if loader._iterator is iterator:
                self._position = noted
            if self._position is not None:
                self._position["missed"] = progress.current.ready
                self._position["before"][0] = rng_state(self._device)
        if _begins_again(fetcher) and not hasattr(fetcher, "bookmark"):
            fetcher.bookmark = self
            fetcher.__class__ = _noting(type(fetcher))  # type: ignore[arg-type]

    def _go_on(self, fetcher: Any) -> None:
        assert self._position is not None
        position, loader, now = self._position, fetcher.combined_loader, rng_state(self._device)
        batches = self._epoch_loop.batch_progress.current.ready - position["missed"]
        if batches:
            rank_zero_info(f"Going on with batch {batches} of the epoch; those before it are not read again.")
        if position["fresh"]:
            loader.reset()
        set_rng_state(position["made"], self._device)
        with skipping(loader):
            iter(fetcher)
            with suppress(StopIteration):  # fewer batches in the data than were done: the epoch is over
                for index in range(batches):
                    if (before := position["before"].get(index)) is not None:
                        set_rng_state(before, self._device)
                    next(fetcher)
        fetcher.fetched += position["missed"]
        set_rng_state(now, self._device)

    # -- each batch -------------------------------------------------------------------------------------------------

    @contextmanager
    def _noting_batch(self, fetcher: Any) -> Iterator[None]:
        rng, step = rng_state(self._device), self._trainer.global_step
        batches = self._epoch_loop.batch_progress.current.ready
        is_by_hand = not self._trainer.lightning_module.automatic_optimization
        if self._step is None or self._step[1] != step or is_by_hand:
            self._step = (batches, step, rng)
        iterators = list(fetcher.combined_loader._iterator.iterators)
        yield
        # A changed iterator is a shorter loader that has restarted and drawn a new order.
        if self._position is not None and iterators != fetcher.combined_loader._iterator.iterators:
            self._position["before"][batches - self._position["missed"]] = rng


def _begins_again(fetcher: Any) -> bool:
    """Whether all batches come from stateless dataloaders with samplers, so that the epoch's data can be restarted."""
    takes_batches_itself = hasattr(fetcher, "iterator_wrapper")
    # A fetcher that does not know the length has prefetched the next batch already.
    return not takes_batches_itself and fetcher.length is not None and goes_by_samplers(fetcher.combined_loader)


def _go_back(progress: Any, batches: int) -> None:
    for tracker in (progress.total, progress.current):
        for name, count in vars(tracker).items():
            setattr(tracker, name, count - batches)


@cache
def _noting(fetcher: Any) -> type:
    class Noting(fetcher):
        bookmark: Bookmark

        def __next__(self) -> Any:
            with self.bookmark._noting_batch(self):
                return super().__next__()

    return Noting
