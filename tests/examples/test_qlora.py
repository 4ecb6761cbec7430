"""The example of QLoRA learns, and saves adapters that plain PEFT loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.examples.running import SCRIPT, lines_with, run


@pytest.mark.exhaustive
def test_a_quantised_qwen_learns_and_its_adapters_are_saved(tmp_path: Path) -> None:
    output = run(SCRIPT, "examples/qlora.py", "--steps", "20", folder=tmp_path)
    (line,) = lines_with(output, "loss after 20 steps")
    assert float(line.split()[-1]) < 5.0, "of ln 256 = 5.55, where it begins"
    adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert adapters and all("lora_" in name and value.isfinite().all() for name, value in adapters.items())
