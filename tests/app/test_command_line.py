"""The command line itself: help, mistakes, JSON, closed pipes."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_zero import __version__
from lightning_zero.__main__ import COMMANDS
from lightning_zero.commands.showing import print_json
from tests.app.commands import REPOSITORY
from tests.support.warm import warm_python

CHECKPOINT_COMMANDS = ("inspect", "verify", "export", "convert", "import")
EVERY = [*COMMANDS, *(f"checkpoint {name}" for name in CHECKPOINT_COMMANDS)]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "80"}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)  # without a buffer, argparse itself ignores a closed pipe


def command(*arguments: str) -> list[str]:
    return [warm_python(), "-m", "lightning_zero", *arguments]


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=120)


# -- help --------------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, time
from lightning_zero_cli import main
sys.argv = ["lightning-zero", *sys.argv[1:], "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code
print([time.process_time(), [name for name in ("torch", "lightning", "numpy") if name in sys.modules]], file=sys.stderr)
"""


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("name", ["", *EVERY])
def test_help_names_the_command_and_appears_quickly_without_importing_torch(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *name.split()], env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: lightning-zero {name}".rstrip())
    seconds, imported = ast.literal_eval(done.stderr)
    assert imported == []
    assert seconds < 1.5, "0.1 to 0.4 seconds on a quiet machine; importing torch alone takes 1.8"


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(("name", "names"), [("", COMMANDS), ("checkpoint", CHECKPOINT_COMMANDS)])
def test_help_has_one_line_for_each_subcommand(name: str, names: list[str]) -> None:
    lines = run(*name.split(), "--help").stdout.split("  COMMAND\n")[1].split("\n\n")[0].splitlines()
    assert [re.match(r"    (\w+)  +\w.*\w", line)[1] for line in lines] == list(names)


def test_help_of_train_shows_groups_and_the_configuration_with_the_given_overrides() -> None:
    said = run("train", "--help", "stage=ddp", "model=gpt_small").stdout
    assert "  stage: 1, 2, 3, auto, c1, c2, c3, c4, c5, ddp\n" in said
    assert "  optimizer: adafactor, adam, adamw, adamw8bit, lion, muon, sgd, soap\n" in said
    assert "_target_: lightning.pytorch.strategies.DDPStrategy" in said and "prefetch" not in said


def test_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"lightning-zero {__version__}\n"


def test_the_command_without_arguments_prints_its_help() -> None:
    assert run().stdout == run("--help").stdout


# -- mistakes ----------------------------------------------------------------------------------------------------------

MISTAKES = {
    "trian": "lightning-zero: argument COMMAND: invalid choice: 'trian' (choose from ",
    "--vesion": "lightning-zero: unrecognized arguments: --vesion",
    "checkpoint inspct": "lightning-zero checkpoint: argument COMMAND: invalid choice: 'inspct' (choose from ",
    "checkpoint verify x --jsn": "lightning-zero checkpoint: unrecognized arguments: --jsn",
    "checkpoint convert x y": "lightning-zero checkpoint convert: the following arguments are required: --to",
    "plan --stage 7": "lightning-zero plan: argument --stage: invalid choice: 7 (choose from 0, 1, 2, 3)",
    "plan --ranks two": "lightning-zero plan: argument --ranks: 'two' must be an integer of at least 1",
    "plan --ranks 0": "lightning-zero plan: argument --ranks: '0' must be an integer of at least 1",
    "plan --micro-batch 4 -4": "lightning-zero plan: argument --micro-batch: '-4' must be an integer of at least 1",
    "plan --clip -1": "lightning-zero plan: argument --clip: '-1' must be a number of at least 0",
    "parity --steps 0": "lightning-zero parity: argument --steps: '0' must be an integer of at least 1",
    "drift a b --psi-above nan": "lightning-zero drift: argument --psi-above: 'nan' must be a number of at least 0",
    "plan --memory large": "lightning-zero plan: argument --memory: 'large' is not a size such as 500MB, 5GB or 4GiB",
    "plan": "lightning-zero plan: name a project (package.module:Module, train.py or model=gpt_small), or pass --paper",
    "parity model=a --json data=b --steps 0": "lightning-zero parity: argument --steps: '0' must be an integer of",
    "doctor --ranks -2": "lightning-zero doctor: argument --ranks: '-2' must be an integer of at least 1",
    "doctor --ranks 0": "lightning-zero doctor: argument --ranks: '0' must be an integer of at least 1",
    "doctor --disk /dev/null": "lightning-zero doctor: argument --disk: '/dev/null' is not a folder: create it",
    "doctor --device tpu": "lightning-zero doctor: argument --device: invalid choice: 'tpu' (choose from ",
    "doctor --disk /no/folder": "lightning-zero doctor: argument --disk: '/no/folder' is not a folder: create it",
    "doctor here": "lightning-zero doctor: unrecognized arguments: here",
    "train --jsno": "lightning-zero train: unrecognized arguments: --jsno",
    "train --cfg jobs": "lightning-zero train: argument --cfg/-c: invalid choice: 'jobs' (choose from ",
}


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_gives_one_line_that_says_what_to_write(arguments: str) -> None:
    done = run(*arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(MISTAKES[arguments]) and done.stderr.count("\n") == 1
    mistaken = MISTAKES[arguments].partition(":")[0]
    assert done.stderr.endswith(f"(see {mistaken} --help)\n")


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("checkpoint") / "a.ckpt"
    weights = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
    torch.save({"state_dict": weights, "epoch": 1, "global_step": 2, "pytorch-lightning_version": "2.6.0"}, path)
    return path


REPORTS = {
    "checkpoint inspect {path} --json": {"whole": True, "bytes": 80, "epoch": 1, "global_step": 2},
    "checkpoint verify {path} --json": {"whole": True},
    "checkpoint export {path} {out}.safetensors --json": {"tensors": 2, "tied": 0, "bytes": 80, "left_out": []},
    "checkpoint convert {path} {out} --to sharded --json": {"form": "sharded"},
    "checkpoint import fsdp {path} {out} --json": {"form": "full", "bytes": 80},
}


@pytest.mark.parametrize("arguments", REPORTS, ids=lambda arguments: arguments.split()[1])
@pytest.mark.exhaustive
def test_json_is_the_only_output_of_checkpoint_commands(arguments: str, checkpoint: Path, tmp_path: Path) -> None:
    done = run(*(word.format(path=checkpoint, out=tmp_path / "out") for word in arguments.split()))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).items() >= REPORTS[arguments].items()


@pytest.mark.exhaustive
def test_json_of_a_plan_is_the_only_output_although_the_project_prints(tmp_path: Path) -> None:
    (tmp_path / "project.py").write_text(
        "import os, torch\n"
        "from lightning.pytorch import LightningModule\n"
        "class Net(LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(8, 8)\n"
        "    def training_step(self, batch, _):\n"
        "        print('a step')\n"
        "        os.system('echo of a child')\n"
        "        return self.layer(batch).sum()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.Adam(self.parameters())\n"
    )
    done = run("plan", "project:Net", "--batch", "float32[2,8]", "--stage", "2", "--js", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(done.stdout)
    assert plan["stage"] == 2
    assert "a step\n" in done.stderr and "of a child\n" in done.stderr


# -- closed pipes ------------------------------------------------------------------------------------------------------

PRINT_MUCH = ["--help", "train --help", "train --cfg job", "train -sc install=bash"]


@pytest.mark.parametrize("arguments", PRINT_MUCH)
def test_a_pipe_that_closes_early_causes_no_traceback(arguments: str) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        command(*arguments.split()), env=ENVIRONMENT, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    os.close(reading)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.exhaustive
def test_a_command_continues_when_its_output_is_no_longer_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "many.ckpt"
    torch.save({"state_dict": {f"layer_{index}.weight": torch.randn(2) for index in range(5000)}}, path)
    script = '"$@" | head -1; echo "${PIPESTATUS[@]}"'
    for more in ([], ["--json"]):
        words = ["bash", "-c", script, "bash", *command("checkpoint", "inspect", str(path), *more)]
        done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
        assert done.stdout.splitlines()[-1] == "0 0" and done.stderr == ""


def test_json_has_null_for_numbers_that_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [-float("inf"), 0.1, (float("inf"), 2**70)], 3: {"NaN": "NaN"}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 0.1, [None, 2**70]], "3": {"NaN": "NaN"}}
