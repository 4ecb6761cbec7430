"""The wheel has all that a user needs, and works in an environment with its dependencies only."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lightning_zero import __version__
from tests.examples.running import REPOSITORY


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy, since setuptools writes into the source folder
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "lightning_zero_cli.py"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("lightning_zero", "conf"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_contains_yaml_files_and_py_typed_and_only_this_package_and_its_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    carried = set(archive.namelist())
    configuration = REPOSITORY / "conf"
    wanted = {f"lightning_zero/conf/{path.relative_to(configuration)}" for path in configuration.rglob("*.yaml")}
    assert len(wanted) > 30 and {*wanted, "lightning_zero/py.typed"} <= carried
    assert {name.partition("/")[0].partition("-")[0] for name in carried} == {"lightning_zero", "lightning_zero_cli.py"}
    (scripts,) = (name for name in carried if name.endswith("/entry_points.txt"))
    assert "lightning-zero = lightning_zero_cli:main" in archive.read(scripts).decode()


def test_the_newest_version_in_the_changelog_is_the_packages_and_has_a_date() -> None:
    headings = re.findall(r"^## \[(.*?)\](.*)$", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    (first, date), (version, dated) = headings[:2]
    assert (first, date, version) == ("Unreleased", "", __version__)
    assert re.fullmatch(r" - \d{4}-\d\d-\d\d", dated)


def dependencies(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """The installed distributions that a distribution requires, directly and indirectly."""
    found: set[str] = set()
    asked = [(name, extras)]
    while asked:
        name, extras = asked.pop()
        for line in distribution(name).requires or ():
            wanted = Requirement(line)
            applies = wanted.marker is None or any(wanted.marker.evaluate({"extra": each}) for each in ("", *extras))
            if applies and wanted.name not in found:
                try:
                    distribution(wanted.name)
                except PackageNotFoundError:  # torch's packages for GPUs
                    continue
                found.add(wanted.name)
                asked.append((wanted.name, frozenset(wanted.extras)))
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and, by links into this environment, its dependencies."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    (packages,) = environment.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    for name in dependencies("lightning_zero"):
        for file in distribution(name).files or ():
            link = packages / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(Path(str(distribution(name).locate_file(file.parts[0]))))
    return environment / "bin" / "python"


def run(python: Path, *arguments: str, folder: Path) -> tuple[int, str, str]:
    """Exit code and output of `lightning-zero ARGUMENTS`."""
    done = subprocess.run(
        [str(python), "-m", "lightning_zero", *arguments],
        cwd=folder,
        env={"PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_wheel_alone_trains_and_verifies_the_checkpoint(python: Path, tmp_path: Path) -> None:
    size = ("model.width=32", "model.depth=2", "data.max_bytes=500_000")
    code, output, errors = run(python, "train", "debug=short", "hydra.run.dir=job", *size, folder=tmp_path)
    assert code == 0, errors
    assert "\nvalidation perplexity  " in output
    line = 'Metrics are written to a CSV file, because the package tensorboard is missing: pip install "lightning_zero['
    assert line in errors and (tmp_path / "job/logs/metrics.csv").exists()
    (checkpoint,) = (tmp_path / "job" / "checkpoints").iterdir()
    code, output, errors = run(python, "checkpoint", "verify", str(checkpoint), folder=tmp_path)
    assert code == 0, errors


@pytest.mark.exhaustive
def test_a_choice_that_needs_an_extra_names_the_extra_in_one_line(python: Path, tmp_path: Path) -> None:
    code, _, errors = run(python, "train", "experiment=digits", "logger=csv", folder=tmp_path)
    assert code == 2
    line = 'lightning-zero train: data: the package sklearn is missing: pip install "lightning_zero[demo]"\n'
    assert errors == line
