"""An existing Lightning project only needs the import and the strategy's name, and gets the same numbers as before."""

import sys
from pathlib import Path

import pytest

from tests.examples.running import SCRIPT, TORCHRUN, lines_with, run


def figures(launcher: list[str], strategy: str, folder: Path, python: str | None = None) -> list[str]:
    output = run(launcher, "examples/plain_project/train.py", "--strategy", strategy, folder=folder, python=python)
    return lines_with(output, "validation loss", "test accuracy")


@pytest.fixture(scope="module")
def figures_under_ddp(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return figures(SCRIPT, "ddp", tmp_path_factory.mktemp("ddp"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("python", [None, pytest.param(sys.executable, id="python", marks=pytest.mark.exhaustive)])
def test_plain_script_prints_the_same_figures_under_zero3_as_under_ddp(
    figures_under_ddp: list[str], tmp_path: Path, python: str | None
) -> None:
    assert figures(SCRIPT, "zero3", tmp_path, python=python) == figures_under_ddp


@pytest.mark.exhaustive
def test_torchrun_prints_the_same_figures_as_the_plain_script(figures_under_ddp: list[str], tmp_path: Path) -> None:
    assert figures(TORCHRUN, "zero3", tmp_path) == figures_under_ddp


@pytest.fixture(scope="module")
def loss_under_ddp(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("ddp")
    arguments = ["fit", "--trainer.strategy=ddp", "--trainer.max_epochs=2"]
    return lines_with(run(SCRIPT, "examples/plain_project/cli.py", *arguments, folder=folder), "validation loss")


@pytest.mark.exhaustive
def test_lightning_cli_selects_the_strategy_by_an_argument(loss_under_ddp: list[str], tmp_path: Path) -> None:
    arguments = ["fit", "--trainer.strategy=zero3", "--trainer.max_epochs=2"]
    output = run(SCRIPT, "examples/plain_project/cli.py", *arguments, folder=tmp_path)
    assert lines_with(output, "validation loss") == loss_under_ddp


@pytest.mark.exhaustive
def test_hydra_selects_the_strategy_by_a_group(loss_under_ddp: list[str], tmp_path: Path) -> None:
    arguments = ["stage='2'", "stage.offload=cpu", "trainer.max_epochs=2"]
    output = run(SCRIPT, "examples/plain_project/hydra_app.py", *arguments, folder=tmp_path)
    assert lines_with(output, "validation loss") == loss_under_ddp
