"""A user's own Hydra app, which the installed package affects only if its groups are on the app's search path."""

import subprocess
from pathlib import Path

import pytest

from tests.app.commands import REPOSITORY
from tests.support.warm import warm_python

APP = """
import hydra
from hydra.core.plugins import Plugins

@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def app(config):
    assert not [name for name in Plugins.instance().class_name_to_class if "lightning_zero" in name]
    from lightning.pytorch import Trainer
    print(type(Trainer(accelerator="cpu", devices=1, strategy="zero3").strategy).__name__)
    print(config.stage._target_, config.stage.offload.optimizer, config.trainer.devices, config.trainer.precision)

app()
"""
ASKS = "hydra: {searchpath: ['pkg://lightning_zero.conf']}\n"


def run_app(folder: Path, config: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "conf" / "config.yaml").write_text(config)
    script = folder / "app.py"
    script.write_text(APP)
    return subprocess.run(
        [warm_python(), str(script), *overrides],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_an_app_without_the_search_path_has_neither_groups_nor_strategy_names(tmp_path: Path) -> None:
    assert run_app(tmp_path, "folder: .\n", "+stage='2'", "--cfg", "job").stdout == "folder: .\nstage: '2'\n"
    assert "invalid strategy name: `strategy='zero3'`" in run_app(tmp_path, "folder: .\n").stderr


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("by", ["overrides", "defaults"])
def test_search_path_adds_groups_and_strategy_names_in_any_order(by: str, is_reversed: bool, tmp_path: Path) -> None:
    groups = {"stage": "'2'", "offload": "cpu", "trainer": "cpu", "precision": "bf16"}
    chosen = sorted(groups, reverse=is_reversed)
    if by == "overrides":
        done = run_app(tmp_path, f"folder: .\n{ASKS}", *(f"+{name}={groups[name]}" for name in chosen))
    else:
        defaults = "\n".join(f"  - {name}: {groups[name]}" for name in chosen)
        done = run_app(tmp_path, f"defaults:\n{defaults}\n  - _self_\nfolder: .\n{ASKS}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-5:] == ["ZeroStrategy", "lightning_zero.ZeroStrategy", "cpu", "2", "bf16-mixed"]
