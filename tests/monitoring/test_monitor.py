"""ZeroMonitor on real ranks: its figures against DDP's and closed forms."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.monitoring import ZeroMonitor
from tests.engine.test_growth import count as instructions_of
from tests.engine.test_several_machines import on_machines
from tests.support.trainer import make_trainer
from tests.support.workers import rank
from tests.trainer.cases import Net, behaviours, data, fit, same_as_under_ddp, shared_folder, trained


class Written(Logger):
    """A minimal logger, which keeps the logged rows."""

    name, version, experiment = "written", 0, None

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "throughput/step_s" in metrics:
            assert step is not None
            self.rows.append((step, metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def monitored(strategy: Any, module: LightningModule | None = None, **options: Any) -> tuple[list[Any], ZeroMonitor]:
    """Fit for 12 steps under a monitor; return the logged rows and the monitor."""
    logger = Written()
    monitor = ZeroMonitor(options.pop("every_n_steps", 2), **options.pop("monitor", {}))
    fit(
        strategy,
        module,
        callbacks=[monitor, *options.pop("callbacks", [])],
        logger=logger,
        **{"max_epochs": 4, **options},
    )
    return logger.rows, monitor


# -- figures -----------------------------------------------------------------------------------------------------------


class Account(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.held = trainer.strategy.engine.report().at_rest


def figures(stage: int) -> None:
    torch.manual_seed(0)
    blocks = ZeroStrategy(stage, units=nn.Sequential, prefetch=0)
    account = Account()
    options = {"available_flops": 1e9}
    module = Net()
    module.flops_per_batch = 5000
    rows, monitor = monitored(blocks, module, monitor=options, limit_val_batches=0, callbacks=[account])
    assert [step for step, _ in rows] == ([2, 4, 6, 8, 10, 12] if rank() == 0 else [])
    assert [step for step, _ in monitor.loss_curve] == [2, 4, 6, 8, 10, 12]
    if rank():
        return
    found = rows[-1][1]
    assert found == monitor.metrics

    # memory: the engine's account, which tests/numbers compare with the paper's formulas
    padded = monitor.peak_bytes["parameters"] / 1e6 * (2 if stage == 3 else 1)
    held = {name[:-3].removeprefix("memory/"): value for name, value in found.items() if name.startswith("memory/")}
    assert {name: held.pop(name) for name in account.held} == pytest.approx(
        {name: nbytes / 1e6 for name, nbytes in account.held.items()}
    )
    assert held.pop("peak") == sum(monitor.peak_bytes.values()) / 1e6 >= sum(account.held.values()) / 1e6 and not held

    # traffic (section 7 of the paper): every bucket is reduced once and gathered once; in a model as small as this one
    # all units stay gathered from forward to backward at stage 3
    reduced = found["communication/reduce_scatter/within_MB"]
    gathered = found["communication/all_gather/within_MB"]
    assert reduced == pytest.approx(padded)
    assert gathered == pytest.approx(padded)
    assert monitor.elements_per_step == pytest.approx((reduced + gathered) * 1e6 / 4)
    assert found["communication/reduce_scatter/within_calls"] == len(monitor.units) > 1

    # throughput: 4 samples a rank and step
    step_s = found["throughput/step_s"]
    assert found["throughput/samples_per_sec"] == pytest.approx(2 * 4 / step_s)
    assert found["throughput/flops_per_sec"] == pytest.approx(2 * 5000 / step_s)
    assert found["throughput/device/mfu"] == pytest.approx(5000 / step_s / 1e9)

    # waits
    waits = {name: value for name, value in found.items() if name.startswith("wait/")}
    assert len(waits) == min(5, len(monitor.waited)) and all(0 < value < step_s for value in waits.values())
    units = {name or "root" for name in monitor.units}
    assert set(monitor.waited) == units | {"the end of backward", "the monitor", "buffers of rank 0"}
    assert list(monitor.waited.values()) == sorted(monitor.waited.values(), reverse=True)
    assert found["time/wait_for_gather_s"] > 0 < found["time/wait_for_reduction_s"]
    assert found["straggler/rank"] in (0, 1) and found["straggler/slower"] >= 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_monitored_figures_equal_closed_forms(run_on, stage):
    run_on(2, figures, stage=stage)


def measure_on_two_machines() -> None:
    with on_machines("aabb"):
        rows, monitor = monitored(ZeroStrategy(2), limit_val_batches=0)
    if rank():
        return
    found = rows[-1][1]
    for kind in ("all_gather", "reduce_scatter"):
        # this rank's column is half of each buffer, and half of the column is on the other machine
        across, within = (found[f"communication/{kind}/{link}_MB"] for link in ("across", "within"))
        assert across == pytest.approx((across + within) / 4) and across > 0
        assert found[f"communication/{kind}/across_calls"] == len(monitor.units)


def test_traffic_within_and_across_machines_is_logged(run_on):
    run_on(4, measure_on_two_machines)


def with_monitor(strategy: str) -> Any:
    """`ZeroMonitor`: loss, gradient norm and throughput to any logger; training is unchanged"""
    seen, folder = [], shared_folder()
    for options in ({}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}):
        torch.manual_seed(0)
        logger, monitor = Written(), ZeroMonitor(1)
        result = trained(strategy, callbacks=[monitor], logger=[logger, CSVLogger(folder)], **options)
        torch.manual_seed(0)
        assert str(result) == str(trained(strategy, **options)), "a monitor changes nothing"
        norms = [metrics["training/gradient_norm"] for _, metrics in logger.rows]
        seen.append(([step for step, _ in logger.rows], norms, [metrics["step"] for metrics in read_csv(folder)]))
        seen.append(monitor.loss_curve)
        assert rank() or (norms and max(norms) <= options.get("gradient_clip_val", 10) + 1e-6)
    return seen


def read_csv(folder: Path) -> list[dict[str, str]]:
    if rank():
        return []
    (file,) = sorted(folder.rglob("version_*/metrics.csv"))[-1:]
    return [row for row in csv.DictReader(file.open()) if row["throughput/step_s"]]


@pytest.mark.exhaustive
@behaviours("The Trainer", with_monitor)
def test_a_monitored_run_is_the_same_as_under_ddp(run_on, case):
    run_on(2, same_as_under_ddp, case=case, bound=1e-6)


def on_one_rank() -> None:
    for strategy in ("zero3", "ddp"):
        rows, monitor = monitored(strategy, max_epochs=1)
        step, found = rows[-1]
        assert step == 6 and found["throughput/device/samples_per_sec"] > 0 and "straggler/rank" not in found
        assert not any(name.startswith("communication/") for name in found)
        assert monitor.peak_bytes["parameters"] > 0


def test_one_rank_has_no_stragglers_and_no_traffic(run_on):
    run_on(1, on_one_rank)


def offloaded() -> None:
    rows, monitor = monitored("zero3_offload")
    if rank() == 0:
        found = rows[-1][1]
        assert (
            found["time/update_s"] > 0 and "time/wait_for_update_s" in found and "training/gradient_norm" not in found
        )
        assert found["memory/host_MB"] > 0


def test_offloaded_updates_are_timed(run_on):
    run_on(2, offloaded)


class Clock(Callback):
    """Measures the time from the end of an epoch's first step to the start of its validation."""

    def __init__(self) -> None:
        self.seconds = self.began = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.began = time.perf_counter()

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.seconds += time.perf_counter() - self.began


def validated() -> None:
    """Validation between measured steps counts neither as time nor as traffic."""

    class SlowToValidate(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.2)

    _, without = monitored("zero3", limit_val_batches=0)
    clock = Clock()
    _, monitor = monitored("zero3", SlowToValidate(), callbacks=[clock])
    assert monitor.elements_per_step == without.elements_per_step
    assert monitor._measured.total["seconds"] < clock.seconds + 0.2, "no validation, which takes 0.2 s or longer"
    assert monitor.per_second == pytest.approx(
        2 * monitor._measured.total["samples"] / monitor._measured.total["seconds"]
    )
    assert len(monitor.validation_curve) == 5  # the sanity check and four epochs


@pytest.mark.exhaustive
def test_validation_is_not_measured(run_on):
    run_on(2, validated)


class Summed(Net):
    """Keeps the loss of each micro-batch; with manual optimization, every fourth one is followed by a step."""

    def __init__(self, *, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.losses = not manual, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            self.manual_backward(loss)
            if (batch_idx + 1) % 4 == 0:
                self.optimizers().step()
                self.optimizers().zero_grad()
        return loss


def accumulated(strategy: str, manual: bool) -> None:
    module, monitor = Summed(manual=manual), ZeroMonitor(1)
    options = {} if manual else {"accumulate_grad_batches": 4}
    make_trainer(strategy, callbacks=[monitor], max_epochs=1, **options).fit(module, data(40))
    losses = torch.tensor(module.losses)
    assert len(losses) == 10
    expected = {1: losses[:4].mean(), 2: losses[4:8].mean()} | ({} if manual else {3: losses[8:].mean()})
    torch.testing.assert_close(dict(monitor.loss_curve), {step: mean.item() for step, mean in expected.items()})
    assert monitor.metrics["training/loss"] == monitor.loss_curve[-1][1]


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("strategy", ["auto", "zero3"])
def test_the_loss_of_a_step_is_the_mean_over_its_micro_batches(run_on, strategy, manual):
    run_on(1, accumulated, strategy=strategy, manual=manual)


def validated_within_a_step(strategy: str) -> None:
    """24 batches make six steps; a validation after every six batches interrupts the second and the fifth step."""
    found = []
    for options, steps in (({"limit_val_batches": 0}, 5), ({"val_check_interval": 6}, 2)):
        monitor = ZeroMonitor(100)
        trainer = make_trainer(strategy, callbacks=[monitor], max_epochs=1, accumulate_grad_batches=4, **options)
        trainer.fit(Net(), data(2 * 4 * 24), data(16))
        total = monitor._measured.total
        assert (total["steps"], total["batches"], total["samples"]) == (steps, 4 * steps, 4 * 4 * steps)
        found.append(monitor.elements_per_step)
    assert found[0] == found[1] and (found[0] is None) == (strategy == "ddp")


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_step_that_validation_interrupts_is_not_measured(run_on, strategy):
    run_on(2, validated_within_a_step, strategy=strategy)


def validated_after_each_step() -> None:
    for strategy in ("ddp", "zero3"):
        monitor = ZeroMonitor(2)
        torch.manual_seed(0)
        fit(strategy, callbacks=[monitor], overfit_batches=1, max_epochs=6)
        assert [step for step, _ in monitor.loss_curve] == [2, 4, 6]
        assert monitor.per_second is None
        if rank() == 0:
            assert monitor.metrics["training/loss"] > 0 < monitor.metrics["memory/parameters_MB"]
            assert not any(name.startswith(("throughput/", "straggler/")) for name in monitor.metrics)


def test_loss_and_memory_are_logged_if_validation_follows_each_step(run_on):
    run_on(2, validated_after_each_step)


# -- stragglers --------------------------------------------------------------------------------------------------------

DELAY = 0.3


class Delayed(Net):
    """One rank sleeps in some training steps."""

    def __init__(self, slow: int, steps: range, delay: float = DELAY) -> None:
        super().__init__()
        self.slow, self.steps, self.delay = slow, steps, delay

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(self.delay if rank() == self.slow and self.global_step + 1 in self.steps else 0.02)
        return super().training_step(batch, batch_idx)


def straggling(stage: int, slow: int) -> None:
    rows, monitor = monitored(
        f"zero{stage}", Delayed(slow, range(100)), every_n_steps=5, max_epochs=2, limit_val_batches=0
    )
    if rank() == 0:
        (_, found), *_ = rows
        assert found["straggler/rank"] == slow and found["straggler/slower"] > 1
        if slow == 1:  # rank 0 has waited for it, in some unit
            assert sum(monitor.waited.values()) > 0.8 * DELAY


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_slowest_rank_is_named(run_on, stage, slow):
    run_on(2, straggling, stage=stage, slow=slow)


# -- input -------------------------------------------------------------------------------------------------------------


class Rows(LightningModule):
    """Trains on batches of the given numbers of rows."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        self.rows, self.net = rows, nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).sum()

    def train_dataloader(self) -> Any:
        return DataLoader([torch.zeros(rows, 3) for rows in self.rows], batch_size=None)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("rows", [[4, 0, 4], [4, 4, 0], [0, 0, 0]], ids=str)
def test_batches_without_rows_are_monitored_without_rates(rows: list[int]) -> None:
    monitor = ZeroMonitor(1)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[monitor], **QUIET)
    with pytest.warns(UserWarning, match="ZeroMonitor logs no throughput from step [23] on: Expected .* Set batch"):
        trainer.fit(Rows(rows))
    assert len(monitor.loss_curve) == 3 and monitor.metrics["throughput/step_s"] > 0
    assert "throughput/device/samples_per_sec" not in monitor.metrics


def test_items_are_counted_by_length_fn_and_operations_by_the_module() -> None:
    monitor = ZeroMonitor(batch_size_fn=lambda batch: 2 * len(batch), length_fn=torch.numel, available_flops=1e9)
    module = Rows([4] * 6)
    module.flops_per_batch = 6000
    options = QUIET | {"log_every_n_steps": 2}
    Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[monitor], **options).fit(module)
    assert [step for step, _ in monitor.loss_curve] == [2, 4, 6]
    found, seconds = monitor.metrics, monitor._measured.total["seconds"]
    step_s = found.pop("throughput/step_s")
    rates = {name.removeprefix("throughput/"): found[name] for name in found if name.startswith("throughput/")}
    # the first step is not measured
    assert rates == pytest.approx(
        {
            "time": seconds,
            "batches": 5,
            "samples": 5 * 8,
            "lengths": 5 * 12,
            "device/batches_per_sec": 1 / step_s,
            "device/samples_per_sec": 8 / step_s,
            "device/items_per_sec": 12 / step_s,
            "device/flops_per_sec": 6000 / step_s,
            "device/mfu": 6000 / step_s / 1e9,
        }
    )
    assert monitor.per_second == pytest.approx(5 * 12 / seconds)


class SparseSGD(torch.optim.SGD):
    """Keeps a number of its own beside the parameters' states, like MADGRAD."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state["k"] = torch.tensor([1])
        return loss


class Embedded(Rows):
    def __init__(self) -> None:
        super().__init__([4] * 3)
        self.table = nn.Embedding(5, 3, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(self.table(torch.tensor([0, 2, 2]))).sum()

    def configure_optimizers(self) -> Any:
        return SparseSGD(self.parameters(), lr=0.1, momentum=0.9)


def test_sparse_gradients_and_an_optimizers_own_state_are_measured() -> None:
    module = Embedded()
    norms: list[Tensor] = []

    class Norm(Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            dense = [p.grad.to_dense() for p in module.parameters() if p.grad is not None]
            norms.append(torch.nn.utils.get_total_norm(dense))

    monitor = ZeroMonitor(1)
    Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[monitor, Norm()], **QUIET).fit(module)
    found = monitor.metrics
    assert found["training/gradient_norm"] == pytest.approx(norms[-1].item())
    assert found["memory/parameters_MB"] == pytest.approx((4 + 15) * 4 / 1e6)
    # three rows of three values with their indices, and a dense gradient of four elements
    assert found["memory/gradients_MB"] == pytest.approx((9 * 4 + 3 * 8 + 4 * 4) / 1e6)


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
}


# -- overhead ----------------------------------------------------------------------------------------------------------


def test_a_monitored_step_costs_few_instructions():
    """Count instructions, since times vary: in steps without an observation, and in one with it."""
    monitor = ZeroMonitor(every_n_steps=50)
    counted: list[int] = []

    def counting(hook: Any) -> Any:
        def call(*args: Any) -> None:
            counted.append(instructions_of(lambda: hook(*args)))

        return call

    monitor.on_train_batch_end = counting(monitor.on_train_batch_end)  # type: ignore[method-assign]
    trainer = make_trainer("ddp", max_epochs=None, max_steps=101, callbacks=[monitor], use_distributed_sampler=False)
    trainer.fit(Net(), data(4 * 101))
    assert len(counted) == 101
    assert max(counted[1:49]) < 600, "some microseconds"
    assert counted[99] < 50_000
