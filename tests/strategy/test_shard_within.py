"""``shard_within`` in the Trainer and in Fabric: the numbers of stage 3, and the same parameters on all machines.

Machines are simulated, as in tests/engine/test_several_machines.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from lightning_zero import ZeroStrategy
from lightning_zero.fabric import ZeroStrategy as FabricStrategy
from lightning_zero.pruning import MagnitudePruning
from tests.checkpoint.test_matrix import SaveAtTheEnd
from tests.engine.test_several_machines import on_machines
from tests.fabric.training import make_fabric, set_up, train, weights
from tests.strategy.test_uneven_forwards import write_as_under_ddp
from tests.strategy.test_uneven_loops import Classifier, evaluate, loader
from tests.support import models, whole
from tests.support.selection import exhaustive_but
from tests.support.trainer import Learner, fit, make_trainer
from tests.support.training import CLOSE, same_runs, same_tensors

PRECISIONS = exhaustive_but(["bf16-mixed"], ["bf16-mixed", "32-true", "bf16-true"])

learner = partial(Learner, partial(models.OddModel, rows=2), models.adam_with_large_eps, batches=3)


def within(**options: Any) -> ZeroStrategy:
    return ZeroStrategy(3, shard_within="node", **options)


class SamePartsOnAllMachines(Callback):
    """Checks that both machines hold the same parameters, before training and after each batch."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for bucket in trainer.strategy.engine.buckets:
            assert bucket.part is not None
            held: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(held, (bucket.layout.own_part, bucket.part.values().clone()))
            alike = [values for span, values in held if span == bucket.layout.own_part]
            assert len(alike) == 2 and torch.equal(*alike)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.on_train_start(trainer, pl_module)


# -- training ----------------------------------------------------------------------------------------------------------


def train_with(options: dict[str, Any]) -> None:
    with on_machines("aabb"):
        found = fit(within(), learner, callbacks=[SamePartsOnAllMachines()], **options)
    same_runs(found, fit("ddp", learner, **options), bound=CLOSE)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.3}, {"accumulate_grad_batches": 2}], ids=str)
def test_the_trainer_clips_and_accumulates_as_under_ddp(run_on, options):
    run_on(4, train_with, options=options)


def train_by_name() -> None:
    strategy = make_trainer("zero3_node").strategy
    assert (strategy.stage, strategy.config.shard_within) == (3, "node")
    same_runs(fit("zero3_node", learner), fit("zero3", learner))


def test_zero3_node_is_the_name_of_stage_3_with_shard_within(run_on):
    run_on(2, train_by_name)


def average(averaged: Tensor, value: Tensor, count: Any) -> Tensor:
    return averaged + (value - averaged) / (count + 1)


# before 2.12, torch averages parameters of two dtypes only by a function of the project's own
AVERAGING = WeightAveraging if torch.__version__ >= (2, 12) else partial(WeightAveraging, avg_fn=average)


def write_parameters(callback: Any, precision: str) -> None:
    def run(strategy: Any, *callbacks: Callback) -> Any:
        module = partial(Learner, whole.Layered, models.adam, batches=3)
        return fit(strategy, module, callbacks=[callback(), *callbacks], precision=precision)

    with on_machines("aabb"):
        same_runs(run(within(), SamePartsOnAllMachines()), run(ZeroStrategy(3)))


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("precision", ["bf16-true", pytest.param("32-true", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("callback", [partial(MagnitudePruning, 0.5), AVERAGING], ids=["pruning", "averaging"])
def test_parameters_that_callbacks_write_reach_all_machines(run_on, callback, precision):
    run_on(4, write_parameters, callback=callback, precision=precision)


class Compiled(Learner):
    def configure_model(self) -> None:
        self.model.compile(backend="aot_eager")


def train_compiled() -> None:
    with on_machines("aabb"):
        found = fit(within(), Compiled)
    same_tensors(found.weights, fit("ddp", Learner).weights, 1e-5)


@pytest.mark.exhaustive
def test_a_compiled_model_trains_as_under_ddp(run_on):
    run_on(4, train_compiled)


# -- ranks that differ -------------------------------------------------------------------------------------------------


def evaluate_unevenly() -> None:
    torch.manual_seed(0)
    module = Classifier()
    expected, expected_batches = evaluate(lambda: "ddp", copy.deepcopy(module), uneven_loaders())
    with on_machines("aabb"):
        found, batches = evaluate(within, module, uneven_loaders())
    torch.testing.assert_close((found, batches), (expected, expected_batches), rtol=1e-5, atol=1e-6)


def uneven_loaders() -> list[Any]:
    return [loader(counts, seed) for seed, counts in enumerate(([1, 4, 3, 2], [3, 1, 5, 1]))]


def test_evaluation_on_loaders_of_uneven_length_gives_ddps_results(run_on):
    run_on(4, evaluate_unevenly)


def generate() -> None:
    with on_machines("aabb"):
        write_as_under_ddp(3, shard_within="node")


@pytest.mark.exhaustive
def test_ranks_generate_texts_of_different_lengths(run_on):
    run_on(4, generate)


# -- checkpoints -------------------------------------------------------------------------------------------------------

SAVERS = {
    "zero3": lambda: ZeroStrategy(3),
    "zero2 sharded": lambda: ZeroStrategy(2, checkpoint="sharded"),
    "within": within,
    "within, sharded, in the background": lambda: within(checkpoint="sharded", async_save=True),
    "within, from the CPU's memory": lambda: within(offload="cpu"),
}
LOADERS = {"within": within, "zero1": lambda: ZeroStrategy(1), "zero3": lambda: ZeroStrategy(3)}


def save_and_load(folder: Path, precision: str) -> None:
    whole_run = fit(ZeroStrategy(3), learner, precision=precision, max_epochs=2)
    for name, saver in SAVERS.items():
        fit(saver(), learner, callbacks=[SaveAtTheEnd(folder / f"{name}.ckpt")], precision=precision)
    for name in SAVERS:
        for loader_name, made in LOADERS.items():
            if "within" not in name + loader_name:
                continue
            callbacks = [SamePartsOnAllMachines()] if loader_name == "within" else []
            path = str(folder / f"{name}.ckpt")
            found = fit(made(), learner, path, callbacks=callbacks, precision=precision, max_epochs=2)
            same_tensors(found.weights, whole_run.weights, bound=0 if loader_name != "zero1" else CLOSE)


def save_and_load_on_two_machines(**case: Any) -> None:
    with on_machines("aabb"):
        save_and_load(**case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", PRECISIONS)
def test_checkpoints_in_both_forms_resume_under_another_placement(run_on, tmp_path, precision):
    run_on(4, save_and_load_on_two_machines, folder=tmp_path, precision=precision)


# -- Fabric ------------------------------------------------------------------------------------------------------------


def train_in_fabric(path: Path, precision: str) -> None:
    def run(strategy: Any) -> Any:
        fabric = make_fabric(strategy, precision=precision)
        module, optimizer = set_up(fabric)
        losses = train(fabric, module, optimizer, 2)
        fabric.save(path, {"model": module, "optimizer": optimizer})
        losses += train(fabric, module, optimizer, 2, 2)
        fabric.load(path, {"model": module, "optimizer": optimizer})
        losses += train(fabric, module, optimizer, 2, 2)
        assert torch.equal(losses[2], losses[4]) and torch.equal(losses[3], losses[5])
        found = weights(module)
        fabric.strategy.teardown()
        return losses, found

    with on_machines("aabb"):
        flat, sharded_within = run(FabricStrategy(3)), run(FabricStrategy(3, shard_within="node"))
    assert torch.equal(torch.stack(flat[0]), torch.stack(sharded_within[0]))
    same_tensors(sharded_within[1], flat[1], bound=0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fabric_trains_saves_and_loads_as_at_stage_3(run_on, tmp_path, precision):
    run_on(4, train_in_fabric, path=tmp_path / "checkpoint", precision=precision)
