"""Checkpoints of the Trainer's strategy: save, load and resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.callbacks.restarts import Restarts
from lightning_zero.checkpoint.checksums import DamagedCheckpointError, NoCheckpointError
from lightning_zero.checkpoint.commit import Destination, remove
from lightning_zero.checkpoint.fitting import check_module, check_optimizers
from lightning_zero.checkpoint.form import CHECKPOINT_KEY, FORMAT, LEFT_OUT, NAMES, configs_of_models
from lightning_zero.checkpoint.saver import Saver
from lightning_zero.checkpoint.saving import by_name, names_in
from lightning_zero.checkpoint.snapshot import snapshot
from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.comm.tensor_parallel import in_full, is_dtensor
from lightning_zero.engine.init.deferred_param import give_values, is_deferred, taking_values
from lightning_zero.engine.init.sources import leave_in_files, listed
from lightning_zero.engine.tensor.sharded_tree import Leaf, walk
from lightning_zero.strategies.lightning_internals import dump_checkpoint, is_absent
from lightning_zero.strategies.newest import is_last, others_by_age
from lightning_zero.strategies.options import TrainerOptions
from lightning_zero.strategies.processes import ZeroProcesses
from lightning_zero.strategies.resuming import DataLoadingState, in_tensors

log = logging.getLogger("lightning_zero.strategies.trainer")  # projects may filter by this name


class TrainerCheckpoints(ZeroProcesses):
    """Checkpoint methods of a Trainer's strategy. The constructor takes the arguments of ``ZeroProcesses``."""

    _options_class = TrainerOptions
    options: TrainerOptions
    model: Any

    def __init__(self, **options: Any) -> None:
        self.engine: Engine | None = None
        super().__init__(**options)
        self._has_come_back = False  # whether this run can communicate although it has failed
        self._masters: dict[str, Tensor] = {}
        self._data_loading: DataLoadingState | None = None
        self._saves_epoch_state = False
        self._loaded: dict[str, Any] | None = None
        # Rank 0's master weights after a fit, by module: a checkpoint may be saved after the engine has been closed.
        self._masters_after_fit: WeakKeyDictionary[Any, dict[str, Tensor]] | None = None
        self._restarts: Restarts | None = None
        self._leniency: Any = None  # the handle of a hook; see ``_let_frozen_be_missing``
        self._copies_parts = False  # whether ``_taking_parts`` is in effect

    def _convert_module(self) -> None:
        """Convert the module to the Trainer's precision."""
        if self._converts_module:
            leave_in_files(self.model)
        self.model = self.precision_plugin.convert_module(self.model)

    @property
    def _converts_module(self) -> bool:
        """Whether the Trainer's precision converts all parameters to one dtype."""
        precisions = self.lightning.plugins.precision
        return isinstance(self.precision_plugin, (precisions.HalfPrecision, precisions.DoublePrecision))

    def _can_save(self) -> bool:
        """Whether the ranks can save a checkpoint.

        Saving requires all ranks, so after a failure it is possible only if all have failed alike.
        """
        if not self._is_cut_off:
            return True
        if self._mesh is not None:
            return False
        if self.engine is None:
            return True
        if self._have_all_failed:
            self._have_all_failed = False
            with suppress(RuntimeError):  # another rank does not save, and has ended
                self.engine.rejoin()
                self._has_come_back = True
        return not self._is_cut_off

    @property
    def _updates(self) -> object:
        updates = self.engine.updates if self.engine is not None else 0
        return f"rank {self.global_rank} is updating" if updates is None else updates

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return self._mesh is not None  # with a mesh, some parameters are DTensors before setup: each rank has a share

    @property
    def _has_hooks(self) -> bool:
        """Whether the project overrides ``on_save_checkpoint``, which runs on every rank."""
        hooked = [self.lightning_module, *self.lightning_module.trainer.callbacks]
        return not all(
            each.on_save_checkpoint.__module__.startswith(("lightning.", "pytorch_lightning.")) for each in hooked
        )

    @property
    def _state_is_in_parts(self) -> bool:
        """Whether a checkpoint's tensors stay sharded at first: ranks write their shards, or rank 0 gathers them later.

        For a full checkpoint, tensors that the project's hooks read must be gathered immediately.
        """
        return self._takes_parts or (self._assembles_in_background and not self._has_hooks)

    @property
    def _takes_parts(self) -> bool:
        """Whether each rank saves or copies only its own shards."""
        return self._saves_in_parts or self._copies_parts

    @property
    def _leaf_for_hooks(self) -> Leaf:
        """The ``_leaf`` for entries that the project's hooks read. With hooks, every rank needs the values."""
        return self._leaf(parts=self._state_is_in_parts, keeps=self.is_global_zero or self._has_hooks)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state dict on rank 0, and meta tensors of the same names and shapes on the other ranks.

        If the project overrides ``on_save_checkpoint``, which runs on every rank, every rank receives the full state
        dict. For a sharded checkpoint, the tensors stay sharded.
        """
        if not self._can_save():
            return {}
        if self.engine is not None:
            return self.engine.full_state_dict(leaf=self._leaf_for_hooks, without=self._left_out)
        state = super().lightning_module_state_dict()
        for name in self._left_out & set(state):
            del state[name]
        return walk(state, self._full_leaf, is_dtensor)

    def _full_leaf(self, tensor: Tensor) -> Tensor:
        """Return a DTensor's full value on ranks that need it, and a meta tensor on the others. Collective."""
        return self._leaf(parts=False, keeps=self.is_global_zero or self._has_hooks)(in_full(tensor))

    @property
    def _left_out(self) -> set[str]:
        """Names of parameters that are not saved."""
        if not self.options.exclude_frozen_parameters or self._copies_parts:  # a restart must not lose their values
            return set()
        parameters = self.lightning_module.named_parameters(remove_duplicate=False)
        return {name for name, parameter in parameters if not parameter.requires_grad}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, self.lightning.core.optimizer.LightningOptimizer):
            optimizer = optimizer.optimizer
        if not self._can_save():
            return {}
        if self.engine is None or is_absent(optimizer):
            return walk(super().optimizer_state(optimizer), self._full_leaf, is_dtensor)
        with self.engine.rendezvous.have_met() if self._copies_parts else nullcontext():
            return self.engine.full_optimizer_state_dict(optimizer, leaf=self._leaf_for_hooks)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not self._can_save():
            log.warning(
                "%s was not written: after the exception, the other ranks, which hold shards of the model and of the "
                "optimizer's state, could not take part in saving, or were at another step. To keep a checkpoint in "
                "such cases, also save at intervals: ModelCheckpoint(every_n_train_steps=...).",
                filepath,
            )
            return
        to_resume = "optimizer_states" in checkpoint  # false with ``save_weights_only=True``
        about = self._about_checkpoint(to_resume=to_resume)
        checkpoint = {**checkpoint, CHECKPOINT_KEY: about}
        if self._takes_parts:
            self._save_in_parts(self._tree_in(checkpoint), checkpoint, filepath, storage_options)
        elif not self._has_default_io or storage_options is not None:
            whole, save = self._gathered(checkpoint), super().save_checkpoint
            writes_later = isinstance(self.checkpoint_io, self.lightning.plugins.AsyncCheckpointIO)
            self._on_rank_0(lambda: save(snapshot(whole) if writes_later else whole, filepath, storage_options))
        else:
            communicator = self.engine.communicator if self.engine is not None and self._state_is_in_parts else None
            self._save_whole(checkpoint, filepath, communicator)
        if self._restarts is not None and to_resume:
            self._restarts.note(filepath)

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
    def _taking_parts(self) -> Iterator[None]:
        before, self._copies_parts = self._copies_parts, True
        try:
            yield
        finally:
            self._copies_parts = before

    def state_to_keep(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the entries of a checkpoint that are stored in DCP's format, and all others. Tensors stay sharded.

        Collective. The ranks must have synchronized just before.
        """
        with self._taking_parts(), self.saving_epoch_state():
            checkpoint = dump_checkpoint(self.lightning_module.trainer)
            checkpoint[CHECKPOINT_KEY] = self._about_checkpoint(to_resume=True)
            return self._tree_in(checkpoint), checkpoint

    def save_generation(
        self, saver: Saver, path: str, folders: list[int], before: Callable[[Destination], None]
    ) -> None:
        """Begin to save the state to a folder in each machine's memory; see ``Saver.save_in_parts``. Collective."""
        tree, rest = self.state_to_keep()
        rank, ranks = self.global_rank, self.all_gather_values
        first = before if rank in folders else None
        saver.save_in_parts(tree, rest, path, self._written_by, rank, ranks, self._on_rank_0, folders, first)

    def save_last(self, path: Any) -> None:
        """Save the last checkpoint of a job that a signal ends. Collective.

        It is sharded if there is one machine, and otherwise as in ``options.checkpoint``.
        """
        with self._taking_parts() if self.num_nodes == 1 else nullcontext(), self.saving_epoch_state():
            self.lightning_module.trainer.save_checkpoint(path)
        self._alike(self._saver.finish)  # at the end of the run, a save in the background may be abandoned

    @contextmanager
    def saving_epoch_state(self) -> Iterator[None]:
        """Context in which checkpoints contain the state of the running epoch, from which the job continues."""
        self._saves_epoch_state = True
        try:
            yield
        finally:
            self._saves_epoch_state = False

    def _about_checkpoint(self, *, to_resume: bool) -> dict[str, Any]:
        """Return this package's entry for a checkpoint: versions, and state that Lightning does not save."""
        about: dict[str, Any] = {"format": FORMAT, "written_by": self._written_by}
        if left_out := self._left_out:
            about[LEFT_OUT] = sorted(left_out)
        if to_resume and not self._takes_parts:  # sharded checkpoints store optimizer states by name
            about[NAMES] = {f"optimizer_{number}": names for number, names in enumerate(self._names_in_optimizers())}
        if to_resume and self._data_loading is not None:
            loading = self._data_loading
            ranks = self.all_gather_values(
                in_tensors(loading.state_with_epoch() if self._saves_epoch_state else loading.state())
            )
            about |= {name: [state[name] for state in ranks] for name in ranks[0]}
        masters = (self._masters_after_fit or {}).get(self.lightning_module, {})
        if self.engine is not None and to_resume:
            leaf = self._leaf(parts=self._state_is_in_parts, keeps=self.is_global_zero)
            masters = self.engine.masters_by_name(leaf=leaf)
        if masters and to_resume:
            about["masters"] = masters
        if configs := configs_of_models(self.lightning_module):
            about["transformers"] = configs
        return about

    def _names_in_optimizers(self) -> list[list[str]]:
        """Return each optimizer's parameter names in the order in which its state dict numbers them."""
        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        return [names_in(optimizer, names) for optimizer in self.optimizers]

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint atomically, after all checkpoints saved so far have been written."""
        if self.is_global_zero:
            act = remove if self._has_default_io else self.checkpoint_io.remove_checkpoint
            self._saver.then(partial(act, filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None, **options: Any) -> dict[str, Any]:
        """Load a checkpoint, but leave weights and optimizer states in the files: each rank later reads its shards.

        Checksums detect damage here. If ``ckpt_path="last"`` resolved to a damaged checkpoint, or to something that is
        not a checkpoint, the newest undamaged checkpoint of the Trainer's callbacks is loaded instead.

        Raises:
            FileNotFoundError: if there is nothing at the path.
            DamagedCheckpointError: if the checkpoint is incomplete or altered.
            NoCheckpointError: if the path contains no checkpoint.
            UnsafeFileError: if the checkpoint contains more than data.
            ValueError: if a newer version wrote the checkpoint.
        """
        self._alike(self._saver.finish)
        is_kept = self._restarts is not None and self._restarts.loaded(checkpoint_path)
        if not (self._loads_itself or is_kept):
            return super().load_checkpoint(checkpoint_path, weights_only, **options)
        try:
            return self._opened(checkpoint_path, weights_only).checkpoint
        except Exception as error:  # raised on every rank, but the errors may differ
            trainer = self.lightning_module.trainer
            if not is_last(trainer, checkpoint_path) or (self._restarts is not None and self._restarts.is_trying):
                raise
            # FileNotFoundError means an empty folder here.
            is_spoilt = isinstance(error, (DamagedCheckpointError, NoCheckpointError, FileNotFoundError))
            others = others_by_age(trainer, checkpoint_path) if self.is_global_zero else []
            of_ranks = self.all_gather_values((is_spoilt, others))
            if not all(spoilt for spoilt, _ in of_ranks):
                raise
            _, others = of_ranks[0]
            for other in others:
                with suppress(Exception):
                    checkpoint = self._opened(other, weights_only).checkpoint
                    rank_zero_warn(f"{error} Resuming instead from {other}, the newest undamaged checkpoint.")
                    return checkpoint
            if others:
                raise DamagedCheckpointError(
                    f"{error} All other checkpoints are damaged, too: {listed(others)}."
                ) from error
            raise

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._restarts is not None and self.engine is None:
            self._convert_module()  # before loading: in 64-true, fp32 parameters would round the loaded values
        self._let_frozen_be_missing(checkpoint.get(CHECKPOINT_KEY, {}))
        check_module(self.lightning_module, checkpoint["state_dict"], strict)
        with taking_values(self.lightning_module, is_deferred) as targets:
            super().load_model_state_dict(checkpoint, strict)
        give_values(targets, wait=True)
        if self._loaded is None:  # otherwise a callback is restoring a checkpoint of this run
            self._loaded = checkpoint.get(CHECKPOINT_KEY)
        masters = checkpoint.get(CHECKPOINT_KEY, {}).get("masters", {})
        if self.engine is not None and engine_of(self.lightning_module) is self.engine:
            self.engine.load_masters(masters)
        else:
            self._masters = masters  # until the module is sharded

    def _let_frozen_be_missing(self, about: Mapping[str, Any]) -> None:
        """Accept state dicts without the parameters that were left out of the checkpoint, until the run starts.

        Callbacks restore state dicts, too (``WeightAveraging``).
        """
        self._accept_all()
        if not self.options.exclude_frozen_parameters:
            return
        left_out = self._left_out | set(about.get(LEFT_OUT, ()))  # parameters may be frozen only when the run starts

        def let_be_missing(module: Any, keys: Any) -> None:
            keys.missing_keys[:] = [name for name in keys.missing_keys if name not in left_out]

        self._leniency = self.lightning_module.register_load_state_dict_post_hook(let_be_missing)

    def _accept_all(self) -> None:
        if self._leniency is not None:
            self._leniency.remove()
            self._leniency = None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        check_optimizers(self.optimizers, checkpoint["optimizer_states"])
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            optimizer.load_state_dict(state)
        loaded: dict[str, Any] = checkpoint.get(CHECKPOINT_KEY, {})
        if self._data_loading is not None and "rng" in loaded and loaded is self._loaded:
            rng, data, epochs, own = loaded["rng"], loaded["data"], loaded.get("epoch", [None]), None
            if len(data) == self.world_size:
                own = data[self.global_rank]
            self._data_loading.resume(
                rng[self.global_rank] if self.global_rank < len(rng) else None,
                own,
                epochs[self.global_rank % len(epochs)],
            )

    def on_train_start(self) -> None:
        super().on_train_start()
        self._accept_all()
        self._loaded = self._loaded or {}  # from here on, callbacks only restore checkpoints of this run
        if self._data_loading is not None:
            self._data_loading.restore()
