"""A user's own Hydra app gets the strategy names and the config groups without an import."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.app.commands import REPOSITORY
from tests.support.warm import warm_python

APP = """
{before}
import hydra

@hydra.main(config_path=None, config_name=None, version_base="1.3")
def app(config):
    {after}
    from lightning.pytorch import Trainer
    print(type(Trainer(accelerator="cpu", devices=1, strategy="zero3").strategy).__name__)
    print(config.stage._target_, config.trainer.precision)

app()
"""


@pytest.mark.parametrize(
    ("python", "before", "after"),
    [
        (warm_python, "import lightning.pytorch", "pass"),
        (warm_python, "import lightning", "pass"),
        (
            lambda: sys.executable,
            "import sys",
            "assert 'torch' not in sys.modules, 'Hydra imported torch at its start'",
        ),
    ],
    ids=["lightning imported first", "lightning imported first, as a whole", "lightning imported in the app"],
)
def test_names_and_groups_are_there_without_an_import(
    python: Callable[[], str], before: str, after: str, tmp_path: Path
) -> None:
    script = tmp_path / "app.py"
    script.write_text(APP.format(before=before, after=after))
    done = subprocess.run(
        [python(), str(script), "+stage='2'", "+trainer=cpu", "+precision=bf16"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["ZeroStrategy", "lightning_zero.ZeroStrategy", "bf16-mixed"]
