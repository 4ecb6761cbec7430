"""Skip batches of dataloaders by advancing their samplers, without reading a sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import Any

import torch
from lightning.fabric.utilities.types import _Stateful
from torch.utils.data import DataLoader

from lightning_zero.engine.compat import DatasetKind, SingleProcessDataLoaderIter


def goes_by_samplers(combined: Any) -> bool:
    """Whether all loaders of a ``CombinedLoader`` are map-style, read by samplers, and keep no state of their own."""
    return all(
        isinstance(each, DataLoader)
        and not isinstance(each, _Stateful)
        and each._dataset_kind == DatasetKind.Map
        and type(each).__iter__ is DataLoader.__iter__
        and type(each)._get_iterator is DataLoader._get_iterator
        for each in combined.flattened
    )


@contextmanager
def skipping(combined: Any) -> Iterator[None]:
    """Context in which a ``CombinedLoader`` yields None for each batch; afterwards its iterators continue behind those.

    Arguments:
        combined: to be iterated anew within the context. ``goes_by_samplers`` must be true.
    """
    loaders = {id(each): _Skipped(each) for each in combined.flattened}
    with ExitStack() as stack:
        for skipped in loaders.values():
            stack.callback(skipped.leave)
        yield
    modes = combined._iterator
    modes.iterators = [each.begin() if isinstance(each, _Places) else each for each in modes.iterators]


class _Skipped:
    """A dataloader whose iterators only advance the sampler."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.kept, loader._iterator = loader._iterator, None  # includes the workers, if they persist
        vars(loader)["_get_iterator"] = self._get_iterator

    def leave(self) -> None:
        del vars(self.loader)["_get_iterator"]
        self.loader._iterator = self.kept

    def _get_iterator(self) -> _Places:
        if self.kept is None:
            return _Places(self)
        with _drawing_nothing(self.loader):
            places = _Places(self)
        places._reset(self.loader)  # as reusing the kept iterator would have done
        return places


class _Places(SingleProcessDataLoaderIter):
    """Dataloader iterator that draws the same random numbers in this process as the real one, but reads no sample."""

    def __init__(self, skipped: _Skipped) -> None:
        self._skipped, loader = skipped, skipped.loader
        here: Any = object.__new__(type(loader))
        vars(here).update(vars(loader), num_workers=0, timeout=0, pin_memory=False)
        super().__init__(here)
        if loader.num_workers:
            self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        if loader.num_workers:  # their first index is drawn at once
            self._sampler_iter = chain(list(islice(self._sampler_iter, 1)), self._sampler_iter)

    def _next_data(self) -> Any:
        self._next_index()

    def begin(self) -> Any:
        """Return the real iterator, which continues from here."""
        loader, kept = self._skipped.loader, self._skipped.kept
        name = "batch_sampler" if loader._auto_collation else "sampler"
        sampler = getattr(loader, name)
        vars(loader)[name] = rest = _Rest(self._sampler_iter)
        try:
            with _drawing_nothing(loader):
                if kept is None:
                    iterator = loader._get_iterator()
                else:
                    iterator, kept._index_sampler = kept, rest
                    kept._reset(loader)
        finally:
            vars(loader)[name] = sampler
        iterator._index_sampler = sampler
        if loader.persistent_workers and loader.num_workers:
            loader._iterator = iterator
        return iterator


class _Rest:
    """A sampler's remaining indices, as a sampler."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices


@contextmanager
def _drawing_nothing(loader: Any) -> Iterator[None]:
    """Context that restores the random state afterwards, since creating an iterator draws random numbers."""
    generators = [torch.default_generator, *([loader.generator] if loader.generator is not None else [])]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
