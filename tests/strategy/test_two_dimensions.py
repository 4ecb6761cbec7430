"""`ZeroStrategy(tensor_parallel_size=...)`: data-parallel and tensor-parallel ranks, with a Trainer and with Fabric."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero.fabric
from lightning_zero import ZeroAutoStrategy, ZeroStrategy
from lightning_zero.callbacks.monitor import ranks_with_data
from lightning_zero.monitoring import ZeroMonitor
from lightning_zero.pruning import MagnitudePruning
from tests.engine.test_tensor_parallel import CLOSE, Net, loss_of, parallelised
from tests.fabric.training import make_fabric, weights
from tests.support.trainer import make_trainer
from tests.support.training import same_values
from tests.support.workers import rank, world_size

SAMPLES, BATCH = 32, 4


class Divided(LightningModule):
    """Divided over `device_mesh`, where there is one, as a module for Lightning's `ModelParallelStrategy` is."""

    def __init__(self, on_meta: bool = False) -> None:
        super().__init__()
        self.net: nn.Module | None = None
        self.on_meta = on_meta
        self.validated: list[Tensor] = []

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(0)
        with torch.device("meta" if self.on_meta else "cpu"):
            self.net = Net()
        if self._device_mesh is not None:
            parallelised(self.net, self.device_mesh)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch[0])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(loss_of(self.net, batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        tokens = torch.randint(11, (SAMPLES, 5), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(tokens), batch_size=BATCH, shuffle=True)

    val_dataloader = train_dataloader


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def train(strategy: Any, resume: str | None = None, save: str | None = None, **options: Any) -> dict[str, Tensor]:
    """The weights after training, and the logged loss."""
    strategy = ZeroStrategy(**strategy) if isinstance(strategy, dict) else strategy
    module = Divided(options.pop("on_meta", False))
    trainer = make_trainer(strategy, **({"gradient_clip_val": 0.5, "num_sanity_val_steps": 0} | options))
    trainer.fit(module, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    learned = {name: full(value) for name, value in module.state_dict().items()}
    return learned | {name: value.clone() for name, value in trainer.callback_metrics.items()}


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The Trainer", "With tensor parallelism: `tensor_parallel_size`, as for `ModelParallelStrategy`")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"on_meta": True}], ids=str)
def test_a_trainer_on_two_by_two_ranks_learns_what_ddp_learns_on_two(run_on, stage, options):
    (expected, *_) = run_on(2, train, strategy="ddp", **{**options, "on_meta": False})
    for found in run_on(4, train, strategy={"stage": stage, "tensor_parallel_size": 2}, **options):
        same_values(found, expected, "weights", bound=CLOSE)


class Fails(Divided):
    """Rank 1 fails in the second step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and rank() == 1:
            raise OSError("no data")
        return super().training_step(batch, batch_idx)


def train_after_a_failure(strategy: dict[str, Any]) -> dict[str, Tensor]:
    torch.distributed.new_group()  # torch numbers groups: those of the first mesh get other names than the second's
    with pytest.raises(OSError if rank() == 1 else RuntimeError, match="no data"):
        make_trainer(ZeroStrategy(**strategy)).fit(Fails())
    return train(strategy)


@pytest.mark.exhaustive
def test_after_a_failure_the_same_processes_can_train_with_tensor_parallelism_again(run_on):
    """The process groups are new, and DTensor does not communicate in those of the failed run."""
    (expected, *_) = run_on(2, train, strategy="ddp")
    for found in run_on(4, train_after_a_failure, strategy={"stage": 3, "tensor_parallel_size": 2}):
        same_values(found, expected, "weights", bound=CLOSE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_in_low_precision_tensor_parallel_ranks_learn_nearly_what_ddp_learns(run_on, precision):
    """Sums over tensor-parallel ranks round differently."""
    (expected, *_) = run_on(2, train, strategy="ddp", precision=precision, max_epochs=4)
    found = run_on(4, train, strategy={"stage": 3, "tensor_parallel_size": 2}, precision=precision, max_epochs=4)
    assert found[0]["loss"] == pytest.approx(expected["loss"].item(), rel=1e-2)
    for name, value in found[0].items():
        assert all(torch.equal(value, other[name]) for other in found), name


def train_as_model_parallel() -> None:
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 1}
    expected = train(ModelParallelStrategy(**sizes, save_distributed_checkpoint=False), gradient_clip_val=None)
    for stage in (1, 2, 3):
        same_values(train({"stage": stage, **sizes}, gradient_clip_val=None), expected, "weights", bound=CLOSE)
    defaults: dict[str, Any] = {
        name: parameter.default
        for name, parameter in inspect.signature(ModelParallelStrategy).parameters.items()
        if name != "save_distributed_checkpoint"
    }
    assert defaults["data_parallel_size"] == defaults["tensor_parallel_size"] == "auto"
    same_values(train(defaults, gradient_clip_val=None), expected, "weights", bound=CLOSE)


@pytest.mark.parametrize(
    ("machines", "options", "mesh"),
    [
        (1, {"tensor_parallel_size": "auto"}, (1, 4)),
        (2, {"tensor_parallel_size": "auto", "data_parallel_size": "auto"}, (2, 4)),
        (2, {"tensor_parallel_size": "auto", "data_parallel_size": 2}, (2, 4)),
        (2, {"tensor_parallel_size": 2, "data_parallel_size": "auto"}, (4, 2)),
    ],
    ids=str,
)
def test_automatic_sizes_are_ranks_per_machine_and_number_of_machines(machines, options, mesh):
    trainer = make_trainer(ZeroStrategy(**options), devices=4, num_nodes=machines)
    assert trainer.strategy.ranks.mesh_shape == mesh


@pytest.mark.exhaustive
def test_a_module_for_model_parallel_strategy_learns_the_same_under_zero_strategy(run_on):
    run_on(2, train_as_model_parallel)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["full", pytest.param("sharded", marks=pytest.mark.exhaustive)])
def test_checkpoints_resume_on_any_mesh_and_under_ddp(run_on, form, tmp_path: Path):
    """2 x 2 saves; 1 x 4, 1 x 2, 2 x 2, 4 x 1, ZeRO and DDP on two ranks, and plain Lightning on one rank resume."""
    saved = str(tmp_path / "first.ckpt")
    two_by_two = {"stage": 3, "tensor_parallel_size": 2, "checkpoint": form}
    run_on(4, train, strategy=two_by_two, save=saved)
    (again, *_) = run_on(4, train, strategy=two_by_two, resume=saved, max_epochs=3)
    meshes = [(4, 4, 2), (2, 2, 1), (4, 2, 3), (4, 1, 2)]
    for world, tensor_parallel_size, stage in meshes:
        options = {"stage": stage, "tensor_parallel_size": tensor_parallel_size, "checkpoint": form}
        data_parallel_size = world // tensor_parallel_size
        (found, *_) = run_on(world, train, strategy=options, resume=saved, max_epochs=3)
        if data_parallel_size == 2:
            same_values(found, again, "weights", bound=CLOSE)
        back = str(tmp_path / f"{world}-{tensor_parallel_size}.ckpt")
        run_on(world, train, strategy=options, resume=saved, save=back, max_epochs=2)
        (found, *_) = run_on(4, train, strategy=two_by_two, resume=back, max_epochs=3)
        same_values(found, again, "weights", bound=CLOSE)
    (found, *_) = run_on(2, train, strategy={"stage": 3}, resume=saved, max_epochs=3)
    same_values(found, again, "weights", bound=CLOSE)
    if form == "full":
        (found, *_) = run_on(2, train, strategy="ddp", resume=saved, max_epochs=3)
        same_values(found, again, "weights", bound=CLOSE)
        back = str(tmp_path / "one.ckpt")
        run_on(1, train, strategy="auto", resume=saved, save=back, max_epochs=2)
        (found, *_) = run_on(4, train, strategy=two_by_two, resume=back, max_epochs=3)
        same_values(found, again, "weights", bound=CLOSE)


def monitored(strategy: Any) -> tuple[int, dict[str, float]]:
    """The number of ranks with different batches, and rank 0's figures."""
    monitor = ZeroMonitor(every_n_steps=2, available_flops=1e9)
    strategy = ZeroStrategy(**strategy) if isinstance(strategy, dict) else strategy
    trainer = make_trainer(strategy, callbacks=[monitor], num_sanity_val_steps=0, max_epochs=1)
    module = Divided()
    module.flops_per_batch = 4000
    trainer.fit(module)
    return ranks_with_data(trainer), monitor.metrics


def test_the_monitor_counts_each_batch_once(run_on):
    divided = run_on(4, monitored, strategy={"stage": 1, "tensor_parallel_size": 2})
    whole = run_on(2, monitored, strategy="ddp")
    assert [ranks for ranks, _ in divided] == [2] * 4 and [ranks for ranks, _ in whole] == [2, 2]
    for (_, found), ranks in ((divided[0], 4), (whole[0], 2)):
        step_s = found["throughput/step_s"]
        assert found["throughput/batches_per_sec"] == pytest.approx(2 / step_s)
        assert found["throughput/samples_per_sec"] == pytest.approx(2 * BATCH / step_s)
        assert found["throughput/flops_per_sec"] == pytest.approx(2 * 4000 / step_s)
        assert found["throughput/device/mfu"] == pytest.approx(2 * 4000 / step_s / (ranks * 1e9))


def test_zero_auto_refuses_to_plan_tensor_parallelism():
    with pytest.raises(TypeError, match="zero_auto does not plan tensor parallelism"):
        ZeroAutoStrategy(tensor_parallel_size=2)


class Mismatched(Divided):
    """With samplers that give each rank other batches."""

    def __init__(self, validates: bool) -> None:
        super().__init__()
        self.validates = validates

    def train_dataloader(self, start: int | None = None) -> Any:
        tokens = torch.arange(SAMPLES * 5).view(SAMPLES, 5) % 11
        order = range(rank() if start is None else start, SAMPLES)
        return DataLoader(TensorDataset(tokens), batch_size=BATCH, sampler=order)

    def val_dataloader(self) -> Any:
        return self.train_dataloader(None if self.validates else 0)


def refuse_batches(validates: bool) -> None:
    trainer = make_trainer(ZeroStrategy(stage=3, tensor_parallel_size=2), use_distributed_sampler=False)
    with pytest.raises(
        ValueError, match=r"Tensor-parallel ranks \[\d, \d\] .* values in batch\[0\].*\*\*trainer\.strategy\.dist"
    ):
        trainer.fit(Mismatched(validates))
    assert trainer.global_step == 0


@pytest.mark.parametrize("validates", [False, True], ids=["in training", "in validation"])
def test_a_first_batch_that_differs_on_tensor_parallel_ranks_is_refused(run_on, validates):
    run_on(4, refuse_batches, validates=validates)


def refuse_with_fabric() -> None:
    fabric = make_fabric(lightning_zero.fabric.ZeroStrategy(stage=3, tensor_parallel_size=2))
    model = fabric.setup(parallelised(Net(), fabric.strategy.device_mesh))
    with pytest.raises(ValueError, match=r"values in batch\[0\].*\*\*fabric\.strategy\.distributed_sampler_kwargs"):
        model(torch.full((2, 5), rank()))


def test_the_error_for_different_batches_in_fabric_names_fabrics_sampler_arguments(run_on):
    run_on(2, refuse_with_fabric)


def evaluate(stage: int) -> Any:
    module = Divided()
    trainer = make_trainer(ZeroStrategy(stage=stage, tensor_parallel_size=2))
    trainer.validate(module, verbose=False)
    return [value.clone() for value in module.validated]


def validate_plainly() -> list[Tensor]:
    module = Divided()
    make_trainer("ddp").validate(module, verbose=False)
    return [value.clone() for value in module.validated]


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_without_training_computes_what_ddp_computes(run_on, stage):
    found, expected = run_on(4, evaluate, stage=stage), run_on(2, validate_plainly)
    for number, values in enumerate(found):
        same_values(values, expected[number // 2], f"rank {number}", bound=CLOSE)


def train_with_fabric(strategy: Any) -> Any:
    if isinstance(strategy, dict):
        strategy = lightning_zero.fabric.ZeroStrategy(**strategy)
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    model = Net()
    place = rank()
    if world_size() == 4:
        mesh = fabric.strategy.device_mesh
        parallelised(model, mesh)
        place = mesh["data_parallel"].get_local_rank()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + place)
        fabric.backward(loss_of(model, torch.randint(11, (2, 5), generator=generator)))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("Fabric", "With tensor parallelism: `tensor_parallel_size`")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fabric_on_two_by_two_ranks_learns_what_ddp_learns_on_two(run_on, stage):
    (expected, *_) = run_on(2, train_with_fabric, strategy="ddp")
    for found in run_on(4, train_with_fabric, strategy={"stage": stage, "tensor_parallel_size": 2}):
        same_values(found, expected, "weights", bound=CLOSE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be 'auto', an integer of at least 1 or None"),
        ({"data_parallel_size": 2}, "data_parallel_size=2 has no effect .* set both, or leave both out"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 cannot be used with 2 ranks"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "set sizes whose product is the number of ranks"),
        ({"tensor_parallel_size": 2, "shard_within": "node"}, "shard_within='node' cannot be combined"),
    ],
    ids=str,
)
def test_sizes_that_make_no_mesh_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        trainer = make_trainer(ZeroStrategy(stage=3, **options), devices=2)
        trainer.fit(Divided())


def save_with_fabric(folder: str) -> None:
    fabric = make_fabric(lightning_zero.fabric.ZeroStrategy(stage=3, tensor_parallel_size=2, async_save=True))
    torch.manual_seed(0)
    model = Net()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelised(model, fabric.strategy.device_mesh)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.save(f"{folder}/saved.ckpt", {"model": model, "optimizer": optimizer})
    fabric.strategy.teardown()
    if fabric.is_global_zero:
        same_values(dict(torch.load(f"{folder}/saved.ckpt")["model"]), expected, "weights", bound=0)


def test_a_full_checkpoint_saved_in_the_background_has_whole_weights(run_on, tmp_path: Path):
    run_on(4, save_with_fabric, folder=str(tmp_path))


def prune() -> None:
    trainer = make_trainer(ZeroStrategy(stage=3, tensor_parallel_size=2), callbacks=[MagnitudePruning(0.5)])
    with pytest.raises(ValueError, match="MagnitudePruning does not work with tensor parallelism yet"):
        trainer.fit(Divided())


def test_pruning_is_refused_with_tensor_parallelism(run_on):
    run_on(2, prune)


class Failing(Divided):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if rank() == 1 and batch_idx == 1:
            raise ArithmeticError("only here")
        return super().training_step(batch, batch_idx)


def fail_on_one_rank() -> None:
    trainer = make_trainer(ZeroStrategy(stage=3, tensor_parallel_size=2), num_sanity_val_steps=0)
    with pytest.raises((ArithmeticError, RuntimeError), match="only here"):
        trainer.fit(Divided() if rank() != 1 else Failing())


def test_a_failing_rank_ends_its_tensor_parallel_group_and_all_other_ranks(run_on):
    run_on(4, fail_on_one_rank)
