"""Read what runs have written: manifests, results, a CSVLogger's metrics, Hydra's overrides. All are read as data."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_zero.io.annotations import matches
from lightning_zero.io.plain import plain
from lightning_zero.io.untrusted import inside, open_regular
from lightning_zero.reporting.manifest import NAME as MANIFEST

Curve = list[tuple[int, float]]

_DAMAGES = (ArithmeticError, AttributeError, OSError, RecursionError, TypeError, ValueError, csv.Error, yaml.YAMLError)
RESULTS, OVERRIDES = "results.json", ".hydra/overrides.yaml"
_LONGEST = 2**16  # number of characters in a file with overrides
_DEPTH = 3  # of a run's folder below the given folder; the jobs of a sweep are at depth 1


class ReportError(Exception):
    """Raised if a report cannot be written; the message is one line."""


class Run(NamedTuple):
    """What one run, or one job of a sweep, has written, without passwords and keys. Missing files are empty here."""

    folder: Path
    name: str  # the folder's path below the given one, or the given folder's name
    overrides: list[str]
    manifest: dict[str, Any]
    results: dict[str, Any]
    metrics: dict[str, Curve]


def read_runs(folder: Path) -> list[Run]:
    """Read the run in a folder, or the runs in its subfolders: the jobs of a sweep, or the versions of a logger.

    Raises:
        ReportError: if ``folder`` is not a folder, or a record cannot be read.
    """
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder: pass the folder of a run or of a sweep")
    return [_read(each, folder) for each in _run_folders(folder, _DEPTH)]


def overrides_of(folder: Path) -> list[str]:
    """Hydra's overrides for the job in a folder; empty if Hydra has written none. Raises ReportError if damaged."""
    with _reading(folder / OVERRIDES):
        text = _text_in(folder, OVERRIDES)
        if len(text) > _LONGEST:  # aliases could multiply it
            raise ValueError("it is too large")
        found = yaml.load(text or "[]", yaml.BaseLoader)  # makes texts only, and merges no mappings
        if not matches(found, list[str]):
            raise ValueError("it is not a list of overrides")
    return found


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Context in which every error that a damaged record can cause becomes a ReportError."""
    try:
        yield
    except _DAMAGES as error:
        raise ReportError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _text_in(folder: Path, name: str) -> str:
    """The text of a file; empty if it does not exist. A link that leads out of the folder is not followed."""
    if not os.path.lexists(folder / name):
        return ""
    with open_regular(inside(folder, name)) as file:
        return file.read().decode()


def _run_folders(folder: Path, depth: int) -> list[Path]:
    if any(os.path.lexists(folder / name) for name in (MANIFEST, RESULTS, "metrics.csv", OVERRIDES)):
        return [folder]
    children = [child for child in folder.iterdir() if depth and child.is_dir() and not child.is_symlink()]
    children.sort(key=lambda child: (len(child.name), child.name))
    return [found for child in children for found in _run_folders(child, depth - 1)]


def _read(folder: Path, root: Path) -> Run:
    name = folder.relative_to(root).as_posix() if folder != root else root.resolve().name
    results = _json_in(folder, RESULTS)
    metrics: dict[str, Curve] = {}
    with _reading(folder / RESULTS):
        for step, loss in results.pop("loss_curve", []):
            metrics.setdefault("loss", []).append((int(step), float(loss)))
        for step, found in results.pop("validation_curve", []):
            for metric, value in found.items():
                metrics.setdefault(metric, []).append((int(step), float(value)))
    files = sorted(folder.rglob("metrics.csv"), key=lambda file: file.lstat().st_mtime)  # a resumed run has several
    logged = _curves_in(folder, files[-1].relative_to(folder).as_posix()) if files else {}
    return Run(folder, name, plain(overrides_of(folder)), _json_in(folder, MANIFEST), results, metrics | logged)


def _json_in(folder: Path, name: str) -> dict[str, Any]:
    with _reading(folder / name):
        found = json.loads(_text_in(folder, name) or "{}")
        if not isinstance(found, dict):
            raise ValueError("it contains no JSON object")
        return plain(found)


def _curves_in(folder: Path, name: str) -> dict[str, Curve]:
    """Each metric's curve in a CSVLogger's file."""
    found: dict[str, Curve] = {}
    with _reading(folder / name):
        for row in csv.DictReader(_text_in(folder, name).splitlines()):
            step = row.pop("step", "")
            for metric, value in row.items():
                if step and value and metric != "epoch":
                    found.setdefault(metric, []).append((int(float(step)), float(value)))
    return found
