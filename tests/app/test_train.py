"""`lightning-zero train` on two processes: a single job, a sweep, under torchrun, and failures."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_zero.zoo.gpt import LanguageModel
from tests.app.commands import TINY, finish, start, succeed
from tests.support.warm import warm_python

REAL = (sys.executable,)  # a Python that is started, not forked: as slow as a user's
LEAN = (Path(__file__).parents[1] / "support" / "lean",)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A sweep over DDP and stage 3: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("sweep")
    output = succeed("train", "-m", *TINY, "stage=ddp,3", "hydra.sweep.dir=sweep", folder=folder)
    return folder / "sweep", output


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One job at stage 3: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("alone")
    return folder / "job", succeed("train", *TINY, "hydra.run.dir=job", folder=folder)


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


@pytest.mark.exhaustive
def test_output_ends_with_a_plain_text_table_and_the_paths(alone: tuple[Path, str]) -> None:
    folder, output = alone
    assert "\x1b" not in output
    *lines, checkpoint, curves = output.splitlines()
    rows = {name: values for name, *values in (re.split(" {2,}", line) for line in lines)}
    assert re.fullmatch(r"\d+(\.\d+)?", *rows["validation perplexity"])
    assert re.fullmatch(r"\d+", *rows["tokens/s"])
    for name in ("states", "formula", "buffers", "memory", "DDP's memory"):
        assert re.fullmatch(r"\d+\.\d MB", *rows[name])
    assert re.fullmatch(r"\d\.\d\d Psi", *rows["traffic"]) and rows["traffic's formula"] == ["3 Psi"]
    assert checkpoint == f"checkpoint {folder / 'checkpoints' / 'step_6.ckpt'}"
    assert curves == f"curves lightning-zero report {folder}"


@pytest.mark.exhaustive
def test_a_model_that_stays_sharded_generates_the_same_sample(alone: tuple[Path, str], tmp_path: Path) -> None:
    output = succeed("train", *TINY, "stage.after_fit=sharded", "hydra.run.dir=job", folder=tmp_path)
    ordinary, sharded = (re.findall("- sample -+\n(.+?)\n-{80}\n", text, re.S) for text in (alone[1], output))
    assert sharded == ordinary != []


@pytest.mark.exhaustive
def test_a_pruned_job_reports_its_sparsity(tmp_path: Path) -> None:
    output = succeed("train", *TINY, "callbacks=[none,magnitude_pruning]", "hydra.run.dir=job", folder=tmp_path)
    assert re.search(r"^sparsity +50.0%$", output, flags=re.MULTILINE)
    assert results(tmp_path / "job")["sparsity"] == pytest.approx(0.5, abs=1e-4)


def test_printed_figures_are_those_in_the_results_file(alone: tuple[Path, str]) -> None:
    folder, output = alone
    found = results(folder)
    assert re.search(rf"^validation perplexity +{found['validation']['perplexity']:.4g}$", output, flags=re.MULTILINE)
    assert [step for step, _ in found["loss_curve"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in found["validation_curve"]] == [0, 3, 6]
    assert found["validation_curve"][0][1]["validation/perplexity"] == pytest.approx(256, rel=0.1)
    assert found["validation"]["perplexity"] < 200


def test_the_checkpoint_is_an_ordinary_lightning_checkpoint(alone: tuple[Path, str]) -> None:
    model = LanguageModel.load_from_checkpoint(results(alone[0])["checkpoint"], map_location="cpu")
    assert model.gpt.generate(b"def ", length=10).startswith(b"def ")


@pytest.mark.exhaustive
def test_a_job_of_a_sweep_is_not_affected_by_an_earlier_job(sweep: tuple[Path, str], alone: tuple[Path, str]) -> None:
    second, single = results(sweep[0] / "1"), results(alone[0])
    assert second["strategy"] == "ZeRO stage 3"
    assert second["loss_curve"] == single["loss_curve"]
    assert second["validation"] == single["validation"]


@pytest.mark.exhaustive
def test_stage_3_learns_what_ddp_learns_and_only_stage_3_counts_traffic(sweep: tuple[Path, str]) -> None:
    ddp, stage3 = results(sweep[0] / "0"), results(sweep[0] / "1")
    # the norm for clipping is summed in a different order: 1e-6 relative, then six steps of Adam
    assert stage3["validation"]["loss"] == pytest.approx(ddp["validation"]["loss"], rel=1e-4)
    assert ddp["communicated_psi"] is None and re.search("^traffic +not counted$", sweep[1], flags=re.MULTILINE)
    # DDP holds 16 bytes a parameter: its value, its gradient and Adam's two moments, 4 bytes each
    assert sum(ddp["peak_bytes"].values()) == pytest.approx(16 * ddp["parameters"], rel=0.01)
    assert 2 <= stage3["communicated_psi"] <= 3 and stage3["expected_psi"] == 3
    assert ddp["ddp_bytes"] == ddp["formula_bytes"] == stage3["ddp_bytes"] == 16 * stage3["parameters"]
    assert sum(stage3["units"].values()) == stage3["parameters"] and ddp["units"] == {}


def test_sweep_ends_with_a_comparison(sweep: tuple[Path, str]) -> None:
    folder, output = sweep
    assert list(json.loads((folder / "comparison.json").read_text())) == ["0 stage=ddp", "1 stage=3"]
    table = output.splitlines()[-5:-2]
    heading, *jobs = (re.split(" {2,}", line) for line in table)
    assert heading[:5] == ["job", "status", "training loss", "validation loss", "validation perplexity"]
    assert heading[5:] == ["tokens/s", "states", "memory", "traffic"]
    assert [job[0] for job in jobs] == ["0 stage=ddp", "1 stage=3"]


@pytest.mark.exhaustive
def test_jobs_train_alike_wherever_their_states_are_offloaded(tmp_path: Path, alone: tuple[Path, str]) -> None:
    arguments = [*TINY, "offload=cpu,cpu_params", "hydra.sweep.dir=sweep", "--json"]
    output = succeed("train", "-m", *arguments, folder=tmp_path)
    comparison = json.loads((tmp_path / "sweep/comparison.json").read_text())
    assert list(comparison) == ["0 offload=cpu", "1 offload=cpu_params"] and json.loads(output) == comparison
    output = succeed("train", *TINY, "offload=nvme", "stage.offload.path=here", "hydra.run.dir=job", folder=tmp_path)
    assert list((tmp_path / "here").iterdir()) == [], "files are gone with the run"
    for job in ("sweep/0", "sweep/1", "job"):
        found, single = results(tmp_path / job), results(alone[0])
        assert (found["loss_curve"], found["validation"]) == (single["loss_curve"], single["validation"])


@pytest.mark.exhaustive
def test_under_torchrun_the_command_starts_no_further_ranks(tmp_path: Path, alone: tuple[Path, str]) -> None:
    output = succeed("train", *TINY, "hydra.run.dir=job", folder=tmp_path, launcher=(warm_python(), *TORCHRUN))
    assert len(re.findall("^traffic ", output, flags=re.MULTILINE)) == 1
    assert results(tmp_path / "job")["loss_curve"] == results(alone[0])["loss_curve"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("argument", "said"),
    [("model.width=none", "model.width='none' must be an integer"), ("stage=4", "stage=4: no such option")],
)
def test_under_torchrun_rank_0_reports_an_error_though_it_is_the_slowest(
    tmp_path: Path, argument: str, said: str
) -> None:
    # torchrun ends all other ranks as soon as one rank has failed.
    (tmp_path / "sitecustomize.py").write_text("import os, time\nif os.environ.get('RANK') == '0': time.sleep(3)")
    process = start("train", argument, folder=tmp_path, launcher=(*REAL, *TORCHRUN), path=(tmp_path,))
    code, _, errors = finish(process)
    assert code != 0 and errors.count(f"lightning-zero train: {said}") == 1, errors


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("scheme", ["", "file://"], ids=["path", "URL"])
def test_a_resumed_run_continues_where_the_first_run_stopped(
    scheme: str, tmp_path: Path, alone: tuple[Path, str]
) -> None:
    checkpoint = f"{scheme}{alone[0] / 'checkpoints' / 'step_6.ckpt'}"
    arguments = [*TINY, "stage=2", "trainer.max_steps=9", f"resume={checkpoint}", "hydra.run.dir=job"]
    arguments[arguments.index("trainer.max_steps=6")] = "trainer.log_every_n_steps=1"
    printed = succeed("train", *arguments, "--json", folder=tmp_path)
    assert json.loads(printed) == results(tmp_path / "job"), "progress and the report's table went to stderr"
    assert [step for step, _ in results(tmp_path / "job")["loss_curve"]] == [7, 8, 9]


@pytest.mark.exhaustive
def test_the_results_of_a_diverged_run_are_printed_as_json_with_null_for_nan(tmp_path: Path) -> None:
    arguments = ["stage=ddp", "trainer.devices=1", "optimizer.lr=1e30", "trainer.log_every_n_steps=1"]
    printed = succeed("train", *TINY, *arguments, "--json", folder=tmp_path)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    losses = dict(json.loads(printed, parse_constant=refuse)["loss_curve"])
    assert losses[1] > 0 and losses[6] is None


@pytest.mark.exhaustive
def test_a_job_that_keeps_its_state_in_memory_continues_after_a_rank_is_killed(
    alone: tuple[Path, str], tmp_path: Path
) -> None:
    fault = ("_target_=tests.resilience.callbacks.Killed", "rank=1", "step=4")
    killed = [f"+callbacks.killed.{value}" for value in fault]
    kept = ["resilience=memory", "stage.resilience.every_n_steps=1", "hydra.run.dir=job"]
    launcher = (warm_python(), *TORCHRUN, "--max-restarts=1")
    code, _, errors = finish(start("train", *TINY, *kept, *killed, folder=tmp_path, launcher=launcher))
    # The last state may not have been whole when the rank was killed.
    assert code == 0 and re.search(r"Restart: continuing after step [34],", errors), errors
    assert results(tmp_path / "job")["validation"] == results(alone[0])["validation"]


@pytest.mark.exhaustive
def test_digits_are_learned(tmp_path: Path) -> None:
    arguments = ["experiment=digits", "stage=2", "trainer.max_steps=100", "trainer.enable_progress_bar=false"]
    output = succeed("train", *arguments, "hydra.run.dir=job", folder=tmp_path)
    assert results(tmp_path / "job")["validation"]["accuracy"] > 0.8
    assert re.search(r"^validation accuracy +0\.[89]\d*$", output, flags=re.MULTILINE)
    assert "samples/s" in output


OWN_DATA = """
import torch
from lightning.pytorch import LightningDataModule
from lightning_zero.zoo.digits import DigitClassifier, DigitsData

class Requires(DigitsData):
    def setup(self, stage):
        assert self.trainer.world_size == 2
        super().setup(stage)

class Prepares(DigitsData):
    def prepare_data(self):
        super().setup()
        torch.save(self.train.tensors, "prepared.pt")
    def setup(self, stage):
        self.train = self.validation = torch.utils.data.TensorDataset(*torch.load("prepared.pt"))

class Twice(DigitsData):
    def val_dataloader(self):
        return [super().val_dataloader(), super().val_dataloader()]

class ReadsTwo(DigitClassifier):
    def validation_step(self, batch, index, dataloader_idx=0):
        super().validation_step(batch, index)

class Minimal(LightningDataModule):
    def train_dataloader(self):
        prepared = DigitsData()
        prepared.setup()
        return prepared.train_dataloader()
"""


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    ("choice", "losses"),
    [
        ("own.Requires", {"loss"}),
        ("own.Prepares", {"loss"}),
        (
            "own.Twice model._target_=own.ReadsTwo callbacks.checkpoint.monitor=null",
            {"loss/dataloader_idx_0", "loss/dataloader_idx_1"},
        ),
        ("own.Minimal", set()),
        ("lightning_zero.zoo.digits.DigitsData trainer.limit_val_batches=0", set()),
    ],
)
def test_data_trains_with_whichever_hooks_of_lightning_it_has(tmp_path: Path, choice: str, losses: set[str]) -> None:
    (tmp_path / "own.py").write_text(OWN_DATA)
    arguments = ["data=digits", *f"data._target_={choice}".split(), "~data.batch_size", "model=vit_tiny"]
    arguments += ["debug=short", "trainer.enable_progress_bar=false", "logger=csv", "hydra.run.dir=job"]
    code, _, errors = finish(start("train", *arguments, folder=tmp_path, path=(tmp_path,)))
    assert code == 0, errors
    found = results(tmp_path / "job")
    assert found["steps"] == 10 and {name for name in found["validation"] if name.startswith("loss")} == losses


@pytest.mark.exhaustive
def test_a_job_continues_when_its_output_is_no_longer_read(tmp_path: Path, alone: tuple[Path, str]) -> None:
    arguments = [*TINY, "trainer.enable_progress_bar=true", "hydra.run.dir=job"]
    arguments.remove("trainer.enable_progress_bar=false")
    process = start("train", *arguments, folder=tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    code, _, errors = finish(process)
    assert code == 0 and "Traceback" not in errors
    assert results(tmp_path / "job")["loss_curve"] == results(alone[0])["loss_curve"]


@pytest.fixture
def endless(tmp_path: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A job that would train for a long time, and its ranks."""
    arguments = ["train", *TINY, "stage=ddp", "trainer.max_steps=1_000_000", "hydra.run.dir=job"]
    process = start(*arguments, folder=tmp_path, launcher=REAL, path=LEAN)
    assert process.stderr is not None
    said = ""
    while "Starting with 2 processes" not in said:
        line = process.stderr.readline()
        assert line, f"the job ended early:\n{said}"
        said += line
    ranks = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(ranks) == 2
    return process, ranks


def end_of(job: tuple[subprocess.Popen[str], list[psutil.Process]]) -> tuple[int, str]:
    """Exit code and standard error of a job that must end within seconds, and leave no rank behind."""
    process, ranks = job
    code, _, errors = finish(process, timeout=20)
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive
    return code, errors


@pytest.mark.exhaustive
def test_a_killed_rank_ends_the_other_ranks(endless: tuple[subprocess.Popen[str], list[psutil.Process]]) -> None:
    process, ranks = endless
    ranks[1].kill()
    code, errors = end_of(endless)
    assert code == 1
    assert re.search(r"^lightning-zero train: rank \d of 2 (was killed|failed) ", errors, flags=re.MULTILINE)


CTRL_C = pytest.param(signal.SIGINT, id="ctrl-c", marks=pytest.mark.exhaustive)


@pytest.mark.exhaustive
@pytest.mark.parametrize("signum", [CTRL_C, pytest.param(signal.SIGTERM, id="sigterm")])
def test_a_signal_to_the_command_ends_every_rank(
    signum: signal.Signals, endless: tuple[subprocess.Popen[str], list[psutil.Process]]
) -> None:
    process, _ = endless
    if signum is signal.SIGINT:
        os.killpg(process.pid, signum)  # a terminal sends it to all processes
    else:
        process.send_signal(signum)
    code = end_of(endless)[0]
    assert code == 128 + signum or (signum is signal.SIGTERM and code == 0)  # 0 if the ranks have begun to train


@pytest.mark.exhaustive
def test_killing_the_command_leaves_no_ranks(endless: tuple[subprocess.Popen[str], list[psutil.Process]]) -> None:
    process, ranks = endless
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert not alive
    finish(process)


@pytest.mark.exhaustive
def test_a_job_in_float8_says_so_in_its_results(tmp_path: Path) -> None:
    pytest.importorskip("torchao.float8")
    output = succeed("train", *TINY, "precision=float8", "hydra.run.dir=job", folder=tmp_path)
    assert results(tmp_path / "job")["precision"] == "bf16-mixed, float8 tensorwise"
    assert "2 processes, bf16-mixed, float8 tensorwise" in output
