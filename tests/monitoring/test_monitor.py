"""ZeroMonitor on real ranks: its figures against DDP's, closed forms and torch's own counts; its warnings."""

from __future__ import annotations

import csv
import json
import logging
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import SumMetric

from lightning_zero import ZeroStrategy
from lightning_zero.monitoring import ZeroMonitor
from lightning_zero.monitoring.band import Band
from lightning_zero.monitoring.flops import FlopCounter
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
    options = {"available_flops": 1e9, "top_units": 2}
    rows, monitor = monitored(blocks, monitor=options, limit_val_batches=0, callbacks=[account])
    assert [step for step, _ in rows] == ([2, 4, 6, 8, 10, 12] if rank() == 0 else [])
    assert [step for step, _ in monitor.loss_curve] == list(range(1, 13))
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
    assert held.pop("peak") == sum(monitor.peak_bytes.values()) / 1e6 >= sum(account.held.values()) / 1e6
    resident, unaccounted = held.pop("resident"), held.pop("unaccounted")
    assert 50 < unaccounted == pytest.approx(resident - sum(account.held.values()) / 1e6) and not held

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
    # matrix products: forward, gradients of the weights, and gradients of the inputs except the first layer's
    forward, first = 2 * 4 * (36 + 36 + 18), 2 * 4 * 36
    assert found["throughput/device/mfu"] == pytest.approx((3 * forward - first) / step_s / 1e9)

    # waits
    waits = {name: value for name, value in found.items() if name.startswith("wait/")}
    assert len(waits) == 2 and all(0 < value < step_s for value in waits.values())
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


def validated() -> None:
    """Validation between measured steps counts neither as time nor as traffic."""

    class SlowToValidate(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.2)

    _, without = monitored("zero3", limit_val_batches=0)
    _, monitor = monitored("zero3", SlowToValidate())
    assert monitor.elements_per_step == without.elements_per_step
    assert monitor.per_second is not None and 1 / monitor.per_second < 0.2
    assert len(monitor.validation_curve) == 5  # the sanity check and four epochs


def test_validation_is_not_measured(run_on):
    run_on(2, validated)


class Plateau(Net):
    """The learning rate falls at once, in each step, unless the logged loss falls."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", 1.0 + (self.global_step + 1) % 3, sync_dist=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "loss"}]


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen.append((float(trainer.callback_metrics.get("loss", 0)), trainer.optimizers[0].param_groups[0]["lr"]))


def own_loss(strategy: str) -> list[Any]:
    found = []
    for callbacks in ([], [ZeroMonitor(1)]):
        rates = Rates()
        torch.manual_seed(0)
        trainer, _ = fit(strategy, Plateau(), callbacks=[*callbacks, rates], enable_progress_bar=True)
        found.append((rates.seen, dict(trainer.callback_metrics)))
        assert trainer.progress_bar_metrics["loss"] == trainer.callback_metrics["loss"]
        assert ("MB/rank" in trainer.progress_bar_metrics) == bool(callbacks and rank() == 0)
    assert found[0] == found[1]
    return found[1][0]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_progress_bar_leaves_a_modules_own_metrics_and_their_schedulers_alone(run_on, strategy):
    rates = run_on(2, own_loss, strategy=strategy)
    assert rates[0] == rates[1] and len({lr for _, lr in rates[0]}) > 2


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
        total = monitor._total
        assert (total.steps, total.batches, total.samples) == (steps, 4 * steps, 4 * 4 * steps)
        found.append(monitor.elements_per_step)
    assert found[0] == found[1] and (found[0] is None) == (strategy == "ddp")


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_step_that_validation_interrupts_is_not_measured(run_on, strategy):
    run_on(2, validated_within_a_step, strategy=strategy)


def validated_after_each_step() -> None:
    for strategy in ("ddp", "zero3"):
        monitor = ZeroMonitor(2)
        torch.manual_seed(0)
        fit(strategy, callbacks=[monitor], overfit_batches=1, max_epochs=6)
        assert monitor._losses == [] and [step for step, _ in monitor.loss_curve] == list(range(1, 7))
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


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_slowest_rank_is_named(run_on, stage, slow):
    run_on(2, straggling, stage=stage, slow=slow)


# -- warnings ----------------------------------------------------------------------------------------------------------


class Jumping(Net):
    """The loss is multiplied for some steps, as by a bad batch."""

    def __init__(self, steps: range) -> None:
        super().__init__()
        self.steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        factor = 30.0 if self.global_step + 1 in self.steps else 1.0
        return super().training_step(batch, batch_idx) * factor


def warned(strategy: str, module: LightningModule) -> list[str]:
    """The warnings in 48 steps with a learning rate of 0."""
    module.lr = 0.0  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitored(strategy, module, max_epochs=16, limit_val_batches=0)
    return [str(warning.message) for warning in caught if "ZeroMonitor" in str(warning.message)]


def warnings_of_a_delay() -> None:
    said = warned("zero2", Delayed(1, range(41, 45), delay=1.0))
    found = [re.search(r"at step (\d+),.* compute time was ([\d.]+) times", text) for text in said]
    # other programs that occupy the machine for a moment cause warnings, too, but not of a rank that was so much slower
    late = [text for text, match in zip(said, found) if match and int(match[1]) > 40 and float(match[2]) > 10]
    assert len(late) == (1 if rank() == 0 else 0), said
    if late:
        assert "throughput fell to" in late[0] and "at step 42" in late[0] and "Rank 1's compute time" in late[0]


def warnings_of_a_jump() -> None:
    said = [text for text in warned("ddp", Jumping(range(43, 46))) if "the training loss at step" in text]
    assert len(said) == (1 if rank() == 0 else 0), said
    if said:
        assert "at step 44" in said[0]


@pytest.mark.exhaustive
def test_a_delay_on_one_rank_causes_one_warning(run_on):
    run_on(2, warnings_of_a_delay)


def test_a_jump_of_the_loss_causes_one_warning(run_on):
    run_on(2, warnings_of_a_jump)


def test_a_jump_leaves_the_band_once_and_a_steady_series_never():
    for seed in range(20):
        noise = torch.randn(500, generator=torch.Generator().manual_seed(seed))
        for steady in (10 + noise, torch.exp(0.2 * noise), 5 - 0.005 * torch.arange(500) + 0.05 * noise):
            band = Band(50, 8.0)
            assert [band.exceeded_by(value) for value in steady.tolist()] == [None] * 500
            jump = 20 + steady[-1].item()
            low, high = band.exceeded_by(jump) or (0.0, 0.0)
            assert low < steady[-50:].median() < high < jump
            assert [band.exceeded_by(jump) for _ in range(100)] == [None] * 100
            # after a long steady series the former jump is outside the band again
            assert [band.exceeded_by(value) for value in steady.tolist()] == [None] * 500
            assert band.exceeded_by(jump) is not None


def test_non_finite_values_are_always_outside_the_band():
    band = Band(50, 8.0)
    assert band.exceeded_by(float("nan")) is not None and band.exceeded_by(float("inf")) is None
    assert band.exceeded_by(1.0) is None and band.exceeded_by(float("inf")) is not None


# -- input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["every_n_steps", "window", "band_width"])
def test_arguments_out_of_range_are_named(argument):
    with pytest.raises(ValueError, match=rf"^ZeroMonitor: {argument}=0 must be an? (integer|number) of at least \d\.$"):
        ZeroMonitor(**{argument: 0})


def test_available_flops_are_read_from_a_file_written_by_the_doctor_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"resources": {"flops": 2e9}}))
    found = [_mfu(ZeroMonitor(1, available_flops=given, flops_per_batch=1e6)) for given in (2e9, file, str(file))]
    assert all(value > 0 for value in found)
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    assert _mfu(ZeroMonitor(1)) is None
    said = [record.message for record in caplog.records if "MFU" in record.message]
    assert len(said) == 1 and "available_flops" in said[0]
    file.write_text("{}")
    with pytest.raises(ValueError, match="does not state the FLOP/s: available_flops must be a number, or a file"):
        ZeroMonitor(available_flops=file)


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


def of_rows(module: Rows, **options: Any) -> tuple[dict[str, float], ZeroMonitor, dict[str, float]]:
    """The last figures of a fit, the monitor, and what the progress bar showed."""
    monitor = ZeroMonitor(every_n_steps=1, **options)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[monitor], **QUIET | {"enable_progress_bar": True}
    )
    trainer.fit(module)
    return monitor.metrics, monitor, {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


@pytest.mark.parametrize("rows", [[4, 0, 4], [4, 0, 0], [0, 0, 0]], ids=str)
def test_batches_without_rows_are_monitored(rows: list[int]) -> None:
    """Nothing is measured before the end of the first step."""
    found, monitor, _ = of_rows(Rows(rows), length_fn=len)
    assert (found["throughput/batches"], found["throughput/samples"]) == (2, sum(rows[1:]))
    assert found["throughput/device/samples_per_sec"] == pytest.approx(rows[-1] / found["throughput/step_s"])
    assert len(monitor.loss_curve) == 3


@pytest.mark.parametrize(
    ("own", "options", "counted", "per_step"),
    [
        ({}, {}, "steps", 1),
        ({"counted": "tokens"}, {}, "steps", 1),
        ({}, {"length_fn": torch.numel}, "items", 12),
        ({"count": torch.numel}, {}, "items", 12),
        ({"counted": "tokens"}, {"length_fn": torch.numel}, "tokens", 12),
        ({"counted": "tokens", "count": torch.numel}, {}, "tokens", 12),
        ({"counted": "tokens", "count": lambda batch: 0}, {}, "tokens", 0),
        ({"count": 0}, {}, "steps", 1),
        ({"count": nn.Buffer(torch.zeros(1))}, {}, "steps", 1),
        ({"count": SumMetric()}, {}, "steps", 1),
    ],
    ids=[
        "nothing",
        "no count",
        "length_fn",
        "count",
        "length_fn and unit",
        "count and unit",
        "no tokens",
        "count is a number",
        "count is a buffer",
        "count is a metric",
    ],
)
def test_throughput_has_the_unit_that_it_counts(own, options, counted, per_step) -> None:
    module = Rows([4] * 3)
    for name, value in own.items():
        setattr(module, name, value)
    found, monitor, shown = of_rows(module, **options)
    rate = per_step / found["throughput/step_s"]
    assert monitor.counted == counted
    assert shown[f"{counted}/s"] == pytest.approx(rate)
    assert monitor.per_second == pytest.approx(2 * per_step / monitor._total.seconds)
    if "length_fn" in options:
        assert found["throughput/device/items_per_sec"] == pytest.approx(rate)
        assert found["throughput/lengths"] == 2 * per_step
    elif counted != "steps":
        assert found[f"throughput/{counted}_per_sec"] == pytest.approx(rate)


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


def _mfu(monitor: ZeroMonitor) -> float | None:
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=3, callbacks=[monitor], **QUIET)
    trainer.fit(Net(), data())
    return monitor.metrics.get("throughput/device/mfu")


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
}


def test_a_trainer_without_a_logger_is_reported_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    _mfu(ZeroMonitor(1))
    (said,) = [record.message for record in caplog.records if "no logger" in record.message]
    assert said == "ZeroMonitor: the Trainer has no logger, so values are only in the callback's `metrics`."


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.ReLU())
        self.out = nn.Linear(4, 4)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x).unflatten(1, (4, 4)).transpose(2, 3).contiguous()  # as the fused kernel requires
        keys = x[:, : self.heads]
        shares = self.heads < 4
        return self.out(nn.functional.scaled_dot_product_attention(x, keys, keys, enable_gqa=shares))


@pytest.mark.parametrize("heads", [4, 2], ids=["a head of keys each", "query heads that share keys"])
def test_counted_operations_equal_torchs_count_of_single_products(heads: int) -> None:
    x = torch.randn(2, 8, 32)
    own, torchs = FlopCounter(), FlopCounterMode(display=False)
    with own:
        Attention(heads)(x).sum().backward()
    with torchs, sdpa_kernel(SDPBackend.MATH):
        Attention(heads)(x).sum().backward()
    # the fused kernel computes the product of queries and keys once more, in backward
    assert own.total == torchs.get_total_flops() + 2 * (2 * 4 * 32 * 32 * 4)


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
