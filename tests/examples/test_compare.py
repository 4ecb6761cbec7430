"""`python benchmarks/compare.py`: which results are slower or larger, by how much, and how certain that is."""

from __future__ import annotations

import csv
import json
import random
import statistics
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_zero.monitoring import ZeroMonitor
from tests.app.commands import REPOSITORY
from tests.examples.running import make
from tests.planning.projects import Net

STORED = REPOSITORY / "benchmarks" / "results"
sys.path.append(str(STORED.parent))  # its modules import each other as scripts do

from compare import Series, change_of, main, series_of  # noqa: E402


def steps(seconds: float, seed: int, count: int = 12) -> list[float]:
    drawn = random.Random(seed)
    return [seconds * drawn.uniform(0.97, 1.03) for _ in range(count)]


def written(
    file: Path, seconds: dict[str, float], megabytes: float = 100.0, seed: int = 0, machine: str = "one"
) -> Path:
    systems = {
        system: {
            "seconds": [steps(median, seed + round_) for round_ in range(2)],
            "median_seconds": median,
            "live_bytes": 1e6 * megabytes,
            "allocated_bytes": 0,
        }
        for system, median in seconds.items()
    }
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"about": {"hardware": machine, "command": "python x.py"}, "systems": systems}))
    return file


def compared(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, dict[str, Any], str]:
    code = main([*map(str, arguments), "--json"])
    said = capsys.readouterr()
    found = json.loads(said.out) if said.out else {"series": []}
    return code, {each["name"]: each for each in found["series"]}, said.err


def test_p_is_the_fraction_of_orderings_at_least_as_far_from_even() -> None:
    old, new = [1.0, 2.0, 3.0, 7.0], [4.0, 5.0, 6.0, 8.0, 9.0]
    everything = sorted([*old, *new])

    def larger(group: Any) -> int:
        return sum(a > b for a in group for b in everything if b not in group)

    even = len(old) * len(new) / 2
    orders = [abs(larger(group) - even) for group in combinations(everything, len(old))]
    expected = sum(order >= abs(larger(old) - even) for order in orders) / len(orders)
    found = change_of("x", Series("s", old), Series("s", new), 1.05, 0.05)
    assert found.p == pytest.approx(expected, rel=1e-9)
    assert (found.old, found.new, found.samples) == (2.5, 6.0, (4, 5))
    assert found.ratio == statistics.median(new) / statistics.median(old) and found.verdict == ""
    assert change_of("x", Series("s", old), Series("s", new), 1.05, 2 * expected).verdict == "slower"


def test_the_interval_contains_the_ratio_and_is_as_wide_as_the_scatter_of_the_samples() -> None:
    old = steps(1.0, seed=1, count=30)
    for scale in (1.0, 1.5):
        found = change_of("x", Series("s", old), Series("s", [scale * value for value in old]), 1.05, 0.05)
        assert found.interval is not None
        low, high = found.interval
        assert 0.97 * scale < low < scale < high < 1.03 * scale


def test_a_slower_or_larger_result_gives_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(tmp_path / "old.json", {"ddp": 1.0, "zero3": 2.0})
    alike = written(tmp_path / "alike.json", {"ddp": 1.0, "zero3": 2.06}, seed=7)
    code, found, said = compared(capsys, old, alike)
    assert (code, said) == (0, "") and list(found) == [
        f"{system}/{reading}" for system in ("ddp", "zero3") for reading in ("seconds", "live_bytes")
    ]
    assert {each["verdict"] for each in found.values()} == {""} and found["zero3/seconds"]["samples"] == [24, 24]

    slower = written(tmp_path / "slower.json", {"ddp": 0.8, "zero3": 2.4}, seed=7)
    code, found, _ = compared(capsys, old, slower)
    assert code == 1 and found["zero3/seconds"]["verdict"] == "slower" and found["ddp/seconds"]["verdict"] == "faster"
    assert found["zero3/seconds"]["p"] < 0.001 and 1.15 < found["zero3/seconds"]["interval"][0]
    assert compared(capsys, old, slower, "--threshold", "1.3")[0] == 0
    assert compared(capsys, old, slower, "--alpha", "1e-12")[0] == 0

    code, found, _ = compared(capsys, old, written(tmp_path / "larger.json", {"ddp": 1.0, "zero3": 2.0}, 106.0))
    assert code == 1 and found["ddp/live_bytes"]["verdict"] == "larger" and found["ddp/live_bytes"]["p"] is None


def test_results_of_machines_with_different_speeds_are_compared_relative_to_a_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = written(tmp_path / "old.json", {"ddp": 1.0, "zero2": 1.0, "zero3": 1.5})
    other = written(tmp_path / "new.json", {"ddp": 2.0, "zero2": 2.0, "zero3": 3.0}, seed=5, machine="another")
    code, _, said = compared(capsys, old, other)
    assert code == 1 and "was measured on one" in said and "on another: compare times with --relative-to" in said
    code, found, said = compared(capsys, old, other, "--relative-to", "ddp")
    assert (code, said) == (0, "")
    assert {name for name, each in found.items() if each["unit"] == "x"} == {"zero2/seconds", "zero3/seconds"}
    assert found["zero3/seconds"]["old"] == pytest.approx(1.5, rel=0.02)


def test_folders_are_compared_file_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        written(tmp_path / "old" / f"{name}.json", {"ddp": 1.0, "zero3": 1.0})
    written(tmp_path / "new" / "two.json", {"zero3": 1.0})
    code, found, said = compared(capsys, tmp_path / "old", tmp_path / "new")
    assert code == 0 and list(found) == ["two: zero3/seconds", "two: zero3/live_bytes"]
    assert "lacks 3 of the readings in" in said and "ddp/seconds" in said and "in only one of" in said


def test_a_file_without_samples_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    medians = {"about": {"command": "python x.py --store"}, "systems": {"zero3": {"median_seconds": 1.0}}}
    for folder in ("old", "new"):
        written(tmp_path / folder / "whole.json", {"zero3": 1.0})
        (tmp_path / folder / "medians.json").write_text(json.dumps(medians))
    code, found, said = compared(capsys, tmp_path / "old", tmp_path / "new")
    assert code == 0 and len(found) == 2
    assert f"{tmp_path}/old/medians.json has no samples" in said and "python x.py --store" in said


def test_readings_with_too_few_samples_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"about": {"hardware": "one"}}
    for name, seconds in (("old", [1.0, 1.1]), ("new", [2.0, 2.1])):
        (tmp_path / f"{name}.json").write_text(json.dumps({**about, "start_up_seconds": seconds}))
    code, found, said = compared(capsys, tmp_path / "old.json", tmp_path / "new.json")
    assert code == 0 and found["start_up_seconds"]["ratio"] > 1.9
    assert "too few samples for a significant change at --alpha 0.05: start_up_seconds (2 and 2)" in said


def test_stored_results_do_not_differ_from_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = compared(capsys, STORED, STORED)
    assert code == 0 and {each["ratio"] for each in found.values()} == {1.0}
    without = {file.stem for file in STORED.glob("*.json")} - {name.partition(":")[0] for name in found}
    assert without <= {"ratios", "neutrality", "neutrality_states"}, "each of the others has samples of times or bytes"
    growth = series_of(json.loads((STORED / "growth.json").read_text()))
    sizes = [path[-2] for path in growth if path[:4] == ("series", "tensors", "rounds", "zero3") and "seconds" in path]
    assert sizes == ["0", "1", "2", "3"], "the sizes are apart"
    offload = series_of(json.loads((STORED / "offload.json").read_text()))
    assert len(offload["rounds", "nvme", "seconds"].values) == 18, "three rounds of six steps"
    assert len(offload["rounds", "nvme", "peak", "parameters"].values) == 3


def test_runs_with_the_monitor_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("old", "new"):
        torch.manual_seed(0)
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            strategy="zero2",
            max_steps=8,
            callbacks=[ZeroMonitor(every_n_steps=1)],
            logger=CSVLogger(tmp_path / name),
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Net(), DataLoader(torch.randn(16, 16, 64), batch_size=2))
    _, found, _ = compared(capsys, tmp_path / "old", tmp_path / "new")
    assert found["memory/peak_MB"]["ratio"] == 1.0 and found["throughput/step_s"]["samples"][0] > 5
    assert "training/loss" not in found
    (metrics,) = (tmp_path / "old").rglob("metrics.csv")
    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    longest = max(float(row["throughput/step_s"] or 0) for row in rows)
    (tmp_path / "slow").mkdir()
    with (tmp_path / "slow" / "metrics.csv").open("w", newline="") as file:  # as if each step took twice the longest
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, "throughput/step_s": row["throughput/step_s"] and 2 * longest} for row in rows)
    code, found, _ = compared(capsys, tmp_path / "old", tmp_path / "slow")
    assert code == 1 and found["throughput/step_s"]["verdict"] == "slower"
    assert found["throughput/step_s"]["new"] == pytest.approx(2 * longest)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "there is no such file or folder"),
        ("{", [], "cannot be read as JSON"),
        ("[1, 2]", [], "is not a benchmark result of this project: it has no 'about' entry"),
        ('{"about": {}, "systems": {"zero1": {"seconds": [1.0]}}}', [], "have no readings in common"),
        (..., ["--relative-to", "ddp2"], "have no readings in common that can be expressed relative to ddp2"),
        (..., ["--threshold", "0.9"], "--threshold 0.9 must be >= 1, and --alpha 0.05 between 0 and 1"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, options: list[str], message: str
) -> None:
    old, new = written(tmp_path / "old.json", {"zero3": 1.0}), tmp_path / "new.json"
    if isinstance(content, str):
        new.write_text(content)
    elif content is ...:
        new.write_text('{"about": {"hardware": "one"}, "systems": {"zero3": {"seconds": [1.0, 1.1]}}}')
    assert main([str(old), str(new), *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_without_metrics_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path)]) == 2
    assert "has no metrics from ZeroMonitor" in capsys.readouterr().err


def test_make_bench_runs_the_script_that_is_named(tmp_path: Path) -> None:
    old, new = (written(tmp_path / f"the {name}.json", {"zero3": 1.0}) for name in ("old", "new"))
    printed = make("bench", f"compare '{old}' '{new}' --threshold 1.2", timeout=60)
    assert "| zero3/live_bytes | 100 MB | 100 MB |" in printed
