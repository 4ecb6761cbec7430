"""An installed package includes the configuration groups and the Hydra plug-in."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.examples.running import REPOSITORY


def test_wheel_carries_every_yaml_file_and_the_hydra_plugin(tmp_path: Path) -> None:
    # From a copy, since setuptools writes into the source folder.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("lightning_zero", "hydra_plugins", "conf"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr

    (wheel,) = tmp_path.glob("*.whl")
    carried = set(zipfile.ZipFile(wheel).namelist())
    configuration = REPOSITORY / "conf"
    wanted = {f"lightning_zero/conf/{path.relative_to(configuration)}" for path in configuration.rglob("*.yaml")}
    assert wanted and wanted <= carried
    assert any(name.startswith("hydra_plugins/") for name in carried)
    assert not any(name.startswith(("tests/", "examples/", "benchmarks/", "conf/")) for name in carried)
