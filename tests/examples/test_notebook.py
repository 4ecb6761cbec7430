"""The notebook runs from top to bottom in a Jupyter kernel."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.examples.running import REPOSITORY


@pytest.mark.filterwarnings("ignore")  # from Jupyter's own packages
@pytest.mark.exhaustive
def test_every_cell_of_the_notebook_runs_and_stage_3_learns_what_ddp_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    notebook = nbformat.read(REPOSITORY / "examples" / "notebook.ipynb", as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "outputs belong in no commit"
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    accuracies = [line.split()[-1] for line in printed.splitlines() if line.startswith("accuracy under")]
    assert len(accuracies) == 2 and accuracies[0] == accuracies[1] and float(accuracies[0]) > 0.8
