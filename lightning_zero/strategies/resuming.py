"""Capture and restore random states, the position in the data, and what an epoch has set."""

from __future__ import annotations

import inspect
import pickle
import warnings
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_zero.engine import compat
from lightning_zero.strategies import lightning_internals as internals
from lightning_zero.strategies.loops import Wrappers

Rng = dict[str, Any]
"""States of this process's random number generators."""


def rng_state(device: torch.device, generators: Iterable[torch.Generator] = ()) -> Rng:
    """Return the states of the generators of Python, NumPy and torch (CPU and device), and of other generators."""
    state: Rng = internals.collect_rng_states(include_cuda=False)
    # as tensors, which ``torch.load(weights_only=True)`` accepts, of signed integers, which torch pickles
    state["numpy"] = compat.tree_map_only(
        numpy.ndarray, lambda words: torch.from_numpy(words.view(f"i{words.itemsize}")), state["numpy"]
    )
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return {**state, "generators": [generator.get_state() for generator in generators]}


def set_rng_state(state: Rng, device: torch.device, generators: Iterable[torch.Generator] = ()) -> None:
    """Restore states that ``rng_state`` returned. Generators without a saved state do not change."""
    words = compat.tree_map_only(Tensor, lambda each: each.numpy().view(f"u{each.itemsize}"), state["numpy"])
    internals.set_rng_states({**state, "numpy": words})
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])
    for generator, saved in zip(generators, state.get("generators", ())):  # earlier versions did not save them
        generator.set_state(saved)


class DataLoadingState:
    """Data-loading state: the order of an epoch's samples, and how many batches were trained on before the checkpoint.

    Lightning itself would restart the epoch in another order, and repeat batches that were already trained on. Here a
    dataloader's sampler restarts from the random state in which it began, and skips the finished batches without
    reading their samples. An optimizer step that was unfinished when the checkpoint was saved is repeated from its
    first micro-batch, since checkpoints contain no gradients. Loaders without samplers (a stream, a queue or another
    iterable) and stateful loaders are left to Lightning, which saves and loads the state of stateful loaders.
    """

    def __init__(self, trainer: Trainer, device: torch.device, wrappers: Wrappers) -> None:
        self._trainer, self._device, self._wrappers = trainer, device, wrappers
        self._loop: Any = trainer.fit_loop
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop
        self._saved: dict[str, Any] | None = None  # the loaded state, until the first epoch begins
        self._generators: list[torch.Generator] = []  # those of all loaders and their samplers
        self._has_order = False  # whether samplers determine the order in all loaders
        self._epoch_of_iterators: int | None = None
        # The current optimizer step: its number, and the state before its first batch was fetched.
        self._step: tuple[int, dict[str, Any]] | None = None
        wrappers.put(self._loop, internals.LOAD_LOADER_STATES, self._before_iterators)
        wrappers.put(self._epoch_loop, "reset", self._reset)
        wrappers.put(self._epoch_loop, "on_run_start", self._begin_epoch)

    def state(self, *, with_epoch: bool) -> dict[str, Any]:
        """Return this rank's entries ``rng`` and ``data`` and, if requested, ``epoch``; Lightning saves none."""
        if self._saved is not None:
            return {name: self._saved[name] for name in ("rng", "data", "epoch") if with_epoch or name != "epoch"}
        within = self._step[1] if self._step is not None and self._is_within_step else None
        state = within or self._now()
        if not with_epoch:
            return state
        is_between = within is None and not self._trainer.validating
        return {**state, "epoch": {**epoch_state(self._trainer), "is_between": is_between}}

    def _now(self, *, repeats: bool = False) -> dict[str, Any]:
        data, combined = None, internals.combined_loader(self._loop)
        modes = internals.iterator_of(combined) if combined is not None else None
        iterators = modes.iterators if modes is not None and self._epoch_of_iterators == self._epoch else []
        samplers = [internals.index_sampler(each) for each in iterators]
        if samplers and all(isinstance(each, _Indices) for each in samplers):
            data = {
                "epoch": self._epoch,
                "loaders": [
                    sampler.position(internals.yielded_batches(each)) for sampler, each in zip(samplers, iterators)
                ],
                "combined": {name: vars(modes)[name] for name in internals.POSITION_AMONG_LOADERS & vars(modes).keys()},
                "batches": self._epoch_loop.batch_progress.current.ready,
                "repeats": repeats,
            }
        return {"rng": rng_state(self._device, self._generators), "data": data}

    @property
    def _epoch(self) -> int:
        return int(self._loop.epoch_progress.current.processed)

    @property
    def _is_within_step(self) -> bool:
        assert self._step is not None
        progress = self._epoch_loop.batch_progress.current
        # In manual optimization, a batch that does not advance global_step may still have changed weights.
        is_own_batch = self._trainer.lightning_module.automatic_optimization or progress.processed < progress.ready
        return bool(is_own_batch) and self._trainer.global_step == self._step[0]

    def _before_fetch(self, go_on: Any) -> None:
        step = self._trainer.global_step
        is_by_hand = not self._trainer.lightning_module.automatic_optimization
        if self._step is None or self._step[0] != step or is_by_hand:
            self._step = (step, self._now(repeats=True))
        go_on()

    def resume(self, rng: Rng | None, data: dict[str, Any] | None, epoch: EpochState | None) -> None:
        """Set the state from which training continues. An argument is None if the checkpoint lacks the entry."""
        self._saved = {"rng": rng or rng_state(self._device), "data": data, "epoch": epoch}
        if epoch is not None:
            self._trainer.should_stop = epoch["should_stop"]

    def restore(self) -> None:
        """Restore random states, logged metrics and the state of modules, if a checkpoint was loaded."""
        if self._saved is None:
            return
        if self._epoch_loop.restarted_on_train_batch_end and self._epoch_loop.batch_progress.is_last_batch:
            self._loop.reset_restart_stage()  # otherwise Lightning, which begins the next epoch, skips and miscounts it
        set_rng_state(self._saved["rng"], self._device, self._generators)
        if self._saved["epoch"] is not None:
            set_state(self._trainer, self._saved["epoch"])

    @property
    def _data(self) -> dict[str, Any] | None:
        """The saved position in the data; None if it belongs to another epoch or does not match the loaders."""
        data = self._saved["data"] if self._saved is not None else None
        if data is None or not self._has_order or data["epoch"] != self._epoch:
            return None
        # Checkpoints of earlier versions have no "loaders" entry.
        return data if len(data.get("loaders", ())) == len(internals.combined_loader(self._loop).flattened) else None

    def _before_iterators(self, load_states: Any) -> None:
        load_states()
        self._epoch_of_iterators, loaders = self._epoch, internals.combined_loader(self._loop).flattened
        fetches = "dataloader_iter" in inspect.signature(self._trainer.lightning_module.training_step).parameters
        self._has_order = not fetches and _go_by_samplers(loaders)
        self._generators = [generator for loader in loaders for generator in _generators_of(loader)]
        for loader in loaders if self._has_order else ():
            self._note_order(loader)

    def _reset(self, reset: Any) -> None:
        with warnings.catch_warnings():
            if self._data is not None:
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            reset()

    def _begin_epoch(self, begin: Any, fetcher: Any) -> None:
        data, is_first = self._data, self._saved is not None
        epoch = self._saved["epoch"] if self._saved is not None and self._loop.restarted_mid_epoch else None
        self._saved = self._step = None
        progress = self._epoch_loop.batch_progress
        iterator = internals.iterator_of(fetcher.combined_loader)
        if data is not None:
            # Lightning's count may have batches of an unfinished step, or lack a batch whose manual step was finished.
            _set_completed(progress, data["batches"])
            progress.is_last_batch = progress.is_last_batch and not data["repeats"]
        begin(fetcher)
        if data is not None:
            self._continue(fetcher, data)
        elif is_first and self._has_order and progress.current.ready == 0:
            # As in an uninterrupted run, start the iterators after the hooks, which set the epoch's number.
            if internals.iterator_of(fetcher.combined_loader) is iterator:
                iter(fetcher)
        if epoch is not None:
            internals.do_not_restart(self._loop)
            if epoch["is_between"]:
                self._epoch_loop.restarting = False  # otherwise Lightning repeats what follows a batch
            set_epoch(self._trainer, epoch)
        self._epoch_of_iterators = self._epoch
        self._wrappers.put(fetcher, internals.BEFORE_FETCH, self._before_fetch)

    def _continue(self, fetcher: Any, data: dict[str, Any]) -> None:
        rng = rng_state(self._device)
        for loader, position in zip(fetcher.combined_loader.flattened, data["loaders"]):
            internals.forget_iterator(loader)
            self._note_order(loader, position)
        iter(fetcher)
        vars(internals.iterator_of(fetcher.combined_loader)).update(data["combined"])
        fetcher.fetched += self._epoch_loop.batch_progress.current.ready
        set_rng_state(rng, self._device)
        if data["repeats"]:
            self._epoch_loop.restarting = False  # otherwise the loop would try to continue an interrupted validation
        if data["batches"]:
            rank_zero_info(f"Resuming the epoch after {data['batches']} batch(es), which are not read again.")

    def _note_order(self, loader: Any, position: _Position | None = None) -> None:
        """Make a loader's iterators record their sampler's random state. The next one continues from ``position``."""
        name, generators = internals.name_of_sampler(loader), _generators_of(loader)

        def get_iterator(create: Any) -> Any:
            nonlocal position
            sampler = getattr(loader, name)
            vars(loader)[name], position = _Indices(sampler, position, generators), None
            try:
                return create()
            finally:
                vars(loader)[name] = sampler

        self._wrappers.put(loader, internals.GET_ITERATOR, get_iterator)


def _go_by_samplers(loaders: list[Any]) -> bool:
    """Whether samplers determine the batches, as in distinct, map-style, sized, unmodified and stateless loaders."""
    return len(set(map(id, loaders))) == len(loaders) and all(
        isinstance(each, DataLoader)
        and not isinstance(each, internals.Stateful)
        and not isinstance(each.dataset, IterableDataset)
        and sized_len(each) is not None
        and type(each).__iter__ is DataLoader.__iter__
        and getattr(type(each), internals.GET_ITERATOR) is getattr(DataLoader, internals.GET_ITERATOR)
        for each in loaders
    )


_Position = tuple[Rng | None, int, int | None]
"""The random state before a sampler started, the number of batches to skip, and a checksum of the first index."""


class _Indices:
    """Wrapper around a loader's sampler. It records the random state at the start, or continues from a position.

    The random state includes the states of ``generators``, those of the loader and its samplers. If the sampler begins
    with another index than before, the project has restored a position of its own, and nothing is skipped.
    """

    def __init__(self, sampler: Any, position: _Position | None, generators: list[torch.Generator]) -> None:
        self._sampler, self._starts_over, self._generators = sampler, position is None, generators
        # checkpoints of earlier versions lack the checksum
        self._rng, self._skipped, self._begin = (*(position or (None, 0)), None)[:3]

    def position(self, yielded: int) -> _Position:
        """The position after an iterator has yielded ``yielded`` batches."""
        return self._rng, self._skipped + yielded, self._begin

    def __iter__(self) -> Iterator[Any]:  # a generator: like samplers, it starts when the first index is fetched
        cpu = torch.device("cpu")  # no sampler draws from a device's generator
        now = rng_state(cpu, self._generators)
        if self._starts_over:
            self._rng, self._skipped, self._begin = now, 0, None
        self._starts_over, self._rng = True, self._rng or now
        set_rng_state(self._rng, cpu, self._generators)
        indices = iter(self._sampler)
        first = list(islice(indices, 1))
        begin = _checksum(first)
        if self._skipped and (begin == self._begin or None in (begin, self._begin)):
            first = list(islice(indices, self._skipped - 1, self._skipped))
        self._begin = begin
        if self._rng is not now:
            set_rng_state(now, cpu)
        yield from chain(first, indices)

    def __len__(self) -> int:
        return len(self._sampler)


def _checksum(indices: Any) -> int | None:
    """A checksum of the first index in nested lists: that of the first batch's first sample, whatever its size.

    None for an index that cannot be pickled, which nothing requires in a loader without workers.
    """
    while isinstance(indices, (list, tuple)) and indices:
        indices = indices[0]
    try:
        return zlib.crc32(pickle.dumps(indices))
    except Exception:
        return None


def _generators_of(loader: Any) -> list[torch.Generator]:
    """The generators of a loader and of its samplers, which may be wrapped in others."""
    found: dict[int, torch.Generator] = {}
    seen, to_see = {id(loader)}, [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    while to_see:
        for value in getattr(to_see.pop(), "__dict__", {}).values():
            if isinstance(value, torch.Generator):
                found[id(value)] = value
            elif isinstance(value, Sampler) or internals.WRAPPED_SAMPLER in getattr(value, "__dict__", {}):
                if id(value) not in seen:
                    seen.add(id(value))
                    to_see.append(value)
    return list(found.values())


def _set_completed(progress: Any, batches: int) -> None:
    """Count this many batches of the epoch as completed, and none as begun."""
    earlier = progress.total.completed - progress.current.completed
    for tracker, count in ((progress.current, batches), (progress.total, earlier + batches)):
        for name in vars(tracker):
            setattr(tracker, name, count)


# -- the running epoch -------------------------------------------------------------------------------------------------

EpochState = dict[str, Any]
"""State of the running epoch that Lightning's checkpoints do not contain, for a fit that a signal or a kill interrupts.

Means over the epoch and the states of torchmetrics are not part of it.
"""


def epoch_state(trainer: Trainer) -> EpochState:
    """Return the metrics logged so far, which parameters are frozen, and which modules are in evaluation mode.

    Tensors are copied to CPU memory. The state also says whether training should stop.
    """
    module = trainer.lightning_module
    modes = internals.modes_before_validation(trainer) if trainer.validating else {}
    logged = {name: dict(getattr(internals.logger_connector(trainer), name)) for name in internals.LOGGED}
    return {
        "should_stop": trainer.should_stop,
        "logged": compat.tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), logged),
        "trained": {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)},
        "training": {name: modes.get(name, part.training) for name, part in module.named_modules()},
        "reloaded": getattr(trainer.fit_loop, internals.EPOCH_OF_LOADERS),
        "accumulate": trainer.accumulate_grad_batches,
    }


def set_state(trainer: Trainer, state: EpochState) -> None:
    """Restore the metrics logged so far, which parameters are frozen, and the modes of modules."""
    module = trainer.lightning_module
    for name, logged in state["logged"].items():
        restored = compat.tree_map_only(Tensor, lambda tensor: tensor.to(module.device), logged)
        getattr(internals.logger_connector(trainer), name).update(restored)
    for name, part in module.named_modules():
        part.training = state["training"].get(name, part.training)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(state["trained"].get(name, parameter.requires_grad))


def set_epoch(trainer: Trainer, state: EpochState) -> None:
    """Restore what belongs to the epoch that is about to continue."""
    module = trainer.lightning_module
    setattr(trainer.fit_loop, internals.EPOCH_OF_LOADERS, state["reloaded"])
    # ``GradientAccumulationScheduler`` sets this only when an epoch begins.
    trainer.accumulate_grad_batches = state.get("accumulate", trainer.accumulate_grad_batches)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(cls.__name__ == "StochasticWeightAveraging" for cls in type(callback).__mro__):
            # The loaded options of optimizers, and buffers, already contain what this hook changes.
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            callback.on_train_epoch_start(trainer, module)
            for group, before in zip(groups, options):
                group.update(before)
            for name, buffer in module.named_buffers():
                buffer.detach().copy_(buffers[name])
