"""Checkpoints of the Trainer's strategy: what is saved, and how a run resumes from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.callbacks.restarts import Restarts
from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.fitting import check_optimizers, load_module
from lightning_zero.checkpoint.form import CHECKPOINT_KEY, FORMAT, LEFT_OUT, NAMES, configs_of_models
from lightning_zero.checkpoint.saver import SaveJob, SaveMode, Saver
from lightning_zero.checkpoint.saving import by_name, names_in
from lightning_zero.engine import Engine, engine_of, quantised_layers, sharded_tree, tensor_parallel
from lightning_zero.strategies.checkpoint_files import CheckpointFiles
from lightning_zero.strategies.lightning_internals import dump_checkpoint, is_absent
from lightning_zero.strategies.resuming import DataLoadingState

log = logging.getLogger("lightning_zero.strategies.trainer")  # projects may filter by this name


class TrainerCheckpoints:
    """Saves, loads and resumes the Trainer's checkpoints for the strategy that holds this object."""

    def __init__(self, strategy: Any, files: CheckpointFiles) -> None:
        self._strategy, self._files = strategy, files
        self.data_loading: DataLoadingState | None = None
        # Rank 0's master weights by module: a checkpoint may be saved after the engine has been closed.
        self.masters_after_fit: WeakKeyDictionary[Any, dict[str, Tensor]] = WeakKeyDictionary()
        # This package's entry of the run's own checkpoint: {} if there is none, None before it can be loaded.
        self.loaded: dict[str, Any] | None = None
        self._saves_epoch_state = self._is_for_restart = False  # see ``for_restart``

    def __reduce__(self) -> Any:
        # Users copy trainers and strategies; the state of the running fit belongs only to the original.
        return TrainerCheckpoints, (self._strategy, self._files)

    def end_loading(self) -> None:
        """Note that the run's own checkpoint has been loaded: from here on, only callbacks restore checkpoints."""
        self.loaded = self.loaded or {}

    def _can_save(self) -> bool:
        """Whether the ranks can save a checkpoint: after a failure, only if all have failed alike."""
        ranks, engine = self._strategy.ranks, self._strategy.engine
        if not ranks.is_cut_off:
            return True
        if ranks.mesh is not None:
            return False  # the mesh's process groups have failed, too
        if engine is None:
            return True
        ranks.come_back(engine.rejoin)
        return not ranks.is_cut_off

    @property
    def _has_hooks(self) -> bool:
        """Whether the project overrides ``on_save_checkpoint``, which runs on every rank."""
        module = self._strategy.lightning_module
        return not all(
            each.on_save_checkpoint.__module__.startswith(("lightning.", "pytorch_lightning."))
            for each in [module, *module.trainer.callbacks]
        )

    @property
    def _mode(self) -> SaveMode:
        """How a checkpoint is saved: tensors that the project's hooks read must be gathered before."""
        return SaveMode.SHARDED if self._is_for_restart else self._files.mode(reads_values=self._has_hooks)

    def _leaf(self, mode: SaveMode) -> sharded_tree.Leaf:
        """Return what converts tensors that the project's hooks read. With hooks, every rank needs the values."""
        return self._files.leaf(mode, everywhere=self._has_hooks)

    def module_state(self) -> dict[str, Any]:
        """Return the full state dict on rank 0, and meta tensors of the same names and shapes on the other ranks.

        If the project overrides ``on_save_checkpoint``, which runs on every rank, every rank receives the full state
        dict. Where ranks write or copy their shards, the tensors stay sharded.
        """
        if not self._can_save():
            return {}
        if self._strategy.engine is not None:
            return self._strategy.engine.full_state_dict(leaf=self._leaf(self._mode), without=self._left_out)
        state = self._strategy.lightning_module.state_dict()
        for name in self._left_out & set(state):
            del state[name]
        return sharded_tree.walk(state, self._in_full, tensor_parallel.is_dtensor)

    def _in_full(self, tensor: Tensor) -> Tensor:
        """Return a DTensor's full value on ranks that need it, and a meta tensor on the others. Collective."""
        return self._leaf(SaveMode.GATHERED)(tensor_parallel.in_full(tensor))

    @property
    def _left_out(self) -> set[str]:
        """Names of parameters that are not saved."""
        if not self._strategy.options.exclude_frozen_parameters or self._is_for_restart:  # which must not lose values
            return set()
        module = self._strategy.lightning_module
        parameters = module.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in parameters if not parameter.requires_grad}
        return frozen.union(*quantised_layers.names_of_scales(module).values())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state; see ``module_state``."""
        if isinstance(optimizer, self._strategy.lightning.core.optimizer.LightningOptimizer):
            optimizer = optimizer.optimizer
        if not self._can_save():
            return {}
        engine = self._strategy.engine
        if engine is None or is_absent(optimizer):
            return sharded_tree.walk(optimizer.state_dict(), self._in_full, tensor_parallel.is_dtensor)
        with engine.have_met() if self._is_for_restart else nullcontext():
            return engine.full_optimizer_state_dict(optimizer, leaf=self._leaf(self._mode))

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> bool:
        """Save a checkpoint, and return whether a fit can resume from it."""
        if not self._can_save():
            log.warning(
                "%s was not written: after the exception, the other ranks, which hold shards of the model and of the "
                "optimizer's state, could not take part in saving, or were at another step. To keep a checkpoint in "
                "such cases, also save at intervals: ModelCheckpoint(every_n_train_steps=...).",
                path,
            )
            return False
        to_resume = "optimizer_states" in checkpoint  # false with ``save_weights_only=True``
        mode = self._mode
        contents = {**checkpoint, CHECKPOINT_KEY: self._about_checkpoint(mode, to_resume=to_resume)}
        self._files.save(mode, path, contents, self._tree_in, storage_options)
        return to_resume

    def _tree_in(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Remove and return the entries that are stored in DCP's format: weights, and optimizer states by name."""
        tree, names = {}, self._names_in_optimizers()
        if checkpoint.get("state_dict"):  # DCP does not store empty containers
            tree["state_dict"] = checkpoint.pop("state_dict")
        if any(checkpoint.get("optimizer_states", ())):  # false for Lightning's placeholder optimizer
            for number, state in enumerate(checkpoint.pop("optimizer_states")):
                tree[f"optimizer_{number}"] = by_name(state, names[number] if number < len(names) else [])
        return tree

    @contextmanager
    def for_restart(self, *, is_sharded: bool = True) -> Iterator[None]:
        """Context in which checkpoints contain the state of the running epoch, from which the job continues.

        With ``is_sharded``, they are also sharded and complete, whatever the options say.
        """
        self._saves_epoch_state, self._is_for_restart = True, is_sharded
        try:
            yield
        finally:
            self._saves_epoch_state = self._is_for_restart = False

    def state_to_keep(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the entries of a checkpoint that are stored in DCP's format, and all others. Tensors stay sharded.

        Collective; the ranks must have synchronized just before.
        """
        with self.for_restart():
            checkpoint = dump_checkpoint(self._strategy.lightning_module.trainer)
            checkpoint[CHECKPOINT_KEY] = self._about_checkpoint(SaveMode.SHARDED, to_resume=True)
            return self._tree_in(checkpoint), checkpoint

    def save_generation(self, saver: Saver, path: str, folders: list[int], before: Callable[[], None]) -> None:
        """Begin to save the state to a folder on each machine. Collective.

        The ranks in ``folders``, the first of each machine, call ``before`` before files are written.
        """
        tree, contents = self.state_to_keep()
        ranks = self._files.ranks()
        before = before if ranks.rank in folders else lambda: None
        saver.save(SaveJob(SaveMode.SHARDED, path, contents, tree, self._files.written_by, folders, before), ranks)

    def save_last(self, path: Any) -> None:
        """Save the last checkpoint of a job that a signal ends, sharded if there is one machine. Collective."""
        with self.for_restart(is_sharded=self._strategy.num_nodes == 1):
            self._strategy.lightning_module.trainer.save_checkpoint(path)
        self._files.finish()  # which raises the error of a save in the background

    def _about_checkpoint(self, mode: SaveMode, *, to_resume: bool) -> dict[str, Any]:
        """Return this package's entry for a checkpoint: versions, and state that Lightning does not save."""
        about: dict[str, Any] = {"format": FORMAT, "written_by": self._files.written_by}
        module, engine = self._strategy.lightning_module, self._strategy.engine
        if left_out := self._left_out:
            about[LEFT_OUT] = sorted(left_out)
        if configs := configs_of_models(module):
            about["transformers"] = configs
        if not to_resume:
            return about
        if mode is not SaveMode.SHARDED:  # sharded checkpoints store optimizer states by name
            about[NAMES] = {f"optimizer_{number}": names for number, names in enumerate(self._names_in_optimizers())}
        if (loading := self.data_loading) is not None:
            ranks = self._strategy.ranks.all_gather_values(loading.state(with_epoch=self._saves_epoch_state))
            about |= {name: [state[name] for state in ranks] for name in ranks[0]}
        masters = self.masters_after_fit.get(module, {})
        if engine is not None:
            masters = engine.masters_by_name(leaf=self._files.leaf(mode))
        if masters:
            about["masters"] = masters
        return about

    def _names_in_optimizers(self) -> list[list[str]]:
        """Return each optimizer's parameter names in the order in which its state dict numbers them."""
        names = {id(parameter): name for name, parameter in self._strategy.lightning_module.named_parameters()}
        return [names_in(optimizer, names) for optimizer in self._strategy.optimizers]

    def keep_masters(self, engine: Engine, *, are_reachable: bool) -> None:
        """Keep the master weights of an engine that will be closed, if ranks can communicate, for later checkpoints."""
        self.masters_after_fit.clear()
        if are_reachable:
            leaf = self._files.leaf(SaveMode.GATHERED)
            self.masters_after_fit[engine.module] = engine.masters_by_name(leaf=leaf)

    def remove(self, path: Any) -> None:
        """Remove a checkpoint atomically, after all checkpoints saved so far have been written."""
        self._files.saver.expect_no(path)
        if self._strategy.is_global_zero:
            remove = partial(self._strategy.checkpoint_io.remove_checkpoint, path)
            self._files.saver.then(Destination(path).remove if self._files.has_default_io else remove)

    def load(self, path: Any, weights_only: bool | None, restarts: Restarts | None) -> dict[str, Any]:
        """Load a checkpoint, but leave weights and optimizer states in the files: each rank later reads its shards."""
        self._files.finish()
        is_kept = restarts is not None and restarts.loaded(path)
        if not (self._files.are_opened_here or is_kept):
            return self._strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        return self._files.opened(path, weights_only).checkpoint

    def load_module_state(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the weights of a checkpoint; see ``module_state``."""
        module = self._strategy.lightning_module
        about = checkpoint.get(CHECKPOINT_KEY, {})
        strict = strict and not self._lacks_only_frozen(checkpoint["state_dict"], about)
        load_module(module, checkpoint["state_dict"], strict)
        if self.loaded is None:  # otherwise a callback is restoring a checkpoint of this run
            self.loaded = checkpoint.get(CHECKPOINT_KEY)
        engine = engine_of(module)
        if engine is not None and engine is self._strategy.engine:  # otherwise ``setup`` loads them
            engine.load_masters(about.get("masters", {}))

    def _lacks_only_frozen(self, state: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
        """Whether a state dict fits the module, but for parameters that were left out of the checkpoint."""
        if not self._strategy.options.exclude_frozen_parameters:
            return False
        names = self._strategy.lightning_module.state_dict(keep_vars=True).keys()
        left_out = self._left_out | set(about.get(LEFT_OUT, ()))  # parameters may be frozen only when the run starts
        return state.keys() <= names and names - state.keys() <= left_out

    def load_optimizer_states(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states of a checkpoint, and note its position in the data."""
        optimizers, rank = self._strategy.optimizers, self._strategy.global_rank
        check_optimizers(optimizers, checkpoint["optimizer_states"])
        for optimizer, state in zip(optimizers, checkpoint["optimizer_states"]):
            optimizer.load_state_dict(state)
        loaded: dict[str, Any] = checkpoint.get(CHECKPOINT_KEY, {})
        if self.data_loading is not None and "rng" in loaded and loaded is self.loaded:
            rng, data, epochs = loaded["rng"], loaded["data"], loaded.get("epoch", [None])
            self.data_loading.resume(
                rng[rank] if rank < len(rng) else None,
                data[rank] if len(data) == self._strategy.world_size else None,
                epochs[rank % len(epochs)],
            )

    def begin_training(self) -> None:
        """Restore random states and the position in the data, after all hooks that run before training."""
        self.end_loading()
        if self.data_loading is not None:
            self.data_loading.restore()
