"""The script in docs/explanation/how-it-works.md prints the output shown on the page."""

from pathlib import Path

from tests.docs.pages import blocks
from tests.examples.running import TORCHRUN, run


def test_the_script_on_the_page_prints_the_output_shown_there(tmp_path: Path) -> None:
    script, *_ = (block.text for block in blocks("explanation/how-it-works.md") if block.language == "python")
    *_, shown = (block.text for block in blocks("explanation/how-it-works.md") if block.language == "text")
    (tmp_path / "walk.py").write_text(script)
    assert run(TORCHRUN, str(tmp_path / "walk.py"), folder=tmp_path).strip() == shown.strip()
