"""ZeRO strategy for Lightning's Trainer: implements Lightning's strategy hooks by calling the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from lightning import pytorch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.callbacks.restarts import Restarts, keep_for_next_attempt, name_of_job
from lightning_zero.engine import (
    Engine,
    Report,
    ShardedTensor,
    Simulation,
    Unit,
    consolidate,
    deferred_param,
    engine_of,
    tensor_parallel,
)
from lightning_zero.strategies import lightning_internals as internals
from lightning_zero.strategies.base import BaseStrategy, TrainerOptions, takes_options
from lightning_zero.strategies.loops import (
    Wrappers,
    attend,
    log_graphs,
    meet_between_batches,
    name_as_if_written,
    read_for_loggers,
    take_turns,
)
from lightning_zero.strategies.out_of_memory import say_who_holds_memory
from lightning_zero.strategies.resuming import DataLoadingState
from lightning_zero.strategies.signals import Signals
from lightning_zero.strategies.trainer_checkpoints import TrainerCheckpoints

_SAMPLER = (
    "keep use_distributed_sampler=True, or create the sampler with DistributedSampler(dataset, "
    "**trainer.strategy.distributed_sampler_kwargs)"
)


def _in_window(step: str) -> Callable[..., Any]:
    def run(self: TrainerStrategy, *args: Any, **kwargs: Any) -> Any:
        engine, module, run_step = self.engine, self.lightning_module, getattr(super(TrainerStrategy, self), step)
        if engine is None:
            return run_step(*args, **kwargs)
        if step not in self._compared:
            self._compared.add(step)
            engine.tensor_parallel.check_same(args[0] if args else kwargs, _SAMPLER)
        with engine.window():
            output = run_step(*args, **kwargs)
        # Lightning uses DDP only in a fit, and with manual optimization disables DDP's synchronisation after each step.
        if not module.automatic_optimization or module.trainer.state.fn != TrainerFn.FITTING:
            engine.windows.buffers_follow = False
        return output

    return run


@takes_options(TrainerOptions, ParallelStrategy)
class TrainerStrategy(BaseStrategy):
    """ZeRO (Rajbhandari et al., SC20) for an unmodified LightningModule.

    Arguments:
        {options}
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for any strategy.

    Raises:
        TypeError, ValueError: if an option does not exist, or its value is not allowed.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = lightning_zero.ZeroStrategy(stage=3, prefetch=2, reduce_dtype="bf16")
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    """

    _simulation: Simulation | None = None  # set in plans
    options: TrainerOptions
    model: Any

    def __init__(self, stage: int | str = 3, **options: Any) -> None:
        self.engine: Engine | None = None
        self.last_report: Report | None = None
        self._signals: Signals | None = None
        self._compared: set[str] = set()  # steps whose first batch has been compared between tensor-parallel ranks
        self._was_sharded = False  # whether this run reuses the engine of an earlier run
        self._restarts: Restarts | None = None
        self._wrappers = Wrappers()
        super().__init__(stage=stage, **options)
        self.checkpoints = TrainerCheckpoints(self, self._files)

    # -- the processes ----------------------------------------------------------------------------------------------

    is_distributed = True  # Lightning reads this attribute to split data over the ranks and to honour `sync_dist`

    def setup_environment(self) -> None:
        self.checkpoints.loaded = None
        super().setup_environment()
        reset_seed()
        if self.lightning_module is not None and self.ranks.mesh is not None:
            internals.set_device_mesh(self.lightning_module, self.ranks.mesh)
        if self.lightning_module is not None:
            consolidate(self.lightning_module, self.root_device)
            self._restarts = self._new_restarts()
            if self._restarts is not None:
                connector = internals.checkpoint_connector(self.lightning_module.trainer)
                self._wrappers.put(connector, "resume_start", self._restarts.resume)

    def _new_restarts(self) -> Restarts | None:
        """Return the ``Restarts`` of a fit, or None if no state is to be kept."""
        config, trainer = self.options.resilience, self.lightning_module.trainer
        if config is None or trainer.state.fn != TrainerFn.FITTING or trainer.fast_dev_run:
            return None
        job = config.job or self.broadcast(name_of_job())
        if job is None:
            rank_zero_warn(
                "resilience has no effect in this run: no launcher would restart the processes, and the job has no "
                "name. Start the job with torchrun --max-restarts=3 or SLURM, or name the job: "
                "resilience=ResilienceConfig(job=...)."
            )
            return None
        if self._launcher is not None and self.options.start_method != "popen":
            raise ValueError(
                f"resilience cannot be used with start_method={self.options.start_method!r}, since such ranks do not "
                "know which fit of the script they run: start the script with torchrun, or leave resilience out."
            )
        return Restarts(config, self, trainer, job)

    @property
    def _shared_exceptions(self) -> tuple[type[BaseException], ...]:
        return self.lightning.utilities.exceptions.SIGTERMException, internals.tuner_exit(self.lightning)

    # -- setting up -------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> list[Engine]:
        return [self.engine] if self.engine is not None else []

    @property
    def units(self) -> list[Unit]:
        """The module's units, with the root unit first; empty if there is no engine."""
        return self.engine.units if self.engine is not None else []

    def setup(self, trainer: Trainer) -> None:
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.engine = self._kept_engine(fitting=fitting)
        self._was_sharded = self.engine is not None
        if self.engine is None:
            sync = self._layer_sync if fitting else None
            if sync is not None:
                self.model = sync.apply(self.model)
            self._convert_module()
            _made_for[self.lightning_module] = sync, self.precision_plugin.precision
            self.model_to_device()
        log_graphs(trainer, self.lightning_module if self.engine is None else None, self._wrappers)
        if fitting:
            self.setup_optimizers(trainer)
        if self.engine is None and self._cuts(trainer):
            self.engine = Engine(
                self.lightning_module,
                _real(self.optimizers) if fitting else [],
                config=self._config_of_run(),
                device=self.root_device,
                mesh=self.ranks.mesh,
                simulation=self._simulation,
            )
        if self.engine is not None:
            self.engine.windows.buffers_follow = fitting
            self.engine.load_masters((self.checkpoints.loaded or {}).get("masters", {}))
            attend(trainer, self.engine, self._wrappers)
            read_for_loggers(internals.no_experiment(self.lightning), self._wrappers)
        elif not self.ranks.is_single:
            internals.sync_module_states(self.lightning_module)
        if not self.ranks.is_single or self._restarts is not None:
            self._signals = Signals(trainer, self.ranks, self._restarts)
            meet_between_batches(trainer, self._signals.agree, self._signals.end_epoch, self._wrappers)
        if self.options.async_save:
            name_as_if_written(trainer, self._files.saver, self._wrappers)
        if not self.restore_checkpoint_after_setup:
            self.checkpoints.end_loading()
        self._compared.clear()
        self.setup_precision_plugin()
        if fitting:
            self.checkpoints.data_loading = DataLoadingState(trainer, self.root_device, self._wrappers)

    def _kept_engine(self, *, fitting: bool) -> Engine | None:
        """Return the engine left by an earlier run (see ``after_fit``), or None if this run cannot use it."""
        engine = engine_of(self.lightning_module)
        if engine is None:
            return None
        sync, precision = _made_for.get(self.lightning_module, (None, None))
        if (
            engine.config == self._config_of_run()
            and engine.holds_all_of(self.lightning_module)
            and (not fitting or type(sync) is type(self._layer_sync))
            and precision == self.precision_plugin.precision
        ):
            engine.windows.sync_buffers()
            return engine
        engine.close(device=self.root_device)
        self._revert_layers()
        return None

    def _convert_module(self) -> None:
        """Convert the module to the Trainer's precision."""
        self.model = self.precision_plugin.convert_module(self.model)

    def _revert_layers(self) -> None:
        """Undo ``sync_batchnorm``, also of an earlier run after which the module has stayed sharded."""
        sync, _ = _made_for.pop(self.lightning_module, (None, None))
        if sync is not None:
            self.model = sync.revert(self.model)

    @property
    def optimizers(self) -> list[Optimizer]:
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        if self.engine is not None:  # `trainer.optimizers = [...]`, or a second call to `setup_optimizers`
            self.engine.set_optimizers(_real(optimizers))
        super(TrainerStrategy, type(self)).optimizers.fset(self, optimizers)

    def _cuts(self, trainer: Trainer) -> bool:
        """Whether this run needs an engine: it is a fit, or parameters are sharded, DTensors or deferred."""
        module = self.lightning_module
        return (
            trainer.state.fn == TrainerFn.FITTING
            or self._is_sharded
            or tensor_parallel.has_dtensors(module)
            or deferred_param.awaits_values(module)
        )

    def model_to_device(self) -> None:
        """Move the module to the device. If there will be an engine, move only buffers: the engine moves parameters."""
        if not self._cuts(self.lightning_module.trainer):
            self.model.to(self.root_device)
            return
        internals.update_properties(self.lightning_module, device=self.root_device)
        self.model._apply(
            lambda t: t if isinstance(t, Parameter) or deferred_param.is_on_meta(t) else t.to(self.root_device)
        )

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context of ``configure_model`` and ``Trainer.init_module``, in which modules are created."""
        precision = self.precision_plugin.tensor_init_context()
        with deferred_param.values_may_wait(), self._making_module(empty_init), precision:
            yield

    # -- a step -----------------------------------------------------------------------------------------------------

    training_step, validation_step, test_step, predict_step = map(
        _in_window, ("training_step", "validation_step", "test_step", "predict_step")
    )

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self.engine is not None and not self.lightning_module.automatic_optimization:
            self.engine.windows.note_forward()  # as in Lightning's ``prepare_for_backward``

    def on_exception(self, exception: BaseException) -> None:
        is_asked_to_end = isinstance(exception, self.lightning.utilities.exceptions.SIGTERMException)
        keep_for_next_attempt()
        if self._restarts is not None and self.ranks.ended_by is None and is_asked_to_end:
            self._restarts.save_before_end()
        say_who_holds_memory(exception, self.engine)
        super().on_exception(exception)

    def block_backward_sync(self) -> Any:
        return self.engine.no_sync() if self.engine is not None else nullcontext()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        # With a mesh, some parameters are DTensors before setup, and each rank has a share.
        return self.ranks.mesh is not None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.checkpoints.module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.checkpoints.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        can_resume = self.checkpoints.save(checkpoint, filepath, storage_options)
        if self._restarts is not None and can_resume:
            self._restarts.note(filepath, self._files.saver.then)

    def remove_checkpoint(self, filepath: Any) -> None:
        self.checkpoints.remove(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoints.load(checkpoint_path, weights_only, self._restarts)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._restarts is not None and self.engine is None:
            # before loading: in 64-true, fp32 parameters would round the loaded values
            self._convert_module()
        self.checkpoints.load_module_state(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.checkpoints.load_optimizer_states(checkpoint)

    # -- loops of uneven length -------------------------------------------------------------------------------------

    def _take_turns(self) -> None:
        engine = self.engine
        if engine is not None and self.lightning_module is not None:
            loop = internals.active_loop(self.lightning_module.trainer)
            take_turns(loop, lambda position: engine.take_turn(position))  # copies of a Trainer do not copy functions

    on_validation_start = on_test_start = on_predict_start = _take_turns

    # -- the end ----------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        super().on_train_start()
        self.checkpoints.begin_training()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._signals is not None:
            self._signals.agree(is_end=True)

    def _teardown(self) -> None:
        restarts, self._restarts = self._restarts, None
        if restarts is not None:
            restarts.close(has_ended=self.ranks.ended_by is None)
            del restarts  # and its copy of the state, before the module is gathered
            if self.checkpoints.data_loading is not None and self.ranks.ended_by is None:
                self.checkpoints.data_loading.restore()  # if the fit had ended in an earlier attempt
        signals, self._signals = self._signals, None
        if signals is not None:
            signals.close()
        self._wrappers.take_off()
        engine, stays_sharded, error = self.engine, False, None
        if engine is not None:
            self.last_report = engine.report()
            try:
                stays_sharded = self._stays_sharded(engine)
                if engine.optimizers and not stays_sharded:
                    self.checkpoints.keep_masters(engine, are_reachable=not self.ranks.is_cut_off)
            except Exception as raised:
                error = raised
        if stays_sharded:
            self._teardown_but_for_module()
            return
        self.engine = None
        try:
            if engine is not None:
                self._close([engine], error, device="cpu")
        finally:
            self._teardown_but_for_engine()

    def _stays_sharded(self, engine: Engine) -> bool:
        """Whether the module stays sharded after the run. All ranks return the same value. Collective."""
        if self.ranks.is_cut_off or self.options.after_fit == "full" or self.options.start_method != "popen":
            return False  # spawned processes end now, and send an ordinary module's weights to the main process
        if self.options.after_fit == "sharded":
            return True
        shortage = engine.shortage_for_whole(keeps_masters=self.is_global_zero and bool(engine.optimizers))
        if shortage is not None and not self._was_sharded:
            rank_zero_warn(
                "The module stays sharded after this run: the host memory (a tenth of it is left free) does not "
                f"suffice for an ordinary module and its optimizer states on every rank. {shortage}. Every "
                "rank must take part in every use of the sharded module, which the next run reuses. For an ordinary "
                "module, set after_fit='full'; for one file, save a checkpoint and run 'lightning-zero checkpoint "
                "export' on it."
            )
        return shortage is not None

    def _teardown_but_for_engine(self) -> None:
        module = self.lightning_module
        if module is not None and self.model is not None:
            self._revert_layers()
        if module is not None and (deferred_param.awaits_values(module) or any(map(_stays, module.parameters()))):
            # The run has failed, perhaps before deferred parameters had values. Moving them would raise another error.
            module._apply(lambda t: t if _stays(t) else t.cpu())
            self._teardown_but_for_module()
        else:
            super(BaseStrategy, self).teardown()

    def _teardown_but_for_module(self) -> None:
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def __getstate__(self) -> dict[str, Any]:
        # Users copy trainers and strategies; these attributes belong only to the original.
        return {**super().__getstate__(), **dict.fromkeys(("engine", "_signals", "_restarts"))}


_made_for: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()
"""By module, the plugin that has synchronised its layers (``sync_batchnorm``), if any, and the precision of its run."""


def _stays(tensor: Tensor) -> bool:
    """Whether a tensor cannot be moved after a failure: it is deferred, or other ranks have parts of it."""
    return deferred_param.is_deferred(tensor) or isinstance(tensor, ShardedTensor)


def _real(optimizers: list[Optimizer]) -> list[Optimizer]:
    return [optimizer for optimizer in optimizers if not internals.is_absent(optimizer)]


class ZeroStrategy(TrainerStrategy, ParallelStrategy):
    __doc__ = TrainerStrategy.__doc__
    lightning: ClassVar[ModuleType] = pytorch


# Lightning tests for DDPStrategy where it means "every rank holds the module", for example for torch.compile.
DDPStrategy.register(ZeroStrategy)
ZeroStrategy.register_strategies(StrategyRegistry)
