"""Where a run stands beside its weights: its random numbers, and its place in the training data."""

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
from torch.utils._pytree import tree_map_only

from lightning_zero.loops import Around
from lightning_zero.skipping import goes_by_samplers, skipping

Rng = dict[str, Any]
"""The state of this process's generators."""


def rng_state(device: torch.device) -> Rng:
    """The generators of Python, of NumPy if somebody has imported it, of torch's on the CPU and on a device."""
    state: Rng = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: Rng, device: torch.device) -> None:
    """The inverse of ``rng_state``, ``in_tensors`` or not; generators that it does not know stay as they are."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tree_map_only(Tensor, lambda t: t.numpy().view(f"u{t.itemsize}"), state["numpy"]))
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])


def in_tensors(states: Any) -> Any:
    """States with tensors in the place of NumPy's arrays, as ``torch.load(weights_only=True)`` reads them."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return states
    # Of unsigned integers, which torch does not pickle.
    return tree_map_only(numpy.ndarray, lambda words: torch.from_numpy(words.view(f"i{words.itemsize}")), states)


class Bookmark:
    """Keeps what it takes to begin an epoch's data again and to leave out the batches that were done.

    Lightning begins the epoch anew: with another order, since that was drawn when the iterators were made, and with
    batches that were trained on already. Here the iterators are made again from the random numbers of that time,
    samplers go on by as many batches, and then the numbers of the time of saving are put back. A step that was not
    finished (saved within it, or between micro-batches, whose gradients no checkpoint has) is repeated from its first
    micro-batch.

    No sample is read for that. So what has no samplers (a stream, a queue, any other iterable) is left to Lightning.
    Loaders that have a state of their own, which Lightning saves and loads, are left to it as well.

    Arguments:
        trainer: which is about to fit.
        device: this rank's.
    """

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        self._trainer, self._device = trainer, device
        self._loop: Any = trainer.fit_loop
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop
        # The iterators of this epoch: its number; the random numbers when they were made; whether workers were started
        # for them; the numbers before each batch at which iterators may have drawn some; the batches that the loop
        # counts but these iterators have not handed out. None before there are any.
        self._position: dict[str, Any] | None = None
        # The step at work: the batches before it, its number, the random numbers before its first batch was fetched.
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
        """Leave the loops; what is known can still be saved."""
        for loop, name, _ in self._hooks:
            Around.take_off(loop, name)

    # -- saving -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """This rank's ``rng`` and ``data``, to be saved."""
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
        # By hand, a batch without a step that counts may have changed weights all the same.
        is_own_batch = self._trainer.lightning_module.automatic_optimization or progress.processed < progress.ready
        return bool(is_own_batch) and self._trainer.global_step == self._step[1]

    # -- resuming ---------------------------------------------------------------------------------------------------

    def resume(self, rng: Rng | None, data: dict[str, Any] | None) -> None:
        """Go on, once training begins, from what was saved; None for what is not known."""
        self._saved = {"rng": rng or rng_state(self._device), "data": data}

    def restore_rng(self) -> None:
        """Put the random numbers back, if there is something to resume."""
        if self._saved is not None:
            set_rng_state(self._saved["rng"], self._device)

    @property
    def _place(self) -> dict[str, Any] | None:
        """Where in this epoch a resumed run is to go on, if it is in the midst of one and can do so."""
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
        # Persistent workers are known by what is there before.
        noted, self._position = self._position, None
        self._note_iterators(rng)
        begin(fetcher)
        if repeats_step:
            self._epoch_loop.restarting = False  # by which it would look for a validation to go on with
        if place is not None:
            self._position = {name: value for name, value in place.items() if name != "batches"}
            if not self._epoch_loop._num_ready_batches_reached():
                self._go_on(fetcher)
        else:
            if resumed and progress.current.ready == 0 and loader._iterator is iterator and _begins_again(fetcher):
                # As if never stopped: at this point, after the hooks, and knowing the number of the epoch.
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
            with suppress(StopIteration):  # the data has fewer batches than were done: the epoch is over
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
        # A shorter loader that began again has drawn its order.
        if self._position is not None and iterators != fetcher.combined_loader._iterator.iterators:
            self._position["before"][batches - self._position["missed"]] = rng


def _begins_again(fetcher: Any) -> bool:
    """Whether the data comes, batch by batch, from loaders that go by samplers and keep no state of their own."""
    takes_batches_itself = hasattr(fetcher, "iterator_wrapper")
    # Without a length the loop has fetched the next batch already.
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
