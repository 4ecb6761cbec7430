"""Metrics by slice against torchmetrics on the same samples; drift against closed forms, its hook and its exit code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassCalibrationError,
)

from lightning_zero.callbacks.drift import Drift, drift_of, read_values
from lightning_zero.commands import drift as command
from lightning_zero.monitoring import DriftMonitor, SliceMetrics
from tests.support.trainer import make_trainer
from tests.support.workers import rank, world_size
from tests.trainer.cases import Net, data, shared_folder


class Predicts(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


METRICS = MetricCollection(
    {"accuracy": MulticlassAccuracy(3, average="micro"), "calibration": MulticlassCalibrationError(3)}
)
SLICES = {
    "zeros": lambda batch: batch[1] == 0,
    "positive": lambda batch: batch[0][:, 0] > 0,
    "nothing": lambda batch: batch[1] > 5,
}


def sliced(strategy: str) -> None:
    torch.manual_seed(0)
    module, loader = Predicts(), data(32)
    x, y = loader.dataset.tensors
    expected = {}
    with torch.no_grad():
        for name, members in {"zeros": y == 0, "positive": x[:, 0] > 0}.items():
            metrics = METRICS.clone()(module(x)[members].softmax(-1), y[members])
            expected |= {f"slices/{name}/{metric}": value for metric, value in metrics.items()}
            expected[f"slices/{name}/samples"] = members.sum().float()
    slices = SliceMetrics(METRICS, SLICES, lambda outputs, batch: (outputs.softmax(-1), batch[1]))
    trainer = make_trainer(strategy, callbacks=[slices])
    for _ in range(2):  # metrics are reset for the second run
        trainer.validate(module, loader, verbose=False)
        assert trainer.callback_metrics.pop("slices/nothing/samples") == 0
        torch.testing.assert_close(dict(trainer.callback_metrics), expected)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_metrics_of_a_slice_are_those_of_its_samples_on_all_ranks(run_on, strategy):
    run_on(2, sliced, strategy=strategy)


CURVES = MetricCollection(
    {
        "auroc": MulticlassAUROC(3),  # this and the next metric share states
        "precision": MulticlassAveragePrecision(3),
        "calibration": MulticlassCalibrationError(3),
    }
)


def on_one_rank_only(strategy: str) -> None:
    """The slice has samples in the last two of rank 1's batches. The metrics keep floats, integers and matrices."""
    torch.manual_seed(0)
    module, loader = Predicts(), data(32)
    x, y = (each[17::2] for each in loader.dataset.tensors)  # rank 1 has the odd samples
    slices = {"late": lambda batch: (batch[0][:, None] == x).all(-1).any(1)}
    with torch.no_grad():
        expected = CURVES.clone()(module(x).softmax(-1), y)
    callback = SliceMetrics(CURVES, slices, lambda outputs, batch: (outputs.softmax(-1), batch[1]))
    trainer = make_trainer(strategy, callbacks=[callback], use_distributed_sampler=True)
    for _ in range(2):
        trainer.validate(module, loader, verbose=False)
        found = dict(trainer.callback_metrics)
        assert found.pop("slices/late/samples") == len(y) == 8
        torch.testing.assert_close(found, {f"slices/late/{name}": value for name, value in expected.items()})


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_metrics_that_keep_all_values_need_no_samples_on_some_ranks(run_on, strategy):
    run_on(2, on_one_rank_only, strategy=strategy)


def test_drift_figures_equal_closed_forms():
    half = np.repeat([0.0, 1.0], 500)
    fifth = np.repeat([0.0, 0.0, 0.0, 0.0, 1.0], 200)
    drift = drift_of({"x": half}, {"x": fifth})["x"]
    assert drift.psi == pytest.approx(0.3 * math.log(0.8 / 0.5) - 0.3 * math.log(0.2 / 0.5))
    assert drift.ks == pytest.approx(0.3) and drift.p < 1e-6 and drift.exceeds(0.2, 0.1)
    # a uniform distribution moved by half: five of ten bins are empty, the last one has the rest
    uniform = (np.arange(1000) + 0.5) / 1000
    drift = drift_of({"x": uniform}, {"x": uniform + 0.5})["x"]
    assert drift.ks == pytest.approx(0.5, abs=0.01) and drift.psi > 3
    generator = np.random.default_rng(0)
    for _ in range(20):
        drift = drift_of({"x": generator.normal(size=2000)}, {"x": generator.normal(size=2000)})["x"]
        assert not drift.exceeds(0.2, 0.1)
    with pytest.raises(ValueError, match="there are no values of 'x' to compare"):
        drift_of({"x": uniform}, {"y": uniform})


def inputs(shift: float) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(int(shift))
    x = torch.randn(400, 6, generator=generator)
    return DataLoader(TensorDataset(x + shift, torch.zeros(400, dtype=torch.long)), batch_size=25)


def watched(strategy: str) -> None:
    folder, called = shared_folder(), []
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    module = Net()

    def values(outputs: Any, batch: Any) -> dict[str, Any]:
        return {"first": batch[0][:, 0], "entropy": torch.distributions.Categorical(logits=outputs).entropy()}

    def predict(loader: DataLoader[Any], **options: Any) -> DriftMonitor:
        monitor = DriftMonitor(values, on_drift=called.append, **options)
        make_trainer(strategy, callbacks=[monitor], use_distributed_sampler=True).predict(module, loader)
        torch.distributed.barrier()
        return monitor

    predict(inputs(0), save_to=folder / "reference.npz")
    saved = read_values(folder / "reference.npz")
    expected = inputs(0).dataset.tensors[0][:, 0]
    assert np.array_equal(np.sort(saved["first"]), np.sort(expected.numpy())), "of both ranks"
    steady = predict(inputs(0), reference=folder / "reference.npz")
    assert called == [] and (rank() or steady.found["first"] == Drift(0.0, 0.0, 1.0))
    moved = predict(inputs(2), reference=folder / "reference.npz", save_to=folder / "recent.npz")
    assert called == ([moved.drifted] if rank() == 0 else [])
    if rank() == 0:
        assert "first" in moved.drifted and set(moved.found) == {"first", "entropy"}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_drift_calls_the_hook_once_on_rank_0(run_on, strategy):
    run_on(2, watched, strategy=strategy)


def partly_nan(ranks_with_nan: int) -> None:
    """On some ranks, every value of `odd` is NaN."""
    folder = shared_folder()
    folder.mkdir(exist_ok=True)

    def values(outputs: Any, batch: Any) -> dict[str, Any]:
        first = batch[0][:, 0]
        return {"first": first, "odd": torch.full_like(first, math.nan) if rank() < ranks_with_nan else first}

    def predict(**options: Any) -> None:
        trainer = make_trainer("ddp", callbacks=[DriftMonitor(values, **options)], use_distributed_sampler=True)
        trainer.predict(Net(), inputs(0))

    predict(save_to=folder / "values.npz")
    if rank():
        return
    saved = read_values(folder / "values.npz")
    assert saved["odd"].shape == (400 * (world_size() - ranks_with_nan) // world_size(),)
    assert saved["first"].shape == (400,)
    if ranks_with_nan == 1 == world_size():
        np.savez(folder / "reference.npz", odd=saved["first"])
        with pytest.raises(ValueError, match="there are no values of 'odd' to compare"):
            predict(reference=folder / "reference.npz")


@pytest.mark.parametrize(("ranks", "ranks_with_nan"), [(1, 1), (2, 1), (2, 2)])
def test_quantities_may_have_no_values_other_than_nan(run_on, ranks, ranks_with_nan):
    run_on(ranks, partly_nan, ranks_with_nan=ranks_with_nan)


def by_class() -> None:
    """Each rank sees the quantities in its own order, and one of them on one rank only."""
    folder = shared_folder()
    folder.mkdir(exist_ok=True)

    def values(outputs: Any, batch: Any) -> dict[str, Any]:
        low, high = batch[0][:, 0], batch[0][:, 0] + 100
        return {"low": low, "high": high} if rank() == 0 else {"high": high, "low": low, "other": low + 200}

    monitor = DriftMonitor(values, save_to=folder / "values.npz")
    make_trainer("ddp", callbacks=[monitor], use_distributed_sampler=True).predict(Net(), inputs(0))
    if rank() == 0:
        saved, first = read_values(folder / "values.npz"), inputs(0).dataset.tensors[0][:, 0]
        assert np.array_equal(np.sort(saved["low"]), np.sort(first.numpy()))
        assert np.array_equal(np.sort(saved["high"]), np.sort((first + 100).numpy()))
        assert saved["other"].shape == (200,)


def test_ranks_may_see_quantities_in_any_order(run_on):
    run_on(2, by_class)


def test_the_drift_commands_exit_code_says_whether_something_drifted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(0)
    for name, shift in (("reference", 0), ("steady", 0), ("moved", 1)):
        np.savez(tmp_path / name, x=generator.normal(size=2000) + shift, y=generator.normal(size=2000))
    reference, steady, moved = (str(tmp_path / f"{name}.npz") for name in ("reference", "steady", "moved"))
    assert command.main([reference, steady]) == 0
    assert command.main([reference, moved]) == 1
    assert capsys.readouterr().out.splitlines()[-2].split()[::4] == ["x", "yes"]
    assert command.main([reference, moved, "--psi-above", "100", "--ks-above", "1"]) == 0
    assert command.main([reference, str(tmp_path / "none.npz")]) == 2
    assert "none.npz" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["text", "npy", "cut", "strings", "objects", "NaN"])
def test_the_drift_command_refuses_other_files_in_one_line_that_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    reference, other = str(tmp_path / "reference.npz"), tmp_path / "other.npz"
    np.savez(reference, x=np.arange(20.0))
    values = {"strings": np.array(["a", "b"]), "objects": np.array([{}, {}]), "NaN": np.full(20, np.nan)}
    np.savez(other, x=values.get(content, np.arange(20.0)))
    if content == "text":
        other.write_text("x")
    elif content == "npy":
        with other.open("wb") as file:
            np.save(file, np.arange(20.0))
    elif content == "cut":
        other.write_bytes(other.read_bytes()[:100])
    assert command.main([reference, str(other)]) == 2
    errors = capsys.readouterr().err
    said = "there are no values of 'x' to compare" if content == "NaN" else f"{other} has other contents than arrays"
    assert errors.startswith(f"lightning-zero drift: {said}") and errors.count("\n") == 1 and "pickle" not in errors
