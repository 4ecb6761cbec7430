"""The benchmarks run, the compared systems do the same work, and results record machine and versions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.running import REPOSITORY, SCRIPT, run
from tests.support.machines import on_two

SHORT = ["--rounds", "1", "--steps", "2", "--model", "tiny", "--sequence", "32"]


def test_overhead_compares_trainers_that_compute_the_same_losses(tmp_path: Path) -> None:
    options = ["--strategies", "auto,zero3", "--output", str(tmp_path)]
    run(SCRIPT, "benchmarks/overhead.py", *SHORT, *options, folder=tmp_path)
    result = json.loads((tmp_path / "overhead.json").read_text())
    assert result["losses"]["zero3"] == result["losses"]["auto"]
    assert len(result["seconds"]["zero3"][0]) == 2


@pytest.mark.exhaustive
def test_tiny_compares_strategies_whose_losses_are_ddps(tmp_path: Path) -> None:
    options = ["--models", "gnn,sac,schnet", "--rounds", "2", "--steps", "6", "--output", str(tmp_path)]
    run(SCRIPT, "benchmarks/tiny.py", *options, folder=tmp_path)
    models = json.loads((tmp_path / "tiny.json").read_text())["models"]
    assert list(models) == ["gnn", "sac", "schnet"]
    for found in models.values():
        assert found["are_losses_equal"] and list(found["ratios"]) == ["ddp", "zero1", "zero2", "zero3"]
        assert [len(steps) for steps in found["seconds"]["zero3"]] == [6, 6]


@pytest.mark.timeout(300)  # two pairs of processes
@pytest.mark.exhaustive
def test_checkpoint_compares_systems_that_load_what_they_saved(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--saves", "2", "--model", "tiny", "--systems", "sharded,fsdp2"]
    run(
        SCRIPT,
        "benchmarks/checkpoint.py",
        *options,
        *("--disk", str(tmp_path), "--output", str(tmp_path)),
        folder=tmp_path,
        timeout=280,
    )
    result = json.loads((tmp_path / "checkpoint.json").read_text())
    assert result["rounds"]["sharded"][0]["loss"] == result["rounds"]["fsdp2"][0]["loss"]
    assert all(f"| {system} |" in (tmp_path / "checkpoint.md").read_text() for system in ("sharded", "fsdp2"))


def test_disk_compares_the_same_bytes_with_dd(tmp_path: Path) -> None:
    options = ["--size", "16", "--piece", "4", "--rounds", "2", "--disk", str(tmp_path), "--output", str(tmp_path)]
    run(SCRIPT, "benchmarks/disk.py", *options, folder=tmp_path)
    result = json.loads((tmp_path / "disk.json").read_text())
    for what in ("read", "write", "both"):
        assert [len(seconds) for seconds in result["seconds"][what].values()] == [2, 2]
        assert f"| {what} |" in (tmp_path / "disk.md").read_text() and result["ratios"][what] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk.json", "disk.md"]


@pytest.mark.exhaustive
def test_offload_compares_systems_that_compute_the_same_losses(tmp_path: Path) -> None:
    systems = ["none", "cpu", "nvme_all", "fsdp2_cpu"]
    options = ["--systems", ",".join(systems), "--disk", str(tmp_path), "--output", str(tmp_path)]
    run(SCRIPT, "benchmarks/offload.py", *SHORT, *options, folder=tmp_path)
    result = json.loads((tmp_path / "offload.json").read_text())
    assert len({result["rounds"][system][0]["loss"] for system in systems}) == 1
    assert (
        result["rounds"]["nvme_all"][0]["peak"].get("optimizer", 0)
        == 0
        < result["rounds"]["none"][0]["peak"]["optimizer"]
    )
    assert all(f"| {system} |" in (tmp_path / "offload.md").read_text() for system in systems)


@pytest.mark.exhaustive
def test_offload_keeps_what_it_has_measured_if_a_system_fails(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ImportError('not for this torch')")
    options = ["--systems", "none,deepspeed_cpu,cpu", "--disk", str(tmp_path), "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "benchmarks/offload.py", *SHORT, *options],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "deepspeed_cpu FAILED, and is left out" in done.stdout, done.stderr
    assert list(json.loads((tmp_path / "offload.json").read_text())["rounds"]) == ["none", "cpu"]


@pytest.mark.timeout(300)  # a dozen processes
@pytest.mark.exhaustive
def test_growth_gives_exponents_against_tensors_units_and_ranks(tmp_path: Path) -> None:
    sizes = ["--tensors", "4,16", "--units", "2,4", "--ranks", "2,64", "--processes", "2,3"]
    options = ["--rounds", "1", "--steps", "2", "--systems", "zero1,zero3", "--output", str(tmp_path)]
    run(SCRIPT, "benchmarks/growth.py", *sizes, *options, folder=tmp_path, timeout=280)
    series = json.loads((tmp_path / "growth.json").read_text())["series"]
    assert {name: found["sizes"] for name, found in series.items()} == {
        "tensors": [4, 16],
        "units": [2, 4],
        "ranks": [2, 64],
        "processes": [2, 3],
    }
    for found in series.values():
        for system in ("zero1", "zero3"):
            cost = found["costs"][system]
            assert len(cost["step"]) == len(cost["setup"]) == 2
            assert len(cost["step_exponents"]) == len(cost["setup_exponents"]) == 2
    assert "ddp" in series["processes"]["costs"]
    table = (tmp_path / "growth.md").read_text()
    assert table.count("| exponent |") == table.count("| at the end |") == 4
    assert (tmp_path / "growth.png").stat().st_size > 0


@pytest.mark.exhaustive
def test_growth_compares_model_states_of_64_ranks_with_the_formula(tmp_path: Path) -> None:
    options = ["--memory", "--model", "tiny", "--output", str(tmp_path)]
    run(SCRIPT, "benchmarks/growth.py", *options, folder=tmp_path)
    stages = json.loads((tmp_path / "growth_memory.json").read_text())["stages"]
    assert [found["stage"] for found in stages] == 2 * [1, 2, 3]
    # its units are so small that a 64th of one is padded to a multiple of 32 elements
    assert all(1.0 <= found["of_formula"] < 1.05 for found in stages)
    assert "| 3 in bfloat16 |" in (tmp_path / "growth_memory.md").read_text()


@pytest.mark.exhaustive
def test_monitor_compares_parts_of_a_fit_with_and_without_the_monitor(tmp_path: Path) -> None:
    options = ["--strategies", "zero3", "--model", "tiny", "--every", "2", "--pairs", "2", "--output", str(tmp_path)]
    run(SCRIPT, "benchmarks/monitor.py", *options, folder=tmp_path)
    found = json.loads((tmp_path / "monitor.json").read_text())["strategies"]["zero3"]
    assert len(found["seconds"]["on"]) == len(found["seconds"]["off"]) == 2
    assert 0 < found["hooks"] < max(found["seconds"]["on"])


@pytest.mark.timeout(300)  # nine pairs of processes
@pytest.mark.exhaustive
def test_plans_compares_predicted_with_measured_times(tmp_path: Path) -> None:
    options = [
        "--model",
        "tiny",
        "--batch",
        "1",
        "--sequence",
        "16",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--output",
        str(tmp_path),
    ]
    run(SCRIPT, "benchmarks/plans.py", *options, folder=tmp_path, timeout=280)
    found = json.loads((tmp_path / "plans_tiny.json").read_text())
    assert [row["name"] for row in found["configurations"]][:4] == ["ddp", "zero1", "zero2", "zero3"]
    assert all(len(row["seconds"]) == 2 and row["predicted"] > 0 for row in found["configurations"])
    assert 0 < found["of_the_quickest"] <= 1


def run_ranks_on_two(script: str, *options: str, folder: Path) -> None:
    """Run a benchmark that simulates two machines; skips where they cannot be made."""
    with on_two():
        pass
    # not with `warm_python()`, whose processes are forked from a server outside of the machines
    output = ["--output", str(folder)]
    run(SCRIPT, script, *options, *output, folder=folder, timeout=280, python=sys.executable)


@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_links_counts_the_bytes_that_cross_between_machines(tmp_path: Path) -> None:
    options = [
        "--systems",
        "zero3,zero3_node",
        "--rates",
        "none,1gbit",
        "--width",
        "64",
        "--rounds",
        "1",
        "--steps",
        "2",
    ]
    run_ranks_on_two("benchmarks/links.py", *options, folder=tmp_path)
    systems = json.loads((tmp_path / "links_width64.json").read_text())["systems"]
    assert systems["zero3_node"]["left_bytes"] < 0.4 * systems["zero3"]["left_bytes"]
    for found in systems.values():
        assert {rate: len(steps["apart"]) for rate, steps in found["seconds"].items()} == {"none": 2, "1gbit": 2}


@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_neutrality_compares_losses_with_those_of_fp32(tmp_path: Path) -> None:
    options = ["--systems", "fp32,int8,bf16", "--seeds", "0", "--steps", "4"]
    run_ranks_on_two("benchmarks/neutrality.py", *options, folder=tmp_path)
    losses = json.loads((tmp_path / "neutrality.json").read_text())["systems"]
    assert losses["bf16"]["0"] == pytest.approx(losses["fp32"]["0"], rel=0.01)
    assert losses["int8"]["0"] == pytest.approx(losses["fp32"]["0"], rel=0.01)
    assert losses["int8"]["0"] != losses["fp32"]["0"]
    assert losses["int8"]["crossed"] < 0.7 * losses["fp32"]["crossed"]


@pytest.mark.parametrize(
    ("script", "systems", "said"),
    [
        ("links", "zero3,bf16 zero3_node int8", "add bf16 zero3_node, with which other systems are compared"),
        ("links", "zero4", "zero4 is not among zero3"),
        ("neutrality", "int8,bf16", "add fp32, with which other systems are compared"),
        ("neutrality", "fp32,int3", "int3 is not among fp32"),
    ],
)
def test_systems_that_cannot_be_compared_are_refused_at_the_start(script: str, systems: str, said: str) -> None:
    command = [sys.executable, f"benchmarks/{script}.py", "--systems", systems]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"error: --systems: {said}" in done.stderr
