"""The pages on configuration list every option of the strategy with its default, and every option of Hydra's groups."""

from __future__ import annotations

import inspect
import re

from lightning_zero import ZeroStrategy
from tests.examples.running import REPOSITORY

PAGE = (REPOSITORY / "docs" / "reference" / "configuration.md").read_text()
OF_EVERY_STRATEGY = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}


def test_the_page_has_each_option_with_its_default() -> None:
    options = inspect.signature(ZeroStrategy.__init__).parameters
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE, re.MULTILINE))
    assert set(rows) - {"TMPDIR", "OMP_NUM_THREADS"} == set(options) - OF_EVERY_STRATEGY - {"self"}
    defaults = {name: eval(row.strip("`")) for name, row in rows.items() if name in options and name != "timeout"}
    assert defaults == {name: options[name].default for name in defaults}


def test_the_page_on_hydra_has_every_option_of_every_group() -> None:
    page = (REPOSITORY / "docs" / "how-to" / "hydra.md").read_text()
    rows = {
        name: set(re.findall(r"`([\w-]+)`", cell)) for name, cell in re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.M)
    }
    folders = [folder for folder in (REPOSITORY / "conf").iterdir() if list(folder.glob("*.yaml"))]
    assert rows == {folder.name: {file.stem for file in folder.glob("*.yaml")} for folder in folders}
