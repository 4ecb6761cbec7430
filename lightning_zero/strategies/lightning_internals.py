"""Every private name of Lightning, torchmetrics and torch's data loaders that this package uses, each with the reason.

No other file uses them, so only this file has to be checked against a new version; ``tests/strategy/test_internals.py``
tests them. Checked with Lightning 2.6.6 and torchmetrics 1.9. Classes that differ between ``lightning.pytorch`` and
``pytorch_lightning`` are looked up in the package that is passed as an argument.

The strategies also override or set private attributes of Lightning's own strategy classes, which ``INHERITED`` lists.
"""
# ruff: noqa: F401  (other files import these names from here)

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter
from types import FrameType
from typing import Any

from lightning.fabric.strategies import DDPStrategy

# ``device`` and ``dtype`` of a module whose buffers alone are moved
from lightning.fabric.utilities.device_dtype_mixin import _update_properties as update_properties

# Set-up and reduction exactly as under DDP, including logging, the environment's checks and devices' special cases
from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as sync_ddp_if_available

# What ``Trainer.init_module(empty_init=True)`` uses: no initialiser of torch runs
from lightning.fabric.utilities.init import _EmptyInit as EmptyInit

# The same random numbers when a micro-batch is computed again: also those of NumPy and ``random``
from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states

# Loaders with a state of their own, which Lightning saves and loads
from lightning.fabric.utilities.types import _Stateful as Stateful

# Parameters and buffers start from rank 0's in runs without an engine
from lightning.pytorch.overrides.distributed import _sync_module_states as sync_module_states

# Calls ``training_step`` with the precision's context and the profiler
from lightning.pytorch.trainer.call import _call_strategy_hook as call_strategy_hook

INHERITED = {
    "_backward_sync_control": "Fabric.no_backward_sync reads it",
    "_checkpoint_io": "tells whether a plugin writes checkpoints; replaced while Fabric loads one that was read",
    "_configure_launcher": "chooses the launcher, and refuses unsupported options before processes start",
    "_convert_stateful_objects_in_state": "fabric.save converts objects as every other strategy does",
    "_launcher": "set by _configure_launcher",
    "_layer_sync": "sync_batchnorm",
}
"""Private attributes of Lightning's strategy classes that ours override, set or read on ``self``, with the reason."""

# -- strategies --------------------------------------------------------------------------------------------------------

set_world_ranks = DDPStrategy._set_world_ranks
"""Method of a strategy that sets global ranks; the base classes have none."""

get_process_group_backend = DDPStrategy._get_process_group_backend
"""The backend for a strategy's device, if the user names none."""

subprocess_launcher = attrgetter("strategies.launchers._SubprocessScriptLauncher")
"""A package's class that starts the script once more for each rank; it has no public name."""

multiprocessing_launcher = attrgetter("strategies.launchers._MultiProcessingLauncher")
"""A package's class that spawns or forks ranks; it has no public name."""

tuner_exit = attrgetter("utilities.exceptions._TunerExitException")
"""A package's exception by which the tuner ends a run on every rank: it is not a failure."""

no_experiment = attrgetter("loggers.logger.DummyExperiment")
"""The class of a logger's ``experiment`` on all ranks but the first: all its attributes are the method ``nop``."""


def is_absent(optimizer: Any) -> bool:
    """Whether the optimizer is Lightning's placeholder for a module without optimizers."""
    return type(optimizer).__name__ == "_MockOptimizer"


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Set the LightningModule's ``device_mesh``, as ``ModelParallelStrategy`` does; the property has no setter."""
    module._device_mesh = mesh


# -- a Trainer's loops -------------------------------------------------------------------------------------------------

active_loop = attrgetter("_active_loop")
"""The loop that a Trainer runs now; hooks of strategies do not receive it."""

data_fetcher = attrgetter("_data_fetcher")
"""A loop's iterator over batches, the only place that each batch passes before its step."""

training_dataloader = attrgetter("fit_loop._data_source.dataloader")
"""A Trainer's function that makes the training loader, before the fit has made it."""

skips_backward = attrgetter("fit_loop._skip_backward")
"""Whether a Trainer only runs forwards, in StochasticWeightAveraging's pass for batch statistics."""

BETWEEN_BATCHES = "_broadcast_sigterm_tensor"
"""The training epoch's method for Lightning's own SIGTERM exchange, called before each batch on every rank."""


def is_epoch_ending(trainer: Any) -> bool:
    """Whether the batch that has just ended is the last of its epoch on this rank; validation has not begun.

    Epochs of a run that counts steps alone may end at different steps, for example with streams of different lengths.
    """
    loop = trainer.fit_loop
    stops = trainer.should_stop and loop._can_stop_early
    return stops or (loop.epoch_loop._is_training_done and trainer.max_epochs != -1)


def should_accumulate(trainer: Any) -> bool:
    """Whether no optimizer steps after the current micro-batch."""
    return trainer.fit_loop._should_accumulate()


def arguments_of_step(trainer: Any, batch: Any, index: int) -> list[Any]:
    """The arguments that ``training_step`` receives, according to its signature."""
    return list(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, index).values())


combined_loader = attrgetter("_combined_loader")
"""A fit's training loaders, in one; the public property raises an error before the fit has made them."""

LOAD_LOADER_STATES = "_load_combined_loader_states"
"""The training loop's method that is called once its loaders exist, before they make iterators."""

BEFORE_FETCH = "_start_profiler"
"""A fetcher's method that is called before each batch is fetched: the state before a step's first batch is recorded."""

iterator_of = attrgetter("_iterator")
"""The iterator over a ``CombinedLoader``'s loaders, by which the position in each of them is known."""

POSITION_AMONG_LOADERS = {"_idx", "_consumed"}
"""Attributes of that iterator: the loader whose turn it is, and which loaders have ended."""


def do_not_restart(loop: Any) -> None:
    """Let a training loop go on as within an epoch: after a restart it skips schedulers that monitor a metric."""
    loop._restarting = False


modes_before_validation = attrgetter("fit_loop.epoch_loop.val_loop._module_mode.mode")
"""Which modules were in training mode before Lightning put all of them into evaluation mode for a validation."""

EPOCH_OF_LOADERS = "_last_train_dl_reload_epoch"
"""The epoch in which a fit's loaders were last made, from which ``reload_dataloaders_every_n_epochs`` counts."""

# -- a Trainer's connectors and callbacks ------------------------------------------------------------------------------

signal_connector = attrgetter("_signal_connector")
"""The part of a Trainer that installs signal handlers."""

SIGNAL_HANDLERS = "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"
"""The signal connector's methods for SIGTERM and SLURM's requeue signal, which communicate wherever a rank is."""


def requeue(connector: Any, number: int, frame: FrameType | None) -> None:
    """Save a checkpoint and requeue the SLURM job, as Lightning's handler does."""
    type(connector)._slurm_sigusr_handler_fn(connector, number, frame)


LOGGED = "_callback_metrics", "_logged_metrics", "_progress_bar_metrics"
"""Attributes of a Trainer's logger connector: the metrics logged so far, which callbacks and schedulers monitor."""

logger_connector = attrgetter("_logger_connector")
"""The part of a Trainer that has the metrics."""

checkpoint_connector = attrgetter("_checkpoint_connector")
"""The part of a Trainer whose ``resume_start`` loads the checkpoint of a fit; restarts put another one in its place."""


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """The checkpoint that ``Trainer.save_checkpoint`` would write."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


# -- torchmetrics ------------------------------------------------------------------------------------------------------

reductions_of = attrgetter("_reductions")
"""A metric's reduction functions, by the name of the state."""


# -- torch's data loaders ----------------------------------------------------------------------------------------------

GET_ITERATOR = "_get_iterator"
"""A loader's method that makes its iterators, where its sampler is replaced by one that knows its position."""


def name_of_sampler(loader: Any) -> str:
    """The name of the sampler that a loader's iterators use."""
    return "batch_sampler" if loader._auto_collation else "sampler"


def forget_iterator(loader: Any) -> None:
    """With persistent workers, a loader would otherwise reuse its iterator."""
    loader._iterator = None


def index_sampler(iterator: Any) -> Any:
    """The sampler that an iterator takes indices from; None for iterators of other loaders than torch's."""
    return getattr(iterator, "_index_sampler", None)


yielded_batches = attrgetter("_num_yielded")
"""The number of batches that a loader's iterator has yielded; its sampler is ahead of it, for the workers."""

WRAPPED_SAMPLER = "_sampler"
"""Attribute of Lightning's ``DistributedSamplerWrapper``'s dataset: the sampler that it divides among ranks."""
