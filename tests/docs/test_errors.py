"""The site's page of errors has every message of the source."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.examples.running import REPOSITORY


@pytest.fixture(scope="module")
def errors() -> Any:
    spec = importlib.util.spec_from_file_location("errors", REPOSITORY / "docs" / "site" / "errors.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault("errors", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_messages_of_every_area(errors: Any) -> None:
    page = errors.page(REPOSITORY / "lightning_zero")
    areas = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert areas == [*errors.AREAS.values(), errors.OTHER_AREAS]
    assert "| `stage=... is not a ZeRO stage" in page
    assert all(line.count(" | ") == 1 for line in page.replace("\\|", "").splitlines() if line.startswith("| `"))


def test_messages_of_raised_errors_and_warnings_are_found(tmp_path: Path, errors: Any) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "room.py").write_text(
        "def f(x, path):\n"
        "    if x:\n"
        "        raise ValueError(f'{x} is one too many: ' + f'{path.name!r} has {x[0]}')\n"
        "    said = 'three is enough for two'\n"
        "    def g():\n"
        "        raise errors.Unsafe.of('within another function')\n"
        "    warnings.warn(said)\n"
        "    log.warning('two is not enough: %d', x)\n"
        "    raise KeyError('name')\n"
    )
    assert set(errors.messages(package)) == {
        ("X is one too many: NAME has ...", "ValueError", "package/room.py"),
        ("three is enough for two", "warning", "package/room.py"),
        ("within another function", "Unsafe", "package/room.py"),
        ("two is not enough: ...", "warning", "package/room.py"),
    }
