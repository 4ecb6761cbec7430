"""A Llama on 2 x 2 ranks learns as on two ranks without tensor parallelism, from the same global batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import SCRIPT, lines_with, run


def loss_after_six_steps(folder: Path, *options: str) -> float:
    output = run(SCRIPT, "examples/tensor_parallel.py", "--steps", "6", "--stage", "2", *options, folder=folder)
    (line,) = lines_with(output, "loss after 6 steps")
    return float(line.split()[-1])


@pytest.mark.exhaustive
def test_a_tensor_parallel_llama_learns_what_a_whole_llama_learns(tmp_path: Path) -> None:
    divided = loss_after_six_steps(tmp_path)
    whole = loss_after_six_steps(tmp_path, "--ranks", "2", "--tensor-parallel-size", "1")
    assert divided == pytest.approx(whole, abs=0.0011), "three decimals are printed"
    assert divided < 5.3, "of ln 256 = 5.55, where it begins"
