"""Private names of Lightning, torchmetrics and data loaders that this package uses: each has a test."""

from __future__ import annotations

import inspect
import os
import random
import re
from collections.abc import Iterator

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import numpy
import pytest
import pytorch_lightning
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torchmetrics import SumMetric
from torchmetrics.utilities import dim_zero_sum

import lightning_zero
from lightning_zero.engine import process_group
from lightning_zero.engine.init.sources import HYPERPARAMETERS
from lightning_zero.strategies import lightning_internals as internals

PACKAGES = [lightning.pytorch, pytorch_lightning, lightning.fabric, lightning_fabric]
TRAINERS = PACKAGES[:2]


class Seen(Callback):
    """Calls functions in a run, and keeps what they return."""

    def __init__(self, **functions):
        self.found = {name: [] for name in functions}
        for hook, see in functions.items():
            setattr(self, hook, lambda *args, hook=hook, see=see: self.found[hook].append(see(*args)))


def run(*callbacks, method="fit", module=BoringModel, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    limits = {"limit_train_batches": 4, "limit_val_batches": 1, "max_epochs": 1}
    options = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False} | quiet | limits | options
    trainer = Trainer(callbacks=[*callbacks], **options)
    getattr(trainer, method)(module())
    return trainer


def test_the_process_group_is_set_up_with_these_arguments():
    names = {"cluster_environment", "torch_distributed_backend", "global_rank", "world_size"}
    parameters = inspect.signature(internals.init_dist_connection).parameters
    assert names <= parameters.keys()
    assert any(each.kind is each.VAR_KEYWORD for each in parameters.values())  # our timeout, device_id and store
    assert not process_group.is_initialized()
    assert internals.sync_ddp_if_available(3, None, reduce_op="sum") == 3  # without a group
    assert list(inspect.signature(internals.sync_module_states).parameters) == ["module"]


def test_the_number_of_threads_is_set_unless_the_environment_sets_it(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    internals.set_num_threads_if_needed(10**6)
    assert torch.get_num_threads() == threads
    monkeypatch.delenv("OMP_NUM_THREADS")
    internals.set_num_threads_if_needed(10**6)
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (1, "1")
    torch.set_num_threads(threads)


def test_no_initialiser_runs_in_the_context_for_empty_modules():
    weight = torch.zeros(2)
    with internals.EmptyInit():
        nn.init.normal_(weight)
    assert not weight.any()


def test_the_state_of_all_random_generators_is_restored():
    def draw():
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    states = internals.collect_rng_states()
    first = draw()
    internals.set_rng_states(states)
    assert draw() == first


def test_a_module_takes_its_device_and_mesh_from_these_functions():
    module = LightningModule()
    internals.update_properties(module, device=torch.device("meta"))
    internals.set_device_mesh(module, "mesh")
    assert module.device.type == "meta" and module.device_mesh == "mesh"


def test_hyperparameters_are_kept_under_the_names_that_the_engine_ignores():
    class Model(LightningModule):
        def __init__(self, width):
            super().__init__()
            self.save_hyperparameters()

    assert {name for name, value in vars(Model(3)).items() if value == {"width": 3}} == {*HYPERPARAMETERS}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_each_package_has_both_launchers(package):
    given = ("cluster_environment", "num_processes", "num_nodes")
    assert {*given} <= {*inspect.signature(internals.subprocess_launcher(package)).parameters}
    assert {"strategy", "start_method"} <= {*inspect.signature(internals.multiprocessing_launcher(package)).parameters}


@pytest.mark.parametrize("package", TRAINERS, ids=lambda package: package.__name__)
def test_each_package_with_a_trainer_has_the_tuners_exception_and_wraps_optimizers(package):
    assert issubclass(internals.tuner_exit(package), Exception)


@pytest.mark.parametrize("package", TRAINERS, ids=lambda package: package.__name__)
def test_loggers_without_an_experiment_pass_all_calls_to_one_method(package):
    nothing = internals.no_experiment(package)()
    assert nothing.add_histogram == nothing.log == nothing.nop


def test_ddp_has_the_borrowed_methods():
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")], process_group_backend="gloo")
    assert internals.get_process_group_backend(strategy) == "gloo"
    assert internals.set_world_ranks(strategy) is None  # without a cluster environment it does nothing


def test_a_module_without_optimizers_has_a_placeholder():
    class Untrained(BoringModel):
        def configure_optimizers(self):
            return None

    assert not any(map(internals.is_absent, run().strategy.optimizers))
    assert all(map(internals.is_absent, run(module=Untrained).strategy.optimizers))


def test_a_fit_shows_its_loop_loader_and_accumulation():
    def start(trainer, module, batch, index):
        assert internals.active_loop(trainer) is trainer.fit_loop
        assert len(internals.training_dataloader(trainer)()) == 64
        assert internals.arguments_of_step(trainer, batch, index) == [batch, index]
        assert internals.call_strategy_hook(trainer, "training_step", batch, index)["loss"].ndim == 0
        assert not internals.skips_backward(trainer)
        return internals.should_accumulate(trainer)

    seen = Seen(
        on_train_batch_start=start,
        on_train_batch_end=lambda trainer, *_: internals.is_epoch_ending(trainer),
    )
    trainer = run(seen, accumulate_grad_batches=2)
    assert seen.found["on_train_batch_start"] == [True, False] * 2
    assert seen.found["on_train_batch_end"] == [False, False, False, True]
    assert {"state_dict", "optimizer_states", "loops"} <= internals.dump_checkpoint(trainer).keys()
    assert callable(internals.checkpoint_connector(trainer).resume_start)


def test_batch_statistics_for_averaged_weights_are_a_pass_without_backward():
    seen = Seen(on_train_batch_start=lambda trainer, *_: internals.skips_backward(trainer))

    class Normalised(BoringModel):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(32, 2), nn.BatchNorm1d(2))

        def train_dataloader(self):
            return torch.utils.data.DataLoader(super().train_dataloader().dataset, batch_size=2)

    run(StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1), seen, module=Normalised, max_epochs=2)
    assert seen.found["on_train_batch_start"] == [False] * 8 + [True] * 4


def test_an_evaluation_loop_has_a_fetcher_of_batches():
    def see(trainer, *_):
        return isinstance(internals.data_fetcher(internals.active_loop(trainer)), Iterator)

    seen = Seen(on_validation_batch_start=see)
    run(seen, method="validate")
    assert seen.found["on_validation_batch_start"] == [True]


def test_lightning_calls_the_methods_that_ours_replace():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False)
    epoch_loop, connector = trainer.fit_loop.epoch_loop, internals.signal_connector(trainer)
    assert f"self.{internals.BETWEEN_BATCHES}()" in inspect.getsource(type(epoch_loop).advance)
    registering = inspect.getsource(type(connector).register_signal_handlers)
    for name in internals.SIGNAL_HANDLERS:
        assert f"self.{name}" in registering
        assert len(inspect.signature(getattr(connector, name)).parameters) == 2  # the signal's number and the frame


def test_a_fit_shows_the_position_in_its_loaders():
    def start(trainer, module, batch, index):
        combined = internals.combined_loader(trainer.fit_loop)
        (iterator,) = internals.iterator_of(combined).iterators
        assert internals.index_sampler(iterator) is combined.flattened[0].batch_sampler
        fetches = getattr(internals.data_fetcher(trainer.fit_loop), internals.BEFORE_FETCH)
        assert callable(fetches) and callable(getattr(trainer.fit_loop, internals.LOAD_LOADER_STATES))
        assert getattr(trainer.fit_loop, internals.EPOCH_OF_LOADERS) <= trainer.current_epoch
        return internals.yielded_batches(iterator) - index

    def validate(trainer, module):
        return module.training, internals.modes_before_validation(trainer).get("layer")

    seen = Seen(on_train_batch_start=start, on_validation_start=validate)
    trainer = run(seen, num_sanity_val_steps=0)
    assert seen.found["on_train_batch_start"] in ([1] * 4, [2] * 4)  # one batch may be fetched ahead
    assert seen.found["on_validation_start"] == [(False, True)]
    assert all(isinstance(getattr(internals.logger_connector(trainer), name), dict) for name in internals.LOGGED)
    trainer.fit_loop.restarting = True
    internals.do_not_restart(trainer.fit_loop)
    assert not trainer.fit_loop.restarting


def test_loaders_take_turns_by_these_attributes():
    combined = CombinedLoader([[1, 2], [3]], "sequential")
    iter(combined)
    found = vars(internals.iterator_of(combined)).keys() & internals.POSITION_AMONG_LOADERS
    iter(combined := CombinedLoader([[1, 2], [3]], "max_size_cycle"))
    assert found | vars(internals.iterator_of(combined)).keys() & internals.POSITION_AMONG_LOADERS == {
        "_idx",
        "_consumed",
    }


def test_a_loader_makes_its_iterators_from_its_sampler():
    loader = torch.utils.data.DataLoader(range(4), batch_size=2)
    assert internals.name_of_sampler(loader) == "batch_sampler"
    assert internals.name_of_sampler(torch.utils.data.DataLoader(range(4), batch_size=None)) == "sampler"
    iterator = getattr(loader, internals.GET_ITERATOR)()
    next(iterator)
    assert internals.index_sampler(iterator) is loader.batch_sampler and internals.yielded_batches(iterator) == 1
    loader._iterator = iterator
    internals.forget_iterator(loader)
    assert loader._iterator is None and internals.index_sampler(iter([])) is None
    sampler = torch.utils.data.SequentialSampler(range(4))
    wrapper = DistributedSamplerWrapper(sampler, num_replicas=1, rank=0)
    assert vars(wrapper.dataset)[internals.WRAPPED_SAMPLER] is sampler


def test_loaders_with_a_state_are_recognised():
    class Loader:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    assert isinstance(Loader(), internals.Stateful)
    assert not isinstance(torch.utils.data.DataLoader(range(4)), internals.Stateful)


def test_a_metric_names_the_reduction_of_each_state():
    assert internals.reductions_of(SumMetric()) == {"sum_value": dim_zero_sum}


def test_private_attributes_that_strategies_share_with_their_base_classes_are_listed():
    theirs, ours = set(), set()
    for strategy in (lightning_zero.ZeroStrategy, lightning_zero.fabric.ZeroStrategy):
        for cls in strategy.__mro__[:-1]:
            own = cls.__module__.startswith("lightning_zero.")
            names = re.findall(r"(?:\bself\.|\bdef )(_[a-z]\w*)", inspect.getsource(cls))
            (ours if own else theirs if cls.__module__.startswith("lightning.") else set()).update(names)
    assert theirs & ours == {*internals.INHERITED}
