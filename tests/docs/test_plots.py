"""`python benchmarks/plots.py` draws the plots that the README and the pages show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import REPOSITORY, SCRIPT, run

PAGES = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]


@pytest.mark.exhaustive
def test_the_command_draws_every_plot_that_a_page_shows(tmp_path: Path) -> None:
    run(SCRIPT, "benchmarks/plots.py", "--output", str(tmp_path), folder=tmp_path)
    shown = {name for page in PAGES for name in re.findall(r"assets/([\w-]+\.svg)", page.read_text())}
    assert shown == {path.name for path in tmp_path.iterdir()}
    assert shown <= {path.name for path in (REPOSITORY / "docs" / "assets").iterdir()}
