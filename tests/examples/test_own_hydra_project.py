"""A project with its own Hydra configuration uses our groups through `hydra.searchpath`."""

from pathlib import Path

import pytest

from tests.examples.running import SCRIPT, TORCHRUN, lines_with, run


def validation_loss(launcher: list[str], folder: Path, *overrides: str) -> list[str]:
    output = run(launcher, "examples/own_hydra_project/train.py", "trainer.max_steps=100", *overrides, folder=folder)
    return lines_with(output, "validation loss")


@pytest.fixture(scope="module")
def loss_under_ddp(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return validation_loss(SCRIPT, tmp_path_factory.mktemp("ddp"), "stage=ddp")


@pytest.mark.exhaustive
def test_plain_script_trains_at_stage_3_with_the_loss_of_ddp(loss_under_ddp: list[str], tmp_path: Path) -> None:
    assert validation_loss(SCRIPT, tmp_path) == loss_under_ddp


@pytest.mark.exhaustive
def test_torchrun_gives_the_same_loss_as_the_plain_script(loss_under_ddp: list[str], tmp_path: Path) -> None:
    assert validation_loss(TORCHRUN, tmp_path) == loss_under_ddp
