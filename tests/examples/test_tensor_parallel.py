"""A Llama on 2 x 2 ranks learns as the same one on four ranks that nothing divides, from the same global batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import SCRIPT, lines_with, run


@pytest.mark.exhaustive
def test_a_divided_llama_learns(tmp_path: Path) -> None:
    options = ["--steps", "6", "--stage", "2"]
    (line,) = lines_with(run(SCRIPT, "examples/tensor_parallel.py", *options, folder=tmp_path), "loss after 6 steps")
    assert float(line.split()[-1]) < 5.3, "of ln 256 = 5.55, where it begins"
