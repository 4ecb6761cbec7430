"""ZeRO as a strategy of a Trainer's: Lightning's hooks, each a few lines that call the engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from lightning import pytorch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.early_updates import EarlyUpdates
from lightning_zero.engine import Engine, Report, Unit, engine_of
from lightning_zero.engine.collectives import Communicator
from lightning_zero.engine.offload.config import OffloadConfig
from lightning_zero.engine.promises import awaits_values, is_on_meta, values_may_wait
from lightning_zero.engine.reunion import reunite
from lightning_zero.engine.sources import leave_in_files
from lightning_zero.engine.units import Units
from lightning_zero.loops import attend, leave, meet_between_batches, meets_between_batches, take_turns
from lightning_zero.precision import compute_dtype_of
from lightning_zero.resuming import Bookmark
from lightning_zero.signals import Signals
from lightning_zero.trainer_checkpoints import TrainerCheckpoints, is_absent, nobody


class TrainerStrategy(TrainerCheckpoints):
    """ZeRO (Rajbhandari et al., SC20) for an unmodified LightningModule.

    Arguments:
        stage: 1 shards the optimizer state, 2 the gradients too, 3 the parameters too. Also by the paper's names
            ``"os"``, ``"os+g"``, ``"os+g+p"``.
        offload: which model states are kept outside of the device's memory: ``"cpu"`` for masters and optimizer states
            in the CPU's, ``"nvme"`` for them in files below the folder for temporary ones; an ``OffloadConfig``, or its
            fields in a mapping, for more. ``None`` leaves all on the device.
        units: which modules are gathered and released together: ``"auto"``, module classes, or a predicate of
            (qualified name, module).
        unit_numel: elements up to which neighbouring blocks are gathered together; ``None`` for ``2**20`` with
            automatic units, or less where fewer than four would be left, and each by itself otherwise.
        prefetch: units gathered ahead of need at stage 3.
        overlap: ``False`` waits for every collective where it is started; for debugging.
        reduction_buffers: gradient buffers that may be in reduction at once.
        reduce_dtype: dtype in which gradients travel, ``"fp32"``, ``"bf16"``, ``"fp16"`` or a ``torch.dtype``; by
            default the one in which they are kept: fp32 at any low precision. Micro-batches are added up in that.
        bucket_numel: elements from which on a unit is cut into several collectives; in a model of fewer than four
            times as many, a quarter of the model.
        activation_checkpointing: ``"units"`` computes the forward of each unit again in backward; also module classes
            or a predicate, as for ``units``. ``None`` leaves it to the module.
        allow_any_optimizer: accept optimizer classes that are not known to be elementwise.
        after_fit: ``"full"`` makes the module an ordinary one, whole on the CPU, when a run ends; ``"sharded"`` leaves
            it as it is, for who has no memory for that: then every rank must take part in what is done with it, and
            the next run with the same options goes on with it.
        checkpoint: ``"full"`` saves one ordinary file, which rank 0 writes; ``"sharded"`` a folder in the format of
            ``torch.distributed.checkpoint``, of which each rank writes its parts. Both are read in any case.
        async_save: write checkpoints in the background; training waits only while what is to be written is copied.
        exclude_frozen_parameters: leave parameters with ``requires_grad=False`` out of checkpoints, as for adapters of
            a large model that is stored elsewhere, and let those be missing where this strategy loads one.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as of every strategy.
        process_group_backend: for example ``"nccl"`` or ``"gloo"``; by default what suits the device.
        timeout: of the process group.
        start_method: how the Trainer starts the other processes: ``"popen"`` runs the script again,
            ``"spawn"``, ``"fork"`` and ``"forkserver"`` are ``torch.multiprocessing``'s.

    Raises:
        ValueError: if an argument is not one of the allowed values.
    """

    def __init__(
        self,
        stage: int | str = 3,
        offload: Literal["cpu", "nvme"] | OffloadConfig | Mapping[str, Any] | None = None,
        units: Units = "auto",
        unit_numel: int | None = None,
        prefetch: int = 1,
        overlap: bool = True,
        reduction_buffers: int = 2,
        reduce_dtype: torch.dtype | str | None = None,
        bucket_numel: int = 2**25,
        activation_checkpointing: Units | None = None,
        allow_any_optimizer: bool = False,
        after_fit: Literal["full", "sharded"] = "full",
        checkpoint: Literal["full", "sharded"] = "full",
        async_save: bool = False,
        exclude_frozen_parameters: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        self.model: Any
        self.last_report: Report | None = None
        self._early_updates: EarlyUpdates | None = None
        self._signals: Signals | None = None
        self._backward = ExitStack()  # what is to be left when backward ends
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            offload=offload,
            checkpoint=checkpoint,
            async_save=async_save,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            stage=stage,
            units=units,
            unit_numel=unit_numel,
            prefetch=prefetch,
            overlap=overlap,
            reduction_buffers=reduction_buffers,
            reduce_dtype=reduce_dtype,
            bucket_numel=bucket_numel,
            activation_checkpointing=activation_checkpointing,
            allow_any_optimizer=allow_any_optimizer,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        if after_fit not in ("full", "sharded"):
            raise ValueError(f"after_fit={after_fit!r} must be 'full' or 'sharded'.")
        self._after_fit = after_fit

    # -- the processes ----------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Read by Lightning: data is split over the ranks and ``sync_dist`` means something."""
        return True

    @override
    def setup_environment(self) -> None:
        self._has_come_back = self._has_tried_to_come_back = False
        self._loaded = None
        super().setup_environment()
        reset_seed()
        if self.lightning_module is not None:
            reunite(self.lightning_module, self._handshake_timeout)

    @property
    @override
    def _communicator(self) -> Communicator | None:
        return self.engine.communicator if self.engine is not None else None

    @property
    @override
    def _is_cut_off(self) -> bool:
        return super()._is_cut_off and not self._has_come_back

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduce(tensor, group, reduce_op)

    @property
    @override
    def _shared_exceptions(self) -> tuple[type[BaseException], ...]:
        exceptions = self.lightning.utilities.exceptions
        return exceptions.SIGTERMException, exceptions._TunerExitException

    # -- setting up -------------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            compute_dtype_of(precision_plugin, self.lightning)  # refuses some, before any process is started
        self._precision_plugin = precision_plugin

    @property
    def units(self) -> list[Unit]:
        """The units of the module, the root unit first; empty outside of a run."""
        return self.engine.units if self.engine is not None else []

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.model is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.engine = self._kept_engine()
        self._early_updates = EarlyUpdates(self.lightning) if fitting and self._updates_early else None
        if self.engine is None:
            if fitting and self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
            if isinstance(self.precision_plugin, self._converting_precisions):
                leave_in_files(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
        if self.engine is None and self._cuts(trainer):
            self.engine = Engine(
                self.lightning_module,
                _real(self.optimizers) if fitting else [],
                device=self.root_device,
                handshake_timeout=self._handshake_timeout,
                **self._options_of_engine,
            )
            _options_of[self.engine] = self._options_of_engine
        if self.engine is not None:
            self.engine.load_masters(self._masters)
            attend(trainer, self.engine)
        elif not self._is_single:
            _sync_module_states(self.lightning_module)
        if not self._is_single and meets_between_batches(trainer):
            self._signals = Signals(trainer, self._communicator)
            meet_between_batches(trainer, self._signals.before_training_batch)
        self._masters = {}
        self._loaded = {} if self._loaded is None else self._loaded
        self.setup_precision_plugin()
        if fitting:
            self._bookmark = Bookmark(trainer, self.root_device)

    @property
    def _updates_early(self) -> bool:
        overlaps = self._engine_options["overlap"] and self._offload is not None and self._offload.overlap
        return overlaps and self._offload is not None and self._offload.optimizer is not None

    @property
    def _options_of_engine(self) -> dict[str, Any]:
        return {**self._engine_options, "compute_dtype": compute_dtype_of(self.precision_plugin, self.lightning)}

    def _kept_engine(self) -> Engine | None:
        """The engine that an earlier run has left the module with (``after_fit="sharded"``), if this run can go on."""
        assert self.lightning_module is not None
        engine = engine_of(self.lightning_module)
        if engine is None:
            return None
        if _options_of.get(engine) != self._options_of_engine:
            engine.close(device=self.root_device)
            return None
        engine.sync_buffers()
        return engine

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        if self.engine is not None:  # `trainer.optimizers = [...]`, or `setup_optimizers` called once more
            self.engine.set_optimizers(_real(optimizers))
        self._optimizers = optimizers
        self._lightning_optimizers = [
            self.lightning.core.optimizer.LightningOptimizer._to_lightning_optimizer(each, self) for each in optimizers
        ]

    def _cuts(self, trainer: Trainer) -> bool:
        """Whether this run shards the module, or needs the engine to give it its values."""
        assert self.lightning_module is not None
        return trainer.state.fn == TrainerFn.FITTING or self._is_sharded or awaits_values(self.lightning_module)

    @property
    def _converting_precisions(self) -> tuple[type[Precision], ...]:
        plugins = self.lightning.plugins.precision
        return plugins.HalfPrecision, plugins.DoublePrecision

    @override
    def model_to_device(self) -> None:
        """Move what is not sharded; parameters are moved as they are cut, so that a device never holds them whole."""
        assert self.model is not None and self.lightning_module is not None
        if not self._cuts(self.lightning_module.trainer):
            self.model.to(self.root_device)
            return
        _update_properties(self.lightning_module, device=self.root_device)
        self.model._apply(lambda t: t if isinstance(t, Parameter) or is_on_meta(t) else t.to(self.root_device))

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where tensors are made in ``configure_model`` and ``Trainer.init_module``."""
        with values_may_wait(), self._making_module(empty_init), self.precision_plugin.tensor_init_context():
            yield

    # -- a step -----------------------------------------------------------------------------------------------------

    def _window(self) -> AbstractContextManager[None]:
        return self.engine.window() if self.engine is not None else nullcontext()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._window():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._window():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._window():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._window():
            return super().predict_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._early_updates is not None and self.engine is not None and self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            self._backward.enter_context(self._early_updates.around_backward(self.engine, trainer, closure_loss))

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._backward.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._backward.__exit__(type(exception), exception, exception.__traceback__)
        super().on_exception(exception)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.engine.no_sync() if self.engine is not None else nullcontext():
            yield

    # -- loops of uneven length, and those that a signal ends -------------------------------------------------------

    def _take_turns(self) -> None:
        engine, signals = self.engine, self._signals
        if (engine is None and signals is None) or self.lightning_module is None:
            return
        if signals is not None:
            signals.begin_loop()

        def take_turn(position: int | None) -> None:
            if signals is not None and position is not None:
                signals.before_batch()
            if engine is not None:
                engine.take_turn(position)

        take_turns(self.lightning_module.trainer._active_loop, take_turn)

    @override
    def on_validation_start(self) -> None:
        self._take_turns()

    @override
    def on_test_start(self) -> None:
        self._take_turns()

    @override
    def on_predict_start(self) -> None:
        self._take_turns()

    # -- the end ----------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._signals is not None:
            self._signals.at_end()

    @override
    def teardown(self) -> None:
        try:
            self._finish_saving()
        finally:
            self._teardown()

    def _teardown(self) -> None:
        signals, self._signals = self._signals, None
        if signals is not None:
            signals.close()
        if self._bookmark is not None:
            self._bookmark.close()
        if self.engine is not None:
            if self.lightning_module is not None:
                leave(self.lightning_module.trainer)
            self.last_report = self.engine.report()
            if self._after_fit == "sharded" and not self._is_cut_off:
                self._teardown_but_for_module()
                return
        engine, self.engine = self.engine, None
        try:
            if engine is not None:
                self._end(engine)
        finally:
            self._teardown_but_for_engine()

    def _end(self, engine: Engine) -> None:
        """Make the module an ordinary one, and keep what a checkpoint of it may still want.

        Raises:
            Exception: what went wrong first; but if an exception has ended the run, that is the one to be seen.
        """
        error = None
        try:
            if engine.optimizers:
                self._masters_after_fit, self._fitted = {}, weakref.ref(engine.module)
                if not self._is_cut_off:
                    self._masters_after_fit = engine.masters_by_name(keep=self.is_global_zero)
        except Exception as raised:
            error = raised
        self._close([engine], error, device="cpu")

    def _teardown_but_for_engine(self) -> None:
        if self.lightning_module is not None and self._layer_sync and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        if self.lightning_module is not None and awaits_values(self.lightning_module):
            # The run has failed before the module had values: that error is to be seen, not that it cannot be moved.
            self.lightning_module._apply(lambda t: t if is_on_meta(t) else t.cpu())
            self._teardown_but_for_module()
            return
        super().teardown()

    def _teardown_but_for_module(self) -> None:
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def __getstate__(self) -> dict[str, Any]:
        # users copy trainers and strategies: the engine belongs to one
        of_one: dict[str, Any] = {"engine": None, "_bookmark": None, "_masters_after_fit": {}, "_fitted": nobody}
        of_one |= {"_early_updates": None, "_signals": None, "_backward": ExitStack()}
        return {**super().__getstate__(), **of_one}


_options_of: weakref.WeakKeyDictionary[Engine, dict[str, Any]] = weakref.WeakKeyDictionary()


def _real(optimizers: list[Optimizer]) -> list[Optimizer]:
    return [optimizer for optimizer in optimizers if not is_absent(optimizer)]


class ZeroStrategy(TrainerStrategy, ParallelStrategy):
    __doc__ = TrainerStrategy.__doc__
    lightning: ClassVar[ModuleType] = pytorch


# Lightning asks for DDPStrategy where it means "every rank holds the module": torch.compile, for one.
DDPStrategy.register(ZeroStrategy)
ZeroStrategy.register_strategies(StrategyRegistry)
