"""The examples in the docstrings of what the package exports run and print what they show."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
import torch

import lightning_zero
from lightning_zero.engine import Engine

EXPORTS = [name for name in lightning_zero.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", EXPORTS)
def test_the_example_of_an_export_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, "lightning_zero": lightning_zero, "Engine": Engine}
    text = getattr(lightning_zero, name).__doc__
    example = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert example.examples, "an export shows an example"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=said.append)
    assert not said, "".join(said)
